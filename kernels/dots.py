"""Integer dot products of 4 neighbouring k in 16 rows, for each instruction set; the parts of microkernel.py's loops.

    prep(w)          64 weight bytes (unsigned; 16 rows x 4 k) -> what stays in registers
    start(corr)      fresh accumulator; corr: i32, the correction term
    step(a, w, x)    accumulate; x: i32 holding 4 int8 of one activation vector
    finish(a, corr)  -> <16 x i32>
All are exact, so they give the same integers. A class also says how the loops are cut for its registers:
    tile    activation vectors per loop over K
    chunk   weight vectors (of the 8 in a group) unpacked at a time
    pair    activation vectors interleaved, to hide the latency of the accumulator chain
    codes(w) 64 MXFP4 codes as prep takes them (of the classes for that kind)
    few     registers are too few for the float accumulators of more than 2 vectors: these stay in memory
"""

from llvmlite import ir

from coli.kernels.matmul import TWICE
from coli.kernels.simd import I8, I16, I32, VB, VI, V, call, const, shuffle, splat, undef

OFFSET = 12  # makes twice the value of an MXFP4 code unsigned, where the products need that


def table(values, copies):
    """The constant <16 * copies x i8> with `values` in every 16 bytes."""
    return ir.Constant(V(I8, 16 * copies), list(values) * copies)


class Vnni512:
    """vpdpbusd on 512 bits with the activations broadcast straight from memory."""

    tile, chunk, pair, few = 16, 8, 2, False

    def __init__(self, b):
        self.b = b

    def prep(self, w):
        return w

    def start(self, corr):
        return splat(self.b, corr, VI)

    def step(self, a, w, x):
        # operands as i32 lanes: the signature of older LLVM, which newer ones accept
        w = self.b.bitcast(w, VI)
        return call(self.b, "llvm.x86.avx512.vpdpbusd.512", VI, a, w, splat(self.b, x, VI))

    def finish(self, a, corr):
        return a


class Vnni256:
    """vpdpbusd on 256 bits (AVX-VNNI); also the base of the AVX2 paths: 2 halves of 8 rows."""

    tile, chunk, pair, few = 6, 1, 6, True
    W8, W16, W32 = V(I8, 32), V(I16, 16), V(I32, 8)

    def __init__(self, b):
        self.b = b
        self.one = const(self.W16, 1)

    def prep(self, w):
        return [shuffle(self.b, w, undef(VB), range(h, h + 32)) for h in (0, 32)]

    def start(self, corr):
        return [splat(self.b, corr, self.W32)] * 2

    def step(self, a, w, x):
        x = self.b.bitcast(splat(self.b, x, self.W32), self.W8)
        return [self.half(p, q, x) for p, q in zip(a, w, strict=True)]

    def half(self, a, w, x):
        w, x = (self.b.bitcast(v, self.W32) for v in (w, x))
        return call(self.b, "llvm.x86.avx512.vpdpbusd.256", self.W32, a, w, x)

    def finish(self, a, corr):
        return shuffle(self.b, a[0], a[1], range(16))

    def maddubs(self, u, s):
        return call(self.b, "llvm.x86.avx2.pmadd.ub.sw", self.W16, u, s)

    def pairs(self, m):
        return call(self.b, "llvm.x86.avx2.pmadd.wd", self.W32, m, self.one)


class Vnni512Mxfp4(Vnni512):
    def codes(self, w):
        offset = table([value + OFFSET for value in TWICE], 4)
        return call(self.b, "llvm.x86.avx512.pshuf.b.512", VB, offset, w)


class Vnni256Mxfp4(Vnni256):
    def prep(self, w):
        offset = table([value + OFFSET for value in TWICE], 2)
        return [call(self.b, "llvm.x86.avx2.pshuf.b", self.W8, offset, half) for half in super().prep(w)]

    def codes(self, w):
        return w


class Avx2Q4(Vnni256):
    """vpmaddubsw, summed in int16 over the group: at most 8 * 2 * 15 * 128 = 30720."""

    def start(self, corr):
        return [const(self.W16, 0)] * 2

    def half(self, a, w, x):
        return self.b.add(a, self.maddubs(w, x))

    def finish(self, a, corr):
        dot = super().finish([self.pairs(p) for p in a], corr)
        return self.b.add(dot, splat(self.b, corr, VI))


class Avx2Q8(Vnni256):
    """|w| * (x with the sign of w): 2 * 128 * 127 fits int16. (vpmaddubsw with the unsigned w would saturate.) Needs
    x >= -127, as vpsignb cannot negate -128. w is signed here, so there is nothing to correct."""

    chunk = 1

    def prep(self, w):
        no_poison = const(ir.IntType(1), 0)
        return [
            (call(self.b, "llvm.abs.v32i8", self.W8, h, no_poison), h)
            for h in super().prep(self.b.xor(w, const(VB, -128)))
        ]

    def start(self, corr):
        return [const(self.W32, 0)] * 2

    def half(self, a, w, x):
        mag, signed = w
        x = call(self.b, "llvm.x86.avx2.psign.b", self.W8, x, signed)
        return self.b.add(a, self.pairs(self.maddubs(mag, x)))


class Avx2Mxfp4(Vnni256Mxfp4, Avx2Q4):
    """vpmaddubsw with the values made unsigned. Their sum over a group does not fit int16, over half of it it does: at
    most 4 * 2 * 24 * 128 = 24576. So the steps add to two sums in turn. (Of more than 3 vectors: assembly.py.)"""

    def start(self, corr):
        return [super().start(corr), super().start(corr)]

    def step(self, a, w, x):
        this, other = a
        return [other, super().step(this, w, x)]

    def finish(self, a, corr):
        sums = [self.b.add(self.pairs(p), self.pairs(q)) for p, q in zip(*a, strict=True)]
        return self.b.add(Vnni256.finish(self, sums, corr), splat(self.b, corr, VI))


class GenericQ4:
    """Plain IR without shuffles: a 16-bit lane holds two neighbouring bytes, take the even and the odd one apart by
    shifts. The sum fits int16 as in Avx2Q4."""

    tile, chunk, pair, few = 4, 2, 1, False
    H = V(I16, 32)

    def __init__(self, b):
        self.b = b

    def even_odd(self, w, signed):
        b, eight = self.b, const(self.H, 8)
        w = b.bitcast(w, self.H)
        if signed:
            return b.ashr(b.shl(w, eight), eight), b.ashr(w, eight)
        return b.and_(w, const(self.H, 255)), b.lshr(w, eight)

    def products(self, w, x):
        xe, xo = self.even_odd(splat(self.b, x, VI), True)
        return self.b.add(self.b.mul(w[0], xe), self.b.mul(w[1], xo))

    def pairs(self, m):
        b, n = self.b, const(VI, 16)
        m = b.bitcast(m, VI)
        return b.add(b.ashr(b.shl(m, n), n), b.ashr(m, n))

    def prep(self, w):
        return self.even_odd(w, False)

    def start(self, corr):
        return const(self.H, 0)

    def step(self, a, w, x):
        return self.b.add(a, self.products(w, x))

    def finish(self, a, corr):
        return self.b.add(self.pairs(a), splat(self.b, corr, VI))


class GenericQ8(GenericQ4):
    """Signed w: 2 * 128 * 127 fits int16, the sum over more does not. x >= -127."""

    def prep(self, w):
        return self.even_odd(self.b.xor(w, const(VB, -128)), True)

    def start(self, corr):
        return const(VI, 0)

    def step(self, a, w, x):
        return self.b.add(a, self.pairs(self.products(w, x)))

    def finish(self, a, corr):
        return a


class GenericMxfp4(GenericQ4):
    """The codes by arithmetic on 16-bit lanes; the sum fits int16 as in Avx2Mxfp4."""

    def codes(self, w):
        return w

    def prep(self, w):
        return [self.value(half) for half in self.even_odd(w, False)]

    def value(self, code):
        """code 0..15 -> TWICE: the magnitude is m, one more from 5 on, another from 6 on, three more for 7."""
        b, h = self.b, self.H
        m = b.and_(code, const(h, 7))
        total = m
        for least, more in ((5, 1), (6, 1), (7, 3)):
            total = b.add(total, b.select(b.icmp_unsigned("<", m, const(h, least)), const(h, 0), const(h, more)))
        return b.select(b.icmp_unsigned("<", code, const(h, 8)), total, b.sub(const(h, 0), total))

    def finish(self, a, corr):
        return self.pairs(a)


PATHS = {  # by kind: q4, q8, mxfp4
    "avx512": (Vnni512, Vnni512, Vnni512Mxfp4),
    "avxvnni": (Vnni256, Vnni256, Vnni256Mxfp4),
    "avx2": (Avx2Q4, Avx2Q8, Avx2Mxfp4),
    "generic": (GenericQ4, GenericQ8, GenericMxfp4),
}
