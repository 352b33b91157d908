"""`posbench eval FOLDER`: a Hugging Face folder is scored like a run, and nothing is copied."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import posbench as api
from posbench.config import TokenizerConfig
from posbench.data.text.tokenizer import plain_bytes, train_bpe
from posbench.evaluation.texts import corpus_for
from posbench.runs.start import start_of
from tests.conftest import write_documents
from tests.json_schema import faults

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "pad_token_id": None,
}
TEXT = ["--data", "files", "--data", "data.path=books", "--data", "data.name=books"]
ON_CPU = ["--device", "cpu", "--dtype", "float32"]
FEW = "evaluation.windows=4"


@pytest.fixture
def folder(posbench):
    """Return a folder with a small Llama, its tokenizer, and random weights, beside a folder of books."""
    write_documents(Path("books"), count=6)
    return saved("mini", plain_bytes(TokenizerConfig(kind="bytes"), ()), vocab_size=257)


def saved(name, tokenizer, class_name="LlamaConfig", **config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**SIZES | config))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(name)
    tokenizer.save(f"{name}/tokenizer.json")
    return Path(name)


def scored(posbench, name, *words):
    """Score a few windows of the books, of 64 tokens unless words say otherwise."""
    length = [] if "--length" in words else ["--length", "64"]
    return posbench("eval", name, *TEXT, *ON_CPU, *length, *words, FEW)


def test_a_folder_is_scored_as_transformers_scores_it(posbench, folder):
    result = scored(posbench, "mini", "--length", "64,256")
    assert result.status == 0, result.error
    run = api.load_run("runs/subjects/mini/seed=0")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = corpus_for(run, None, print).test.tokens
    assert [stored.length for stored in run.results()[0]] == [64, 128, 256]  # 128 is its training length
    for stored in run.results()[0]:
        for row in stored.windows.itertuples():
            end = row.start + row.targets
            ids = torch.from_numpy(np.asarray(tokens[end - stored.length - 1 : end]).astype(np.int64))
            with torch.no_grad():
                logits = model(ids[None, :-1]).logits[0, -row.targets :]
            nll = F.cross_entropy(logits, ids[-row.targets :], reduction="sum").item()
            assert abs(nll - row.nll) / row.targets < 1e-4


def test_its_record_names_path_and_digest_and_nothing_is_copied(posbench, folder):
    assert scored(posbench, "mini").status == 0
    run = api.load_run("runs/subjects/mini/seed=0")
    assert run.manifest.subject is not None and run.manifest.subject["path"] == str(folder)
    assert run.manifest.weights and len(run.manifest.weights) == 64
    assert {file.suffix for file in run.path.rglob("*") if file.is_file()} == {".json", ".yaml", ".parquet"}
    assert not (run.path / "tokenizer.json").exists()
    assert start_of("subjects/mini", 0, "runs").digest == start_of("mini", 0, "runs").digest  # as train.from_run
    assert sum(run.manifest.subject["document_tokens"]) == corpus_for(run, None, print).test.num_tokens
    assert "already there" in scored(posbench, "mini").out
    assert "scored fixed 32" not in posbench("eval", "mini", *ON_CPU, "--length", "64", "evaluation.windows=5").out


@pytest.mark.slow
def test_another_model_of_the_same_name_is_refused(posbench, folder):
    assert scored(posbench, "mini").status == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    )
    assert "has results of another model of this name" in scored(posbench, "mini").refusal
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    assert "has results of another model of this name" in scored(posbench, "mini").refusal
    assert "have changed since" in posbench("eval", "subjects", *ON_CPU, "--length", "64,128").refusal
    (folder / "config.json").unlink()
    assert "has no config.json" in posbench("eval", "subjects", *ON_CPU, "--length", "64,128").refusal
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree("runs/subjects/mini")
    assert scored(posbench, "mini").status == 0


def test_it_prints_the_positions_in_use_and_in_the_configuration(posbench, folder):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    out = scored(posbench, "mini", "--length", "256", "--under", "rescale=pi").out
    assert "with base 10,000 (yarn with factor 4, temperature 1.3). Trained on 64 tokens." in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    slowest = f"{10000.0 ** (-14 / 16) / 4:.3g}"
    assert f"as it is 0-1 (2) all 16 of 16 10000 yarn 4 1 {slowest}" in lines
    assert f"rescale=pi 0-1 (2) all 16 of 16 10000 pi 4 0.25 {slowest}" in lines


@pytest.mark.slow
def test_the_report_puts_options_side_by_side_and_models_by_bits_per_byte(posbench, folder):
    bpe = train_bpe(TokenizerConfig(kind="bpe", vocab_size=300), [file.read_text() for file in Path("books").iterdir()])
    saved("wide", bpe, vocab_size=300)
    protocols = ["--protocol", "fixed,order,mechanism"]
    command = ["eval", "mini", "wide", *TEXT, *ON_CPU, "--length", "128,256", "--under", "rescale=pi,yarn"]
    result = posbench(*command, *protocols, FEW, "evaluation.order_windows=4")
    assert result.status == 0, result.error
    result = posbench("report", "subjects")
    assert result.status == 0, result.error
    page = Path("runs/subjects/report/report.md").read_text()
    for words in ("mini: Perplexity by length", "wide: What a model uses of its context", "wide: What heads do"):
        assert f"## {words}" in page
    assert "mini · rescale=yarn |" in page and "128 (trained)" in page and "6 of 6 documents are longer" in page
    bits = api.results("runs/subjects", tidy=True).query("metric == 'bits_per_byte' and under == '' and length == 256")
    sums = bits.groupby("scheme", observed=True)[["value", "count"]].sum()
    for name, value in (sums["value"] / sums["count"]).items():
        assert any(line.startswith(f"{name} |") and f" {value:.4f} (" in line for line in page.splitlines())
    scored = json.loads(posbench("report", "subjects", "--json").out)["schemes"]
    assert {(row["scheme"], row["length"]) for row in scored} >= {("mini · rescale=pi", 256), ("mini", 128)}
    assert posbench("report", "subjects", "--by", "model.name").status == 0
    assert posbench("pack", "subjects").status == 0
    shutil.rmtree("runs/subjects")
    shutil.rmtree("mini")
    assert posbench("report", "subjects").status == 0
    assert Path("runs/subjects/report/report.md").read_text() == page
    assert "mini/tokenizer.json" in posbench("eval", "subjects/mini", *ON_CPU, "--length", "64").refusal


WITH_CARD = ["evaluation.windows=16", "evaluation.order_windows=16"]


def test_eval_ends_with_a_card_which_the_report_has_too(posbench, folder):
    command = ["eval", "mini", *TEXT, *ON_CPU, *WITH_CARD]
    first = posbench(*command, "--length", "64,128,256")
    assert first.status == 0, first.error
    *_, loss, order, rescaling, base, heads, wrote = first.out.strip().splitlines()
    assert loss.startswith("mini: loss") and "(trained: 128)" in loss and loss.endswith("; order: –")
    assert order == "– order: posbench eval mini --protocol order"
    assert rescaling == "– rescaling: posbench eval mini --length 128,256 --under rescale=pi,ntk,yarn"
    assert base == "– base: posbench eval mini --length 128 --under base=1e4,1e6"
    assert (heads, wrote) == ("– heads: posbench eval mini --protocol mechanism", "wrote runs/subjects/mini/card.md")
    posbench(*command, "--length", "256", "--under", "rescale=pi,yarn")
    posbench(*command, "--length", "64,128,256", "--under", "base=1e3")
    last = posbench(*command, "--protocol", "order,mechanism").out.strip().splitlines()
    assert "tokens back" in last[-3] and "Best of pi, yarn at 256: " in last[-2] and "induction head " in last[-2]
    page = Path("runs/subjects/mini/card.md").read_text()
    assert "All layers see all tokens and rotate whole heads with base 10,000." in page
    assert last[-3] in page and f"transformers {transformers.__version__}, adapter 1" in page
    data = json.loads(posbench("report", "subjects", "--json").out)
    assert not faults(data, "report")
    [card] = data["cards"]
    assert card["missing"] == {} and [step["length"] for step in card["steps"]] == [128, 256]
    assert card["base"]["options"] == ["", "base=1e3"] and card["heads"].keys() == {"previous_token", "induction"}
    assert last[-3] in Path("runs/subjects/report/report.md").read_text()


def test_learned_positions_show_a_dash_beyond_their_table(posbench, folder):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": 257, "bos_token_id": 256}
    saved("learned", plain_bytes(TokenizerConfig(kind="bytes"), ()), "GPT2Config", **sizes)
    words = ("learned", "--length", "128,256")
    assert "has no rotations in its config.json" in scored(posbench, *words, "--under", "rescale=yarn").refusal
    result = scored(posbench, *words)
    assert result.status == 0, result.error
    table = [line.split() for line in result.out.splitlines()]
    assert ["scheme", "128", "256"] in table
    assert next(row for row in table if row[:1] == ["learned"] and len(row) == 3)[2] == "–"
    assert "learned is defined up to 128 tokens" in result.out and "reads at most 128: – beyond" in result.out


def test_without_a_length_in_its_configuration_the_lengths_asked_for_are_scored(posbench, folder):
    tokenizer = plain_bytes(TokenizerConfig(kind="bytes"), ())
    bloom = saved("bloom", tokenizer, "BloomConfig", n_layer=1, n_head=2, vocab_size=257)
    content = json.loads((bloom / "config.json").read_text())
    del content["max_position_embeddings"]
    (bloom / "config.json").write_text(json.dumps(content))
    assert "name the lengths to score with --length" in posbench("eval", "bloom", *TEXT, *ON_CPU).refusal
    result = scored(posbench, "bloom", "--length", "64")
    assert result.status == 0 and "The training length is not recorded." in result.out, result
    assert "trained length unknown" in result.out


def test_a_bos_that_the_model_never_saw_is_named(posbench, folder):
    assert "names no BOS" not in scored(posbench, "mini").out
    saved("other", plain_bytes(TokenizerConfig(kind="bytes"), ()), vocab_size=300)
    content = json.loads(Path("other/tokenizer.json").read_text())
    content["added_tokens"] = []
    Path("other/tokenizer.json").write_text(json.dumps(content))
    out = scored(posbench, "other").out
    assert "other: its tokenizer names no BOS: <|bos|>, which the model never saw, begins each document" in out


@pytest.mark.slow
def test_one_model_that_cannot_follow_the_options_does_not_stop_the_others(posbench, folder):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    saved("longer", plain_bytes(TokenizerConfig(kind="bytes"), ()), vocab_size=257, rope_parameters=yarn)
    result = scored(posbench, "longer", "mini", "--length", "256", "--under", "rescale.factor=2")
    assert result.status == 0, result.error
    assert "mini is scored only as trained: mini has no rescaling to change" in result.out
    assert "longer · rescale.factor=2" in result.out
    # Its own text is not foreign text, so it has a place in the table and a card.
    assert "data=" not in result.out.partition("mini/seed=0: scored")[2].partition("\n")[0]
    assert "wrote runs/subjects/mini/card.md" in result.out
    assert posbench("report", "subjects").status == 0, "the two models have different options"


def test_a_report_joins_the_models_of_the_last_command(posbench, folder):
    saved("other", plain_bytes(TokenizerConfig(kind="bytes"), ()), vocab_size=257, num_key_value_heads=2)
    for name in ("mini", "other"):
        assert scored(posbench, name).status == 0
    out = posbench("report", "subjects").out
    assert "the models of the last posbench eval: other." in out and "mini" not in out
    both = posbench("report", "subjects", "--schemes", "mini,other")
    assert both.status == 0, both.error
    page = Path("runs/subjects/report-of-mini,other/report.md").read_text()
    assert "## Gap to mini" in page and "models.svg" in page  # they read the same windows
    losses = [api.load_run(f"runs/subjects/{name}/seed=0").results()[0][0].loss for name in ("mini", "other")]
    rows = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("other | ")]
    gaps = [float(cell.split()[0]) for cell in rows if cell[0] in "+-"]
    assert gaps == [pytest.approx(losses[1] - losses[0], abs=0.01)] and abs(gaps[0]) > 0.1
    run = Path("runs/subjects/mini/seed=0/run.json")
    record = json.loads(run.read_text())
    record["subject"].pop("versions")  # as an older posbench wrote it, whose own decoder scored
    run.write_text(json.dumps(record))
    mixed = posbench("report", "subjects", "--schemes", "mini,other").refusal
    assert "scored by different programs: mini by posbench's own decoder; other by transformers" in mixed
    again = scored(posbench, "mini").refusal
    assert "was scored by posbench's own decoder, and this is transformers" in again


@pytest.mark.slow
def test_bos_can_begin_each_window(posbench, folder):
    losses = {}
    for bos in ("false", "true"):
        assert scored(posbench, "mini", f"evaluation.bos={bos}").status == 0
        losses[bos] = api.load_run("runs/subjects/mini/seed=0").results()[0][0].loss
    assert losses["true"] != losses["false"]


@pytest.mark.slow
def test_a_card_compares_lengths_that_were_scored_alike(posbench, folder):
    """A report compares lengths that agree in BOS, and the smaller number of windows, 4 of 4 and 16."""
    command = ["eval", "mini", *TEXT, *ON_CPU]
    posbench(*command, "--length", "64,128,256", "evaluation.windows=4")
    posbench(*command, "--length", "128,256", "evaluation.windows=16")
    [card] = json.loads(posbench("report", "subjects", "--json").out)["cards"]
    step = card["steps"][0]
    assert (step["length"], step["windows"], step["verdict"]) == (128, 4, "too few windows")
    posbench(*command, "--length", "256", "evaluation.windows=16", "evaluation.bos=true")
    data = json.loads(posbench("report", "subjects", "--json").out)
    [card] = data["cards"]
    assert [step["length"] for step in card["steps"]] == [256] and card["has_bos"] and not faults(data, "report")
    assert "BOS before each window" in Path("runs/subjects/mini/card.md").read_text()


def test_without_transformers_the_refusal_names_the_extra(posbench, folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("posbench.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refusal = scored(posbench, "mini").refusal
    assert "the package transformers is not installed: pip install 'posbench[huggingface]'" in refusal


def test_an_export_of_our_own_class_is_scored_by_its_decoder(posbench, runs, folder):
    assert posbench("export", "demo/vo_rope/seed=0", "exported").status == 0
    result = scored(posbench, "exported", "--under", "base=100")
    assert result.status == 0, result.error
    assert "(PosbenchForCausalLM)" in result.out and "exported · base=100" in result.out


@pytest.mark.slow
def test_bare_commands_leave_subjects_out(posbench, runs, folder):
    assert scored(posbench, "mini").status == 0
    listed = posbench("ls", "--json")
    subject, *others = sorted(json.loads(listed.out)["runs"], key=lambda run: run["experiment"] != "subjects")
    assert (listed.status, subject["scheme"], subject["state"], subject["share"]) == (0, "mini", "finished", 1.0)
    assert len(others) == 4 and posbench("ls").status == posbench("ls", "runs/subjects/mini").status == 0
    result = posbench("eval", *ON_CPU, "--length", "64")
    assert "demo/nope/seed=0" in result.out and "subjects/mini" not in result.out
    assert "posbench: demo" in posbench("report").out
    assert "is for Hugging Face folders" in posbench("eval", "demo", FEW).refusal
    mixed = posbench("report", "subjects", "demo").refusal
    assert "some of these runs were trained here and others only scored" in mixed


def test_a_name_on_the_hub_gets_the_command_that_downloads_it(posbench):
    assert "hf download owner/name --local-dir name" in posbench("eval", "owner/name", "--length", "64").refusal
