"""Only runs that differ in scheme and seed alone are compared, and what is left out is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from fabricate import change_fingerprints, rescore, run_of
from hypothesis import given
from hypothesis import strategies as st

from posbench.config import ConfigError
from posbench.reporting import results
from posbench.reporting.findings import find
from posbench.reporting.joining import Joined, common_seeds, join
from posbench.runs import DIED, RUNNING


def joined(folder: Path) -> Joined:
    return join(results(folder), "qk_rope")


def why(found: Joined) -> dict[tuple[str, int], str]:
    return {(run.scheme, run.seed): run.why for run in found.left_out}


def test_runs_that_agree_are_all_compared(experiment: Path) -> None:
    found = joined(experiment)
    assert (found.schemes, found.seeds) == (["alibi", "nope", "qk_rope", "qkvo_rope"], [0, 1, 2, 3])
    assert not found.left_out and not found.notes


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("data", "the text"),
        ("tokenizer", "the tokenizer"),
        ("config", "the configuration"),
        ("code", "the code"),
        ("batches", "the batches"),
    ],
)
def test_a_run_with_another_fingerprint_is_left_out_and_named(own: Path, name: str, meaning: str) -> None:
    change_fingerprints(run_of(own, "nope", 2), **{name: "0ther"})
    found = joined(own)
    assert "nope" not in set(found.runs[found.runs["seed"] == 2]["scheme"])
    assert meaning in why(found)[("nope", 2)]
    assert found.seeds == [0, 1, 3] and "seed 2 is not finished" in why(found)[("qk_rope", 2)]


def test_runs_of_a_seed_are_joined_where_the_parts_agree_that_both_have(own: Path) -> None:
    parts = run_of(own, "nope", 2).manifest.fingerprints.initial_weights
    fewer = {name: digest for name, digest in parts.items() if name != "attention.q"}
    change_fingerprints(run_of(own, "nope", 2), initial_weights={**fewer, "attention.extra": "c0de"})
    assert not joined(own).left_out, "a row that lacks a part is held to the others"
    change_fingerprints(run_of(own, "nope", 2), initial_weights={**fewer, "attention.k": "0ther"})
    assert why(joined(own))["nope", 2] == "differs from the others in the shared initial weights (attention.k)"
    change_fingerprints(run_of(own, "nope", 2), initial_weights={"all": "0ther"})
    assert "no part in common" in why(joined(own))["nope", 2]


def test_a_scheme_whose_own_code_changed_is_not_joined_with_its_older_self(own: Path) -> None:
    for seed in (0, 1, 2):
        change_fingerprints(run_of(own, "nope", seed), scheme_code="newer")
    left = joined(own)
    assert why(left)["nope", 3] == "differs from the other runs of its scheme in the code of its scheme"
    assert left.schemes == ["alibi", "nope", "qk_rope", "qkvo_rope"] and left.seeds == [0, 1, 2]


def test_a_result_by_other_code_of_its_scheme_is_left_out_and_named(own: Path) -> None:
    for seed in range(4):
        code = {"scheme_code": "newer" if seed == 2 else "older"}
        rescore(run_of(own, "nope", seed), "validation", 256, lambda rows: rows, **code)
    [note] = [note for note in find(own).notes if "left out" in note]
    assert "validation at 256: left out nope seed 2, which" in note and "by other code" in note


def test_initial_weights_and_batches_are_compared_within_a_seed_only(experiment: Path) -> None:
    frame = results(experiment)
    assert frame["fingerprint.batches"].nunique() == 4  # other batches in each seed, and still all are joined
    assert not joined(experiment).left_out


def test_runs_of_one_name_with_other_options_are_not_one_scheme(own: Path) -> None:
    for seed in range(4):
        run_of(own, "qk_rope", seed).update_manifest(identity={"scheme.base": 5e5 if seed == 3 else 1e4})
    found = joined(own)
    assert "has other options (scheme.base: 500000.0, most have 10000.0)" in why(found)[("qk_rope", 3)]
    assert found.seeds == [0, 1, 2]


def test_the_values_that_differ_are_told(own: Path) -> None:
    for scheme in ("qk_rope", "nope"):
        run_of(own, scheme, 0).update_manifest(identity={"train.lr": 0.01 if scheme == "nope" else 0.003, "seed": 0})
    change_fingerprints(run_of(own, "nope", 0), config="0ther")
    frame = results(own)
    frame = frame[(frame["seed"] == 0) & frame["scheme"].isin(["qk_rope", "nope", "alibi"])]
    run_of(own, "alibi", 0).update_manifest(identity={"train.lr": 0.003, "seed": 0})
    assert "train.lr: 0.01, others 0.003" in why(join(frame, "qk_rope"))[("nope", 0)]


def test_the_larger_group_stays_and_the_baseline_breaks_a_tie(own: Path) -> None:
    for scheme in ("qk_rope", "nope"):
        for seed in range(4):
            change_fingerprints(run_of(own, scheme, seed), data="0ther")
    assert joined(own).schemes == ["nope", "qk_rope"]


def test_a_missing_fingerprint_cannot_be_checked_so_the_run_is_left_out(own: Path) -> None:
    change_fingerprints(run_of(own, "nope", 0), batches=None)
    assert "no fingerprint of the batches" in why(joined(own))[("nope", 0)]


def test_unfinished_and_died_runs_are_left_out_with_their_reason(own: Path) -> None:
    run_of(own, "nope", 0).update_manifest(status=DIED, reason="loss nan at step 7")
    run_of(own, "alibi", 1).update_manifest(status=RUNNING)
    found = joined(own)
    assert why(found)[("nope", 0)] == "died: loss nan at step 7" and why(found)[("alibi", 1)] == "interrupted"
    assert found.seeds == [2, 3]


def test_a_scheme_with_too_few_seeds_is_told_which_to_train(own: Path) -> None:
    for seed in (1, 2, 3):
        run_of(own, "nope", seed).update_manifest(status=RUNNING)
    found = joined(own)
    assert (found.schemes, found.seeds) == (["alibi", "qk_rope", "qkvo_rope"], [0, 1, 2, 3])
    assert why(found)[("nope", 0)] == "its scheme has seed 0 of 0, 1, 2, 3: train seeds 1, 2, 3 of it"


def test_versions_that_differ_are_said(own: Path) -> None:
    run = run_of(own, "nope", 0)
    run.update_manifest(versions={**run.manifest.versions, "torch": "2.12.0"})
    assert any("torch differs: 2.13.0 (15 runs), 2.12.0 (1 runs)" in note for note in joined(own).notes)


def test_no_finished_run_says_what_to_do(own: Path) -> None:
    for scheme in ("qk_rope", "qkvo_rope", "nope", "alibi"):
        for seed in range(4):
            run_of(own, scheme, seed).update_manifest(status=RUNNING)
    with pytest.raises(ConfigError, match="no run is finished here: train some with `posbench train`"):
        find(own)


def test_a_baseline_without_runs_is_refused_with_those_there_are(experiment: Path) -> None:
    with pytest.raises(ConfigError, match="'sinusoidal' has no run to compare with: choose one of alibi, nope"):
        find(experiment, baseline="sinusoidal")


def test_seeds_in_common() -> None:
    assert common_seeds({"a": {0, 1, 2}, "b": {0, 1}}, "a") == (["a", "b"], [0, 1])
    assert common_seeds({"a": {0, 1, 2}, "b": {0, 1, 2}, "c": {0}}, "a") == (["a", "b"], [0, 1, 2])  # c is only a trial
    assert common_seeds({"a": {0, 1}, "b": {0}, "c": {0}}, "a") == (["a", "b", "c"], [0])  # one scheme is no comparison
    assert common_seeds({"a": {0}, "b": {1}}, "a") == (["a"], [0])
    far = {"a": {0, 1, 2}, "b": {4, 5, 6}, "c": {0, 1}, "d": {0, 1, 3}}
    assert common_seeds(far, "a") == (["a", "c", "d"], [0, 1])  # c has fewer than b, and is not in the way


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.integers(0, 4), min_size=1), min_size=1))
def test_whatever_seeds_there_are_some_are_shared(seeds: dict[str, set[int]]) -> None:
    baseline = sorted(seeds)[0]
    schemes, shared = common_seeds(seeds, baseline)
    assert baseline in schemes and shared
    assert all(set(shared) <= seeds[scheme] for scheme in schemes)
    assert set(shared) == set.intersection(*(seeds[scheme] for scheme in schemes))
    if set.intersection(*seeds.values()):
        assert len(schemes) == len(seeds) or len(shared) >= 2
