"""A run that begins with another model's weights, under its own scheme or another."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from posbench.analysis.agreement import disagreements
from posbench.analysis.table import results
from posbench.composition.compose import compose
from posbench.model.architecture import build_architecture
from posbench.runs import Run
from posbench.training import train
from tests.conftest import small_run
from tests.refusals import refuses

STEPS = ["train.steps=4", "train.lr=1e-2"]
STILL = ["train.lr=1e-12", "train.weight_decay=0"]  # weights stay as they are


@pytest.fixture(scope="session")
def _trained(documents, cache, tmp_path_factory):
    """Train 12 steps under three schemes, and keep a checkpoint after 8."""
    runs = tmp_path_factory.mktemp("trained") / "runs"
    for scheme in ("qk_rope", "nope", "t5"):
        train(compose([*small_run(documents, cache, runs), f"scheme={scheme}"]))
    return runs


@pytest.fixture
def runs(_trained, tmp_path):
    return Path(shutil.copytree(_trained, tmp_path / "runs"))


@pytest.fixture
def words(documents, cache, runs):
    def make(from_run, *more):
        # Leave out the settings of sizes, which come from the run that is continued.
        usual = [word for word in small_run(documents, cache, runs) if not word.startswith("model")]
        return [*usual, *STEPS, f"train.from_run={from_run}", *more]

    return make


def losses(run):
    return {row["step"]: row["loss"] for row in run.logged if row["kind"] == "validation"}


def test_it_begins_where_the_other_run_ended(runs, words):
    source = Run(runs / "demo/qk_rope/seed=0")
    run = train(compose(words(source.path, "scheme=qk_rope")))
    assert run.path.parent.name == "qk_rope_then_qk_rope"
    assert losses(run)[0] == losses(source)[12]
    assert run.manifest.tokens == (12 + 4) * 128 and run.logged[-1]["tokens"] == 16 * 128
    assert run.manifest.continued == {
        "name": "demo/qk_rope/seed=0",
        "scheme": "qk_rope",
        "tokens": 12 * 128,
        "weights": source.manifest.weights,
    }
    assert run.load_model().embedding.weight.shape == source.load_model().embedding.weight.shape


def test_under_another_scheme_it_begins_as_that_reads_the_weights(runs, words):
    source = Run(runs / "demo/qk_rope/seed=0")
    run = train(compose(words("demo/qk_rope", "scheme=nope", *STILL)))  # a row: its run of the same seed
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, rotated = source.load_model(["scheme=nope"])(tokens), source.load_model()(tokens)
        logits = run.load_model()(tokens)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=0)
    assert (logits - rotated).abs().max() > 1e-3


def test_the_last_steps_under_another_scheme_read_what_a_run_trained_through_has_read(runs, words):
    """This makes three runs comparable: trained with rotations, without, and without only at the end."""
    checkpoint = runs / "demo/qk_rope/seed=0/checkpoints/step=00000008"
    run = train(compose(words(checkpoint, "scheme=nope", "train.schedule=constant", "train.warmup_ratio=0")))
    whole = Run(runs / "demo/nope/seed=0").manifest
    assert run.manifest.tokens == whole.tokens
    assert run.manifest.fingerprints.batches == whole.fingerprints.batches
    table = results(runs / "demo")
    assert list(disagreements(table[table["scheme"] != "t5"])) == []
    row = table.set_index("scheme").loc["qk_rope_then_nope"]
    assert (
        row["tokens_before"] == 8 * 128 and row["train.lr"] == 1e-2 and row["scheme.continued.schedule"] == "constant"
    )


@pytest.mark.slow
def test_parameters_of_the_scheme_are_taken_over_where_both_have_them(runs, words):
    names = Run(runs / "demo/t5/seed=0").load_weights()
    same = train(compose(words("demo/t5", "scheme=t5", *STILL))).load_weights()
    scheme_names = [name for name in names if name.startswith("scheme.")]
    assert scheme_names and all(torch.allclose(same[name], names[name], atol=1e-9) for name in names)
    fresh = train(compose(words("demo/nope", "scheme=t5", *STILL))).load_weights()
    assert not any(torch.allclose(fresh[name], names[name], atol=1e-9) for name in scheme_names)
    without = train(compose(words("demo/t5", "scheme=nope", *STILL))).load_weights()
    assert without.keys() == names.keys() - {*scheme_names}


def test_with_other_windows_it_stands_in_no_table_with_its_source(runs, words):
    run = train(compose(words("demo/qk_rope", "scheme=nope", "train.context_length=64")))
    assert run.manifest.identity["train.context_length"] == 64
    again = train(compose(words(run.path, "scheme=nope", "train.context_length=64", "experiment_name=again")))
    flops = Run(runs / "demo/qk_rope/seed=0").manifest.training_flops
    per_token = (run.manifest.training_flops - flops) / (run.manifest.tokens - 12 * 128)
    assert again.manifest.training_flops == pytest.approx(run.manifest.training_flops + 4 * 256 * per_token)


def test_another_source_is_another_run(runs, words):
    train(compose(words("demo/qk_rope", "scheme=nope", "scheme.name=mine")))
    refuses(
        r"train.from_run: [0-9a-f]{12} -> [0-9a-f]{12}",
        train,
        compose(words("demo/nope", "scheme=nope", "scheme.name=mine")),
    )


@pytest.mark.slow
def test_what_does_not_fit_is_refused(runs, words, tmp_path):
    refuses(r"leave out model\.d_model=64", compose, words("demo/qk_rope", "scheme=nope", "model.d_model=64"))
    refuses("no run or experiment 'demo/absent'", compose, words("demo/absent", "scheme=nope"))
    refuses(
        r"no such weights \(demo/nope/seed=0 has step=00000008, step=00000012\)",
        compose,
        words(runs / "demo/nope/seed=0/checkpoints/step=00000005", "scheme=nope"),
    )
    damaged = shutil.copytree(
        runs / "demo/nope/seed=0/checkpoints/step=00000008", runs / "demo/nope/seed=0/checkpoints/step=00000003"
    )
    (damaged / "state.json").write_text("{")
    refuses(r"state\.json does not match its checksum: name another step", compose, words(damaged, "scheme=nope"))
    shutil.rmtree(damaged)
    refuses(
        r"from_run=demo: it has 3 runs of seed 0, .*are demo/nope/seed=0, demo", compose, words("demo", "scheme=nope")
    )
    for seed in (1, 2):
        shutil.copytree(runs / "demo/nope/seed=0", runs / f"demo/nope/seed={seed}")
    refuses(r"it has 0 runs of seed 7, .*demo/nope/seed=2\)", compose, words("demo/nope", "scheme=nope", "seed=7"))
    refuses(
        r"differs from the tokenizer of train\.from_run=demo/qk_rope",
        train,
        compose(words("demo/qk_rope", "scheme=nope", "tokenizer=bpe", "tokenizer.vocab_size=300")),
    )
    refuses(
        r"blocks\.0\.attention\.qkv\.weight differs", train, compose(words("demo/qk_rope", "scheme=shared_kv_nope"))
    )
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    refuses("model_type=gpt2", compose, words(tmp_path / "gpt2", "scheme=nope"))


def test_without_a_scheme_it_goes_on_under_its_own(runs, words):
    config = compose(words("demo/nope"))
    assert (config.scheme.kind, config.scheme.name) == ("nope", "nope_then_nope")
    (path := runs / "demo/nope/seed=0/run.json").write_text(path.read_text().replace('"nope"', '"t5_then_nope"'))
    assert compose(words("demo/nope")).scheme.name == "t5_then_nope_then_nope"


def test_a_shell_completes_the_path_with_its_seed(runs, words):
    path = runs / "demo/nope/seed=0"
    config = compose(words(f"{path}/", "scheme=qk_rope"))
    assert config.train.from_run == f"{path}/" and config.scheme.name == "nope_then_qk_rope"


@pytest.mark.slow
def test_a_loss_above_the_first_is_not_divergence(runs, words):
    run = train(compose(words("demo/qk_rope", "scheme=qk_rope", "train.lr=0.5", "scheme.name=worse")))
    assert losses(run)[4] > losses(run)[0]
    row = results(runs / "demo/worse").iloc[0]
    assert row["diverged"] is None and math.isfinite(row["loss"])


# ---------------------------------------------------------------- longer windows

LONGER = ["train.context_length=128", "train.batch_size=1"]  # the source was trained at 32


def frequencies(run, length, *under):
    return run.load_model(under).scheme.first.angles(torch.ones(1), length)[0]


FURTHER = ("scheme.factor=4", "scheme=qk_rope")


def yarn_by_hand(width, L, s):
    """YaRN's frequencies (arXiv 2309.00071): with r turns in L tokens, w / s below 1 turn and w above 32 turns."""
    rescaled = []
    for t in range(width // 2):
        w = 10000 ** (-2 * t / width)
        share = min(1, max(0, (L * w / (2 * math.pi) - 1) / 31))
        rescaled.append(w * share + w / s * (1 - share))
    return rescaled


@pytest.mark.parametrize("more", [[], *(pytest.param([word], marks=pytest.mark.slow) for word in FURTHER)])
def test_yarn_extends_the_context_of_the_run_that_is_continued(more, runs, words, capsys):
    run = train(compose(words("demo/qk_rope", *LONGER, "scheme.rescale=yarn", *more)))
    scheme = run.config.scheme
    assert (scheme.trained_length, scheme.options["factor"]) == (32, 4)
    width = run.config.model.head_width
    expected = yarn_by_hand(width, 32, 4)
    for length in (32, 128, 256):  # evaluation rotates as training did, whatever the length
        assert frequencies(run, length).tolist() == pytest.approx(expected, rel=1e-12)
    table = [line.split() for line in capsys.readouterr().err.splitlines()]
    row = ["10000", "yarn", "4", f"{expected[0]:.3g}", f"{expected[-1]:.3g}"]
    assert row in [cells[-5:] for cells in table]
    other = run.config_under(["rescale=dynamic_ntk"]).scheme  # its factor follows the window, as at any evaluation
    assert other.trained_length == 32 and "factor" not in other.options
    assert frequencies(run, 256, "rescale=pi")[0] == pytest.approx(32 / 256)
    plain = train(compose(words("demo/qk_rope", *LONGER, "experiment_name=plain")))
    assert losses(run)[0] != losses(plain)[0]
    assert train(compose(words("demo/qk_rope", *LONGER, "scheme.rescale=yarn", *more))).manifest == run.manifest


def test_continued_twice_it_keeps_its_rotation_unless_asked_to_rescale_again(runs, words):
    first = train(
        compose(words("demo/qk_rope", "train.context_length=64", "train.batch_size=2", "scheme.rescale=yarn"))
    )
    assert (first.config.scheme.trained_length, first.config.scheme.options["factor"]) == (32, 2)
    same = compose(words(first.path, *LONGER, "experiment_name=same")).scheme
    assert (same.trained_length, same.options["factor"]) == (32, 2)
    again = compose(words(first.path, *LONGER, "scheme.rescale=pi", "experiment_name=again")).scheme
    assert (again.trained_length, again.options["factor"]) == (32, 4)
    plain = train(compose(words("demo/qk_rope", "train.context_length=64", "train.batch_size=2", "experiment_name=p")))
    assert plain.config.scheme.trained_length is None
    after = compose(words(plain.path, *LONGER, "scheme.rescale=yarn")).scheme
    assert (after.trained_length, after.options["factor"]) == (64, 2)


def test_a_factor_that_follows_the_window_stays_so(runs, words):
    scheme = compose(words("demo/qk_rope", *LONGER, "scheme.rescale=dynamic_ntk")).scheme
    assert scheme.trained_length == 32 and "factor" not in scheme.options


@pytest.mark.parametrize("scheme", ["hope", "clipped_rope", "fire", "qk_rope_context"])
def test_formulas_with_the_training_length_keep_it(scheme, runs, words):
    assert compose(words("demo/qk_rope", *LONGER, f"scheme={scheme}")).scheme.trained_length == 32
    layers = build_architecture(compose(words("demo/qk_rope", *LONGER, f"scheme={scheme}"))).scheme
    source = build_architecture(compose(words("demo/qk_rope", "train.context_length=32", f"scheme={scheme}"))).scheme
    assert layers.shape.positions_length == source.shape.positions_length == 32
    if scheme != "fire":
        rotated, expected = (each.first.angles(torch.ones(1), 32) for each in (layers, source))
        assert torch.equal(rotated, expected)
