"""The report as people meet it: on a terminal, as Markdown, as a page; and what it says when it cannot be made."""

from __future__ import annotations

import html
import io
import math
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fabricate import World, change_fingerprints, fabricate, rename, rescore, run_of
from rich.console import Console
from shown import in_markdown, on_terminal

from posbench.composition import compose
from posbench.config import ConfigError
from posbench.reporting import report
from posbench.reporting.findings import Findings, find
from posbench.reporting.report import write
from posbench.reporting.sections.next_runs import command, settings
from posbench.reporting.sections.ranking import ranking
from posbench.runs import DIED, Run
from posbench.runs.manifest import Costs

EVIL = "<script>alert(1)</script>"


def said(folder: Path, output: Path, width: int = 100, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    report(folder, output=output, console=console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Page(HTMLParser):
    """What a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_all_files_are_there_and_named(written: Path) -> None:
    pictures = ["gaps", "curves", "perplexity-fixed", "perplexity-nonoverlapping", "protocols", "order"]
    pictures += ["position", "retrieval"]
    expected = {"table.csv", "runs.csv", "pairs.csv", "costs.csv", "against.csv", "order.csv", "position.csv"}
    expected |= {"retrieval.csv", "columns.csv"}
    expected |= {"report.md", "report.html"}
    expected |= {f"{stem}.{kind}" for stem in pictures for kind in ("svg", "png")}
    assert {file.name for file in written.iterdir()} - {"terminal.txt"} == expected


def test_the_last_line_names_what_to_open_and_where_the_rest_is(written: Path) -> None:
    made = len(list(written.iterdir())) - 1  # terminal.txt is the test's own
    last = (written / "terminal.txt").read_text().splitlines()[-1]
    assert last == f"wrote report.html, report.md, table.csv and {made - 3} more in {written}/"


@pytest.mark.slow
def test_the_report_can_be_made_again_and_is_the_same(experiment: Path, written: Path, tmp_path: Path) -> None:
    said(experiment, tmp_path)
    for name in ("table.csv", "report.md", "report.html", "curves.svg"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_with_no_cell_broken(losses: Findings, width: int) -> None:
    text = on_terminal(losses, width)
    assert max(map(len, text.splitlines())) <= width
    whole = r"^(qk_rope|qkvo_rope|alibi|nope) +relative +\d\.\d{3} ± 0\.0\d\d +(0|[+-]0\.\d+ ± 0\.0*[1-9]\d)"
    whole += r" +[a-d]+ +(–|± 0\.0+[1-9]\d) +\d\.\d+$"
    assert len(re.findall(whole, text, re.MULTILINE)) == 4


def test_letters_lead_and_the_chain_says_equal_where_that_was_tested(written: Path) -> None:
    text = (written / "terminal.txt").read_text()
    letters = r"^(qk_rope|qkvo_rope) \(a\), (qk_rope|qkvo_rope) \(a\), alibi \(b\), nope \(c\)$"
    chain = r"^(qk_rope ≈ qkvo_rope|qkvo_rope ≈ qk_rope) > alibi > nope$"
    assert re.search(rf"{letters}\n\n{chain}", text, re.MULTILINE)


def test_what_could_be_seen_and_what_to_run_next_are_printed(losses_only: Path) -> None:
    found = find(losses_only, margin=0.0005)
    text = on_terminal(found, width=200)
    assert re.search(
        r"^(qk_rope ~ qkvo_rope|qkvo_rope ~ qk_rope) +0\.00\d\d ± 0\.\d{4} +\S+ +\S+ +0\.00\d\d +(about|more than) \d+",
        text,
        re.MULTILINE,
    )
    last = text.split("Open pairs that matter")[1]
    assert re.search(r"(qk_rope ~ qkvo_rope|qkvo_rope ~ qk_rope) +neighbours here, published qk_rope ~ qkvo_rope", last)
    line = command(found, [4, 5])
    schemes = ",".join(found.schemes)
    assert line == f"posbench train -m experiment=demo model=tiny scheme={schemes} seed=4,5".replace(
        "model=tiny", " ".join(settings(found.config)[1:])
    )
    words = [*settings(found.config), "scheme=qk_rope"]
    assert compose(words).to_mapping()["model"] == found.config.to_mapping()["model"]  # the same runs, by these words


def test_two_schemes_are_one_pair(losses_only: Path) -> None:
    section = ranking(find(losses_only, only=["qk_rope", "alibi"]))
    assert section is not None and "seeds for the only pair, with Holm's correction" in " ".join(section.words)


def test_a_smaller_family_is_tested_alone(losses_only: Path) -> None:
    found = find(losses_only, family="baseline")
    text = " ".join(on_terminal(found, width=200).split())
    assert "for the pairs with the baseline (3), with Holm's correction" in text and "no letters and no chain" in text
    assert sum(pair.is_tested for pair in found.pairs) == 3
    assert all(("qk_rope" in (pair.left, pair.right)) == pair.is_tested for pair in found.pairs)
    with pytest.raises(ConfigError, match="did you mean 'published'"):
        find(losses_only, family="publishd")
    with pytest.raises(ConfigError, match="above 0"):
        find(losses_only, margin=0.0)


def test_one_seed_is_told_which_seeds_to_run(tmp_path: Path, world: Callable[..., World]) -> None:
    folder = fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.5}, seeds=(0,), lengths=()))
    text = on_terminal(find(folder), width=60)
    assert re.search(r"^posbench train -m experiment=demo .*scheme=qk_rope,nope seed=1,2,3,4$", text, re.MULTILINE)


def test_the_set_up_states_the_options_of_every_scheme(tmp_path: Path, world: Callable[..., World]) -> None:
    folder = fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.1, "sinusoidal": 0.2}, seeds=(0,), lengths=()))
    file = run_of(folder, "sinusoidal", 0).path / "config.yaml"
    file.write_text(file.read_text().replace("amplitude: 1.0", "amplitude: 0.5"))
    table = html.unescape(in_markdown(find(folder)).rpartition("## Set-up")[2])
    amount = "sines of amplitude 0.01; token embeddings begin with standard deviation 0.02"
    assert "\n| qk_rope | rotary | base=10000.0, sites=['q', 'k'] | – |" in table
    assert "\n| nope | nope | – | – |" in table
    assert f"\n| sinusoidal | sinusoidal | amplitude=0.5, base=10000.0 | {amount} |" in table


def test_speed_is_the_median_and_memory_the_mean_of_what_there_is(own: Path) -> None:
    peaks = {"nope": [300 * 2**20, None, 100 * 2**20, None], "alibi": [None] * 4}
    for scheme, of_seeds in peaks.items():
        for seed, (speed, peak) in enumerate(zip([100.0, 1000.0, 300.0, 200.0], of_seeds, strict=True)):
            run_of(own, scheme, seed).update_manifest(costs=Costs(speed, None, peak))
    text = on_terminal(find(own), width=160)
    assert re.search(r"^nope .* 250 +200 +1,024$", text, re.MULTILINE)
    assert re.search(r"^alibi .* 250 +– +1,024$", text, re.MULTILINE)
    assert "depend on what else the machine was doing" in " ".join(text.split())


def test_the_one_scheme_that_keeps_the_chain_whole_is_named(tmp_path: Path, world: Callable[..., World]) -> None:
    """vo_rope is so noisy that no test decides it, and stands last: no place can be cut."""
    effects = {"qk_rope": 0.0, "nope": 0.1, "alibi": 0.2, "vo_rope": 0.6}
    folder = fabricate(tmp_path, world(effects, seeds=(0, 1, 2, 3), lengths=()))
    for seed, times in enumerate((0.9, 1.6, 0.8, 1.1)):
        noisy = run_of(folder, "vo_rope", seed)
        rescore(noisy, "validation", 256, lambda rows, by=times: rows.assign(nll=rows["nll"] * by))
    text = " ".join(on_terminal(find(folder), width=1000).split())
    assert "qk_rope ~ nope ~ alibi ~ vo_rope" in text
    assert re.search(
        r"vo_rope alone prevents 2 “>”: without vo_rope the same tests give qk_rope > nope > alibi\.", text
    )
    shutil.rmtree(folder / "vo_rope")
    text = " ".join(on_terminal(find(folder), width=1000).split())
    assert "qk_rope > nope > alibi" in text and "The chain has no “>”" not in text


def test_one_seed_claims_nothing(tmp_path: Path, world: Callable[..., World]) -> None:
    folder = fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.5, "alibi": 1.0}, seeds=(0,)))
    text = on_terminal(find(folder))
    assert "1 seed: the order was not tested" in text and "By loss, lowest first: qk_rope, nope, alibi" in text
    assert not re.search(r"qk_rope [>~]", text)
    assert "1 seed: not tested" in text or "No pair is reversed" in text
    assert not re.search(r"\d ± \d", text.split("Perplexity by length")[0])


def test_what_was_left_out_is_always_printed(own: Path) -> None:
    run_of(own, "nope", 1).update_manifest(status=DIED, reason="loss nan at step 7")
    change_fingerprints(run_of(own, "alibi", 2), data="0ther")
    text = on_terminal(find(own))
    assert re.search(r"nope +1 +died: loss nan at step 7", text)
    assert re.search(r"alibi +2 +differs from the others in the text", text)
    assert "Compared over the seeds that all compared schemes have: 0, 3." in text


def test_a_scheme_of_which_every_run_died_is_a_row(own: Path) -> None:
    for seed in range(4):
        run_of(own, "nope", seed).update_manifest(status=DIED, reason="loss nan")
    assert re.search(r"^nope +– +died", on_terminal(find(own)), re.MULTILINE)


def test_the_first_sentence_says_what_is_ranked(written: Path, losses: Findings) -> None:
    size = "These are models of 6.82 million parameters after 399,360 tokens (0.059 tokens a parameter); "
    first = (written / "report.md").read_text().split("## Loss on held-out text\n\n")[1]
    assert re.match(
        re.escape(size) + r"the best, (qk_rope|qkvo_rope), uses the order of tokens up to 16 tokens back, "
        r"where it is worth \S+ ± \S+ nats/token\. "
        r"The learning rate is \S+ for all\. No other was tried \(`posbench tune`\), so gaps may be due to the rate\.",
        first,
    )
    text = " ".join(on_terminal(losses).split())
    unknown = "how far back they use the order of tokens was not measured (`posbench eval --protocol"
    assert text.startswith(size + unknown)


def test_protocols_are_never_in_one_table(written: Path) -> None:
    tables = (written / "report.md").read_text().split("## Perplexity by length in tokens: ")
    assert [table.split("\n")[0] for table in tables[1:]] == ["fixed", "nonoverlapping"]
    assert all(
        len(re.findall(r"^\| qk_rope", t.split("\n## ")[0].split("### ")[0], re.MULTILINE)) == 1 for t in tables[1:]
    )


def test_the_page_needs_nothing_else(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    text = (written / "report.html").read_text()
    assert "url(http" not in text and "@import" not in text
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'") and "script-src" not in policy


def test_pictures_shrink_with_the_page(written: Path) -> None:
    text = (written / "report.html").read_text()
    rule = re.search(r"^figure svg {(.*)}$", text, re.MULTILINE)
    assert rule and "max-width: 100%; height: auto;" in rule[1] and "min-width" not in rule[1]
    drawn = [attributes for tag, attributes in Page(text).tags if tag == "svg" and "class" not in attributes]
    assert len(drawn) == 8 and all("viewbox" in a and not {"width", "height"} & set(a) for a in drawn)


def test_ids_on_the_page_are_unique(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {a["xlink:href"][1:] for _, a in page.tags if a.get("xlink:href")}  # type: ignore[index]
    assert wanted <= set(ids)


@pytest.fixture
def evil(tmp_path: Path, world: Callable[..., World]) -> Path:
    """Hand-made manifests: no folder can have such names."""
    folder = fabricate(tmp_path / "runs", world({"qk_rope": 0.0, "nope": 0.1, "alibi": 0.2}, seeds=(0, 1), probes=True))
    for seed in (0, 1):
        rename(run_of(folder, "nope", seed), scheme=EVIL, experiment="<img src=x onerror=alert(2)>")
        rename(run_of(folder, "alibi", seed), scheme='x$\\no$"|`[a](javascript:alert(3))\x1b[31m')
    Run(folder / "stranger" / "seed=0").path.mkdir(parents=True)
    (folder / "stranger" / "seed=0" / "run.json").write_text(
        '{"format": 1, "status": "died", "reason": "<b>&\\u001b[2J"}'
    )
    return folder


@pytest.mark.slow
def test_hostile_names_are_inert_everywhere(evil: Path, tmp_path: Path) -> None:
    target = tmp_path / "report"
    terminal = said(evil, target, width=200)
    assert EVIL in terminal and "\x1b[31m" not in terminal and "\x1b[2J" not in terminal
    page = Page((target / "report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "img", "b"} - {"b"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert sum(EVIL in words for words in page.words) >= 6  # shown as text: tables, chain, pictures
    assert "javascript:" not in str([a for _, a in page.tags])
    for line in (target / "report.md").read_text().splitlines():
        assert "<" not in line and "](javascript" not in line
    for picture in target.glob("*.svg"):
        assert "<script" not in picture.read_text()
        assert "x$\\no$" in picture.read_text()  # no formula of matplotlib's


def test_nothing_half_written_is_left_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write(tmp_path / "report" / "table.csv", b"scheme")
    assert list((tmp_path / "report").iterdir()) == []


def test_no_link_that_lies_in_the_way_is_written_through(losses_only: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "report").mkdir()
    for name in ("table.csv", ".table.csv.tmp", f".table.csv.{os.getpid()}.tmp"):
        (tmp_path / "report" / name).symlink_to(tmp_path / "victim")
    said(losses_only, tmp_path / "report")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "report" / "table.csv").read_text().startswith("scheme,")
    assert not (tmp_path / "report" / "table.csv").is_symlink()


def test_a_folder_without_runs_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no runs: train some with `posbench train"):
        report(tmp_path)


@pytest.mark.slow
def test_a_model_that_gives_no_numbers_is_not_flattered(probed: Path) -> None:
    """One NaN among the windows must not be skipped by a sum: the perplexity is not a number."""
    run = run_of(probed, "nope", 0)
    for protocol, column in (("fixed", "nll"), ("retrieval", "control_nll"), ("position", "nll")):
        rescore(run, protocol, 1024, lambda rows, c=column: rows.assign(**{c: rows[c].where(rows.index != 3)}))
    found = find(probed, against="rove")
    assert math.isnan(found.at("fixed", 1024)["nope"].perplexity) and found.at("fixed", 512)["nope"].perplexity > 1
    assert math.isnan(found.probes["retrieval"].set_index(["scheme", "length"]).loc[("nope", 1024), "drop"])
    assert found.probes["position"].set_index("scheme").loc["nope", "loss"].isna().sum() == 1
    assert re.search(r"^nope .* nan", on_terminal(found), re.MULTILINE)


def test_order_shows_what_is_lost_by_distance_and_the_reach(written: Path) -> None:
    text = (written / "report.md").read_text().split("## How far back order matters\n")[1].split("\n## ")[0]
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in text.split("### ")[1].splitlines() if "|" in line}
    assert lines["| scheme"][:4] == ["reach", "1", "2", "3-4"] and len(lines["| scheme"]) == 9
    assert lines["| qk_rope"][0] == "16" and lines["| nope"][0] == "0"  # fabricate.py: 0.6 at 1, nothing beyond 16
    assert re.fullmatch(r"\+0\.(60|59)\d\d ± 0\.00\d\d", lines["| alibi"][1])
    for title in ("Order lost, ± over seeds, by d", "Identity lost by d"):
        assert f"### {title} in tokens, windows of 256, nats/token" in text
    assert "24 targets at d = 1, 1,536 in the last column, of 12 documents" in text and "](order.svg)" in text


def test_retrieval_shows_repetition_and_the_part_by_order(written: Path) -> None:
    text = " ".join((written / "report.md").read_text().split("## Retrieval\n")[1].split("\n## ")[0].split())
    cell = r"[+-]?\d\.\d{3,4} ± \d\.\d{3,4} \| "
    for title in ("benefit of repetition", "the part due to order"):
        assert re.search(rf"### Retrieval: {title} by gap in tokens, nats/token .*\| qk_rope \| ({cell}){{5}}", text)
    assert "12 trials, 372 targets per gap" in text and "only a model that uses the order of the passage gains" in text


def test_retrieval_from_before_the_shuffled_control_is_shown_without_the_part_by_order(probed: Path) -> None:
    for seed in range(4):
        rescore(run_of(probed, "nope", seed), "retrieval", None, lambda rows: rows.drop(columns="shuffled_nll"))
    found = find(probed)
    assert found.probes["retrieval"]["drop"].notna().all() and found.probes["retrieval"]["by_order"].isna().all()
    text = " ".join(on_terminal(found).split())
    assert "Retrieval: benefit of repetition" in text and "Retrieval: the part due to order" not in text
    assert "`posbench eval --protocol retrieval --length 512,1024` scores them again" in text


def test_windows_that_differ_are_not_set_side_by_side(own: Path) -> None:
    rescore(run_of(own, "nope", 1), "validation", 256, lambda rows: rows.assign(start=rows["start"] + 1))
    text = " ".join(on_terminal(find(own)).split())
    assert "validation at 256: left out nope seed 1, which scored other windows than the rest" in text
    assert "Compared over seeds 0, 2, 3, since the others lack this evaluation: validation at 256." in text
    assert "Paired t-tests over 3 seeds" in text  # the ranking is of the losses in the table


def test_a_scheme_far_noisier_than_the_others_is_pointed_at(own: Path, losses: Findings) -> None:
    assert "vary more over seeds" not in on_terminal(losses)
    rescore(run_of(own, "nope", 1), "validation", 256, lambda rows: rows.assign(nll=rows["nll"] * 1.2))
    assert re.search(r"The losses of nope \(\d+ times\) vary more over seeds", " ".join(on_terminal(find(own)).split()))
