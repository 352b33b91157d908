"""Reference vectors: equal to transformers and to our hooks, and ports that are wrong in known ways are named."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from transformers import BloomModel, LlamaConfig
from transformers import modeling_rope_utils as rope_utils
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5Attention

from posbench.tools.vectors.publishing import Sizes, chosen, write, wrong_values
from tests.cli.commands import posbench  # noqa: F401
from tests.refusals import refuses
from tests.rows import Float64

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "vectors"
RIGHT = load_file(PUBLISHED / "positions-1.safetensors")
ABOUT = json.loads((PUBLISHED / "positions-1.json").read_text())
POSITIONS = RIGHT["positions"]
D, LENGTH = 64, int(POSITIONS[-1]) + 1
ROTATED = ["default", "linear", "dynamic", "yarn", "yarn_mscale", "yarn_untruncated", "llama3", "longrope"]

# ---------------------------------------------------------------- the published file


def test_published_values_do_not_change(tmp_path):
    """Libraries of other machines may round the last bits differently, so values computed again are not bytes."""
    sums = dict(line.split()[::-1] for line in (PUBLISHED / "SHA256SUMS").read_text().splitlines())
    for name, digest in sums.items():
        assert hashlib.sha256((PUBLISHED / name).read_bytes()).hexdigest() == digest
    assert sums["positions-1.safetensors"] == ABOUT["sha256"]
    assert (PUBLISHED / "positions-1.safetensors").stat().st_size <= 300_000
    values, about = write(tmp_path, [], Sizes())
    header = values.read_bytes()[:200]
    assert write(tmp_path, [], Sizes())[0].read_bytes()[:200] == header, "two metadata keys have a random order"
    computed = load_file(values)
    assert computed.keys() == RIGHT.keys()
    for name, array in computed.items():
        assert array.dtype == RIGHT[name].dtype
        assert np.allclose(array, RIGHT[name], rtol=1e-10, atol=1e-10), name
    written = json.loads(about.read_text())
    assert written["entries"].keys() == ABOUT["entries"].keys() and written["mistakes"] == ABOUT["mistakes"]


# ---------------------------------------------------------------- transformers


def inputs(name):
    return torch.from_numpy(RIGHT[name]).double()[None]


def close(name, theirs, limit=1e-9):
    """Return whether a tensor [1, heads, T, .] is the published one."""
    return bool(np.abs(theirs[0].numpy() - RIGHT[name]).max() < limit)


def cos_and_sin(width, base=10000.0):
    """Return cosines and sines [1, T, width / 2] in float64."""
    angles = torch.from_numpy(POSITIONS).double()[:, None] / base ** (torch.arange(0, width, 2).double() / width)
    return angles.cos()[None], angles.sin()[None]


@pytest.fixture
def in_float64(monkeypatch):
    """Let transformers compute angles in float64."""
    monkeypatch.setattr(modeling_llama, "torch", Float64())
    monkeypatch.setattr(rope_utils, "torch", Float64())
    torch.set_default_dtype(torch.float64)  # of the base of dynamic
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("entry", [*ROTATED, "proportional"])
def test_rope_types_are_those_of_transformers(entry, in_float64):
    parameters = ABOUT["entries"][entry]["settings"]["rope_parameters"]
    length = 4096 if entry == "dynamic" else LENGTH
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=D,
        max_position_embeddings=length,
        rope_parameters=dict(parameters),
    )
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(inputs("q"), torch.from_numpy(POSITIONS)[None])
    q, k = modeling_llama.apply_rotary_pos_emb(inputs("q"), inputs("k"), cos, sin)
    # Its code of longrope computes powers of the base in float32.
    limit = 1e-2 if entry == "longrope" else 1e-9
    assert close(f"{entry}.q", q, limit) and close(f"{entry}.k", k, limit)
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    assert close(f"{entry}.scores", scores.tril(), limit)


def test_layouts_are_those_of_gptj_gpt_neox_and_deepseek():
    cos, sin = cos_and_sin(D)
    for name in ("q", "k"):
        theirs = modeling_gptj.apply_rotary_pos_emb(inputs(name).transpose(1, 2), sin, cos)
        assert close(f"adjacent.{name}", theirs.transpose(1, 2))
    cos, sin = cos_and_sin(D // 4)
    q, k = modeling_gpt_neox.apply_rotary_pos_emb(
        inputs("q"), inputs("k"), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    )
    assert close("first_quarter.q", q) and close("first_quarter.k", k)
    for name in ("q", "k"):
        assert close(f"last_quarter.{name}", modeling_deepseek_v4.apply_rotary_pos_emb(inputs(name), cos, sin))


def test_outputs_and_sinks_are_those_of_gpt_oss_and_deepseek():
    T = len(POSITIONS)
    later = torch.full((T, T), -torch.inf).triu(1)
    layer = SimpleNamespace(num_key_value_groups=2, sinks=inputs("sinks")[0], training=False)

    def attend(q, k, v):
        return modeling_gpt_oss.eager_attention_forward(layer, q, k, v, later, D**-0.5)[0].transpose(1, 2)

    assert close("sinks.o", attend(inputs("q"), inputs("k"), inputs("v")))
    cos, sin = cos_and_sin(D // 8)
    q, kv = (modeling_deepseek_v4.apply_rotary_pos_emb(inputs(name), cos, sin) for name in ("q", "k"))
    o = modeling_deepseek_v4.apply_rotary_pos_emb(attend(q, kv, kv), cos, -sin)
    assert close("deepseek_v4.q", q) and close("deepseek_v4.k", kv)
    assert close("deepseek_v4.o", o, 1e-6)  # it rotates in float32


def test_biases_are_those_of_bloom_and_t5():
    for heads in (8, 12, 129):
        theirs = BloomModel.build_alibi_tensor(None, torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]
        assert np.allclose(RIGHT[f"alibi_{heads}.slopes"], theirs.numpy(), rtol=1e-6, atol=0)
    distances = torch.from_numpy(RIGHT["distances"])
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional=False)
    assert RIGHT["t5.buckets"].tolist() == theirs.tolist()


# ---------------------------------------------------------------- our hooks


# ---------------------------------------------------------------- ports that are wrong


def turned(x, frequencies, back=False):
    """Return x [heads, T, r] rotated as complex numbers, pairs (t, t + r/2), as a port would."""
    half = x.shape[-1] // 2
    angles = POSITIONS[:, None] * frequencies
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(-1j * angles if back else 1j * angles)
    return np.concatenate((z.real, z.imag), axis=-1)


def frequencies_of(width, base=10000.0):
    return np.asarray(base ** (-np.arange(0, width, 2) / width))


def adjacent_pairs():
    order = [*range(0, D, 2), *range(1, D, 2)]
    values = {}
    for name in ("q", "k"):
        values[name] = np.empty_like(RIGHT[name], dtype=float)
        values[name][..., order] = turned(RIGHT[name][..., order], frequencies_of(D))
    return {f"default.{name}": array for name, array in values.items()}


def missing_inverse():
    v = np.repeat(turned(RIGHT["v"], frequencies_of(D)), 2, axis=0)
    scores = RIGHT["q"].astype(float) @ np.repeat(RIGHT["k"], 2, axis=0).transpose(0, 2, 1) / 8
    weights = np.tril(np.exp(scores))
    return {"vo.o": weights / weights.sum(-1, keepdims=True) @ v}


PORTS = [adjacent_pairs, missing_inverse]


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.__name__)
def test_wrong_ports_are_named(port, posbench):  # noqa: F811
    """By the command, and by the script in the documents, which knows only distances."""
    values = port()
    save_file(values, "mine.safetensors")
    [entry] = {name.split(".")[0] for name in values}
    result = posbench("vectors", "--check", "mine.safetensors")
    assert result.status == 1
    assert f"{entry}: looks like {port.__name__} (" in result.out and ", or " not in result.out
    assert checked("mine.safetensors") == (1, f"{entry} looks like {port.__name__}\n")


def checked(path, script=PUBLISHED / "check.py"):
    """Return the exit status of the script in the documents, and all that it prints."""
    result = subprocess.run([sys.executable, str(script), path], capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_the_script_names_every_mistake_of_every_entry(dtype, tmp_path):
    """The numbers of xPos that grow with distance are infinite in float32."""
    inputs, number = Sizes().inputs(), 0
    wrong = {}
    for entry in chosen([], D):
        right = entry.values(inputs)
        wrong[entry.name] = list(wrong_values(entry, right, inputs).items())
        assert [name for name, _ in wrong[entry.name]] == [*ABOUT["entries"][entry.name]["mistakes"]]
    assert f"knows {len(ABOUT['mistakes'])} mistakes" in (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8")
    for number in range(max(map(len, wrong.values()))):
        made = {name: mistakes[number] for name, mistakes in wrong.items() if number < len(mistakes)}
        tensors = {}
        for entry, (_, values) in made.items():
            with np.errstate(over="ignore"):
                tensors |= {f"{entry}.{name}": array.astype(dtype) for name, array in values.items()}
        save_file(tensors, tmp_path / "wrong.safetensors")
        status, text = checked(tmp_path / "wrong.safetensors")
        assert status == 1
        for line, (entry, (mistake, _)) in zip(text.splitlines(), made.items(), strict=True):
            # Ports with different mistakes may have the same values.
            assert line.startswith(f"{entry} looks like ") and mistake in line.split(), line


def test_a_file_that_the_script_cannot_check_is_refused_in_words(tmp_path):
    path, whole = tmp_path / "mine.safetensors", RIGHT["default.q"]
    for tensors in ({}, {"q": RIGHT["q"], "k": RIGHT["k"]}):
        save_file(tensors, path)
        assert checked(path) == (1, "nothing was checked: call a tensor ENTRY.TENSOR, such as default.q\n")
    for array in (whole[None], whole.swapaxes(0, 1), whole[:0]):
        save_file({"default.q": np.ascontiguousarray(array)}, path)
        status, text = checked(path)
        assert (status, text) == (1, f"default.q has the shape {list(array.shape)}: it must be [4, 5, 64]\n")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        save_torch({"default.q": torch.from_numpy(whole).to(dtype)}, path)
        status, text = checked(path)
        assert status == 1 and "save it as F32 or F64, or I32 for buckets, with shape [4, 5, 64]" in text
    save_file({"default.q": whole}, path)
    content = path.read_bytes()
    for part in (b"", content[:40], b"12345678{}"):
        path.write_bytes(part)
        status, text = checked(path)
        assert status == 1 and ("is cut off" in text or "cannot be read as safetensors" in text)
    assert "cannot be read" in checked(tmp_path / "missing")[1]
    usage = subprocess.run([sys.executable, str(PUBLISHED / "check.py")], capture_output=True, text=True)
    assert usage.returncode == 1 and "python check.py MINE.safetensors" in usage.stderr


def test_buckets_may_be_integers(tmp_path):
    save_file({"t5.buckets": RIGHT["t5.buckets"].astype(np.int32)}, tmp_path / "mine.safetensors")
    assert checked(tmp_path / "mine.safetensors") == (0, "t5 is right to 0e+00\n")


def test_the_page_can_be_followed_without_posbench(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 500
    for name in ("positions-1.safetensors", "positions-1.json", "check.py"):
        (tmp_path / name).write_bytes((PUBLISHED / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [said] = re.findall(r"```\n(default .*?\n)```", page)
    wrong, frequencies = adjacent_pairs()["default.q"], frequencies_of(D)
    for my_rope, expected, status in (
        (lambda q, positions: wrong, said, 1),
        (lambda q, positions: turned(q, frequencies), "default is right to ", 0),
    ):
        exec(block, {"my_rope": my_rope})
        script_status, text = checked("mine.safetensors", "check.py")
        assert script_status == status and text.startswith(expected)
    save_file({"query": wrong}, "mine.safetensors")
    status, text = checked("mine.safetensors", "check.py")
    assert status == 1 and "['query'] are no names of entries" in text


def test_float32_angles_are_right_and_bfloat16_values_with_their_rounding(posbench):  # noqa: F811
    angles = torch.from_numpy(POSITIONS).float()[:, None] * torch.from_numpy(frequencies_of(D)).float()
    first, second = torch.from_numpy(RIGHT["q"]).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    q = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    save_torch({"default.q": q}, "float32.safetensors")
    assert posbench("vectors", "--check", "float32.safetensors").status == 0
    assert checked("float32.safetensors")[1].startswith("default is right to ")
    save_torch({"default.q": q.bfloat16()}, "bfloat16.safetensors")
    assert posbench("vectors", "--check", "bfloat16.safetensors").status == 1
    assert posbench("vectors", "--check", "bfloat16.safetensors", "--rounding", "1e-2").status == 0


def test_unknown_mistakes_say_where_they_begin(posbench):  # noqa: F811
    q = RIGHT["default.q"].copy()
    q[1, 2, 5] += 0.5
    later = np.triu(np.full((5, 5), -np.inf), 1)
    save_file({"default.q": q, "default.scores": RIGHT["default.scores"] + later}, "mine.safetensors")
    result = posbench("vectors", "--check", "mine.safetensors")
    assert result.status == 1
    assert "default: no known mistake; wrong from q at 255 on" in result.out
    save_file({"t5.buckets": np.full(len(RIGHT["distances"]), np.nan)}, "nan.safetensors")
    assert "no known mistake" in posbench("vectors", "--check", "nan.safetensors").out
    save_file({"default.q": q[:, :, :32].copy()}, "narrow.safetensors")
    result = posbench("vectors", "--check", "narrow.safetensors")
    assert result.status == 1 and "q has shape [4, 5, 32] and must have [4, 5, 64]" in result.out


def test_other_sizes_and_some_entries(posbench):  # noqa: F811
    sizes = ("--heads", "3", "--kv-heads", "1", "--head-dim", "32", "--positions", "0,7,300", "--schemes", "yarn,t5")
    written = posbench("vectors", "out", *sizes)
    assert written.status == 0 and "out/positions-1.safetensors: " in written.out
    values = load_file("out/positions-1.safetensors")
    assert values["yarn.q"].shape == (3, 3, 32) and not [name for name in values if name.startswith("default.")]
    assert posbench("vectors", "--check", "out/positions-1.safetensors", *sizes).status == 0
    assert "give --heads" in posbench("vectors", "--check", "out/positions-1.safetensors").out


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give either a FOLDER"),
        (("out", "--schemes", "yarm"), "did you mean 'yarn'"),
        (("out", "--heads", "3"), "--heads 3 must be a multiple of --kv-heads 2"),
        (("out", "--head-dim", "40"), "--head-dim 40 must be a multiple of 16"),
        (("out", "--positions", "5,1"), "in ascending order"),
        (("out", "--positions", "a"), "must be whole numbers"),
        (("--check", "missing.safetensors"), "missing.safetensors is no file"),
    ],
)
def test_refusals_say_what_to_do(words, message, posbench):  # noqa: F811
    assert message in posbench("vectors", *words).refusal


def test_files_that_cannot_be_checked_are_refused(posbench):  # noqa: F811
    Path("text.safetensors").write_text("not tensors, but long enough for a header")
    assert "is not safetensors" in posbench("vectors", "--check", "text.safetensors").refusal
    save_file({"q_out": np.ones(3)}, "mine.safetensors")
    assert "name tensors ENTRY.TENSOR" in posbench("vectors", "--check", "mine.safetensors").refusal
    save_file({"default.q": RIGHT["default.q"], "default.qq": np.ones(3)}, "mine.safetensors")
    assert "'default.qq' that no entry has; did you mean" in posbench("vectors", "--check", "mine.safetensors").refusal
    refuses("there are default", chosen, ["x"], D)
