"""`posbench positions`: a config.json, a family, a scheme or a run; what is trained with the command that it prints."""

import json
import shlex

import pytest


def test_a_config_needs_no_weights(posbench, tmp_path):
    keys = {"model_type": "smollm3", "num_hidden_layers": 8, "max_position_embeddings": 4096, "rope_theta": 5e6}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    result = posbench("positions", str(tmp_path / "config.json"))
    assert result.status == 0 and "at 4k tokens:" in result.out
    assert "Every 4th layer (from 3) sees all tokens and has no position. Trained on 4,096 tokens." in " ".join(
        result.out.split()
    )
    data = json.loads(posbench("positions", str(tmp_path), "--json").out)
    assert data["trained"] == 4096 and data["contradictions"] == []
    assert [entry["layers"] for entry in data["layers"]] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert data["layers"][0]["rotation"]["base"] == 5e6 and data["layers"][1]["rotation"] is None
    # What it prints trains the same positions.
    words = shlex.split(data["train"])[1:]
    job = posbench(*words, "model.num_layers=8", "--cfg", "job").out
    assert "kind: interleaved" in job and "base: 5000000.0" in job


def test_a_scheme_a_family_and_a_run(posbench):
    out = posbench("positions", "vo_rope").out
    assert "All layers see all tokens and rotate whole heads of v, o with base 10,000." in out
    assert "posbench train scheme=vo_rope" in out
    out = " ".join(posbench("positions", "gpt2").out.split())
    assert "Positions are added to the embeddings (learned)." in out and "note: the numbers are the class's" in out
    assert "posbench has no scheme for learned positions at the embeddings" in out


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("qk_rop", "no config.json, folder, run, scheme or family of transformers 'qk_rop'; did you mean 'qk_rope'?"),
        ("reformer", "reformer cannot be read: AssertionError"),
    ],
)
def test_what_is_no_model_is_refused(what, message, posbench):
    assert message in posbench("positions", what).refusal
