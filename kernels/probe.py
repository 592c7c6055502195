"""What the machine could do at best: bytes read from memory and 8-bit products from registers, per second.

`coli bench` sets the speed of a model beside these. No model code calls them, and they compile when first used. Both
loops use the vectors and the dot products the kernels are compiled for, so that a share of 1 is what they could reach.
"""

import time

import numpy as np
from numba import types
from numba.extending import intrinsic

from coli.kernels.dots import PATHS
from coli.kernels.runtime import Stage, address, arguments, unpacker
from coli.kernels.simd import (
    I32,
    I64,
    VB,
    VI,
    const,
    feature_text,
    iadd,
    load,
    load_i32x16,
    plus,
    pointer,
    splat_i32,
    store,
    store_i32x16,
)
from coli.kernels.target import simd_path_of

unpack4 = unpacker(4)

LINE = 64
BLOCK = 4 * LINE  # read by one turn of the loop
STEPS, CHAINS = 8, 4  # steps of a group of 32 inputs, groups interleaved
MACS_PER_TURN = STEPS * CHAINS * LINE
SECONDS = 0.05  # of one timing


def _read(args, part, parts):
    """args: 0 memory, 1 blocks, 2 passes, 3 out (parts, 16) int32."""
    memory, blocks, passes, out = unpack4(args, 0)
    a = b = c = d = splat_i32(np.int32(0))
    first, last = blocks * part // parts, blocks * (part + 1) // parts
    for _ in range(passes):
        for i in range(first, last):
            at = memory + 256 * i
            a, b = iadd(a, load_i32x16(at)), iadd(b, load_i32x16(at + 64))
            c, d = iadd(c, load_i32x16(at + 128)), iadd(d, load_i32x16(at + 192))
    store_i32x16(out + 64 * part, iadd(iadd(a, b), iadd(c, d)))


READ = Stage(_read)


@intrinsic
def _products(typingctx, weights, x, turns, out):
    """weights: 64 bytes; x: int32 (STEPS * CHAINS); out: int32 (16), sums that nobody needs."""

    def codegen(context, b, _sig, args):
        wp, xp, count, op = pointer(b, args[0]), pointer(b, args[1]), args[2], pointer(b, args[3])
        dot = PATHS[simd_path_of(feature_text(context))][0](b)
        w = dot.prep(load(b, wp, 0, VB))
        before = b.block
        loop, done = b.append_basic_block("turn"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        i, total = b.phi(I64), b.phi(VI)
        i.add_incoming(const(I64, 0), before)
        total.add_incoming(const(VI, 0), before)
        shifted = plus(b, xp, b.shl(b.and_(i, const(I64, 1)), const(I64, 2)))  # or one turn would do for all
        accumulators = [dot.start(const(I32, 0)) for _ in range(CHAINS)]
        for step in range(STEPS):
            for chain in range(CHAINS):
                value = load(b, shifted, 4 * (step * CHAINS + chain), I32)
                accumulators[chain] = dot.step(accumulators[chain], w, value)
        summed = total
        for accumulator in accumulators:
            summed = b.add(summed, dot.finish(accumulator, const(I32, 0)))
        following = b.add(i, const(I64, 1))
        end = b.block
        i.add_incoming(following, end)
        total.add_incoming(summed, end)
        b.cbranch(b.icmp_signed("<", following, count), loop, done)
        b.position_at_end(done)
        store(b, summed, op, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _multiply(args, part, parts):
    """args: 0 weights (64 bytes), 1 x (STEPS * CHAINS + 1,) int32, 2 turns, 3 out (parts, 16) int32."""
    weights, x, turns, out = unpack4(args, 0)
    _products(weights, x, turns, out + 64 * part)


MULTIPLY = Stage(_multiply)


def read_bandwidth(threads: int, nbytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes per second that `threads` threads read from `nbytes` of memory, which should exceed the caches by far: the
    best of `repeats`."""
    memory = np.ones(nbytes // BLOCK * BLOCK, np.uint8)
    at, out = address(memory), np.zeros((threads, 16), np.int32)
    block = arguments(at, memory.nbytes // BLOCK, 1, address(out))
    return memory.nbytes / _best_seconds(READ, block, threads, repeats)


def integer_rate(threads: int, repeats: int = 5) -> float:
    """Multiply-adds per second of `threads` threads over q4 weights and int8 activations that stay in the first cache:
    the best of `repeats`."""
    weights = np.ones(LINE, np.uint8)
    x, out = np.ones(STEPS * CHAINS + 1, np.int32), np.zeros((threads, 16), np.int32)
    turns = 1000
    while True:
        block = arguments(address(weights), address(x), turns, address(out))
        seconds = _best_seconds(MULTIPLY, block, threads, 1)
        if seconds >= SECONDS / 4:
            break
        turns *= 4
    seconds = _best_seconds(MULTIPLY, block, threads, repeats)
    return turns * MACS_PER_TURN * threads / seconds


def _best_seconds(stage: Stage, block: np.ndarray, threads: int, repeats: int) -> float:
    stage.run(block, threads)  # compiles, and starts the threads
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        stage.run(block, threads)
        best = min(best, time.perf_counter() - began)
    return best
