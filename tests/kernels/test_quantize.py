"""Weight quantizers: packing is lossless, q8 is Q8_0-like, q4 beats max/7 and equals its slow twin, nothing overflows
silently."""

import naive
import numpy as np
import pytest

from coli.kernels import quantize
from coli.kernels.matmul import KIND_F32, KIND_Q4, KIND_Q8
from coli.kernels.runtime import address


def weights(rows: int = 33, cols: int = 160, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def squared_error(w: np.ndarray, kind: int, q: np.ndarray, scales: np.ndarray, importance=1.0) -> float:
    error = quantize.dequantize(kind, q, scales)[:, : w.shape[1]] - w
    return float((error.astype(np.float64) ** 2 * importance).sum())


@pytest.mark.parametrize("weighted", [False, True])
def test_q4_equals_the_slow_twin(weighted):
    w = weights(6)
    importance = np.random.default_rng(1).random(160).astype(np.float32) if weighted else None
    q, scales = quantize.quantize_q4(w, importance)
    for r in range(6):
        for g in range(5):
            part = slice(32 * g, 32 * g + 32)
            nibbles, scale = naive.quantize_q4(
                w[r, part], quantize.STARTS, None if importance is None else importance[part]
            )
            assert np.array_equal(q[r, part], nibbles)
            assert scales[r, g] == scale


@pytest.mark.parametrize("threads", [1, 2])
def test_quantizing_is_deterministic_over_threads_and_rows(threads):
    w = weights()
    q, scales = quantize.quantize_q4(w, threads=threads)
    for r in range(0, len(w), 5):
        alone, alone_scales = quantize.quantize_q4(w[r : r + 1])
        assert np.array_equal(q[r], alone[0])
        assert np.array_equal(scales[r], alone_scales[0])


def test_q4_has_less_error_than_max_scales():
    w = weights(64, 512)
    q, scales = quantize.quantize_q4(w)
    groups = w.reshape(64, 16, 32)
    plain = (np.abs(groups).max(axis=2) / 7).astype(np.float16)
    plain_q = (np.clip(np.rint(groups / plain.astype(np.float32)[..., None]), -8, 7) + 8).reshape(64, 512)
    assert squared_error(w, KIND_Q4, q, scales) < 0.8 * squared_error(w, KIND_Q4, plain_q, plain)


def test_importance_lowers_the_weighted_error():
    w, importance = weights(64, 512), np.random.default_rng(3).exponential(size=512).astype(np.float32) ** 2
    plain = squared_error(w, KIND_Q4, *quantize.quantize_q4(w), importance)
    weighted = squared_error(w, KIND_Q4, *quantize.quantize_q4(w, importance), importance)
    assert weighted < 0.97 * plain


def test_a_quantized_matrix_is_its_own_quantization():
    """Zero error exists and is found: the integers of a matrix that is exactly representable come back."""
    rng = np.random.default_rng(4)
    q = rng.integers(0, 16, (20, 64)).astype(np.uint8)
    q[:, ::32], q[:, 1::32] = 0, 15  # both ends in every group
    scales = (0.5 + rng.random((20, 2))).astype(np.float16)
    again, again_scales = quantize.quantize_q4(quantize.dequantize(KIND_Q4, q, scales))
    assert np.array_equal(again, q)
    assert np.array_equal(again_scales, scales)


def test_q8_rounds_to_the_nearest_step_of_max_over_127():
    w = weights()
    q, scales = quantize.quantize_q8(w, threads=2)
    top = np.abs(w.reshape(33, 5, 32)).max(axis=2)
    assert np.array_equal(scales, (top / np.float32(127)).astype(np.float16))
    step = np.repeat(scales.astype(np.float32), 32, axis=1)
    assert (np.abs(quantize.dequantize(KIND_Q8, q, scales) - w) <= 0.502 * step).all()
    assert np.abs(q.astype(int)).max() <= 127


@pytest.mark.parametrize("kind", [KIND_Q4, KIND_Q8])
def test_bad_weights_and_scales_are_counted(kind):
    run = quantize.quantize_q4 if kind == KIND_Q4 else quantize.quantize_q8
    w = weights(4, 64)
    w[0, 3], w[1, 40] = np.nan, np.inf
    w[2, :32] = 3e-10  # below the smallest fp16 step
    w[3, 7] = 3e38
    w[3, 32:] = 0
    report = np.zeros(3, np.int64)
    q, scales = run(w, report=report)
    assert report.tolist() == [2, 1, 1]
    assert np.isfinite(scales).all()
    zero = 8 if kind == KIND_Q4 else 0
    assert (q[0, :32] == zero).all()
    assert (q[3, 32:] == zero).all()


@pytest.mark.parametrize("value", [1e-45, 1e-39, 1e-20, 1e20, 3.4e38])
def test_extreme_magnitudes_do_not_crash(value):
    w = np.full((1, 32), value, np.float32)
    w[0, ::2] *= -1
    for q, scales in (quantize.quantize_q4(w), quantize.quantize_q8(w)):
        assert np.isfinite(scales).all()
        assert q.shape == (1, 32)


def test_columns_are_padded_with_zero_weights():
    q, scales = quantize.quantize_q4(weights(3, 40))
    assert q.shape == (3, 64)
    assert scales.shape == (3, 2)
    assert (q[:, 40:] == 8).all()


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_packing_is_lossless(rows):
    rng = np.random.default_rng(rows)
    scales = rng.random((rows, 3)).astype(np.float16)
    for low, high, dtype, pack, unpack in (
        (0, 16, np.uint8, quantize.pack_q4, quantize.unpack_q4),
        (-128, 128, np.int8, quantize.pack_q8, quantize.unpack_q8),
    ):
        q = rng.integers(low, high, (rows, 96)).astype(dtype)
        packed, packed_scales = pack(q, scales)
        assert packed.shape == (-(-rows // 16), 3, 256 if dtype == np.uint8 else 512)
        again, again_scales = unpack(packed, packed_scales)
        assert np.array_equal(again[:rows], q)
        assert np.array_equal(again_scales[:rows], scales)
        assert (again[rows:] == (8 if dtype == np.uint8 else 0)).all()
    w = weights(rows, 50)
    assert np.array_equal(quantize.unpack_f32(quantize.pack_f32(w))[:rows, :50], w)


@pytest.mark.parametrize("kind", [KIND_F32, KIND_Q8, KIND_Q4])
def test_embedding_rows_read_the_packed_order(kind):
    w, no_scales = weights(40, 72), np.zeros(0, np.float16)
    if kind == KIND_F32:
        packed, packed_scales, expected = quantize.pack_f32(w), no_scales, w
    else:
        run, pack = (
            (quantize.quantize_q4, quantize.pack_q4) if kind == KIND_Q4 else (quantize.quantize_q8, quantize.pack_q8)
        )
        q, scales = run(w)
        packed, packed_scales = pack(q, scales)
        expected = quantize.dequantize(kind, q, scales)[:, :72]
    ids = np.array([39, 0, 17, 17, 5])
    out = np.empty((5, 72), np.float32)
    quantize.embed_rows(kind, address(packed), address(packed_scales), ids, 3, out, 2)
    assert np.array_equal(out, expected[ids])
