"""The int16 micro-kernel: exact integer dot products of rows with 16 lanes, scaled to float32.

    dot[i][lane] = sum over l of a[i][2l] * B[l][lane][0] + a[i][2l+1] * B[l][lane][1]           exact, int32
    SCORES       C[i][lane]  = float(dot) * (a_scale[i] * b_scale[lane])
    SUMS         C[i][lane]  = fma(float(dot), a_scale[i], C[i][lane])
    MORE         C[i][lane]  = fma(float(dot), a_scale[i] * b_scale[lane], C[i][lane])
The caller's numbers are such that no partial sum leaves int32 (fixed.py). An integer sum is the same in every order, so
neither the rows that run side by side nor the instruction set can change a bit. B lies in panels: 64 bytes after 64
bytes, each the 16 lanes of one pair. AVX2 is written as assembly: 6 rows fill the 16 registers, and LLVM spills.
"""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coli.kernels.loops import MORE, SCORES, SUMS
from coli.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VF,
    VI,
    V,
    call,
    const,
    features,
    ir_fma,
    load,
    plus,
    pointer,
    splat,
    store,
)

UNROLL = 4  # pairs per turn of the loop; `pairs` is a multiple of it
AHEAD = 4096  # bytes by which B is prefetched: panels come from the third-level cache
_LOW, _HIGH, _X, _TMP = "%ymm12", "%ymm13", "%ymm14", "%ymm15"  # lanes 0..7 and 8..15; a broadcast pair; a temporary
# Operands of the assembly. rax and rdx go along the rows 0 .. 2 and 3 .. 5, rcx along B, rsi counts.
_A, _A_ROW, _B, _PAIRS, _C, _C_ROW, _A_SCALE, _B_SCALE = (f"${i}" for i in range(8))


# ------------------------------------------------------------------ AVX2
def _sum(i, half):
    return f"%ymm{2 * i + half}"


def _row(i, offset):
    at = "%rax" if i < 3 else "%rdx"
    return (f"{offset}({at})", f"{offset}({at},{_A_ROW})", f"{offset}({at},{_A_ROW},2)")[i % 3]


def tile_text(m, mode):
    """Assembly (AT&T) of m rows x 16 lanes over all pairs."""
    lines = [
        f"movq {_A}, %rax",
        f"leaq ({_A},{_A_ROW},2), %rdx",
        f"addq {_A_ROW}, %rdx",
        f"movq {_B}, %rcx",
        f"movq {_PAIRS}, %rsi",
    ]
    lines += [f"vpxor {_sum(i, half)}, {_sum(i, half)}, {_sum(i, half)}" for i in range(m) for half in (0, 1)]
    lines += [".p2align 5", "1:"]
    for u in range(UNROLL):
        lines.append(f"prefetcht0 {AHEAD + 64 * u}(%rcx)")
        lines += [f"vmovdqu {64 * u}(%rcx), {_LOW}", f"vmovdqu {64 * u + 32}(%rcx), {_HIGH}"]
        for i in range(m):
            lines += [
                f"vpbroadcastd {_row(i, 4 * u)}, {_X}",
                f"vpmaddwd {_X}, {_LOW}, {_TMP}",
                f"vpmaddwd {_X}, {_HIGH}, {_X}",
                f"vpaddd {_TMP}, {_sum(i, 0)}, {_sum(i, 0)}",
                f"vpaddd {_X}, {_sum(i, 1)}, {_sum(i, 1)}",
            ]
    lines += [f"addq $${64 * UNROLL}, %rcx", f"addq $${4 * UNROLL}, %rax", f"addq $${4 * UNROLL}, %rdx"]
    lines += [f"subq $${UNROLL}, %rsi", "jnz 1b", f"movq {_C}, %rax"]
    if mode != SUMS:
        lines += [f"vmovups ({_B_SCALE}), {_LOW}", f"vmovups 32({_B_SCALE}), {_HIGH}"]
    for i in range(m):
        low, high = _sum(i, 0), _sum(i, 1)
        lines += [f"vbroadcastss {4 * i}({_A_SCALE}), {_X}", f"vcvtdq2ps {low}, {low}", f"vcvtdq2ps {high}, {high}"]
        if mode == SCORES:
            lines += [
                f"vmulps {_X}, {_LOW}, {_TMP}",
                f"vmulps {_X}, {_HIGH}, {_X}",
                f"vmulps {_TMP}, {low}, {low}",
                f"vmulps {_X}, {high}, {high}",
            ]
        elif mode == MORE:
            lines += [
                f"vmulps {_X}, {_LOW}, {_TMP}",
                f"vmulps {_X}, {_HIGH}, {_X}",
                f"vfmadd213ps (%rax), {_TMP}, {low}",
                f"vfmadd213ps 32(%rax), {_X}, {high}",
            ]
        else:
            lines += [f"vfmadd213ps (%rax), {_X}, {low}", f"vfmadd213ps 32(%rax), {_X}, {high}"]
        lines += [f"vmovups {low}, (%rax)", f"vmovups {high}, 32(%rax)", f"addq {_C_ROW}, %rax"]
    return "\n".join(lines)


class Assembled:
    """AVX2 with fma."""

    most = 6

    @staticmethod
    def emit(b, m, mode, a, a_row, bp, pairs, c, c_row, a_scale, b_scale):
        binding.initialize_native_asmparser()
        pointers, number = [I8.as_pointer()], [I64]
        kinds = pointers + number + pointers + number + pointers + number + 2 * pointers
        clobbered = ",".join(f"~{{xmm{i}}}" for i in range(16)) + ",~{rax},~{rdx},~{rcx},~{rsi},~{flags},~{memory}"
        block = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), kinds), tile_text(m, mode), "r," * 8 + clobbered, side_effect=True
        )
        b.call(block, [a, a_row, bp, pairs, c, c_row, a_scale, b_scale])


# ------------------------------------------------------------------ others
class Emitted:
    """Plain IR: a lane of 32 bits holds a pair."""

    most = 2

    @staticmethod
    def products(b, x, y):
        half = const(VI, 16)
        even = b.mul(b.ashr(b.shl(x, half), half), b.ashr(b.shl(y, half), half))
        return b.add(even, b.mul(b.ashr(x, half), b.ashr(y, half)))

    @classmethod
    def emit(cls, b, m, mode, a, a_row, bp, pairs, c, c_row, a_scale, b_scale):
        rows = [plus(b, a, b.mul(a_row, const(I64, i))) for i in range(m)]
        outs = [plus(b, c, b.mul(c_row, const(I64, i))) for i in range(m)]
        before, loop, done = b.block, b.append_basic_block("pairs"), b.append_basic_block("scale")
        b.branch(loop)
        b.position_at_end(loop)
        index = b.phi(I64)
        index.add_incoming(const(I64, 0), before)
        sums = [b.phi(VI) for _ in range(m)]
        lanes = load(b, bp, b.mul(index, const(I64, 64)), VI)
        after = b.add(index, const(I64, 1))
        index.add_incoming(after, loop)
        totals = []
        for row, total in zip(rows, sums, strict=True):
            x = splat(b, load(b, row, b.mul(index, const(I64, 4)), I32), VI)
            totals.append(b.add(total, cls.products(b, x, lanes)))
            total.add_incoming(const(VI, 0), before)
            total.add_incoming(totals[-1], loop)
        b.cbranch(b.icmp_signed("<", after, pairs), loop, done)
        b.position_at_end(done)
        for i, (out, total) in enumerate(zip(outs, totals, strict=True)):
            scale, value = splat(b, load(b, a_scale, 4 * i, F32), VF), b.sitofp(total, VF)
            if mode != SUMS:
                scale = b.fmul(scale, load(b, b_scale, 0, VF))
            if mode == SCORES:
                value = b.fmul(value, scale)
            else:
                value = ir_fma(b, value, scale, load(b, out, 0, VF))
            store(b, value, out, 0)


class Wide(Emitted):
    """AVX-512; LLVM makes one vpdpwssd of it where there is VNNI."""

    most = 12

    @staticmethod
    def products(b, x, y):
        x, y = (b.bitcast(v, V(I16, 32)) for v in (x, y))
        return call(b, "llvm.x86.avx512.pmaddw.d.512", VI, x, y)


def path_of(context):
    found = features(context)
    if "avx512bw" in found:
        return Wide
    return Assembled if {"avx2", "fma"} <= found else Emitted


@intrinsic
def _outer16(typingctx, mode, m, blocks, a, a_row, bp, b_block, pairs, c, c_row, c_block, a_scale, b_scale):
    """C[i][j] (16 f32 at c + i*c_row + j*c_block) from a (int16 rows at a + i*a_row) and B (panels of `pairs` x 16
    lanes x 2 int16 at bp + j*b_block), i < m, j < blocks; strides in bytes, pairs a positive multiple of 4.
    a_scale: f32 (m,); b_scale: f32 (blocks, 16), of SUMS not read."""

    def codegen(context, b, _sig, args):
        mode, m, blocks, a, a_row, bp, b_block, pairs, c, c_row, c_block, a_scale, b_scale = args
        a, bp, c, a_scale, b_scale = (pointer(b, x) for x in (a, bp, c, a_scale, b_scale))
        path = path_of(context)
        # rows go in nearly equal runs; a panel is in the first-level cache for all but the first
        limit = const(I64, path.most)
        runs = b.udiv(b.add(m, const(I64, path.most - 1)), limit)
        least, extra = b.udiv(m, runs), b.urem(m, runs)  # the first `extra` runs hold one row more
        with cgutils.for_range(b, blocks) as block:
            bj, cj = plus(b, bp, b.mul(block.index, b_block)), plus(b, c, b.mul(block.index, c_block))
            scales = plus(b, b_scale, b.mul(block.index, const(I64, 64)))
            with cgutils.for_range(b, runs) as run:
                more = b.icmp_signed("<", run.index, extra)
                rows = b.add(least, b.zext(more, I64))
                i0 = b.add(b.mul(run.index, least), b.select(more, run.index, extra))
                ai, ci = plus(b, a, b.mul(i0, a_row)), plus(b, cj, b.mul(i0, c_row))
                scale = plus(b, a_scale, b.mul(i0, const(I64, 4)))
                end = b.append_basic_block("case.end")
                switch = b.switch(b.add(rows, b.mul(mode, const(I64, 16))), end)
                for kind in (SCORES, SUMS, MORE):
                    for i in range(1, path.most + 1):
                        case = b.append_basic_block(f"case.{kind}.{i}")
                        switch.add_case(const(I64, 16 * kind + i), case)
                        b.position_at_end(case)
                        path.emit(b, i, kind, ai, a_row, bj, pairs, ci, c_row, scale, scales)
                        b.branch(end)
                b.position_at_end(end)
        return context.get_dummy_value()

    i = types.int64
    return types.void(*[i] * 13), codegen


def run_outer16(mode, m, blocks, a, a_row, bp, b_block, pairs, c, c_row, c_block, a_scale, b_scale):
    _outer16(mode, m, blocks, a, a_row, bp, b_block, pairs, c, c_row, c_block, a_scale, b_scale)
