"""What a report has for a paper: LaTeX and PDF, rows as asked for, sources, and a line on every column."""

import re

import pandas as pd
import pytest
from rich.console import Console

from posbench.config import ConfigError
from posbench.reporting import report
from posbench.reporting.columns import meaning
from posbench.reporting.findings import find
from posbench.reporting.latex import latex_text, tabular
from posbench.reporting.sections import sections
from posbench.reporting.sections.losses import loss_table
from posbench.reporting.tables import Table


@pytest.fixture(scope="module")
def paper(losses_only, tmp_path_factory):
    target = tmp_path_factory.mktemp("paper")
    console = Console(file=(target / "terminal.txt").open("w"), width=80)
    asked = {"schemes": ["nope", "qk_rope", "alibi"], "order": "given", "title": "50% & more", "latex": True}
    report(losses_only, output=target, console=console, **asked)
    return target


def test_the_loss_table_is_a_tabular_with_intervals_and_letters(findings):
    text = tabular(loss_table(findings))
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    [row] = [line for line in text.splitlines() if line.startswith("alibi")]
    cells = row.removesuffix(r" \\").split(" & ")
    assert len(cells) == len(loss_table(findings).headers)
    assert re.fullmatch(r"\d\.\d+ \$\\pm\$ \d\.\d+", cells[2]) and cells[4] == "b"


def test_every_table_is_plain_ascii_with_as_many_cells_a_row_as_columns(findings):
    tables = [table for section in sections(findings, []) for table in section.tables]
    for table in tables:
        text = tabular(table)
        assert text.isascii() and not re.search(r"U\+\w{4}", text), table.title
        rows = [line for line in text.splitlines() if line.endswith(r" \\")]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.headers) - 1}
        bare = text.replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")


def test_names_are_shown_and_not_obeyed():
    hostile = r"\input{/etc/passwd} 100% $x_1^2$ #~&"
    shown = latex_text(hostile)
    assert not re.search(r"\\input|(?<!\\)[%#&_]|(?<!\\)\$", shown)
    assert latex_text("ä – 3 ± 1") == r"U+00E4 -- 3 $\pm$ 1"
    assert latex_text("a\x1b]0;\x07\n\nb") == "aU+001B]0;U+0007  b", "nor by a terminal that shows the file"
    first = tabular(Table("t", ["", "x"], [["[9cm]", "a"], ["*", "b"]]))
    assert "\n{}[9cm] &" in first and "\n{}* &" in first, "no option of the rule or of the row before"
    assert "$-$0.3 & $-$.5 & a-b" in tabular(Table("t", ["", "x", "y"], [["-0.3", "-.5", "a-b"]]))


def test_commands_are_set_as_code_and_long_words_stay_inside_their_column():
    assert latex_text("`posbench report A_B`, 5 %") == r"\texttt{posbench report A\_B}, 5 \%"
    assert latex_text("one ` alone") == "one ` alone"
    text = tabular(Table("t", ["", "value"], [["data", f"{'ab' * 20} and `eval -l 64`"]], left=frozenset({0, 1})))
    assert "p{0.4\\linewidth}" in text
    assert "abab\\allowbreak{}abab" in text and r" and \texttt{eval -l 64} \\" in text, "a hash can be broken"
    assert r"& \raggedright" in text, "words are not spread over the width"


def test_a_paper_has_its_tables_figures_and_a_document_of_all(paper):
    names = {file.name for file in (paper / "latex").iterdir()}
    document = (paper / "latex" / "report.tex").read_text()
    inputs = set(re.findall(r"\\input\{([\w-]+)\}", document))
    assert "loss-on-held-out-text" in inputs and {f"{name}.tex" for name in inputs} | {"report.tex"} <= names
    pictures = set(re.findall(r"\\includegraphics\[.*?\]\{([\w-]+)\}", document))
    assert pictures and {f"{name}.pdf" for name in pictures} <= names
    assert all((paper / f"{name}.svg").exists() for name in pictures)
    assert (paper / "latex" / f"{min(pictures)}.pdf").read_bytes().startswith(b"%PDF")
    assert r"\title{50\% \& more}" in document
    words = r"$\pm$ is half the 95\% interval over 4 seeds"
    table = (paper / "latex" / "loss-on-held-out-text.tex").read_text()
    assert f"\n{words}" in document and f"\n% {words}" in table.partition(r"\begin{tabular}")[0]
    assert len(re.findall(r"\\begin\{figure\}", document)) == len(pictures)
    figure = document.partition(r"\begin{figure}")[2]
    assert figure.index(r"\includegraphics") < figure.index(r"\caption"), "the caption of a figure is below it"


def test_a_link_in_place_of_the_folder_is_not_written_through(losses_only, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "latex").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="latex is a symbolic link"):
        report(losses_only, output=tmp_path / "report", schemes=["nope", "alibi"], latex=True)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_rows_are_those_and_in_the_order_that_were_asked_for(paper, losses_only):
    text = (paper / "report.md").read_text()
    assert text.startswith("# posbench: 50% &amp; more")
    assert re.findall(r"^\| (\w+) \|", text.split("\n### ")[0], re.MULTILINE)[1:4] == ["nope", "qk_rope", "alibi"]
    assert set(pd.read_csv(paper / "table.csv")["scheme"]) == {"nope", "qk_rope", "alibi"}
    assert "Left out by --schemes: qkvo_rope." in text
    assert "the best, qk_rope" in " ".join(text.split()) or "how far back they use the order" in text
    assert find(losses_only, order="name").schemes == ["alibi", "nope", "qk_rope", "qkvo_rope"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"only": ["qk_ropes"]}, "'qk_ropes' has no runs here; did you mean 'qk_rope'"),
        ({"order": "best"}, "--order 'best' is not known"),
        ({"order": "given"}, "--schemes nope,qk_rope,vo_rope"),
        ({"only": ["nope", "alibi"], "baseline": "qk_rope"}, "the baseline 'qk_rope' has no run to compare with"),
    ],
)
def test_rows_that_cannot_be_are_refused(losses_only, asked, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        find(losses_only, **asked)


def test_the_report_ends_with_its_sources(paper):
    last = (paper / "report.md").read_text().split("\n## ")[-1]
    assert last.startswith("Sources") and "arXiv 2104.09864" in last and "arXiv 2108.12409" in last
    assert "kexue.fm/archives/10862" in last and "CITATION.cff" in last


def test_every_column_of_every_file_has_a_line(paper, written):
    for folder in (paper, written):
        described = pd.read_csv(folder / "columns.csv").fillna("")
        files = {file.name for file in folder.glob("*.csv")} - {"columns.csv"}
        assert set(described["file"]) == files
        assert [tuple(row) for row in described.to_numpy() if not row[2]] == []
        for file in files:
            assert list(described.loc[described["file"] == file, "column"]) == list(pd.read_csv(folder / file))
    for column in ("lr", "pilot_loss", "better", "verdict", "sign", "cache_bytes_per_token"):  # of other experiments
        assert meaning("rates.csv", column)
