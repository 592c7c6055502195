"""One group of 32 k of a q4 or mxfp4 tile for up to 6 activation vectors on AVX2, as x86 assembly.

The same arithmetic as the loops microkernel.py emits, so the same bits; written out because 6 vectors fill all 16
registers exactly (12 sums, 2 halves of the weights, 2 temporaries) and LLVM, which reorders the sums, spills a quarter
of them. The float accumulators live in scratch memory, where the store of one group is long done before the next.

mxfp4: the values of the codes are made unsigned by 12, and the sums begin at 12 times the activations, lane by lane,
from which the products are taken: what is left is the sum over signed values with the other sign, which fits int16 (at
most 8 * 2 * 12 * 127 = 24384), so that it does not matter how often it went around on the way.
"""

from llvmlite import binding, ir

from coli.kernels.dots import OFFSET, TWICE, table
from coli.kernels.simd import I8, I16, I32, I64, V, const, load, plus, store

# Scratch, byte offsets: 64 bytes of accumulators per vector, then constants.
MOST = 6
NIBBLE, ONES, TABLE, OFFSETS, LEAST = (MOST * 64 + 32 * i for i in range(5))
SCRATCH_BYTES = LEAST + 32
KINDS = ("q4", "mxfp4")
NEEDED = {"avx2", "fma", "f16c"}  # features
_LOW, _HIGH, _X, _TMP = "%ymm12", "%ymm13", "%ymm14", "%ymm15"  # rows 0..7 and 8..15; a broadcast of 4 k; a temporary
# Operands: weights, their scales, x, its scales, its corrections, scratch
_W, _WS, _XQ, _XS, _XC, _M = (f"${i}" for i in range(6))


def _sum(s, half):
    return f"%ymm{2 * s + half}"


def _weights(j, kind):
    """4 k of 16 rows: the low nibbles of 64 bytes are step 2i, the high ones step 2i + 1."""
    if kind == "mxfp4":
        yield f"vmovdqu {TABLE}({_M}), {_TMP}"
    for half, w in enumerate((_LOW, _HIGH)):
        yield f"vmovdqu {64 * (j // 2) + 32 * half}({_W}), {w}"
        if j % 2:
            yield f"vpsrlw $$4, {w}, {w}"
        yield f"vpand {NIBBLE}({_M}), {w}, {w}"
        if kind == "mxfp4":
            yield f"vpshufb {w}, {_TMP}, {w}"


def _step(s, j):
    """Sums of products in int16: at most 8 * 2 * 15 * 128 = 30720."""
    if j == 0:
        yield f"vpmaddubsw {_X}, {_LOW}, {_sum(s, 0)}"
        yield f"vpmaddubsw {_X}, {_HIGH}, {_sum(s, 1)}"
        return
    yield f"vpmaddubsw {_X}, {_LOW}, {_TMP}"
    yield f"vpaddw {_TMP}, {_sum(s, 0)}, {_sum(s, 0)}"
    yield f"vpmaddubsw {_X}, {_HIGH}, {_X}"
    yield f"vpaddw {_X}, {_sum(s, 1)}, {_sum(s, 1)}"


def _begin_mxfp4(s):
    """Each lane of the sums: 12 times the 16 activations that it will be made of."""
    low, high, x = _sum(s, 0), _sum(s, 1), _X.replace("ymm", "xmm")
    part = low.replace("ymm", "xmm")
    yield f"vpmaddubsw {32 * s}({_XQ}), {_TMP}, {low}"
    yield f"vextracti128 $$1, {low}, {x}"
    yield f"vpaddw {x}, {part}, {part}"
    for order in (0x4E, 0xB1):
        yield f"vpshufd $${order}, {part}, {x}"
        yield f"vpaddw {x}, {part}, {part}"
    yield f"vpbroadcastd {part}, {low}"
    yield f"vmovdqa {low}, {high}"


def _step_mxfp4(s):
    yield f"vpmaddubsw {_X}, {_LOW}, {_TMP}"
    yield f"vpsubw {_TMP}, {_sum(s, 0)}, {_sum(s, 0)}"
    yield f"vpmaddubsw {_X}, {_HIGH}, {_X}"
    yield f"vpsubw {_X}, {_sum(s, 1)}, {_sum(s, 1)}"


def _finish(s, kind):
    if kind == "mxfp4":  # ONES are -1 here
        for half in (0, 1):
            yield f"vpmaddwd {ONES}({_M}), {_sum(s, half)}, {_sum(s, half)}"
        return
    yield f"vpbroadcastd {4 * s}({_XC}), {_X}"
    for half in (0, 1):
        yield f"vpmaddwd {ONES}({_M}), {_sum(s, half)}, {_sum(s, half)}"
        yield f"vpaddd {_X}, {_sum(s, half)}, {_sum(s, half)}"


def _scales(kind):
    if kind == "q4":
        yield f"vcvtph2ps ({_WS}), {_LOW}"
        yield f"vcvtph2ps 16({_WS}), {_HIGH}"
        return
    for half, w in enumerate((_LOW, _HIGH)):  # as microkernel.Packed.power_of_two
        yield f"vpmovzxbd {8 * half}({_WS}), {w}"
        yield f"vpslld $$23, {w}, {w}"
        yield f"vpmaxud {LEAST}({_M}), {w}, {w}"


def group_text(m, kind):
    """Assembly (AT&T) of one group of m vectors."""
    lines = []
    if kind == "mxfp4":
        lines.append(f"vmovdqu {OFFSETS}({_M}), {_TMP}")
        for s in range(m):
            lines += _begin_mxfp4(s)
    for j in range(8):
        lines += _weights(j, kind)
        for s in range(m):
            lines.append(f"vpbroadcastd {32 * s + 4 * j}({_XQ}), {_X}")
            lines += _step(s, j) if kind == "q4" else _step_mxfp4(s)
    for s in range(m):
        lines += _finish(s, kind)
    lines += _scales(kind)
    for s in range(m):
        low, high = _sum(s, 0), _sum(s, 1)
        lines += [
            f"vbroadcastss {4 * s}({_XS}), {_X}",
            f"vcvtdq2ps {low}, {low}",
            f"vmulps {_X}, {_LOW}, {_TMP}",
            f"vcvtdq2ps {high}, {high}",
            f"vmulps {_X}, {_HIGH}, {_X}",
            f"vfmadd213ps {64 * s}({_M}), {_TMP}, {low}",
            f"vfmadd213ps {64 * s + 32}({_M}), {_X}, {high}",
            f"vmovups {low}, {64 * s}({_M})",
            f"vmovups {high}, {64 * s + 32}({_M})",
        ]
    return "\n".join(lines)


def panel_text(m):
    """The same for weights that are bytes already, (8, 64) u8, with float32 scales: operands as `emit_panel_group`."""
    w, ws, xq, xs, xc, acc, ones = (f"${i}" for i in range(7))
    lines = []
    for j in range(8):
        lines += [f"vmovdqu {64 * j + 32 * half}({w}), {at}" for half, at in enumerate((_LOW, _HIGH))]
        for s in range(m):
            lines.append(f"vpbroadcastd {32 * s + 4 * j}({xq}), {_X}")
            lines += _step(s, j)
    # in two passes, whose constants stay in registers: a finish is bound by its loads
    lines.append(f"vmovdqu ({ones}), {_LOW}")
    for s in range(m):
        low, high = _sum(s, 0), _sum(s, 1)
        lines += [
            f"vpbroadcastd {4 * s}({xc}), {_X}",
            f"vpmaddwd {_LOW}, {low}, {low}",
            f"vpmaddwd {_LOW}, {high}, {high}",
            f"vpaddd {_X}, {low}, {low}",
            f"vpaddd {_X}, {high}, {high}",
        ]
    lines += [f"vmovups ({ws}), {_LOW}", f"vmovups 32({ws}), {_HIGH}"]
    for s in range(m):
        low, high = _sum(s, 0), _sum(s, 1)
        lines += [
            f"vbroadcastss {4 * s}({xs}), {_X}",
            f"vcvtdq2ps {low}, {low}",
            f"vcvtdq2ps {high}, {high}",
            f"vmulps {_LOW}, {_X}, {_TMP}",
            f"vmulps {_HIGH}, {_X}, {_X}",
            f"vfmadd213ps {64 * s}({acc}), {_TMP}, {low}",
            f"vfmadd213ps {64 * s + 32}({acc}), {_X}, {high}",
            f"vmovups {low}, {64 * s}({acc})",
            f"vmovups {high}, {64 * s + 32}({acc})",
        ]
    return "\n".join(lines)


def emit_group(b, m, kind, weights, scales, x, x_scales, x_corrections, scratch):
    """Accumulate one group; all i8 pointers, see `group_text`."""
    _emit(b, group_text(m, kind), [weights, scales, x, x_scales, x_corrections, scratch])


def emit_panel_group(b, m, weights, scales, x, x_scales, x_corrections, sums, ones):
    """Accumulate one group of unpacked weights into sums (m, 16) f32; ones: 16 int16 of 1."""
    _emit(b, panel_text(m), [weights, scales, x, x_scales, x_corrections, sums, ones])


def _emit(b, text, operands):
    binding.initialize_native_asmparser()
    clobbered = ",".join(f"~{{xmm{i}}}" for i in range(16)) + ",~{memory}"
    block = ir.InlineAsm(
        ir.FunctionType(ir.VoidType(), [I8.as_pointer()] * len(operands)),
        text,
        "r," * len(operands) + clobbered,
        side_effect=True,
    )
    b.call(block, operands)


def emit_constants(b, scratch, kind):
    """Fill the scratch memory's constants; once per call of the kernel."""
    constants = [(NIBBLE, I8, 15), (ONES, I16, 1 if kind == "q4" else -1)]
    if kind == "mxfp4":
        constants += [(OFFSETS, I8, OFFSET), (LEAST, I32, 0x400000)]
        store(b, table([value + OFFSET for value in TWICE], 2), scratch, TABLE)
    for offset, scalar, value in constants:
        store(b, const(V(scalar, 256 // scalar.width), value), scratch, offset)


def emit_clear(b, scratch, m):
    """Accumulators to 0."""
    for s in range(m):
        store(b, const(V(I64, 8), 0), scratch, 64 * s)


def emit_results(b, scratch, outs):
    """Accumulators to their places."""
    for s, out in enumerate(outs):
        store(b, load(b, plus(b, scratch, 64 * s), 0, V(I64, 8)), out, 0)
