"""Documents can be followed: links, file names, Python, the guide's experiment and the packs work."""

import math
import re
import shlex
import shutil
from pathlib import Path

import pytest

from posbench.composition.compose import compose
from posbench.runs import find_runs
from posbench.tools.plan import plan
from posbench.training import train
from tests.conftest import small_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "runs" / "reference").glob("*.md"))


def test_links_lead_to_files_and_headings():
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text(encoding="utf-8")):
            if not link.startswith("https://"):
                target = document.parent / link if link else document
                assert target.exists(), (document, link)
                assert not anchor or anchor in anchors_of(target), (document, link, anchor)


def anchors_of(document):
    """Return the anchors that GitHub gives the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_files_that_documents_and_code_name_exist():
    texts = [*DOCUMENTS, *(ROOT / "posbench").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    name = re.compile(r"\bdocs/[\w/-]+\.\w+|(?<=`)posbench/[a-z\d_/]+\.py")
    paths = {path for file in texts for path in name.findall(file.read_text(encoding="utf-8"))}
    assert len(paths) > 20 and not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_the_python_of_the_readme_runs(documents, cache, tmp_path, monkeypatch):
    run = train(compose(small_run(documents, cache, tmp_path / "made")))
    shutil.copytree(run.path, tmp_path / "runs" / "first" / "alibi" / "seed=0")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert blocks and names["logits"].shape[-1] == 512


@pytest.mark.slow
def test_the_training_commands_of_the_readme_are_configurations():
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/first-ablation.md"))
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.startswith("posbench train")]
    assert len(lines) >= 3
    for line in lines:
        overrides = [word.split(",")[0] for word in shlex.split(line, comments=True) if "=" in word]
        compose([word for word in overrides if "${" not in word])


@pytest.mark.slow
def test_the_experiment_that_the_guide_shows_can_be_planned(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    (tmp_path / "my_conf" / "experiment" / "mine.yaml").write_text(shown, encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("one", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    planned = plan(["experiment=mine", "--config-dir=my_conf"])
    assert (planned.first.experiment.name, planned.schemes, planned.seeds) == ("mine", ["nope", "qk_rope", "alibi"], 3)


def test_committed_packs_are_small():
    files = [file for file in (ROOT / "runs/reference").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40_000_000


@pytest.mark.slow
def test_committed_packs_are_whole():
    runs = find_runs(ROOT / "runs/reference", pytest.fail)
    assert runs
    for run in (run for run in runs if run.manifest.seed == 0 and run.manifest.subject is None):
        results, damaged = run.results()
        [final] = [result for result in results if result.protocol == "validation" and not result.key.under]
        assert not damaged and final.loss == pytest.approx(run.manifest.loss, abs=1e-9) and len(run.logged) > 20


def test_the_perplexities_of_the_readme_are_the_ranges_over_seeds_of_the_packs():
    ranges = {}
    for run in find_runs(ROOT / "runs/reference/headline"):
        for result in run.results()[0]:
            if (result.key.protocol, result.key.length, result.key.under) == ("fixed", 1024, ()):
                loss = result.windows["nll"].sum() / result.windows["targets"].sum()
                ranges.setdefault(run.manifest.scheme, []).append(math.exp(loss))
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for scheme, perplexities in ranges.items():
        low, high = min(perplexities), max(perplexities)
        shown = f"{low:.0f} to {high:.0f}" if high - low > 1 else f"{sum(perplexities) / len(perplexities):.1f}"
        [row] = [row for row in rows if row.startswith(f"| `{scheme}`")]
        assert row.endswith(f"| {shown} |"), f"{scheme}: {shown}"
