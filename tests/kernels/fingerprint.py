"""Prints one hash per kernel over fixed inputs, as JSON: the same on every instruction set, numpy and thread count.

python fingerprint.py auto|avx512|avx2|generic THREADS
"""

import hashlib
import json
import os
import sys

import numpy as np

from coli.kernels import runtime

runtime.configure(sys.argv[1], os.environ.get("COLI_KERNEL_CACHE"), int(sys.argv[2]))

from coli.kernels import activations, attention, elementwise, latent, matmul, moe, noise, quantize, rope, routing  # noqa: E402

THREADS = int(sys.argv[2])
rng = np.random.default_rng(7)


def numbers(*shape: int) -> np.ndarray:
    """Without a transcendental function: sums of integers, nearly normal."""
    return (rng.integers(-(2**20), 2**20, (6, *shape)).sum(axis=0) / 2**21).astype(np.float32)


def products(kind: int, rows: int) -> np.ndarray:
    w, x = numbers(48, 224), numbers(rows, 224)
    if kind == matmul.KIND_F32:
        packed, scales = quantize.pack_f32(w), np.zeros(1, np.float16)
    elif kind == matmul.KIND_Q8:
        packed, scales = quantize.pack_q8(*quantize.quantize_q8(w, threads=THREADS))
    elif kind == matmul.KIND_MXFP4:
        codes = np.arange(48 * 224, dtype=np.int64) * 7 // 3 % 16
        exponents = (np.arange(48 * 7, dtype=np.int64) * 5 % 9 + 118).astype(np.uint8)
        exponents[:3] = 0, 1, 200
        packed, scales = quantize.pack_mxfp4(codes.astype(np.uint8).reshape(48, 224), exponents.reshape(48, 7))
    else:
        packed, scales = quantize.pack_q4(*quantize.quantize_q4(w, np.abs(numbers(224)), threads=THREADS))
    buffer = activations.aligned(activations.x_bytes(kind, rows, 7))
    activations.pack_rows(x, np.arange(rows), kind, buffer, 0, THREADS)
    out = np.empty((rows, 48), np.float32)
    job = [kind, runtime.address(packed), runtime.address(scales), 3, 7, rows, 0, 0, 48, 0]
    matmul.run_jobs(np.array([job], np.int64), buffer, out, THREADS)
    return out


def attend(half: bool) -> np.ndarray:
    heads, kv_heads, dim, cap, rows = 16, 2, 40, 96, 7
    k = np.zeros((kv_heads, cap // 16, dim, 16), np.uint16 if half else np.float32)
    v = np.zeros((kv_heads, cap, dim), k.dtype)
    at = [np.full(cap, runtime.address(a)) for a in (k, v)]
    keys, values, q = numbers(cap, kv_heads * dim), numbers(cap, kv_heads * dim), numbers(rows, heads * dim) * 3
    attention.kv_append(keys, 0, values, 0, *at, np.arange(cap), kv_heads, dim, cap, half, THREADS)
    out = np.empty_like(q)
    prefix, path = np.full(rows, 70), np.arange(95, 95 - rows, -1)[:, None].copy()
    attention.attention(
        q, out, at[0][:rows], at[1][:rows], prefix, path, np.arange(rows) % 2, 50, 0.17, heads, kv_heads, dim, cap,
        half, THREADS,
    )  # fmt: skip
    return out


def attend_latents(half: bool) -> np.ndarray:
    heads, rank, rotary, cap, rows = 20, 48, 16, 320, 3
    cache = np.zeros((cap, rank + rotary), np.uint16 if half else np.float32)
    at, bad = np.full(cap, runtime.address(cache)), np.zeros(THREADS, np.int64)
    latent.append_rows(numbers(cap, 60), 0, 44, 16, at, np.arange(cap), half, THREADS, bad)
    query, out = numbers(rows, heads, rank + rotary) * 3, np.empty((rows, heads, rank), np.float32)
    scratch = np.empty(latent.working_bytes(rows, heads, rank, rotary, cap, THREADS), np.uint8)
    prefix, path = np.array([300, 130, 7]), np.array([[311], [317], [319]])
    latent.attention(query, out, at[:rows], prefix, path, np.arange(rows) % 2, 0.17, cap, half, THREADS, scratch)
    return out


def norms() -> np.ndarray:
    x, out = numbers(9, 100), np.empty((9, 100), np.float32)
    elementwise.rms_norm(x, numbers(100), 1e-6, out, THREADS)
    elementwise.rms_norm_heads(out, 3, 4, 20, numbers(20), 1e-5, THREADS)
    gate_up, hidden = np.concatenate([out, x], axis=1), np.empty((9, 100), np.float32)
    elementwise.swiglu(gate_up * 4, 100, 100, hidden, THREADS)
    elementwise.gate_rows(hidden, numbers(9))
    return hidden


def rotated() -> np.ndarray:
    freq = rope.scale_llama3(rope.inv_freq(500000.0, 32), 8.0, 1.0, 4.0, 8192)
    freq += rope.scale_yarn(rope.inv_freq(10000.0, 32), 10000.0, 40.0, 4096) + rope.scale_linear(freq, 3.0)
    table = rope.rope_table(np.array([0, 3, 70_000]), freq, rope.yarn_mscale(40.0))
    x = numbers(3, 160)
    rope.apply_rope(x, 5, 3, 48, 32, *table, False, THREADS)
    rope.apply_rope(x, 5, 3, 48, 32, *table, True, THREADS)
    return x


def routed() -> np.ndarray:
    ids, weights = np.empty((11, 6), np.int64), np.empty((11, 6), np.float32)
    result = []
    for scoring, mode in ((0, 0), (0, 1), (1, 2)):
        bias = numbers(64) * np.float32(0.1) if mode else None
        logits = numbers(11, 64) * np.float32(3)
        routing.route(logits, 6, scoring, bias, 8, 4, mode, True, 2.5, ids, weights, THREADS)
        result += [ids.astype(np.float32), weights.copy()]
    x, down = numbers(11, 50), numbers(66, 50)
    moe.combine(x, down, np.arange(66).reshape(11, 6), weights, THREADS)
    return np.concatenate([r.ravel() for r in [*result, x]])


def functions() -> np.ndarray:
    wide = rng.integers(-(2**40), 2**40, 20_000) / 2.0**31
    outputs = [elementwise.evaluate(f, wide) for f in range(elementwise.EXP64, elementwise.COS64 + 1)]
    outputs += [elementwise.evaluate(f, wide / 8).astype(np.float64) for f in (0, 1)]
    return np.nan_to_num(np.concatenate(outputs), nan=12345.0)


def sampled() -> np.ndarray:
    logits = numbers(5000) * np.float32(4)
    picks = [noise.gumbel_argmax(logits, 2**63 + 1, p)[0] for p in range(200)]
    ids, chances, _ = noise.select_candidates(logits, 0, 0.95, 0.001)
    return np.concatenate([picks, ids, chances, noise.gumbel(3, 2**40, np.arange(1000))])


def packed_bytes() -> np.ndarray:
    w = numbers(20, 96)
    parts = [a.view(np.uint8).ravel() for a in (*quantize.quantize_q4(w, threads=THREADS), *quantize.quantize_q8(w))]
    return np.concatenate(parts)


CASES = {
    "f32": lambda: products(matmul.KIND_F32, 9),
    "q8": lambda: products(matmul.KIND_Q8, 37),
    "q4": lambda: products(matmul.KIND_Q4, 37),
    "mxfp4": lambda: products(matmul.KIND_MXFP4, 37),
    "attention f32": lambda: attend(False),
    "attention f16": lambda: attend(True),
    "latents f32": lambda: attend_latents(False),
    "latents f16": lambda: attend_latents(True),
    "norms": norms,
    "rope": rotated,
    "routing": routed,
    "functions": functions,
    "sampling": sampled,
    "quantizers": packed_bytes,
}
hashes = {name: hashlib.sha256(np.ascontiguousarray(case()).tobytes()).hexdigest()[:16] for name, case in CASES.items()}
print(json.dumps({"path": runtime.simd_path(), "hashes": hashes}))
