"""How numbers and names are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posbench.reporting.tables import (
    DASH,
    Table,
    flops_text,
    half_text,
    length_text,
    markdown,
    markdown_prose,
    markdown_text,
    number,
    perplexity_text,
    plus_minus,
    printable,
    rough,
    whole,
)


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (1.23456, False, "1.2346"),
        (0.01, True, "+0.0100"),
        (-0.01, True, "-0.0100"),
        (-0.00003, True, "-0.00003"),
        (0.000004, True, "±0"),
        (-1e-9, True, "±0"),
        (0.0, True, "±0"),
        (-0.00003, False, "0.0000"),
        (math.nan, True, DASH),
    ],
)
def test_numbers(value: float, sign: bool, text: str) -> None:
    assert number(value, 4, sign) == text


@pytest.mark.parametrize(
    ("half_width", "text"),
    [
        (0.0299, "3.696 ± 0.030"),
        (0.00996, "3.696 ± 0.010"),
        (0.2065, "3.70 ± 0.21"),
        (1.75, "3.7 ± 1.8"),
        (17.0, "4 ± 17"),
        (0.0013, "3.6964 ± 0.0013"),
        (0.00002, "3.6964 ± 0.0000"),
        (0.0, "3.6964 ± 0.0000"),
        (math.nan, "3.696"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_allows(half_width: float, text: str) -> None:
    assert plus_minus(3.69641, half_width) == text
    assert half_text(half_width) == (text.partition(" ")[2] or DASH)


def test_a_perplexity_has_the_digits_that_the_interval_of_its_loss_allows() -> None:
    assert [perplexity_text(55.4381, half) for half in (0.0002, 0.03, 0.5)] == ["55.438", "55.4", "55"]
    assert perplexity_text(1631.2, 0.01) == "1,631" and perplexity_text(2.5e7, 0.01) == "2.5e+07"


@pytest.mark.parametrize(
    ("value", "text"),
    [(18.4, "18.40"), (178.97, "179.0"), (1631, "1,631"), (2.5e7, "2.5e+07"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_perplexities(value: float, text: str) -> None:
    assert perplexity_text(value) == text


def test_flops_and_rough_counts() -> None:
    assert [flops_text(n) for n in (6.153e12, 3.7e9, math.nan)] == ["6.15e12", "3.70e9", DASH]
    assert [rough(n) for n in (0.1463, 5.88, 9.96, 1234.5, math.nan)] == ["0.15", "5.9", "10", "1,234", DASH]


def test_lengths_and_counts() -> None:
    assert [length_text(n) for n in (256, 1000, 1024, 8192, 8193)] == ["256", "1000", "1k", "8k", "8193"]
    assert whole(399_360) == "399,360" and whole(math.nan) == DASH


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 5))
def test_a_signed_number_has_a_sign_and_no_zero_a_minus(value: float, digits: int) -> None:
    assert number(value, digits, sign=True)[0] in "+-±"
    for text in (number(value, digits, sign=True), number(value, digits)):
        assert not text.startswith("-") or set(text) & set("123456789")


@given(st.text())
def test_what_is_printed_is_one_line_without_control_characters(text: str) -> None:
    assert printable(text).isprintable()


@given(st.text(alphabet="<>&|[]`*~_#abc "))
def test_markdown_shows_a_name_as_it_is(text: str) -> None:
    shown = markdown_text(text)
    assert not set("<>|[]`*") & set(shown)
    assert len(markdown(Table("t", ["a"], [[text]]), with_title=False).splitlines()) == 3


@given(st.text(alphabet="<>&|[]*~_#abc \n"), st.text(alphabet="<>|abc -", min_size=1))
def test_code_in_a_sentence_is_code_in_markdown_too(words: str, code: str) -> None:
    assert markdown_prose(f"{words}`{code}`{words}") == f"{markdown_text(words)}`{code}`{markdown_text(words)}"
    assert markdown_prose(f"{words}`") == markdown_text(f"{words}`")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(40, 120))
def test_a_table_goes_on_below_with_its_first_column(widths: list[int], width: int) -> None:
    table = Table("t", ["x" * n for n in widths], [["y"] * len(widths)])
    parts = table.fitted(width)
    assert [n for part in parts for n in part[1:]] == list(range(1, len(widths)))
    for part in parts:
        assert part[0] == 0
        assert len(part) == 2 or sum(widths[n] for n in part) + 2 * (len(part) - 1) <= width or len(part) == 1
