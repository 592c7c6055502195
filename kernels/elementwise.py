"""Row-wise float32 operations: norms, SwiGLU, small pointwise steps, and arrays of the transcendental functions.

Sums run in 16 lanes by index % 16 and end in a fixed tree, so a row has the same bits in any batch and on any
instruction set. Buffers are 2-D float32 with contiguous columns; a row stride larger than the width is fine.
"""

import numpy as np

from coli.kernels.ops import (
    bits_f32,
    cos64,
    exp64,
    expf,
    fadd,
    fma,
    fmax,
    fmin,
    fmul,
    fsub,
    hsum_f32,
    keep_lanes,
    load_f32,
    load_f64,
    load_i64,
    load_part,
    log64,
    sigmoid,
    sigmoid_x16,
    silu_x16,
    sin64,
    splat_f32,
    sqrt_f32,
    store_f32,
    store_f64,
    store_part,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack2, unpack4, unpack5, unpack7 = unpacker(2), unpacker(4), unpacker(5), unpacker(7)

ADD, CLIP, SCALE, SCALE_ROWS, GATE_ROWS = range(5)
EXP32, SIGMOID32, EXP64, LOG64, SIN64, COS64 = range(6)


@device
def _norm_segment(x, weight, out, n, eps):
    """out = weight * (x / sqrt(mean(x**2) + eps)) over n values."""
    squares = splat_f32(np.float32(0))
    for i in range(0, n, 16):
        v = load_part(x + 4 * i, n - i)
        squares = fma(v, v, squares)
    inv = np.float32(1) / sqrt_f32(hsum_f32(squares) / np.float32(n) + eps)
    for i in range(0, n, 16):
        v = fmul(load_part(x + 4 * i, n - i), splat_f32(inv))
        store_part(out + 4 * i, fmul(v, load_part(weight + 4 * i, n - i)), n - i)


def _rms_norm(args, part, parts):
    """args: x, rows, row stride, segments per row, length of a segment, weight, eps, out, out stride."""
    x, rows, stride, segments = unpack4(args, 0)
    n, weight, eps = load_i64(args + 32), load_i64(args + 40), np.float32(load_f64(args + 48))
    out, out_stride = unpack2(args, 7)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for h in range(segments):
            _norm_segment(x + 4 * (s * stride + h * n), weight, out + 4 * (s * out_stride + h * n), n, eps)


RMS_NORM = Stage(_rms_norm)


@device
def _layer_segment(x, weight, bias, out, n, eps):
    """out = weight * (x - mean) / sqrt(variance + eps) + bias over n values."""
    total, squares = splat_f32(np.float32(0)), splat_f32(np.float32(0))
    for i in range(0, n, 16):
        total = fadd(total, load_part(x + 4 * i, n - i))
    mean = splat_f32(hsum_f32(total) / np.float32(n))
    for i in range(0, n, 16):
        v = keep_lanes(fsub(load_part(x + 4 * i, n - i), mean), 0, n - i, np.float32(0))
        squares = fma(v, v, squares)
    inv = splat_f32(np.float32(1) / sqrt_f32(hsum_f32(squares) / np.float32(n) + eps))
    for i in range(0, n, 16):
        v = fmul(fsub(load_part(x + 4 * i, n - i), mean), inv)
        v = fma(v, load_part(weight + 4 * i, n - i), load_part(bias + 4 * i, n - i))
        store_part(out + 4 * i, v, n - i)


def _layer_norm(args, part, parts):
    """args: x, rows, row stride, width, weight, bias, eps, out, out stride."""
    x, rows, stride, n = unpack4(args, 0)
    weight, bias, eps = load_i64(args + 32), load_i64(args + 40), np.float32(load_f64(args + 48))
    out, out_stride = unpack2(args, 7)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        _layer_segment(x + 4 * s * stride, weight, bias, out + 4 * s * out_stride, n, eps)


LAYER_NORM = Stage(_layer_norm)


def _pointwise(args, part, parts):
    """args: op, x, rows, cols, stride, y, y stride, bound."""
    op, x, rows, cols = unpack4(args, 0)
    stride, y, y_stride, bound = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48), load_f64(args + 56)
    number = np.float32(bound)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        factor = number
        if op == 3:
            factor = load_f32(y + 4 * s * y_stride)
        elif op == 4:
            factor = sigmoid(load_f32(y + 4 * s * y_stride))
        for i in range(0, cols, 16):
            at = x + 4 * (s * stride + i)
            v = load_part(at, cols - i)
            if op == 0:
                v = fadd(v, load_part(y + 4 * (s * y_stride + i), cols - i))
            elif op == 1:
                v = fmin(splat_f32(number), fmax(splat_f32(-number), v))  # NaN stays
            else:
                v = fmul(v, splat_f32(factor))
            store_part(at, v, cols - i)


POINTWISE = Stage(_pointwise)


def _swiglu(args, part, parts):
    """args: gate_up, rows, stride, I, offset of up, out, out stride."""
    gate, rows, stride, n, up, out, out_stride = unpack7(args, 0)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(0, n, 16):
            at = gate + 4 * (s * stride + i)
            v = fmul(silu_x16(load_part(at, n - i)), load_part(at + 4 * up, n - i))
            store_part(out + 4 * (s * out_stride + i), v, n - i)


SWIGLU = Stage(_swiglu)


def _clamped_swiglu(args, part, parts):
    """args: gate_up, rows, stride, I, offset of up, out, out stride, limit."""
    gate, rows, stride, n, up, out, out_stride = unpack7(args, 0)
    limit = np.float32(load_f64(args + 56))
    high, low, one = splat_f32(limit), splat_f32(-limit), splat_f32(np.float32(1))
    alpha = splat_f32(np.float32(1.702))
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(0, n, 16):
            at = gate + 4 * (s * stride + i)
            g = fmin(high, load_part(at, n - i))  # NaN stays
            u = fmin(high, fmax(low, load_part(at + 4 * up, n - i)))
            v = fmul(fadd(u, one), fmul(g, sigmoid_x16(fmul(g, alpha))))
            store_part(out + 4 * (s * out_stride + i), v, n - i)


CLAMPED_SWIGLU = Stage(_clamped_swiglu)


def _functions(args, part, parts):
    """args: function, x, n, y; 32-bit functions on float32, the others on float64."""
    function, x, n, y = unpack4(args, 0)
    for i in range(n * part // parts, n * (part + 1) // parts):
        if function < 2:
            v = load_f32(x + 4 * i)
            store_f32(y + 4 * i, expf(v) if function == 0 else sigmoid(v))
        else:
            w = load_f64(x + 8 * i)
            if function == 2:
                w = exp64(w)
            elif function == 3:
                w = log64(w)
            elif function == 4:
                w = sin64(w)
            else:
                w = cos64(w)
            store_f64(y + 8 * i, w)


FUNCTIONS = Stage(_functions)


def _count_bad(args, part, parts):
    """args: x, rows, cols, stride, counts (rows): NaN or inf per row."""
    x, rows, cols, stride, counts = unpack5(args, 0)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        bad = 0
        for i in range(cols):
            bad += (bits_f32(load_f32(x + 4 * (s * stride + i))) & 0x7FFFFFFF) >= 0x7F800000
        store_f64(counts + 8 * s, np.float64(bad))


COUNT_BAD = Stage(_count_bad)


# ------------------------------------------------------------------ entries
def _stride(x: np.ndarray) -> int:
    assert x.ndim == 2
    assert x.dtype == np.float32
    assert x.strides[1] == 4
    assert x.strides[0] % 4 == 0
    return x.strides[0] // 4


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, threads: int = 1) -> None:
    """out (S, H) = weight (H,) * x / sqrt(mean(x**2) + eps); out may be x."""
    rows, n = x.shape
    assert weight.dtype == np.float32
    assert len(weight) >= n
    block = arguments(address(x), rows, _stride(x), 1, n, address(weight), float(eps), address(out), _stride(out))
    RMS_NORM.run(block, threads)


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, out: np.ndarray, threads: int = 1
) -> None:
    """out (S, H) = weight (H,) * (x - mean) / sqrt(variance + eps) + bias (H,); out may be x."""
    rows, n = x.shape
    assert weight.dtype == bias.dtype == np.float32
    assert min(len(weight), len(bias)) >= n
    block = arguments(
        address(x), rows, _stride(x), n, address(weight), address(bias), float(eps), address(out), _stride(out)
    )
    LAYER_NORM.run(block, threads)


def rms_norm_heads(
    x: np.ndarray, column: int, heads: int, head_dim: int, weight: np.ndarray, eps: float, threads: int = 1
) -> None:
    """In place, each head of x[:, column : column + heads*head_dim] by itself, weight (head_dim,)."""
    assert column + heads * head_dim <= x.shape[1]
    assert weight.dtype == np.float32
    assert len(weight) >= head_dim
    start, stride = address(x) + 4 * column, _stride(x)
    block = arguments(start, len(x), stride, heads, head_dim, address(weight), float(eps), start, stride)
    RMS_NORM.run(block, threads)


def add(x: np.ndarray, y: np.ndarray, threads: int = 1) -> None:
    """x += y, both (S, H)."""
    _run_pointwise(ADD, x, address(y), _stride(y), 0.0, threads)


def clip(x: np.ndarray, bound: float, threads: int = 1) -> None:
    """x = min(max(x, -bound), bound); NaN stays NaN."""
    _run_pointwise(CLIP, x, 0, 0, bound, threads)


def scale(x: np.ndarray, factor: float, threads: int = 1) -> None:
    """x *= factor (rounded to float32)."""
    _run_pointwise(SCALE, x, 0, 0, factor, threads)


def scale_rows(x: np.ndarray, factors: np.ndarray, threads: int = 1) -> None:
    """x[s] *= factors[s]; factors float32 (S,)."""
    assert factors.dtype == np.float32
    assert len(factors) >= len(x)
    _run_pointwise(SCALE_ROWS, x, address(factors), factors.strides[0] // 4, 0.0, threads)


def gate_rows(x: np.ndarray, gate_logits: np.ndarray, threads: int = 1) -> None:
    """x[s] *= sigmoid(gate_logits[s]); gate_logits float32 (S,), strided views welcome."""
    assert gate_logits.dtype == np.float32
    assert len(gate_logits) >= len(x)
    _run_pointwise(GATE_ROWS, x, address(gate_logits), gate_logits.strides[0] // 4, 0.0, threads)


def _run_pointwise(op: int, x: np.ndarray, y: int, y_stride: int, number: float, threads: int) -> None:
    POINTWISE.run(arguments(op, address(x), *x.shape, _stride(x), y, y_stride, float(number)), threads)


def swiglu(gate_up: np.ndarray, n: int, padded: int, out: np.ndarray, threads: int = 1) -> None:
    """out[:, :n] = silu(gate) * up, gate = gate_up[:, :n], up = gate_up[:, padded : padded + n]."""
    assert gate_up.shape[1] >= padded + n
    assert out.shape[1] >= n
    assert len(out) >= len(gate_up)
    block = arguments(address(gate_up), len(gate_up), _stride(gate_up), n, padded, address(out), _stride(out))
    SWIGLU.run(block, threads)


def clamped_swiglu(gate_up: np.ndarray, n: int, padded: int, limit: float, out: np.ndarray, threads: int = 1) -> None:
    """out[:, :n] = (up + 1) * gate * sigmoid(1.702 gate), gate at most `limit`, up within +-limit; as `swiglu`."""
    assert gate_up.shape[1] >= padded + n
    assert out.shape[1] >= n
    assert len(out) >= len(gate_up)
    block = arguments(
        address(gate_up), len(gate_up), _stride(gate_up), n, padded, address(out), _stride(out), float(limit)
    )
    CLAMPED_SWIGLU.run(block, threads)


def count_bad(x: np.ndarray, threads: int = 1) -> np.ndarray:
    """How many NaN or inf each row of x (S, H) holds: float64 (S,)."""
    counts = np.zeros(len(x))
    COUNT_BAD.run(arguments(address(x), *x.shape, _stride(x), address(counts)), threads)
    return counts


def evaluate(function: int, x: np.ndarray) -> np.ndarray:
    """One of EXP32, SIGMOID32 (float32) or EXP64, LOG64, SIN64, COS64 (float64) of every element."""
    dtype = np.float32 if function <= SIGMOID32 else np.float64
    x = np.ascontiguousarray(x, dtype)
    y = np.empty_like(x)
    FUNCTIONS.run(arguments(function, address(x), x.size, address(y)))
    return y
