"""Norms, SwiGLU and pointwise steps equal their slow twins; the transcendental functions keep their stated accuracy."""

import math

import naive
import numpy as np
import pytest

from coli.kernels import elementwise as ew


def rows(shape: tuple[int, int], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("width", [1, 15, 16, 70, 2048])
@pytest.mark.parametrize("threads", [1, 2])
def test_rms_norm_equals_the_slow_twin(width, threads):
    x, weight, out = rows((3, width)), rows((1, width), 1)[0], np.empty((3, width), np.float32)
    ew.rms_norm(x, weight, 1e-5, out, threads)
    assert np.array_equal(out, [naive.rms_norm(row, weight, 1e-5) for row in x])


@pytest.mark.parametrize("width", [1, 15, 16, 70, 2048])
def test_layer_norm_equals_the_slow_twin(width):
    x, weight, bias = rows((5, width)), rows((1, width), 1)[0], rows((1, width), 2)[0]
    out = np.empty_like(x)
    ew.layer_norm(x, weight, bias, 1e-5, out, 2)
    for row, found in zip(x, out, strict=True):
        assert np.array_equal(found, naive.layer_norm(row, weight, bias, 1e-5))


def test_rms_norm_of_heads_touches_only_its_columns():
    x, weight = rows((4, 100)), rows((1, 24), 1)[0]
    before = x.copy()
    ew.rms_norm_heads(x, 10, 3, 24, weight, 1e-6)
    expected = [[naive.rms_norm(row[10 + 24 * h : 34 + 24 * h], weight, 1e-6) for h in range(3)] for row in before]
    assert np.array_equal(x[:, 10:82], np.array(expected).reshape(4, 72))
    assert np.array_equal(x[:, :10], before[:, :10])
    assert np.array_equal(x[:, 82:], before[:, 82:])


def test_swiglu_equals_the_slow_twin():
    gate_up, out = rows((5, 96), scale=20), np.zeros((5, 50), np.float32)
    ew.swiglu(gate_up, 40, 48, out, 2)
    assert np.array_equal(out[:, :40], naive.swiglu(gate_up[:, :40], gate_up[:, 48:88]))
    assert not out[:, 40:].any()


def test_clamped_swiglu_equals_the_slow_twin():
    gate_up, out = rows((5, 96), scale=20), np.zeros((5, 50), np.float32)
    ew.clamped_swiglu(gate_up, 40, 48, 7.0, out, 2)
    assert np.array_equal(out[:, :40], naive.clamped_swiglu(gate_up[:, :40], gate_up[:, 48:88], 7.0))
    assert not out[:, 40:].any()


def test_pointwise_steps():
    x, y, factors = rows((3, 37)), rows((3, 37), 1), rows((1, 3), 2)[0]
    for step, expected in (
        (lambda a: ew.add(a, y), x + y),
        (lambda a: ew.clip(a, 0.5), np.clip(x, np.float32(-0.5), np.float32(0.5))),
        (lambda a: ew.scale(a, 0.22), x * np.float32(0.22)),
        (lambda a: ew.scale_rows(a, factors), x * factors[:, None]),
        (lambda a: ew.gate_rows(a, factors), x * naive.sigmoid(factors)[:, None]),
    ):
        a = x.copy()
        step(a)
        assert np.array_equal(a, expected)


@pytest.mark.parametrize("step", ["rms_norm", "swiglu", "clamped_swiglu", "clip", "add"])
def test_nan_reaches_the_output_of_its_row(step):
    x = rows((2, 64))
    x[1, 3] = np.nan
    out = x.copy()
    if step == "rms_norm":
        ew.rms_norm(x, np.ones(64, np.float32), 1e-6, out)
    elif step == "swiglu":
        out = np.zeros((2, 32), np.float32)
        ew.swiglu(x, 32, 32, out)
    elif step == "clamped_swiglu":
        out = np.zeros((2, 32), np.float32)
        ew.clamped_swiglu(x, 32, 32, 7.0, out)
    elif step == "clip":
        ew.clip(out, 1.0)
    else:
        ew.add(out, rows((2, 64), 3))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 3])


def test_count_bad_counts_nan_and_inf_per_row():
    x = rows((3, 50))
    x[1, 4], x[1, 49], x[2, 0] = np.nan, np.inf, -np.inf
    assert ew.count_bad(x, 2).tolist() == [0, 2, 1]


# ------------------------------------------------------------------ transcendental functions
def ulps(y: np.ndarray, exact: np.ndarray, dtype: type) -> float:
    """Largest error in units of the last place of the exact result."""
    unit = np.spacing(np.abs(exact).astype(dtype)).astype(exact.dtype)
    return float((np.abs(y.astype(exact.dtype) - exact) / unit).max())


def test_expf_equals_its_twin_and_stays_within_one_ulp():
    """Every 3001st float32 of the range with finite, normal results."""
    low, high = np.float32(-87.3).view(np.int32), np.float32(88.7).view(np.int32)
    x = np.concatenate([np.arange(0, high, 3001), np.arange(np.float32(-0.0).view(np.int32), low, 3001)])
    x = x.astype(np.int32).view(np.float32)
    y = ew.evaluate(ew.EXP32, x)
    assert np.array_equal(y, naive.exp32(x))
    assert ulps(y, np.exp(x.astype(np.float64)), np.float32) < 1.0


def test_expf_ends():
    x = np.array([-np.inf, -200, -104, 0, 88.8, 200, np.inf, np.nan], np.float32)
    assert np.array_equal(
        ew.evaluate(ew.EXP32, x), np.array([0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan], np.float32), True
    )
    x = np.linspace(-103.9, -87.4, 1001).astype(np.float32)  # subnormal results
    assert np.abs(ew.evaluate(ew.EXP32, x) - np.exp(x.astype(np.float64))).max() <= 2.0**-149


def test_float64_functions_stay_within_one_ulp():
    """Against long double, which has 11 bits more."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-708, 709, 200_000), rng.uniform(-1, 1, 200_000)])
    assert ulps(ew.evaluate(ew.EXP64, x), np.exp(x.astype(np.longdouble)), np.float64) < 1.0
    x = np.concatenate(
        [rng.uniform(0.5, 2, 200_000), 10.0 ** rng.uniform(-308, 308, 200_000), 1 - 2.0 ** -rng.uniform(1, 52, 9999)]
    )
    x = x[x != 1]
    assert ulps(ew.evaluate(ew.LOG64, x), np.log(x.astype(np.longdouble)), np.float64) < 1.0


def test_sin_and_cos_keep_an_absolute_error_of_2e_16():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-10, 10, 100_000), rng.uniform(-(2.0**20), 2.0**20, 100_000)])
    wide = x.astype(np.longdouble)
    assert np.abs(ew.evaluate(ew.SIN64, x) - np.sin(wide)).max() < 2e-16
    assert np.abs(ew.evaluate(ew.COS64, x) - np.cos(wide)).max() < 2e-16


def test_float64_ends():
    x = np.array([0, -1, np.inf, np.nan, 1, 5e-324])
    expected = [-np.inf, np.nan, np.inf, np.nan, 0, math.log(5e-324)]
    assert np.array_equal(ew.evaluate(ew.LOG64, x), expected, True)
    x = np.array([-np.inf, -746, 0, 710, np.inf, np.nan])
    assert np.array_equal(ew.evaluate(ew.EXP64, x), [0, 0, 1, np.inf, np.inf, np.nan], True)
