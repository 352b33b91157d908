"""`posbench judge losses.csv` and `posbench report losses.csv` as a user gives them."""

import json
from pathlib import Path

import pytest

ROWS = "".join(f"rope,{n},3.{n}1\nmine,{n},2.9{n}\nsame,{n},3.{n}1\n" for n in range(5))


@pytest.fixture
def table(posbench):
    Path("losses.csv").write_text("scheme,seed,loss\n" + ROWS, encoding="utf-8")


@pytest.mark.usefixtures("table")
def test_the_sentence_says_what_the_table_does_not(posbench):
    result = posbench("judge", "losses.csv", "--scheme", "mine")
    assert result.status == 0 and "mine: better than rope at the rates of the table" in result.out
    assert "(not known: whether seeds share batches and first weights, and whether rates were searched)" in result.out
    judgement = json.loads(posbench("judge", "losses.csv", "--scheme", "mine", "--json").out)
    assert judgement["verdict"] == "better" and judgement["seeds"] == [0, 1, 2, 3, 4]
    assert posbench("judge", "losses.csv", "--scheme", "same").status == 11


@pytest.mark.usefixtures("table")
def test_the_report_has_the_table_the_gaps_and_what_is_not_known(posbench):
    printed = posbench("report", "losses.csv", "--baseline", "rope", "--latex").out
    assert "against rope: mine is better; same is equal" in " ".join(printed.split())
    page = Path("losses/report/report.md").read_text(encoding="utf-8")
    assert "Not known: whether seeds share batches" in page and "gaps.svg" in page
    assert Path("losses/report/latex/loss.tex").is_file()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("judge", "nothing.csv"), "nothing.csv"),
        (("judge", "losses.csv", "--baseline", "ropes"), "no finite loss of the baseline 'ropes'; did you mean 'rope'"),
        (("judge", "losses.csv", "--scheme", "minus"), "losses.csv has no 'minus'"),
        (("judge", "losses.csv", "--confirm", "1", "--scheme", "mine"), "--confirm is for runs that posbench trained"),
        (("report", "losses.csv", "--by", "train.lr"), "--by is for runs that posbench trained"),
    ],
)
def test_what_a_table_cannot_serve_is_refused_in_a_line(posbench, words, message):
    assert message in posbench(*words).refusal
