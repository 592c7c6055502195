"""A small vector library for numba: SSA vector values and the LLVM IR behind them.

Three layers: IR helpers that take an llvmlite builder; `Lanes`, which lets IR be written like arithmetic; numba types
`f32x16`, `i32x16` with one intrinsic per operation for ordinary jitted code. Memory is addressed by int64 addresses, so
that arenas, mapped files and slabs look alike. Every operation is exact or correctly rounded per lane (IEEE, never
fastmath): a result does not depend on how LLVM splits 16 lanes into the registers of the machine.
A vector value lives in registers only: never an array element, never a variable that crosses a `prange` body.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
V = ir.VectorType
VF, VI, VB = V(F32, 16), V(I32, 16), V(I8, 64)


# ------------------------------------------------------------------ IR helpers
def const(ty, x):
    """The constant x in every lane of ty (or the plain constant)."""
    return ir.Constant(ty, [x] * ty.count if isinstance(ty, ir.VectorType) else x)


def undef(ty):
    return ir.Constant(ty, ir.Undefined)


def shuffle(b, x, y, idx):
    return b.shuffle_vector(x, y, ir.Constant(V(I32, len(idx)), list(idx)))


def splat(b, x, vt):
    u = b.insert_element(undef(vt), x, const(I32, 0))
    return b.shuffle_vector(u, undef(vt), const(V(I32, vt.count), 0))


def pointer(b, address):
    return b.inttoptr(address, I8.as_pointer())


def plus(b, p, off):
    """The i8* p moved by off bytes (int or i64 value)."""
    if isinstance(off, int):
        if off == 0:
            return p
        off = const(I64, off)
    return b.gep(p, [off])


def load(b, p, off, ty, align=1):
    """ty at byte offset off of the i8* p. Always states an alignment: llvmlite would otherwise assume the natural one
    (64 bytes for a vector) and emit an aligned move, which faults."""
    x = b.load(b.bitcast(plus(b, p, off), ty.as_pointer()))
    x.align = align
    return x


def store(b, x, p, off, align=1):
    b.store(x, b.bitcast(plus(b, p, off), x.type.as_pointer())).align = align


def call(b, name, ret, *args):
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return b.call(fn, args)


def overload_suffix(ty):
    """The suffix of an overloaded LLVM intrinsic: v16f32, f64, ..."""
    scalar = ty.element if isinstance(ty, ir.VectorType) else ty
    name = {F16: "f16", F32: "f32", F64: "f64"}.get(scalar) or f"i{scalar.width}"
    return f"v{ty.count}{name}" if isinstance(ty, ir.VectorType) else name


def like(ty, scalar):
    """ty with its element type replaced."""
    return V(scalar, ty.count) if isinstance(ty, ir.VectorType) else scalar


def ir_fma(b, x, y, z):
    return call(b, "llvm.fma." + overload_suffix(x.type), x.type, x, y, z)


def feature_text(context):
    """The CPU features numba compiles for, which are those of our target (compiler.prepare)."""
    return context.codegen().magic_tuple()[2]


def features(context):
    return {f[1:] for f in feature_text(context).split(",") if f.startswith("+")}


def has_half(context):
    return bool(features(context) & {"f16c", "avx512f"})


class Lanes:
    """An IR value with arithmetic: numbers become constants of the same type. `//`, `%` do not exist; `<`, `>` are the
    ordered comparisons (false with NaN) or signed ones."""

    __slots__ = ("b", "v")

    def __init__(self, b, v):
        self.b, self.v = b, v

    @property
    def type(self):
        return self.v.type

    @property
    def is_float(self):
        ty = self.type.element if isinstance(self.type, ir.VectorType) else self.type
        return not isinstance(ty, ir.IntType)

    def lift(self, x):
        return x.v if isinstance(x, Lanes) else const(self.type, x)

    def _new(self, v):
        return Lanes(self.b, v)

    def __add__(self, o):
        return self._new((self.b.fadd if self.is_float else self.b.add)(self.v, self.lift(o)))

    def __sub__(self, o):
        return self._new((self.b.fsub if self.is_float else self.b.sub)(self.v, self.lift(o)))

    def __mul__(self, o):
        return self._new((self.b.fmul if self.is_float else self.b.mul)(self.v, self.lift(o)))

    def __truediv__(self, o):
        return self._new(self.b.fdiv(self.v, self.lift(o)))

    def __rtruediv__(self, o):
        return self._new(self.b.fdiv(self.lift(o), self.v))

    def __rsub__(self, o):
        return self._new((self.b.fsub if self.is_float else self.b.sub)(self.lift(o), self.v))

    def __and__(self, o):
        return self._new(self.b.and_(self.v, self.lift(o)))

    def __or__(self, o):
        return self._new(self.b.or_(self.v, self.lift(o)))

    def __xor__(self, o):
        return self._new(self.b.xor(self.v, self.lift(o)))

    def __lshift__(self, o):
        return self._new(self.b.shl(self.v, self.lift(o)))

    def __rshift__(self, o):
        """Arithmetic shift right."""
        return self._new(self.b.ashr(self.v, self.lift(o)))

    def logical_right(self, o):
        return self._new(self.b.lshr(self.v, self.lift(o)))

    def _compare(self, op, o):
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return compare(op, self.v, self.lift(o))

    def __gt__(self, o):
        return self._compare(">", o)

    def __lt__(self, o):
        return self._compare("<", o)

    def equals(self, o):
        return self._compare("==", o)

    def where(self, condition, otherwise):
        """self where condition (i1 lanes) holds, else otherwise."""
        return self._new(self.b.select(condition, self.v, self.lift(otherwise)))

    def fma(self, y, z):
        return self._new(ir_fma(self.b, self.v, self.lift(y), self.lift(z)))

    def unary(self, name):
        """One of the exact LLVM intrinsics: fabs, sqrt, rint."""
        return self._new(call(self.b, f"llvm.{name}.{overload_suffix(self.type)}", self.type, self.v))

    def bits(self):
        width = {F16: I16, F32: I32, F64: I64}[self.type.element if isinstance(self.type, ir.VectorType) else self.type]
        return self._new(self.b.bitcast(self.v, like(self.type, width)))

    def as_float(self, scalar):
        return self._new(self.b.bitcast(self.v, like(self.type, scalar)))


def half_to_float(b, h, native):
    """i16 lanes holding fp16 bits -> f32 lanes, exact for every value. Without a conversion instruction LLVM calls a
    library function that the JIT may not find, so then by hand: move the bits into place and scale by 2**112."""
    if native:
        return b.fpext(b.bitcast(h, like(h.type, F16)), like(h.type, F32))
    x = Lanes(b, b.zext(h, like(h.type, I32)))
    mag = (x & 0x7FFF) << 13
    scaled = (mag.as_float(F32) * 2.0**112).bits()
    special = mag | 0x7F800000  # inf and NaN keep their mantissa
    mag = special.where(mag > 0x0F7FFFFF, scaled)
    return (mag | ((x & 0x8000) << 16)).as_float(F32).v


def float_to_half(b, f, native):
    """f32 lanes -> i16 lanes holding fp16 bits, round to nearest even, overflow to inf, NaN stays NaN."""
    if native:
        return b.bitcast(b.fptrunc(f, like(f.type, F16)), like(f.type, I16))
    x = Lanes(b, f).bits()
    mag = x & 0x7FFFFFFF
    tiny = (mag.as_float(F32) + 0.5).bits() - 0x3F000000  # the addition rounds to a multiple of 2**-24
    normal = (mag + (((mag >> 13) & 1) + (0xFFF - (112 << 23)))) >> 13
    half = tiny.where(mag < 0x38800000, normal)
    infinite = half._new(const(half.type, 0x7C00))
    half = infinite.where(mag > 0x477FFFFF, half)
    nan = (mag >> 13) & 0x3FF | 0x7E00
    half = nan.where(mag > 0x7F800000, half)
    half = half | ((x >> 16) & 0x8000)
    return b.trunc(half.v, like(f.type, I16))


# ------------------------------------------------------------------ numba vector types
class Vec(types.Type):
    def __init__(self, name, llty):
        self.llty = llty
        super().__init__(name=name)


@register_model(Vec)
class VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llty)


f32x16, i32x16 = Vec("f32x16", VF), Vec("i32x16", VI)
i64, i32, f32, f64, u16, boolean = types.int64, types.int32, types.float32, types.float64, types.uint16, types.boolean


def op(emit, ret, *argtys):
    """An intrinsic over fixed types; emit(context, builder, *values) -> value or None."""
    names = ", ".join(f"x{i}" for i in range(len(argtys)))
    sig = ret(*argtys)

    def codegen(context, builder, _sig, args):
        value = emit(context, builder, *args)
        return context.get_dummy_value() if value is None else value

    scope = {"sig": sig, "codegen": codegen}
    exec(f"def op(typingctx, {names}):\n    return sig, codegen", scope)
    return intrinsic(scope["op"])


def lanes_op(emit, ret, *argtys):
    """The same for an emit over `Lanes`."""
    return op(lambda c, b, *xs: emit(*(Lanes(b, x) for x in xs)).v, ret, *argtys)


def _loader(ret, llty):
    return op(lambda c, b, a: load(b, pointer(b, a), 0, llty), ret, i64)


def _storer(argty):
    return op(lambda c, b, a, x: store(b, x, pointer(b, a), 0), types.void, i64, argty)


load_i64, load_f64, load_f32, load_i32 = _loader(i64, I64), _loader(f64, F64), _loader(f32, F32), _loader(i32, I32)
load_u16, load_u8 = _loader(u16, I16), _loader(types.uint8, I8)
store_i64, store_f64, store_f32, store_i32 = _storer(i64), _storer(f64), _storer(f32), _storer(i32)
store_u16, store_u8 = _storer(u16), _storer(types.uint8)
load_f32x16, store_f32x16 = _loader(f32x16, VF), _storer(f32x16)
load_i32x16, store_i32x16 = _loader(i32x16, VI), _storer(i32x16)


def _lane_mask(b, n):
    """Lane i: i < n."""
    lane = ir.Constant(V(I64, 16), list(range(16)))
    return b.icmp_signed("<", lane, splat(b, n, V(I64, 16)))


def _load_part(c, b, a, n):
    p = b.bitcast(pointer(b, a), VF.as_pointer())
    fn = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(VF, [p.type, I32, V(I1, 16), VF]), "llvm.masked.load.v16f32.p0"
    )
    # masked memory operations are slow, also where the mask is full
    with b.if_else(b.icmp_signed(">=", n, const(I64, 16))) as (whole, part):
        with whole:
            x, from_whole = load(b, p, 0, VF), b.block
        with part:
            y, from_part = b.call(fn, [p, const(I32, 4), _lane_mask(b, n), const(VF, 0.0)]), b.block
    result = b.phi(VF)
    result.add_incoming(x, from_whole)
    result.add_incoming(y, from_part)
    return result


def _store_part(c, b, a, x, n):
    p = b.bitcast(pointer(b, a), VF.as_pointer())
    fn = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [VF, p.type, I32, V(I1, 16)]), "llvm.masked.store.v16f32.p0"
    )
    with b.if_else(b.icmp_signed(">=", n, const(I64, 16))) as (whole, part):
        with whole:
            store(b, x, p, 0)
        with part:
            b.call(fn, [x, p, const(I32, 4), _lane_mask(b, n)])


# The first n lanes; the others read as 0 and are not touched in memory. n >= 16 is a whole vector.
load_part = op(_load_part, f32x16, i64, i64)
store_part = op(_store_part, types.void, i64, f32x16, i64)
keep_lanes = op(
    lambda c, b, x, first, stop, fill: b.select(
        b.and_(_lane_mask(b, stop), b.not_(_lane_mask(b, first))), x, splat(b, fill, VF)
    ),
    f32x16,
    f32x16,
    i64,
    i64,
    f32,
)  # fmt: skip  (lanes first <= i < stop of x, the rest fill)

load_h16 = op(lambda c, b, a: half_to_float(b, load(b, pointer(b, a), 0, V(I16, 16)), has_half(c)), f32x16, i64)
store_h16 = op(lambda c, b, a, x: store(b, float_to_half(b, x, has_half(c)), pointer(b, a), 0), types.void, i64, f32x16)
half_from_f32 = op(lambda c, b, x: float_to_half(b, x, has_half(c)), u16, f32)
f32_from_half = op(lambda c, b, x: half_to_float(b, x, has_half(c)), f32, u16)

splat_f32 = op(lambda c, b, x: splat(b, x, VF), f32x16, f32)
splat_i32 = op(lambda c, b, x: splat(b, x, VI), i32x16, i32)
fadd = lanes_op(lambda x, y: x + y, f32x16, f32x16, f32x16)
fsub = lanes_op(lambda x, y: x - y, f32x16, f32x16, f32x16)
fmul = lanes_op(lambda x, y: x * y, f32x16, f32x16, f32x16)
fdiv = lanes_op(lambda x, y: x / y, f32x16, f32x16, f32x16)
fma = lanes_op(lambda x, y, z: x.fma(y, z), f32x16, f32x16, f32x16, f32x16)
fma_f32 = lanes_op(lambda x, y, z: x.fma(y, z), f32, f32, f32, f32)
fma_f64 = lanes_op(lambda x, y, z: x.fma(y, z), f64, f64, f64, f64)
sqrt_f32 = lanes_op(lambda x: x.unary("sqrt"), f32, f32)
fabs = lanes_op(lambda x: x.unary("fabs"), f32x16, f32x16)
fsqrt = lanes_op(lambda x: x.unary("sqrt"), f32x16, f32x16)
rint = lanes_op(lambda x: x.unary("rint"), f32x16, f32x16)  # ties to even
fmax = lanes_op(lambda x, y: x.where(x > y, y), f32x16, f32x16, f32x16)  # y where unordered: a NaN in x is skipped
fmin = lanes_op(lambda x, y: x.where(x < y, y), f32x16, f32x16, f32x16)
where_less = lanes_op(lambda x, y, p, q: p.where(x < y, q), f32x16, f32x16, f32x16, f32x16, f32x16)
iadd = lanes_op(lambda x, y: x + y, i32x16, i32x16, i32x16)
isub = lanes_op(lambda x, y: x - y, i32x16, i32x16, i32x16)
imax = lanes_op(lambda x, y: x.where(x > y, y), i32x16, i32x16, i32x16)
imin = lanes_op(lambda x, y: x.where(x < y, y), i32x16, i32x16, i32x16)
imul = lanes_op(lambda x, y: x * y, i32x16, i32x16, i32x16)
to_f32 = op(lambda c, b, x: b.sitofp(x, VF), f32x16, i32x16)
abs_bits = lanes_op(lambda x: x.bits() & 0x7FFFFFFF, i32x16, f32x16)  # orders like |x|, NaN above inf
float_bits = lanes_op(lambda x: x.bits(), i32x16, f32x16)
pair_i16 = lanes_op(lambda low, high: low & 0xFFFF | high << 16, i32x16, i32x16, i32x16)  # of the low halves of lanes
bits_f32 = lanes_op(lambda x: x.bits(), i32, f32)
f32_bits = lanes_op(lambda x: x.as_float(F32), f32, i32)
bits_f64 = lanes_op(lambda x: x.bits(), i64, f64)

# Round to nearest even and convert, for |x| < 2**22 only. Adding 1.5 * 2**23 rounds; its bits hold the integer. A NaN
# gives some integer (a plain conversion of NaN would be undefined).
rint_i32 = lanes_op(lambda x: (x + 12582912.0).bits() - 0x4B400000, i32x16, f32x16)


def reduce_lanes(x, combine):
    """Fixed tree: lane i with lane i+8, then +4, +2, +1. (llvm.vector.reduce.fadd is either a slow in-order sum or,
    with fastmath, one of unspecified order.)"""
    for h in (8, 4, 2, 1):
        y = shuffle(x.b, x.v, undef(x.type), [(i + h) % 16 for i in range(16)])
        x = combine(x, Lanes(x.b, y))
    return Lanes(x.b, x.b.extract_element(x.v, const(I32, 0)))


hsum_f32 = lanes_op(lambda x: reduce_lanes(x, lambda p, q: p + q), f32, f32x16)
hmax_f32 = lanes_op(lambda x: reduce_lanes(x, lambda p, q: p.where(p > q, q)), f32, f32x16)
hsum_i32 = lanes_op(lambda x: reduce_lanes(x, lambda p, q: p + q), i32, i32x16)
hmax_i32 = lanes_op(lambda x: reduce_lanes(x, lambda p, q: p.where(p > q, q)), i32, i32x16)

store_i8x16 = op(
    lambda c, b, a, x: store(b, b.trunc(x, V(I8, 16)), pointer(b, a), 0), types.void, i64, i32x16
)  # the low byte of every lane
store_u16x16 = op(lambda c, b, a, x: store(b, b.trunc(x, V(I16, 16)), pointer(b, a), 0), types.void, i64, i32x16)
interleave_i16 = op(
    lambda c, b, a, p, q: store(
        b,
        shuffle(
            b, *(load(b, pointer(b, at), 0, V(I16, 16)) for at in (p, q)), [i // 2 + i % 2 * 16 for i in range(32)]
        ),
        pointer(b, a),
        0,
    ),
    types.void,
    i64,
    i64,
    i64,
)  # the 16 int16 at two places, side by side: (16, 2)


def _turn(c, b, target, step, source):
    """(8, 16) i32 at source -> (16, 8), rows `step` bytes apart: within quarters, then quarters of 128 bits."""
    source, target = pointer(b, source), pointer(b, target)
    for half in (0, 1):
        rows = [load(b, source, 64 * i + 32 * half, V(I32, 8)) for i in range(8)]
        for width in (1, 2, 4):
            low = [k // (2 * width) * 2 * width + k % width + k // width % 2 * 8 for k in range(8)]
            rows = [
                shuffle(b, rows[i & ~width], rows[i | width], [k + (width if i & width else 0) for k in low])
                for i in range(8)
            ]
        for i, row in enumerate(rows):
            store(b, row, plus(b, target, b.mul(step, const(I64, 8 * half + i))), 0)


turn_i32 = op(_turn, types.void, i64, i64, i64)
load_i8x16 = op(lambda c, b, a: b.sext(load(b, pointer(b, a), 0, V(I8, 16)), VI), i32x16, i64)


def _prefetch(c, b, a):
    """The line goes to the second-level cache."""
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, a), const(I32, 0), const(I32, 2), const(I32, 1))


prefetch = op(_prefetch, types.void, i64)


def _cycles(c, b):
    if not b.module.triple.startswith("x86_64"):
        return const(I64, 0)
    return call(b, "llvm.readcyclecounter", I64)


cycle_counter = op(_cycles, i64)  # of the processor; 0 where reading it is not allowed to programs
# What the C function int (void) at an address returns.
call_i32 = op(lambda c, b, a: b.sext(b.call(b.inttoptr(a, ir.FunctionType(I32, []).as_pointer()), []), I64), i64, i64)


def stack(size):
    """An intrinsic () -> address of `size` bytes of the caller's stack frame, 64-byte aligned."""

    def codegen(context, b, _sig, _args):
        memory = cgutils.alloca_once(b, I8, const(I64, size))
        memory.align = 64
        return b.ptrtoint(memory, I64)

    @intrinsic
    def stack_memory(typingctx):
        return i64(), codegen

    return stack_memory
