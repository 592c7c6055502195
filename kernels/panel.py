"""A q4 tile of 16 rows times many activation vectors on AVX2: a stretch of K at a time, its weights unpacked once.

Every vector's sum goes through the groups in the order of k, kept in memory from stretch to stretch: arithmetic and
bits are those of microkernel.py. Saved is the unpacking (an eighth of the instructions where it serves 6 vectors), and
a stretch of unpacked weights stays in the first-level cache. Elsewhere `has_panel()` is 0.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coli.kernels import assembly
from coli.kernels.microkernel import GROUP, ROWS, XREC, Packed, emit_runs, prefetch, scaled
from coli.kernels.simd import I16, I64, VF, V, const, feature_text, features, has_half, plus, pointer, stack, store
from coli.kernels.target import simd_path_of

STRETCH = 16  # groups of 32 k: 8 kB of unpacked weights
UNPACKED = ROWS * GROUP  # bytes of a group's weights, one each
weights_memory, scales_memory, ones_memory = stack(STRETCH * UNPACKED), stack(STRETCH * 64), stack(32)


def _assembled(context):
    return simd_path_of(feature_text(context)) == "avx2" and features(context) >= assembly.NEEDED


@intrinsic
def has_panel(typingctx):
    """1 where this processor runs `run_panel`."""
    return types.int64(), lambda context, b, _sig, _args: const(I64, int(_assembled(context)))


@intrinsic
def _unpack(typingctx, w, ws, groups, weights, scales, ones):
    """`groups` groups of a packed tile to bytes (groups, 8, 64) and float32 scales (groups, 16); 16 int16 of 1."""

    def codegen(context, b, _sig, args):
        if _assembled(context):
            w, ws, groups, weights, scales, ones = args
            w, ws, weights, scales, ones = (pointer(b, a) for a in (w, ws, weights, scales, ones))
            store(b, const(V(I16, 16), 1), ones, 0)
            packed = Packed(b, "q4", Plain, has_half(context), w, ws)
            with cgutils.for_range(b, groups) as loop:
                packed.at(loop.index, ahead=False)
                target = plus(b, weights, scaled(b, loop.index, UNPACKED))
                for j, value in packed.chunk(range(8)).items():
                    store(b, value, target, 64 * j)
                store(b, packed.scale(), plus(b, scales, scaled(b, loop.index, 64)), 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


class Plain:
    """For `Packed`: nothing to prepare, the bytes are what is wanted."""

    @staticmethod
    def prep(w):
        return w


@intrinsic
def _multiply(typingctx, n, weights, scales, x, groups, sums, ones, ahead, end):
    """sums (n, 16) f32 go on over `groups` unpacked groups; x: their records in a block of n <= 16 vectors. Meanwhile
    the lines from `ahead` on are prefetched, one at a time, up to `end`: many at once would fill the miss buffers."""

    def codegen(context, b, _sig, args):
        if not _assembled(context):
            return context.get_dummy_value()
        n, weights, scales, x, groups, sums, ones, ahead, end = args
        weights, scales, x, sums, ones = (pointer(b, a) for a in (weights, scales, x, sums, ones))
        cursor = cgutils.alloca_once_value(b, ahead)

        def run(m, s0):
            first = plus(b, x, scaled(b, s0, GROUP))
            to_scale = b.add(scaled(b, n, GROUP), scaled(b, s0, 4 - GROUP))  # from there, in the record
            to_corr = b.add(to_scale, scaled(b, n, 4))
            with cgutils.for_range(b, groups) as loop:
                line = b.load(cursor)
                prefetch(b, pointer(b, line))
                after = b.add(line, const(I64, 64))
                b.store(b.select(b.icmp_signed("<", after, end), after, line), cursor)
                at = plus(b, first, b.mul(loop.index, scaled(b, n, XREC)))
                assembly.emit_panel_group(
                    b,
                    m,
                    plus(b, weights, scaled(b, loop.index, UNPACKED)),
                    plus(b, scales, scaled(b, loop.index, 64)),
                    at,
                    plus(b, at, to_scale),
                    plus(b, at, to_corr),
                    plus(b, sums, scaled(b, s0, 64)),
                    ones,
                )

        emit_runs(b, n, assembly.MOST, run)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


def run_panel(i0, i1, base, extra, w, ws, x, groups, sums, out, out_row):
    """sums (vectors of the blocks i0 .. i1-1, 16) f32 = the tile at w, ws times these vectors. Blocks of base + 1
    (the first `extra`) and then base vectors lie packed at x, that of vector 0. The caller will write the sums to out,
    out_row bytes apart: these lines are fetched meanwhile, as a store waits for its line and all later ones for it."""
    weights, scales, ones = weights_memory(), scales_memory(), ones_memory()
    start = i0 * base + min(i0, extra)
    for i in range(start, i1 * base + min(i1, extra)):
        _clear(sums + 64 * (i - start))
    for g in range(0, groups, STRETCH):
        some, ahead = min(STRETCH, groups - g), w + 256 * (g + STRETCH)
        _unpack(w + 256 * g, ws + 32 * g, some, weights, scales, ones)
        for i in range(i0, i1):
            s0, n = i * base + min(i, extra), base + 1 if i < extra else base
            if g + STRETCH >= groups:
                for s in range(s0 - start, s0 - start + n):
                    _own(out + out_row * s)
            _multiply(
                n,
                weights,
                scales,
                x + 40 * (s0 * groups + n * g),
                some,
                sums + 64 * (s0 - start),
                ones,
                ahead,
                w + 256 * (g + 3 * STRETCH),
            )
            ahead = min(ahead + 64 * some * ((n + 5) // 6), w + 256 * (g + 3 * STRETCH) - 64)


@intrinsic
def _own(typingctx, at):
    """Prefetch a line for writing."""

    def codegen(context, b, _sig, args):
        prefetch(b, pointer(b, args[0]), write=True)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _clear(typingctx, at):
    """16 zeros."""

    def codegen(context, b, _sig, args):
        store(b, const(VF, 0.0), pointer(b, args[0]), 0)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
