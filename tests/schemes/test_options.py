"""What a scheme refuses, and that the message says how to mend it."""

import pytest
import torch

from posbench.config import ConfigError, SchemeConfig
from posbench.schemes import SCHEMES, At, Scheme, Shape, build_scheme

SHAPE = Shape(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16)

REFUSED = [
    ("rotery", {}, "did you mean 'rotary'"),
    ("rotary", {}, "scheme.sites is missing"),
    ("rotary", {"sites": ["q", "w"]}, "must name each of ['q', 'k', 'v', 'o'] at most once"),
    ("rotary", {"sites": ["q", "q"]}, "at most once"),
    ("rotary", {"sites": 3}, "scheme.sites=3 is not a list"),
    ("rotary", {"sites": None}, "scheme.sites=None is not a list"),
    ("rotary", {"sites": {"q": 1}}, "is not a list"),
    ("rotary", {"sites": ["q"], "bas": 5}, "scheme.bas is not an option of 'rotary'; did you mean 'base'"),
    ("rotary", {"sites": ["q"], "base": 1}, "scheme.base=1 must lie above 1"),
    ("rotary", {"sites": ["q"], "base": float("nan")}, "must lie above 1"),
    ("rotary", {"sites": ["q"], "base": "10k"}, "scheme.base=10k must lie above 1"),
    ("rotary", {"sites": ["q"], "base": True}, "must lie above 1"),
    ("rotary", {"sites": ["q"], "_target_": "os.system"}, "scheme._target_ is not an option"),
    ("nope", {"base": 10000}, "(options: none)"),
    ("sinusoidal", {"amplitude": -1}, "scheme.amplitude=-1 must lie between"),
    ("sinusoidal", {"amplitude": float("inf")}, "must lie between"),
    ("sinusoidal", {"base": 0.5}, "scheme.base=0.5 must lie above 1"),
    ("t5", {"num_buckets": 31}, "scheme.num_buckets=31 must be an even whole number above 0 (32 is usual)"),
    ("t5", {"num_buckets": True}, "must be an even whole number"),
    ("t5", {"max_distance": 16}, "scheme.max_distance=16 must be a whole number of tokens above"),
    ("t5", {"max_distance": 128.0}, "must be a whole number of tokens above"),
    ("fire", {"hidden": 0}, "scheme.hidden=0 must be a whole number above 0 (32 is the paper's)"),
    ("shaw", {"clip": 0}, "scheme.clip=0 must be a whole number of tokens above 0 (16 is the paper's)"),
    ("transformer_xl", {"channels": 15}, "scheme.channels=15 must be an even number above 0"),
    ("transformer_xl", {"channels": "C"}, "16 is as wide as a head, 64 the paper's choice"),
]


@pytest.mark.parametrize("kind, options, says", REFUSED, ids=lambda part: str(part)[:30])
def test_refused(kind, options, says):
    with pytest.raises(ConfigError) as refusal:
        build_scheme(SchemeConfig("mine", kind, options), SHAPE)
    assert says in str(refusal.value)


def test_an_odd_width_has_no_pairs_for_sines():
    with pytest.raises(ConfigError, match=r"model\.d_model=33 is odd"):
        build_scheme(SchemeConfig("mine", "sinusoidal"), Shape(33, 1, 1, 16))


def test_no_rotated_site_is_nope():
    scheme = build_scheme(SchemeConfig("mine", "rotary", {"sites": []}), SHAPE)
    x = torch.randn(1, 4, 5, 16)
    assert scheme.is_relative and all(
        getattr(scheme, site)(x, scheme.prepare(torch.arange(5), 5)) is x for site in "qkvo"
    )


def test_the_base_class_unchanged_is_nope():
    assert SCHEMES["nope"] is Scheme
    scheme = Scheme(SHAPE)
    x = torch.randn(2, 4, 5, 16)
    assert all(getattr(scheme, hook)(x, None) is x for hook in ("embed", "q", "k", "v", "o"))
    assert scheme.gate(x, None) is None and scheme.bias(x, None, At(None, 0, 0, 5)) is None


class Swallows(Scheme):
    """Passes its arguments on, as a first draft may."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_keyword_arguments_by_the_handful_name_no_option(monkeypatch):
    monkeypatch.setitem(SCHEMES, "swallows", Swallows)
    assert build_scheme(SchemeConfig("mine", "swallows"), SHAPE).shape == SHAPE
    with pytest.raises(ConfigError, match=r"scheme\.buckets is not an option of 'swallows'"):
        build_scheme(SchemeConfig("mine", "swallows", {"buckets": 32}), SHAPE)
