"""Our own exp, log, sin and cos: the same bits on every processor, instruction set and library version.

Each is written once over `Lanes` and instantiated for scalars and 16 lanes, with fma where written. Accuracy (tests
compare with mpmath-grade references): expf 1 ulp over all of float32; exp64 and log64 1 ulp; sin64 and cos64 absolute
error 2e-16 for |x| < 2**28. NaN gives NaN; overflow gives inf; underflow is gradual.
Series: exp and sin/cos are Taylor sums after reduction by ln 2 and pi/2; log is 2 atanh(f / (2 + f)); expf alone uses a
minimax polynomial (own fit, weighted least squares iterated to equal ripple, error 3e-9).
"""

from math import factorial

from coli.kernels.simd import F32, F64, f32, f32x16, f64, lanes_op

LOG2E = 1.4426950408889634
LN2_HI, LN2_LO = 0.6931471805599453, 2.3190468138462996e-17
LN2F_HI, LN2F_LO = 0.693359375, -2.12194440e-4
HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)
EXPF = (
    0.0013814539415761828,
    0.00836874544620514,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)
EXP64 = tuple(1.0 / factorial(k) for k in range(13, -1, -1))
ATANH = tuple(2.0 / (2 * k + 1) for k in range(11, 0, -1))  # of s**2 after the leading 2
SIN = tuple((-1.0) ** k / factorial(2 * k + 1) for k in range(8, 0, -1))
COS = tuple((-1.0) ** k / factorial(2 * k) for k in range(9, 1, -1))


def _horner(x, coefficients):
    total = x * 0.0 + coefficients[0] if len(coefficients) == 1 else x.fma(coefficients[0], coefficients[1])
    for c in coefficients[2:]:
        total = total.fma(x, c)
    return total


def emit_exp32(x):
    x = (x._new(x.lift(-104.0))).where(x < -104.0, x)
    x = (x._new(x.lift(89.0))).where(x > 89.0, x)
    shifted = x.fma(LOG2E, 12582912.0)  # 1.5 * 2**23: the low bits of the sum are the rounded integer
    n = shifted.bits() - 0x4B400000
    turns = shifted - 12582912.0
    r = turns.fma(-LN2F_LO, turns.fma(-LN2F_HI, x))
    return _scaled(_horner(r, EXPF), n, 127, 23, F32)


def emit_exp64(x):
    x = (x._new(x.lift(-750.0))).where(x < -750.0, x)
    x = (x._new(x.lift(710.0))).where(x > 710.0, x)
    shifted = x.fma(LOG2E, 6755399441055744.0)  # 1.5 * 2**52
    n = shifted.bits() - 0x4338000000000000
    turns = shifted - 6755399441055744.0
    r = turns.fma(-LN2_LO, turns.fma(-LN2_HI, x))
    return _scaled(_horner(r, EXP64), n, 1023, 52, F64)


def _scaled(value, n, bias, mantissa, scalar):
    """value * 2**n in two steps, each a normal power of two, so that results may be subnormal or overflow."""
    half = n >> 1
    first = ((half + bias) << mantissa).as_float(scalar)
    second = ((n - half + bias) << mantissa).as_float(scalar)
    return value * first * second


def emit_log64(x):
    tiny = x < 2.2250738585072014e-308
    scaled = (x * 18014398509481984.0).where(tiny, x)  # subnormals times 2**54
    ix = scaled.bits()
    k = (ix - 0x3FE6A09E667F3BCD) >> 52  # exponent that leaves a mantissa in [sqrt(1/2), sqrt(2))
    f = (ix - (k << 52)).as_float(F64) - 1.0
    # k to float exactly, without a conversion instruction: |k| < 2**12
    turns = (k + 0x4338000000000000).as_float(F64) - 6755399441055744.0
    turns = (turns - 54.0).where(tiny, turns)
    s = f / (f + 2.0)
    z = s * s
    tail = z * _horner(z, ATANH)
    small = f - (s * (f - tail) - turns * LN2_LO)
    y = turns.fma(LN2_HI, small)
    inf = x._new(x.lift(float("inf")))
    y = inf.where(x.equals(float("inf")), y)
    y = (x._new(x.lift(float("-inf")))).where(x.equals(0.0), y)
    return y.where(x > -5e-324, x._new(x.lift(float("nan"))))  # negative or NaN: NaN


def _reduced(x):
    shifted = x.fma(0.6366197723675814, 6755399441055744.0)
    turns = shifted - 6755399441055744.0
    r = turns.fma(-HALF_PI[0], x)
    r = turns.fma(-HALF_PI[1], r)
    r = turns.fma(-HALF_PI[2], r)
    z = r * r
    sine = (r * z).fma(_horner(z, SIN), r)
    cosine = z.fma(z * _horner(z, COS) - 0.5, 1.0)
    return shifted.bits() & 3, sine, cosine


def _quadrant(n, even, odd):
    value = odd.where((n & 1).equals(1), even)
    return (value * -1.0).where((n & 2).equals(2), value)


def emit_sin64(x):
    n, sine, cosine = _reduced(x)
    return _quadrant(n, sine, cosine)


def emit_cos64(x):
    n, sine, cosine = _reduced(x)
    return _quadrant(n + 1, sine, cosine)


def emit_sigmoid32(x):
    return 1.0 / (emit_exp32(x * -1.0) + 1.0)


def emit_silu32(x):
    return x / (emit_exp32(x * -1.0) + 1.0)


expf = lanes_op(emit_exp32, f32, f32)
expf_x16 = lanes_op(emit_exp32, f32x16, f32x16)
sigmoid = lanes_op(emit_sigmoid32, f32, f32)
sigmoid_x16 = lanes_op(emit_sigmoid32, f32x16, f32x16)
silu_x16 = lanes_op(emit_silu32, f32x16, f32x16)
exp64 = lanes_op(emit_exp64, f64, f64)
log64 = lanes_op(emit_log64, f64, f64)
sin64 = lanes_op(emit_sin64, f64, f64)
cos64 = lanes_op(emit_cos64, f64, f64)
