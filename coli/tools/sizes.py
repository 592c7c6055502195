"""How large a model is once it is converted: from a container, from a checkpoint that is not, or from its config alone.

Pure arithmetic on shapes; nothing of the weights is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.errors import CheckpointError, OptionError
from coli.model.config import ModelSpec
from coli.model.families import spec_from_config
from coli.model.tensors import TensorSpec, container_spec, dense_tensors, expert_matrices, stored_spec
from coli.store.container import Container
from coli.store.layout import TILE_ROWS, Kind, MatrixShape, lay_out_record, round_up
from coli.store.manifest import MANIFEST
from coli.store.safetensors_file import read_header
from coli.store.strict_json import parse_object, read_text_file

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a converted model; `files` are those that a disk probe may read, `source` says what was looked at."""

    source: str
    spec: ModelSpec
    dense_bytes: int
    embedding_bytes: int  # of it, when the output matrix is another one: read one row at a time
    record_bytes: Mapping[int, int]  # by layer
    files: tuple[Path, ...]

    @property
    def experts_bytes(self) -> int:
        return sum(self.record_bytes.values()) * self.spec.num_experts

    @property
    def cycle_bytes(self) -> int:
        """Expert bytes one token uses; those of an MTP head's guesses come on top."""
        return sum(self.record_bytes[i] for i in self.spec.moe_layers) * self.spec.num_experts_per_tok

    @property
    def dense_read_bytes(self) -> int:
        """Dense bytes one token uses."""
        return self.dense_bytes - self.embedding_bytes


def model_sizes(path: Path) -> ModelSizes:
    """Sizes of the model at `path`: a container, a GGUF file, a Hugging Face folder, or one with config.json alone.

    What is not converted counts as `coli convert` would write it without options.

    Raises:
        OptionError: nothing of the kind is there. CheckpointError, UnsupportedModelError: it is damaged or unknown.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise OptionError(f"{path}: expected a container, a GGUF file or a folder with config.json")
        return _of_gguf(path)
    if (path / MANIFEST).is_file():
        return _of_container(path)
    if not (path / "config.json").is_file():
        raise OptionError(f"{path}: expected a container, a GGUF file or a folder with config.json")
    config_path = path / "config.json"
    config = parse_object(read_text_file(config_path), str(config_path))
    spec = spec_from_config(config, config_path)
    weights = tuple(sorted(path.glob("*.safetensors")))
    what = "Hugging Face folder" if weights else "config.json alone"
    if (path / INDEX).is_file():
        from coli.convert.hf import weight_map

        spec = stored_spec(spec, weight_map(path).keys())
    elif weights:
        spec = stored_spec(spec, {name for shard in weights for name in read_header(shard).tensors})
    method = (config.get("quantization_config") or {}).get("quant_method")
    experts = Kind.MXFP4 if method == "mxfp4" else Kind.Q4
    what += f", as `coli convert` would write it (dense q8, experts {experts.label})"
    return _of_spec(what, spec, weights, experts)


def _of_container(path: Path) -> ModelSizes:
    container = Container.open(path)
    spec = container_spec(container)
    layouts = {layer_idx: container.expert_layout(layer_idx) for layer_idx in container.moe_layers}
    dense = sum(container.array(name).nbytes for name in container.tensor_names())
    embedding = 0 if spec.tie_word_embeddings else _stored_bytes(container.manifest.tensors[EMBEDDING])
    files = tuple(sorted({layout.path for layout in layouts.values()} or {path / "dense.safetensors"}))
    return ModelSizes("container", spec, dense, embedding, {i: x.record_bytes for i, x in layouts.items()}, files)


def _of_gguf(path: Path) -> ModelSizes:
    from coli.convert.gguf import GgufSource, split_files
    from coli.convert.matching import match
    from coli.convert.options import ConvertOptions
    from coli.convert.plan import Plan

    source = GgufSource(path)
    try:
        plan = Plan(match(source, spec_from_config(source.config, path)), ConvertOptions())
        spec = plan.spec
    finally:
        source.close()
    return ModelSizes(
        "GGUF file, as `coli convert` would write it",
        spec,
        sum(map(_stored_bytes, plan.tensors.values())),
        0 if spec.tie_word_embeddings else _stored_bytes(plan.tensors[EMBEDDING]),
        {layer_idx: layer.record_bytes for layer_idx, layer in plan.layers().items()},
        tuple(split_files(path)),
    )


def _of_spec(source: str, spec: ModelSpec, files: Iterable[Path], experts: Kind) -> ModelSizes:
    stored = {tensor.name: _stored(tensor) for tensor in dense_tensors(spec)}
    records = dict.fromkeys(spec.moe_layers, _record_bytes(spec, experts)) if spec.moe_layers else {}
    if spec.mtp is not None:
        records[spec.mtp.layer_idx] = _record_bytes(spec, Kind.Q8)
    return ModelSizes(
        source,
        spec,
        sum(map(_stored_bytes, stored.values())),
        0 if spec.tie_word_embeddings else _stored_bytes(stored[EMBEDDING]),
        records,
        tuple(files),
    )


def _record_bytes(spec: ModelSpec, kind: Kind) -> int:
    parts = [(name, MatrixShape(kind, rows, cols)) for name, rows, cols in expert_matrices(spec)]
    return lay_out_record(parts, spec.expert_bias)[1]


def _stored(tensor: TensorSpec) -> MatrixShape | int:
    if tensor.role == "vector":
        return tensor.shape[0]
    if tensor.role == "bias":
        return round_up(tensor.shape[0], TILE_ROWS)
    rows, cols = tensor.shape
    return MatrixShape(Kind.F32 if tensor.role == "router" else Kind.Q8, rows, cols)


def _stored_bytes(stored: Any) -> int:
    """Of a packed matrix, or of a float32 vector of so many numbers."""
    if isinstance(stored, MatrixShape):
        return stored.weights_bytes + stored.scales_bytes
    if isinstance(stored, int):
        return 4 * stored
    raise CheckpointError(f"unknown tensor {stored!r}")
