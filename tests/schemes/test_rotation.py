"""`rotate` is a rotation, and its angles are right a million tokens out."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posbench.schemes import Shape, rotate
from posbench.schemes.rotary import Rotary, Turn, inverse_frequencies, turn

EPS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@st.composite
def rotations(draw):
    """x [..., T, D] of any shape and dtype, and two sets of angles [T, D/2] from small to a million tokens' worth."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    T, pairs = draw(st.integers(1, 9)), draw(st.integers(1, 33))
    dtype = draw(st.sampled_from(list(EPS)))
    x = torch.randn(*lead, T, 2 * pairs, generator=generator, dtype=torch.float64).to(dtype)
    scale = draw(st.sampled_from([0.1, 10.0, 2.0**20]))
    a, b = scale * torch.randn(2, T, pairs, generator=generator, dtype=torch.float64)
    return x, a, b, EPS[dtype] * float(x.double().abs().max()) * 4


@settings(deadline=None, max_examples=150)
@given(rotations())
def test_rotate_keeps_norms_round_trips_and_composes(case):
    x, a, b, tolerance = case
    turned = rotate(x, a)
    assert turned.dtype == x.dtype and turned.shape == x.shape
    first, second = (part.double() for part in x.chunk(2, dim=-1))
    first_turned, second_turned = (part.double() for part in turned.chunk(2, dim=-1))
    assert torch.allclose(
        first.hypot(second), first_turned.hypot(second_turned), rtol=0, atol=tolerance
    )  # pair by pair
    assert torch.allclose(rotate(turned, a, inverse=True), x, rtol=0, atol=tolerance)
    assert torch.allclose(rotate(x, a, inverse=True), rotate(x, -a), rtol=0, atol=tolerance)
    inexact_sum = 1e-15 * float((a.abs() + b.abs()).max() * x.double().abs().max())  # a + b itself is rounded
    assert torch.allclose(rotate(turned, b), rotate(x, a + b), rtol=0, atol=tolerance + inexact_sum)


def test_rotate_turns_a_pair_from_the_first_half_towards_the_second():
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    quarter = torch.tensor([[torch.pi / 2, 0.0]], dtype=torch.float64)
    assert torch.allclose(rotate(x, quarter), torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64), atol=1e-15)
    assert torch.allclose(
        rotate(x, quarter, inverse=True), torch.tensor([[0.0, 0.0, -1.0, 0.0]], dtype=torch.float64), atol=1e-15
    )


def test_a_shared_turn_is_the_same_rotation():
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4, dtype=torch.float64)
    for inverse in (False, True):
        assert torch.equal(turn(x, Turn(angles.cos(), angles.sin()), inverse), rotate(x, angles, inverse))


def exact_angle(position, t, head_dim, base):
    return mpmath.mpf(position) * mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * t) / head_dim)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 128])
def test_angles_are_exact_to_a_millionth_of_a_radian_up_to_position_2_to_the_20(head_dim, base):
    positions = [0, 1, 255, 257, 2049, 65537, 2**20 - 1, 2**20]
    scheme = Rotary(Shape(64, 4, 4, head_dim), sites="qk", base=base)
    pos = torch.tensor(positions)
    angles, (cos, sin) = scheme.angles(pos, 1), scheme.prepare(pos, 1)
    cos, sin = cos.float(), sin.float()  # as a float32 model gets them
    with mpmath.workdps(40):
        for row, p in enumerate(positions):
            for t in range(head_dim // 2):
                exact = exact_angle(p, t, head_dim, base)
                assert abs(angles[row, t].item() - exact) < 1e-6
                assert abs(cos[row, t].item() - mpmath.cos(exact)) < 1e-6
                assert abs(sin[row, t].item() - mpmath.sin(exact)) < 1e-6


def test_angles_do_not_depend_on_the_length_asked_or_on_what_was_asked_before():
    short, long = (Rotary(Shape(64, 4, 4, 16), sites=["q"], base=base) for base in (10000.0, 1e6))
    assert torch.equal(short.angles(torch.arange(8), 8), short.angles(torch.arange(4096), 4096)[:8])
    assert not torch.allclose(short.angles(torch.arange(8), 8), long.angles(torch.arange(8), 8))
    assert torch.equal(short.angles(torch.tensor([4000]), 1), short.angles(torch.arange(4096), 4096)[4000:4001])


def test_inverse_frequencies_by_hand():
    assert torch.allclose(inverse_frequencies(4, 10000.0), torch.tensor([1.0, 0.01], dtype=torch.float64), rtol=1e-15)


def test_low_precision_is_rounded_once_at_the_end():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 300, 64, generator=generator).bfloat16()
    angles = 1000 * torch.randn(300, 32, generator=generator, dtype=torch.float64)
    for inverse in (False, True):
        exact = rotate(x.double(), angles, inverse)
        assert (
            (rotate(x, angles, inverse).double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6
        ).all()  # half a unit in the last place
