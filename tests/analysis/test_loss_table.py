"""`judge losses.csv` and `report losses.csv`: the same statistics for runs of any other trainer."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import posbench
from posbench.analysis.loss_table import compare_table
from posbench.config import ConfigError
from tests.refusals import refuses

SEEDS = [1337, 1338, 1339, 1340, 1341]
LOSSES = {
    "rope": [3.201, 3.214, 3.195, 3.222, 3.208],
    "mine": [3.150, 3.170, 3.139, 3.181, 3.149],
    "other": [3.199, 3.220, 3.190, 3.219, 3.216],
}


def write(path, rows):
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.fixture
def table(tmp_path):
    rows = [{"scheme": s, "seed": seed, "loss": x} for s in LOSSES for seed, x in zip(SEEDS, LOSSES[s], strict=True)]
    return write(tmp_path / "losses.csv", rows)


def holm(p):
    """Return p-values after Holm's correction, by its definition."""
    order, adjusted, most = np.argsort(p), np.empty(len(p)), 0.0
    for rank, place in enumerate(order):
        most = max(most, (len(p) - rank) * p[place])
        adjusted[place] = min(1.0, most)
    return adjusted


def test_gaps_and_p_are_those_of_paired_t_tests_with_holms_correction(table):
    c = compare_table(table, None, 0.01)
    names = [("mine", "rope"), ("other", "rope"), ("mine", "other")]
    tests = [ttest_rel(LOSSES[a], LOSSES[b]) for a, b in names]
    expected = holm(np.array([test.pvalue for test in tests]))
    for pair, test, p in zip(names, tests, expected, strict=True):
        row = c.pairs[c.pairs["left"].isin(pair) & c.pairs["right"].isin(pair)].iloc[0]
        low, high = test.confidence_interval(0.95)
        assert row["p_claimed"] == pytest.approx(p, rel=1e-9)
        assert sorted(map(abs, (row["difference_low"], row["difference_high"]))) == pytest.approx(
            sorted(map(abs, (low, high))), rel=1e-9
        )


def test_with_several_rates_each_scheme_is_at_its_best_and_must_win_at_both(tmp_path):
    rng = np.random.default_rng(0)
    costs = {"rope": {1e-3: 0.05, 2e-3: 0.0, 4e-3: 0.02}, "mine": {1e-3: -0.03, 2e-3: 0.01, 4e-3: 0.03}}
    rows = []
    for scheme, of_rates in costs.items():
        for lr, cost in of_rates.items():
            for seed in range(5):
                for tokens, early in ((1e6, 0.4), (2e6, 0.0)):
                    loss = 3 + cost + early + rng.normal(scale=0.005)
                    rows.append({"scheme": scheme, "seed": seed, "lr": lr, "tokens": tokens, "loss": loss})
    c = compare_table(write(tmp_path / "rates.csv", rows), "rope", 0.01)
    frame = pd.DataFrame(rows)
    last = frame[frame["tokens"] == 2e6].pivot(index="seed", columns=["scheme", "lr"], values="loss")
    assert dict(zip(c.runs["scheme"], c.runs["train.lr"], strict=True)) == {"rope": 2e-3, "mine": 1e-3}
    p = max(ttest_rel(last["mine", 1e-3], last["rope", lr], alternative="less").pvalue for lr in (2e-3, 4e-3))
    assert c.pairs["p_claimed"].iloc[0] == pytest.approx(min(1.0, 2 * p), rel=1e-9)
    assert c.is_at_best_rates and "searched" not in c.unknown
    assert len(c.curve) == 2 * 5 * 2, "two points of each run at its best rate"


def test_a_run_that_diverged_fails_its_scheme(table):
    frame = pd.read_csv(table)
    frame.loc[(frame["scheme"] == "mine") & (frame["seed"] == 1339), "loss"] = math.inf
    c = compare_table(write(table, frame), "rope", 0.01)
    assert c.failed == {"mine": {1339: "its loss is infinite"}}
    assert c.pairs.set_index(["left", "right"]).loc[("mine", "rope"), "p_claimed"] == 1.0
    refuses("--metric order is for runs that posbench trained", posbench.judge, table, scheme="mine", metric="order")
    few = compare_table(write(table, frame[frame["seed"] < 1340]), "rope", 0.01)
    assert few.failed == c.failed and not (few.pairs["p_claimed"] < 0.05).any()


WIDE = "step," + ",".join(f"run{n}" for n in range(3000)) + "\n1" + ",2.5" * 3000
HEAD = "scheme,seed,loss\n"
RATES = "scheme,seed,lr,loss\n" + "".join(
    f"{s},{n},{lr},{3 + lr}\n" for s in ("rope", "mine") for n in range(3) for lr in (0.1, 0.2)
)
THREE = HEAD + "".join(f"rope,{n},3.{n}\nmine,{n},2.{n}\n" for n in range(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as comma-separated text"),
        (HEAD, "has no row below its header"),
        (WIDE, "has no column scheme (3,001 columns: step, run0, run1, run2, run3, run4 ...)"),
        ("scheme,seed,val_loss\nrope,0,3\n", "has no column loss (3 columns: scheme, seed, val_loss)"),
        (HEAD + "rope,0,3.1\nmine,0,3.0\n", "mine and rope share 1 seed, a test needs 3"),
        (THREE + "far,7,3\nfar,8,3\nfar,9,3\n", "far and rope share 0 seeds, a test needs 3"),
        (RATES + "mine,3,0.2,3.2\n", "mine has different seeds at lr 0.1 and 0.2: give both the same"),
        (THREE + "rope,2,3.3\n", "line 8 repeats a scheme and seed"),
        (THREE + "rope,3,nan\n", "line 8: loss is 'nan', which is not a number (inf: a run that diverged)"),
        (THREE + "rope,three,3\n", "line 8: seed is 'three', which is not a number"),
        (THREE + "rope,0.5,3\n", "line 8 has a seed that is not a whole number"),
        ("\n" + THREE + " \n,4,3\n", "line 10 has no scheme"),
        ("scheme,seed,loss,text\na,0,3,books\nb,0,3,code\n", "the column text has books, code: give each a table"),
        (
            "scheme,seed,loss,tokens\na,0,3,1e6\na,0,2,2e6\nb,0,3,1e6\n",
            "b seed 0 ends at 1e+06 tokens, others at 2e+06",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_a_line(tmp_path, text, message):
    file = tmp_path / "losses.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        compare_table(file, None, 0.01)
    assert message in str(refusal.value) and "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_binary_file_is_refused(tmp_path):
    file = tmp_path / "losses.csv"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="cannot be read as comma-separated text"):
        compare_table(file, None, 0.01)
