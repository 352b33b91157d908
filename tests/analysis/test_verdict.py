"""`posbench judge`: the report's verdict for scripts, and the planned looks of a loop."""

import json
import re
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import posbench
from posbench.analysis.comparison import build
from posbench.analysis.options import JudgeOptions
from posbench.analysis.reading import read_runs
from posbench.analysis.verdict import Judgement, judge_all
from posbench.config import ConfigError
from posbench.reporting.sections import loss_table, name_with_remarks
from posbench.reporting.text import as_text
from posbench.runs import Run, append_metrics, find_runs
from posbench.runs.finding import REFERENCE
from posbench.system.console import console
from tests.analysis.fabricate import (
    World,
    change_fingerprints,
    comparison,
    fabricate,
    fabricate_search,
    paragraph,
    rescore,
    run_of,
    searched,
    write_evaluation,
)
from tests.analysis.test_long_range_order import stored
from tests.json_schema import DEFINITIONS, faults
from tests.refusals import refuses


def judge(place, scheme=None, **options):
    return posbench.judge(place, scheme=scheme, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["headline", "demo_cpu", "ladder_s", "ladder_m", "all_schemes"])
def test_every_verdict_on_the_reference_packs_is_the_reports(name):
    place = REFERENCE / name
    comparison = build(*read_runs([place], None, console(quiet=True)))
    table = as_text(loss_table(comparison)).set_index("scheme")
    judgements, left_out = judge_all(place, JudgeOptions())
    assert not left_out and {j.scheme for j in judgements} == {*comparison.schemes} - {comparison.baseline}
    for judgement in judgements:
        data = json.loads(judgement.as_json())
        assert not faults(data, "judge")
        if not comparison.can_rank:
            assert data["verdict"] == "open" and data["p"] is None
            continue
        row = table.loc[name_with_remarks(comparison, judgement.scheme)]
        assert data["verdict"] == row["verdict"]
        assert float(row[f"gap to {comparison.baseline}"].split()[0]) == pytest.approx(judgement.gap, abs=6e-3)
        assert (data["p"] <= 0.05) == (data["verdict"] in ("better", "worse"))


def test_the_schema_has_every_field():
    schema = DEFINITIONS["judge"]
    assert [field.name for field in fields(Judgement)] == list(schema["properties"]) == schema["required"]
    data = json.loads(judge(REFERENCE / "headline", "alibi").as_json())
    broken = [data | {"verdict": "good"}, data | {"p": "small"}, data | {"beyond": {}}, data | {"go_on": 0}]
    assert all(faults(wrong, "judge") for wrong in (*broken, {**data, "more": 1}, {"verdict": "open"}))


def test_the_worth_in_tokens_of_alibi_is_what_its_branches_give_by_hand():
    """Interpolate each seed's loss in ln(tokens) between 3.07M, 6.14M and 12.3M tokens, at qk_rope's final loss."""
    runs = [posbench.results(REFERENCE / name) for name in ("headline-3.07M", "headline-6.14M", "headline")]
    losses = pd.concat(runs).pivot(index="tokens", columns=["scheme", "seed"], values="loss").sort_index()
    logs = []
    for seed in range(5):
        curve, goal = losses["alibi", seed], losses["qk_rope", seed].iloc[-1]
        tokens = np.interp(goal, curve.to_numpy()[::-1], np.log(curve.index.to_numpy(float))[::-1])
        logs.append(tokens - np.log(curve.index[-1]))
    half = 2.776445 * np.std(logs, ddof=1) / np.sqrt(5)  # Student's t with 4 degrees of freedom
    expected = np.exp([np.mean(logs), np.mean(logs) - half, np.mean(logs) + half])
    worth = judge(REFERENCE / "headline", "alibi").worth_in_tokens
    assert worth is not None and [worth[key] for key in ("share", "low", "high")] == pytest.approx(expected, rel=1e-6)


def test_beyond_the_training_length_other_targets_do_not_count(experiment_copy):
    """One scheme has results at this length on the targets of two anchors; the baseline has those of one."""
    before = judge(experiment_copy, "alibi").beyond
    for seed in range(4):
        run = run_of(experiment_copy, "alibi", seed)
        stored = next(x for x in run.results()[0] if (x.protocol, x.length) == ("fixed", 512) and not x.key.under)
        shifted = stored.windows.assign(nll=stored.windows["nll"] + 9)
        write_evaluation(run, "fixed", 512, "test", shifted, anchor=stored.key.anchor + 4096)
    assert judge(experiment_copy, "alibi").beyond == before


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """Write a baseline of eight seeds, candidates of eight, and one that has the baseline's losses."""
    effects = {"qk_rope": 0.0, "vo_rope": -0.1, "alibi": -0.005, "nope": 0.1}
    world = World(effects, tuple(range(8)), noise_sd=0.004, experiment="loop")
    folder = fabricate(tmp_path_factory.mktemp("loop"), world)
    for run in find_runs(folder):
        run.update_manifest(
            command=[f"scheme={run.manifest.scheme}", f"seed={run.manifest.seed}", "experiment_name=loop"]
        )
    return folder


def after(loop, seeds, scheme, **options):
    """Return the judgement of a scheme after this many seeds of it, as one of 20 candidates."""
    summary, rows = read_runs([loop], None, console(quiet=True))
    summary = summary[(summary["scheme"] != scheme) | (summary["seed"] < seeds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posbench.analysis.verdict.read_runs", lambda *_: (summary, rows))
        return judge(loop, scheme, **{"family": 20, **options})


def test_a_candidate_that_both_first_seeds_find_worse_is_dropped_without_a_verdict(loop):
    worse = after(loop, 2, "nope")
    assert (worse.verdict, worse.go_on, worse.next_commands) == ("open", False, [])
    assert worse.reason == "dropped: worse by more than 0.01 nats with each of the first 2 seeds"
    assert after(loop, 1, "nope").go_on and after(loop, 5, "nope").verdict == "worse"


def test_a_loop_looks_at_two_five_and_eight_seeds_only_and_says_why(loop):
    """Vo_rope is decided at the second look, alibi at none."""
    better = [after(loop, seeds, "vo_rope") for seeds in range(1, 9)]
    assert [(j.verdict, j.go_on) for j in better] == [("open", True)] * 4 + [("better", False)] * 4
    assert [j.look for j in better] == [
        {"number": number, "of": 3, "seeds": seeds}
        for number, seeds in ((0, 0), (1, 2), (1, 2), (1, 2), (2, 5), (2, 5), (2, 5), (2, 5))
    ]
    assert better[3].reason == "not decided yet: the next look is at 5 seeds"
    decided = {(j.p, j.reason) for j in better[4:]}
    assert decided == {(better[4].p, "decided by the test of 5 seeds")}  # the first look that decides counts
    small = [after(loop, seeds, "alibi") for seeds in (5, 6, 8)]
    assert [(j.verdict, j.go_on) for j in small] == [("open", True), ("open", True), ("open", False)]
    assert small[0].p == small[1].p != small[2].p and small[2].look == {"number": 3, "of": 3, "seeds": 8}
    assert small[2].reason == "not decided by the test of 8 seeds, the last one"
    assert after(loop, 5, "vo_rope", family=None).look is None


def test_the_next_commands_train_the_seeds_that_are_missing(loop):
    def command(scheme, seeds):
        return ["posbench", "train", "-m", f"scheme={scheme}", "experiment_name=loop", f"seed={seeds}"]

    assert [after(loop, seeds, "vo_rope").next_commands for seeds in (1, 2, 4)] == [
        [command("vo_rope", "1")],
        [command("vo_rope", "2,3,4")],
        [command("vo_rope", "4")],
    ]
    assert after(loop, 5, "alibi").next_commands == [command("alibi", "5,6,7")]
    summary, rows = read_runs([loop], None, console(quiet=True))
    few = summary[summary["seed"] < 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posbench.analysis.verdict.read_runs", lambda *_: (few, rows))
        commands = judge(loop, "vo_rope", family=20).next_commands
    assert commands == [command("vo_rope", "2,3,4"), command("qk_rope", "2,3,4")]


def test_a_candidate_that_diverged_has_failed(tmp_path):
    """Both runs of nope died, and one of three of alibi; k_rope was only stopped, which is not its fault."""
    effects = {"qk_rope": 0.0, "alibi": -0.1, "nope": 0.1, "k_rope": 0.1}
    folder = fabricate(tmp_path, World(effects, (0, 1, 2)))
    shutil.rmtree(folder / "nope/seed=2")
    dead = [run_of(folder, "alibi", 1), *find_runs(folder / "nope")]
    for run in dead:
        run.update_manifest(status="died", reason=f"NaN in {run.manifest.run_name}", loss=None, bits_per_byte=None)
    for run in find_runs(folder / "k_rope"):
        run.update_manifest(status="stopped", reason="no space", loss=None, bits_per_byte=None)
    nope = judge(folder, "nope", family=20)
    assert (nope.verdict, nope.go_on, nope.next_commands) == ("failed", False, [])
    assert nope.reason == "seed 0 diverged: NaN in demo/nope/seed=0; seed 1 diverged: NaN in demo/nope/seed=1"
    data = json.loads(nope.as_json())
    assert nope.seeds == [] and nope.baseline_seeds == [0, 1, 2]
    assert [data[name] for name in ("gap", "gap_low", "p", "beyond")] == [None] * 4
    assert str(nope) == f"nope: failed ({nope.reason}); stop"
    judgements, left_out = judge_all(folder, JudgeOptions())
    assert [(j.scheme, j.verdict) for j in judgements] == [("alibi", "failed"), ("nope", "failed")]
    assert left_out == {"k_rope": [f"k_rope seed {seed}: stopped: no space" for seed in (0, 1, 2)]}
    refuses(r"(?s)'k_rope' has no finished run.*stopped: no space", judge, folder, "k_rope")


@pytest.mark.slow
def test_with_a_search_the_verdict_holds_at_best_rates_and_waits_for_its_end(tmp_path):
    place = searched(tmp_path, qk_rope=0.1, alibi=0.0)
    finished = judge(place, "alibi", family=20)
    assert (finished.verdict, finished.scope) == ("better", "best rates")
    first, *_ = find_runs(place.with_name("demo-tune"))
    interrupted = shutil.copytree(first.path, place / first.manifest.scheme / first.path.name)
    # In the experiment's own folder; the search has finished it.
    Run(interrupted).update_manifest(status="stopped", experiment="demo")
    table = as_text(loss_table(build(*read_runs([place], None, console(quiet=True))))).set_index("scheme")
    by_report = judge(place, "alibi")
    assert by_report.verdict == table.loc["alibi", "verdict"] == "better"
    stopped, *_ = [run for run in find_runs(place.with_name("demo-tune")) if run.manifest.seed == 4]
    stopped.update_manifest(status="stopped")
    for run in find_runs(place.with_name("demo-tune")):
        run.update_manifest(command=[f"scheme={run.manifest.scheme}", "scheme.lr=0.001", "seed=4", "data=files"])
    for family in (None, 20):
        waiting = judge(place, "alibi", family=family)
        assert (waiting.verdict, waiting.scope) == ("open", "this rate")
        assert any("unfinished" in warning for warning in waiting.warnings)
        assert waiting.reason == "not tested: the search for learning rates is unfinished"
        assert waiting.next_commands == [["posbench", "tune", "scheme=alibi", "data=files", "experiment_name=demo"]]


@pytest.mark.slow
def test_a_scheme_that_diverged_at_both_kept_rates_is_named_and_decides_nothing(tmp_path):
    """Alibi is far ahead, but one of its runs died at each of its two rates."""
    place = searched(tmp_path, qk_rope=0.1, alibi=0.0, nope=0.3)
    before = build(*read_runs([place], None, console(quiet=True)))
    assert before.undecidable == [] and (before.pairs["p_claimed"] < 0.05).all()
    for rate, seed in ((0.001, 3), (0.002, 4)):
        run = Run(place.with_name("demo-tune") / f"lr={rate}/alibi/seed={seed}")
        run.update_manifest(status="died", reason="NaN", loss=None, bits_per_byte=None)
    after_deaths = build(*read_runs([place], None, console(quiet=True)))
    p = after_deaths.pairs.set_index(["left", "right"])["p_claimed"]
    assert after_deaths.undecidable == ["alibi"] and after_deaths.is_at_best_rates
    assert p[("alibi", "qk_rope")] == p[("alibi", "nope")] == 1.0 and p[("qk_rope", "nope")] < 0.05
    posbench.report(place, output=tmp_path / "report", console=console(quiet=True))
    page = (tmp_path / "report/report.md").read_text()
    assert (
        "Open: alibi and qk_rope; alibi and nope. alibi diverged with a seed at each rate that its search kept" in page
    )
    assert judge(place, "nope").verdict == "worse"


def test_the_baseline_under_another_name_is_equal(loop, tmp_path):
    world = World({"qk_rope": 0.0, "stranger": 0.0}, tuple(range(5)))
    folder = fabricate(tmp_path, world)
    for run in find_runs(folder / "stranger"):
        same = run_of(folder, "qk_rope", run.manifest.seed)
        for result in same.results()[0]:
            run.store(result.key, result.windows, result.header | {"weights": run.manifest.weights})
    judgement = judge(folder, "stranger", family=20)
    assert (judgement.verdict, judgement.gap, judgement.go_on) == ("equal", 0, False)
    assert any("exactly the losses" in warning for warning in judgement.warnings)


def test_runs_on_another_text_and_unknown_schemes_are_refused(tmp_path):
    folder = fabricate(tmp_path, World({"qk_rope": 0.0, "nope": 0.1, "alibi": 0}, (0, 1)))
    refuses(
        r"'nop' has no finished run to compare with qk_rope.*nope",
        judge,
        folder,
        "nop",
        baseline="qk_rope",
    )
    refuses("name one scheme to judge", judge, folder)
    refuses("family 0 must be 1 or more", judge, folder, family=0)
    for seed in (0, 1):
        change_fingerprints(run_of(folder, "nope", seed), data="other text")
    refuses(
        r"(?s)'nope' has no finished run to compare.*nope seed 1.*the text or its",
        judge,
        folder,
        "nope",
    )
    shutil.rmtree(folder / "alibi")
    refuses(r"(?s)no scheme has a finished run to compare with qk_rope.*the text or its", judge, folder)


def with_settings(run, **settings):
    """Change settings of a run as if it had been trained with them, such as `train_lr=1e-3`."""
    changes = {name.replace("_", ".", 1): value for name, value in settings.items()}
    run.update_manifest(identity=run.manifest.identity | changes)


def stored_loss(run):
    windows = pd.read_parquet(run.path / "eval/validation/256.parquet")
    return float(windows["nll"].sum() / windows["targets"].sum())


def test_a_run_with_other_settings_stops_no_other_candidate(tmp_path):
    """All of nope's runs have another length of training, and alibi's last seed another learning rate."""
    effects = {"qk_rope": 0.0, "alibi": -0.1, "nope": 0.1, "k_rope": 0.05}
    folder = fabricate(tmp_path, World(effects, (0, 1, 2)))
    for seed in (0, 1, 2):
        with_settings(run_of(folder, "nope", seed), train_tokens=123)
    with_settings(run_of(folder, "alibi", 2), train_lr=0.25)
    gaps = [
        stored_loss(run_of(folder, "alibi", seed)) - stored_loss(run_of(folder, "qk_rope", seed)) for seed in (0, 1)
    ]
    alibi = judge(folder, "alibi", family=20)
    assert alibi.seeds == [0, 1] and alibi.gap == pytest.approx(np.mean(gaps)) and alibi.go_on
    [line] = [warning for warning in alibi.warnings if "left out" in warning]
    assert re.search(r"alibi seed 2: not comparable: it differs in train\.lr: .*0\.25 \(alibi seed 2\)", line)
    assert not [
        warning for judged in (alibi, judge(folder, "k_rope")) for warning in judged.warnings if "nope" in warning
    ]
    judgements, left_out = judge_all(folder, JudgeOptions())
    assert [judgement.scheme for judgement in judgements] == ["alibi", "k_rope"]
    assert list(left_out) == ["nope"] and len(left_out["nope"]) == 3
    assert all(f"nope seed {seed}: not comparable" in line for seed, line in enumerate(left_out["nope"]))
    refuses(r"(?s)'nope' has no finished run to compare with qk_rope.*train\.tokens", judge, folder, "nope")
    rescore(run_of(folder, "alibi", 1), "validation", None, lambda rows: rows.iloc[1:])
    alibi = judge(folder, "alibi")
    assert alibi.seeds == [0] and "it differs in train.validation_tokens" in str(alibi.warnings)
    # The baseline itself has to be one: it is refused with advice that judge takes.
    with_settings(run_of(folder, "qk_rope", 1), train_lr=0.25)
    with pytest.raises(
        ConfigError, match=r"(?s)cannot be one baseline.*train\.lr.*Move the folders .* --baseline"
    ) as refusal:
        judge(folder, "alibi")
    assert "--schemes" not in str(refusal.value)
    assert judge(folder, "alibi", baseline="k_rope").baseline == "k_rope"


def test_a_report_of_a_loop_corrects_for_the_tests_that_the_loop_planned(tmp_path):
    """20 candidates have two tests each. The uncorrected p is between 0.05 / 40 and 0.05."""
    random = np.random.default_rng(3)
    world = World({"qk_rope": 0.0, "alibi": -0.006}, noise_sd=0.002, random=random)
    folder = fabricate(tmp_path, world)
    losses = {name: [stored_loss(run_of(folder, name, seed)) for seed in range(5)] for name in ("alibi", "qk_rope")}
    p = stats.ttest_rel(losses["alibi"], losses["qk_rope"]).pvalue
    assert 0.05 / 40 < p < 0.05
    before = comparison(folder)
    assert before.pairs["p_claimed"].tolist() == pytest.approx([p]) and before.planned_tests == 0
    assert judge(folder, "alibi").verdict == "better, below margin"
    looped = judge(folder, "alibi", family=20)
    assert looped.verdict == "open" and looped.p == pytest.approx(40 * p)
    assert json.loads((folder / "judge.json").read_text()) == {"qk_rope": 40}
    after_loop = comparison(folder)
    assert after_loop.pairs["p_claimed"].tolist() == pytest.approx([40 * p])
    assert after_loop.pairs["detectable"].iloc[0] > before.pairs["detectable"].iloc[0]
    posbench.report(folder, output=tmp_path / "report", console=console(quiet=True))
    page = (tmp_path / "report/report.md").read_text()
    assert "corrects for the 40 tests that a loop planned here" in page and "alibi beats" not in page
    # Another family in the middle of a loop is warned of, and the largest counts.
    fewer = judge(folder, "alibi", family=1)
    assert any("an earlier --family planned 40 tests against qk_rope" in warning for warning in fewer.warnings)
    assert json.loads((folder / "judge.json").read_text()) == {"qk_rope": 40}
    (folder / "judge.json").write_text("{")
    refuses(r"judge\.json is damaged .*--family or --confirm again", comparison, folder)


def test_nothing_is_recorded_in_a_reference_experiment():
    judge(REFERENCE / "headline", "alibi", family=20)
    assert not list(REFERENCE.rglob("judge.json"))


def test_a_scheme_with_late_seeds_at_its_best_rate_only_leaves_its_pairs_open(tmp_path):
    """Alibi is far ahead at both rates, but two of its five seeds at the best one never use long-range order."""
    place = searched(tmp_path, qk_rope=0.1, alibi=0.0, nope=0.3)
    for run in find_runs(place.with_name("demo-tune")):
        is_late = run.manifest.scheme == "alibi" and "lr=0.001" in str(run.path) and run.manifest.seed > 2
        worth = {"kind": "order", "step": 9, "tokens": 9000, "order_beyond_32": 0.01 if is_late else 0.2}
        append_metrics(run.path / "metrics.jsonl", worth)
    c = build(*read_runs([place], None, console(quiet=True)))
    assert c.is_at_best_rates and c.late_at_best == c.split_in_two == ["alibi"] and c.search is not None
    assert [c.search.using_order("alibi", rate) for rate in c.search.kept("alibi")] == [(3, 5), (5, 5)]
    tests = c.pairs.set_index(["left", "right"])[["p_at_rates_claimed", "p_claimed"]]
    assert tests.loc[("alibi", "qk_rope")].to_list() == [pytest.approx(0, abs=0.01), 1.0]
    assert float(tests["p_claimed"][("qk_rope", "nope")]) < 0.05
    for family in (None, 1):
        alibi = judge(place, "alibi", family=family)
        assert alibi.verdict == "open"
        split = "alibi uses long-range order with 3 of 5 seeds at 0.001, its best rate, and 5 of 5 seeds at 0.002"
        assert f"{split}, so its pairs are open" in alibi.warnings
    assert judge(place, "nope").verdict == "worse"


def with_fresh_seeds(loop, tmp_path, **effects):
    """Return a copy of the loop with seeds 100 to 107 of some schemes, which have these losses."""
    folder = Path(shutil.copytree(loop, tmp_path / "loop"))
    fabricate(tmp_path, World(effects, tuple(range(100, 108)), noise_sd=0.004, experiment="loop"))
    return folder


def test_a_winner_is_confirmed_once_on_seeds_that_no_candidate_has_seen(loop, tmp_path):
    """Vo_rope won on seeds 0 to 7 and is equal on seeds 100 to 107; alibi leads there by 0.05."""
    folder = Path(shutil.copytree(loop, tmp_path / "loop"))
    unseen = "100,101,102,103,104,105,106,107"
    waiting = judge(folder, "vo_rope", confirm=2)
    assert (waiting.verdict, waiting.go_on, waiting.seeds) == ("open", True, [])
    assert waiting.reason == "not confirmed yet: the test is at 8 seeds, 100 to 107"
    assert waiting.next_commands == [
        ["posbench", "train", "-m", f"scheme={scheme}", "experiment_name=loop", f"seed={unseen}"]
        for scheme in ("vo_rope", "qk_rope")
    ]
    assert waiting.look == {"number": 0, "of": 1, "seeds": 0}
    in_loop = judge(folder, "vo_rope", family=20)
    folder = with_fresh_seeds(loop, tmp_path / "confirmed", qk_rope=0.0, vo_rope=0.0, alibi=-0.05)
    lost, won = (judge(folder, name, confirm=2) for name in ("vo_rope", "alibi"))
    assert (lost.verdict, lost.go_on, lost.next_commands) == ("equal", False, [])
    assert (won.verdict, won.seeds) == ("better", list(range(100, 108)))
    assert won.look == {"number": 1, "of": 1, "seeds": 8} and won.confirm == 2 and won.family is None
    losses = pd.DataFrame(
        {name: [stored_loss(run_of(folder, name, seed)) for seed in range(100, 108)] for name in ("alibi", "qk_rope")}
    )
    assert won.p == pytest.approx(2 * stats.ttest_rel(losses["alibi"], losses["qk_rope"]).pvalue)
    again = judge(folder, "vo_rope", family=20)
    assert (again.p, again.seeds, again.gap) == (in_loop.p, list(range(8)), in_loop.gap)  # the looks leave them out
    refuses("give --scheme, and leave out --family", judge, folder, "alibi", confirm=1, family=20)


def test_every_winner_that_was_confirmed_counts_and_reports_leave_its_seeds_out(loop, tmp_path):
    folder = with_fresh_seeds(loop, tmp_path, qk_rope=0.0, vo_rope=0.02, alibi=-0.05)
    alone = judge(folder, "vo_rope", confirm=1)
    second = judge(folder, "alibi", confirm=1)
    assert json.loads((folder / "confirmed.json").read_text()) == {"qk_rope": ["vo_rope", "alibi"]}
    [warning] = [line for line in second.warnings if "winners were confirmed" in line]
    assert warning.startswith("2 winners were confirmed against qk_rope (vo_rope, alibi), more than --confirm 1 plans")
    again = judge(folder, "vo_rope", confirm=1)
    assert again.p == pytest.approx(2 * alone.p)
    c = comparison(folder)
    assert c.seeds == list(range(8)) and c.left_out[0].startswith("seeds 100 to 107 of alibi, qk_rope, vo_rope: they")


def test_a_death_on_a_loops_seed_does_not_touch_a_confirmation(loop, tmp_path):
    folder = with_fresh_seeds(loop, tmp_path, qk_rope=0.0, vo_rope=0.0, alibi=-0.05)
    judged = partial(judge, folder, "alibi", confirm=1)
    before = judged()
    for scheme in ("alibi", "qk_rope"):
        run_of(folder, scheme, 2).update_manifest(status="died", reason="NaN", loss=None, bits_per_byte=None)
    after = judged()
    assert (before.verdict, after.verdict, after.p) == ("better", "better", before.p)


def test_a_test_of_other_seeds_than_the_planned_ones_is_warned_of(tmp_path):
    folder = fabricate(tmp_path, World({"qk_rope": 0.0, "alibi": -0.1}, (0, 1, 5, 6, 7)))
    for options in ({}, {"family": 2}):
        judged = judge(folder, "alibi", **options)
        assert judged.verdict == "better"
        assert any("reads seeds 0, 1, 5, 6, 7, and the plan is 0 to 4" in line for line in judged.warnings)


@pytest.mark.parametrize(
    ("lead", "verdict", "status"),
    [(-0.05, "better", 0), (-0.004, "better, below margin", 14), (0.004, "worse, below margin", 10)],
)
def test_a_difference_below_the_margin_has_a_verdict_of_its_own(tmp_path, lead, verdict, status):
    world = World({"qk_rope": 0.0, "alibi": lead}, noise_sd=0.0005)
    folder = fabricate(tmp_path, world)
    judged = judge(folder, "alibi")
    assert (judged.verdict, judged.exit_status) == (verdict, status)
    assert ("by less than the margin" in str(judged)) == ("margin" in verdict)
    winners = paragraph(comparison(folder))
    assert ("Better by less than 0.01 nats: alibi than qk_rope." in winners) == (lead == -0.004)
    assert f"At this rate, against qk_rope: alibi is {verdict}." in winners


def test_a_verdict_at_one_rate_stays_after_a_search_has_begun(tmp_path):
    effects = {2.5e-3: {"qk_rope": 0.2, "alibi": 0.1}}
    place = fabricate_search(tmp_path, effects, {2.5e-3: range(2)})
    own = World({"qk_rope": 0.0, "alibi": -0.05, "nope": 0.01}, (0, 1, 2))
    fabricate(tmp_path, own)
    judged = judge(place, "alibi")
    shutil.rmtree(tmp_path / "demo-tune")
    before = judge(place, "alibi")
    assert (judged.verdict, before.verdict, before.at_one_rate) == ("open", "better", None)
    assert judged.at_one_rate is not None and judged.at_one_rate["rates"] == [5e-3]
    kept = {name: judged.at_one_rate[name] for name in ("verdict", "gap", "gap_low", "gap_high", "p")}
    assert kept == {name: getattr(before, name) for name in kept} and judged.at_one_rate["seeds"] == 3
    assert "at 0.005 alone, which is not the claim: better" in str(judged)


def test_a_winner_must_be_better_in_every_further_experiment(tmp_path):
    """Alibi leads by 0.05 on one text, and by nothing on the other."""
    seeds = tuple(range(100, 108))
    for name, lead in (("here", -0.05), ("there", 0.0)):
        world = World({"qk_rope": 0.0, "alibi": lead}, seeds, noise_sd=0.004, experiment=name)
        fabricate(tmp_path, world)
    here, there = tmp_path / "here", tmp_path / "there"
    judged = partial(judge, scheme="alibi", confirm=1)
    assert judged(here).verdict == "better" and judged(here, also=[here]).verdict == "better"
    vanished = judged(here, also=[there])
    assert (vanished.verdict, vanished.go_on) == ("equal", False)
    assert vanished.reason.startswith("better in here, but equal in there: decided by the test of 8 seeds")
    assert vanished.elsewhere[str(there)]["gap"] == judged(there).gap
    assert "in there equal" in str(vanished) and not faults(json.loads(vanished.as_json()), "judge")
    refuses("add --confirm N", judge, here, "alibi", also=[there])


def test_order_is_judged_by_its_own_values_and_more_is_better():
    """The packs of `headline`, whose scores are read and tested here once more."""
    by_seed = stored(REFERENCE / "headline.zip", "headline")
    judged = judge(REFERENCE / "headline", "alibi", metric="order")
    gaps = by_seed["alibi"] - by_seed["qk_rope"]
    assert judged.verdict == "better" and judged.gap == pytest.approx(gaps.mean())
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std() / len(gaps) ** 0.5
    assert (judged.gap_low, judged.gap_high) == pytest.approx((gaps.mean() - half, gaps.mean() + half))
    assert "nats per token of order beyond 32" in str(judged) and judged.beyond is None
    assert judge(REFERENCE / "headline", "nope", metric="order").verdict == "worse"
    refuses(r"posbench eval .* --protocol order", judge, REFERENCE / "all_schemes", "nope", metric="order")
    refuses(
        "--metric bytes is not known: give loss or order",
        judge,
        REFERENCE / "headline",
        "nope",
        metric="bytes",
    )


def test_a_loop_about_order_drops_a_scheme_to_which_it_is_worth_less(monkeypatch):
    monkeypatch.setattr("posbench.analysis.verdict._judged", lambda table, options: table.head(2))
    nope, alibi = (
        posbench.judge(REFERENCE / "headline", scheme=scheme, metric="order", family=4) for scheme in ("nope", "alibi")
    )
    assert nope.gap < 0 and nope.reason.startswith("dropped: worse by more than") and not nope.go_on
    assert alibi.gap > 0 and alibi.go_on


def test_of_two_winners_of_a_loop_that_ran_fresh_seeds_confirm_one():
    page = " ".join(Path("docs/loops.md").read_text(encoding="utf-8").split())
    bases = ("base_8000", "base_9000", "base_11000", "base_12500")
    gaps = {base: judge("runs/reference/loop", base, family=5).gap for base in bases}
    assert min(gaps, key=gaps.__getitem__) == "base_8000" and gaps["base_8000"] < 0, "the best of the four bases"
    winner, lucky = (judge("runs/reference/loop", scheme, confirm=2) for scheme in ("forgetting", "base_8000"))
    assert (winner.verdict, lucky.verdict) == ("better", "equal")
    assert winner.seeds == list(range(100, 108)) == lucky.baseline_seeds
    assert str(winner) in page and str(lucky) in page
