"""Rope: both pairings, partial rotation, and the scalings against formulas written out per dimension."""

import math

import naive
import numpy as np
import pytest

from coli.kernels import rope


def test_frequencies_are_powers_of_theta():
    freq = rope.inv_freq(1e6, 128)
    assert freq.dtype == np.float64
    assert np.abs(freq / [1e6 ** (-2 * i / 128) for i in range(64)] - 1).max() < 4e-15


def test_table_is_the_rounded_cosine_of_the_exact_angle():
    positions, freq = np.array([0, 1, 77, 8191, 1_000_000]), rope.inv_freq(10000.0, 64)
    cosine, sine = rope.rope_table(positions, freq, 1.25)
    angle = positions[:, None].astype(np.longdouble) * freq
    assert np.abs(cosine - 1.25 * np.cos(angle)).max() < 1e-7
    assert np.abs(sine - 1.25 * np.sin(angle)).max() < 1e-7
    assert (cosine[0] == 1.25).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [32, 24, 8])
def test_rotation_equals_the_slow_twin(interleaved, rot_dim):
    x = np.random.default_rng(0).standard_normal((3, 120)).astype(np.float32)
    before, column, heads, dim = x.copy(), 7, 3, 32
    cosine, sine = rope.rope_table(np.array([0, 9, 500]), rope.inv_freq(10000.0, rot_dim))
    rope.apply_rope(x, column, heads, dim, rot_dim, cosine, sine, interleaved, 2)
    expected = before.copy()
    for s in range(3):
        for h in range(heads):
            at = column + h * dim
            expected[s, at : at + rot_dim] = naive.rope(before[s, at : at + rot_dim], cosine[s], sine[s], interleaved)
    assert np.array_equal(x, expected)


def test_linear_scaling_divides():
    assert np.array_equal(rope.scale_linear(np.array([1.0, 0.5]), 4.0), [0.25, 0.125])


def test_llama3_scaling_follows_the_wavelength():
    freq = rope.inv_freq(500000.0, 128)
    scaled = rope.scale_llama3(freq, 8.0, 1.0, 4.0, 8192)
    for f, y in zip(freq, scaled, strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            expected = f
        elif wavelength > 8192:
            expected = f / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * f / 8 + smooth * f
        assert y == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_turning_dimensions(truncate):
    theta, dim, factor, original = 150000.0, 64, 32.0, 4096
    freq = rope.inv_freq(theta, dim)
    scaled = rope.scale_yarn(freq, theta, factor, original, 32.0, 1.0, truncate)

    def turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(32), turning(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    for i, (f, y) in enumerate(zip(freq, scaled, strict=True)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert y == pytest.approx(f / factor * ramp + f * (1 - ramp), rel=1e-12)
    assert rope.yarn_mscale(factor) == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)
    assert rope.yarn_mscale(1.0) == 1.0
