"""Whatever value a field is given, a configuration comes of it or a message does, and never a crash."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import fields
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench import compose
from posbench.composition import checked
from posbench.config import Config, ConfigError

BASE = json.loads(json.dumps(compose(["tokenizer=bytes", "data=files", "data.path=x"]).to_mapping()))
FIELDS = [(group, name) for group, inner in BASE.items() for name in (inner if isinstance(inner, dict) else [None])]
NUMBERS = [
    (group, name)
    for group, name in FIELDS
    if group != "scheme"  # a scheme's class checks its own options
    and isinstance(value := BASE[group][name] if name else BASE[group], (int, float))
    and not isinstance(value, bool)
]
HUGE = [-1, -1e30, 10**20, 1e30, math.inf, -math.inf, math.nan, 10**400]


def with_value(group: str, name: str | None, value: Any) -> dict[str, Any]:
    mapping = copy.deepcopy(BASE)
    if name is None:
        mapping[group] = value
    else:
        mapping[group][name] = value
    return mapping


def test_the_base_is_valid_and_every_group_is_tried() -> None:
    assert isinstance(checked(BASE), Config)
    assert {group for group, _ in FIELDS} == {field.name for field in fields(Config)}
    assert len(NUMBERS) > 35


@pytest.mark.slow
@pytest.mark.parametrize("place", NUMBERS, ids=lambda place: ".".join(filter(None, place)))
@pytest.mark.parametrize("value", HUGE, ids=lambda value: str(value)[:12])
def test_negative_huge_and_infinite_numbers_are_refused_by_name(place: tuple[str, str | None], value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(with_value(*place, value))
    assert str(place[1] or place[0]) in str(refused.value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["???", "${seed}", "${oc.env:HOME}", "\\${x}", "\0", "..", "a\nb", "é", "-", "=", "~x", "x" * 5000]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(place=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_of_any_field_gives_a_configuration_or_a_message(place: tuple[str, str | None], value: Any) -> None:
    try:
        config = checked(with_value(*place, value))
    except ConfigError as refused:
        assert str(refused)
    else:
        written = yaml.safe_load(yaml.safe_dump(config.to_mapping(), sort_keys=False))
        assert repr(checked(written)) == repr(config), "what is written is read back the same"
