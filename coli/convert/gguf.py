"""A GGUF model as a Source: one file, or all files of a split one, with config and tokenizer made from the metadata.

Every header is checked, and every tensor the architecture needs is looked for, before the first weight is read.
Q4_0 and Q8_0 tensors keep their bits unless the options name a kind; other quantized types become floats first.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

from coli.convert.conversion import Notice, Progress, convert_source
from coli.convert.gguf_config import (
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    Metadata,
    RopeVectors,
    Shapes,
    architecture_of,
    config_from_metadata,
)
from coli.convert.gguf_deepseek import DEEPSEEK, deepseek_config
from coli.convert.gguf_file import GgufFile
from coli.convert.gguf_gpt_oss import gpt_oss_config
from coli.convert.gguf_granite_ernie_phi import GRANITE_ERNIE_PHI, granite_ernie_phi_config
from coli.convert.gguf_tensors import FLOAT_TYPES, NATIVE_KINDS, Heads, gguf_name, hugging_face_tensors, to_float32
from coli.convert.latent import with_head_matrices
from coli.convert.options import ConvertOptions, ConvertReport
from coli.convert.source import SourceTensor
from coli.errors import CheckpointError, OptionError
from coli.model.families import spec_from_config
from coli.model.tensors import dense_tensors, expert_matrices
from coli.store.layout import Kind
from coli.text.gguf_tokenizer import tokenizer_files

_ROPE = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
MAX_NAME = 200  # characters kept of a model's name
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufSource:
    """An open GGUF model; see source.Source. `notices`: what the user should know about it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise OptionError(f"{path}: no such file")
        self.path = self.config_path = path
        self.notices: list[str] = []
        self._files: list[GgufFile] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        paths = split_files(self.path)
        self._files.extend(GgufFile(path) for path in paths)
        self.files: Sequence[str] = [path.name for path in paths]
        values = self._files[0].header.metadata
        holders = _holders(self._files)
        _check_split(self._files, holders)
        metadata = Metadata(values, paths[0])
        architecture = architecture_of(metadata)
        shapes = {name: file.header.tensors[name].shape for name, file in holders.items()}
        rope = {name: _rope_vector(holders[name], name) for name in _ROPE if name in holders}
        config, unknown = _config(metadata, shapes, rope)
        if unknown:
            named = ", ".join(key[:80] for key in unknown[:20]) + (", ..." if len(unknown) > 20 else "")
            self.notices.append(f"{paths[0].name}: metadata keys that coli does not know are ignored: {named}")
        query, key = config["num_attention_heads"], config["num_key_value_heads"]
        heads = Heads(query, key, config.get("head_dim", 1), architecture.permuted)
        if "long_factor" in (config["rope_scaling"] or {}):  # elsewhere these two are left over, and refused
            holders = {name: file for name, file in holders.items() if name not in (ROPE_LONG, ROPE_SHORT)}
        self.tensors: Mapping[str, SourceTensor] = hugging_face_tensors(holders, heads)
        self._check_complete(config)
        self.side_files: Mapping[str, Path | bytes] = tokenizer_files(values, paths[0])
        config |= _token_ids(self.side_files)
        self.config: Mapping[str, Any] = config
        self.config_text = json.dumps(config, indent=1, ensure_ascii=False).encode()
        self.description: Mapping[str, Any] = {
            "format": "gguf",
            "name": name[:MAX_NAME] if isinstance(name := values.get(Keys.General.NAME), str) else paths[0].stem,
            "architecture": metadata.architecture,
            "files": [path.name for path in paths],
        }

    def signature(self) -> str:
        digest = hashlib.sha256(self.config_text)
        for file in self._files:
            path = file.header.path
            try:
                status = path.stat()
            except OSError:
                raise CheckpointError(f"{path}: gone while it was being converted") from None
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _check_complete(self, config: Mapping[str, Any]) -> None:
        """CheckpointError with the file's own name of the first tensor that is missing."""
        spec = replace(spec_from_config(config, self.path), mtp=None)  # an MTP head may be incomplete
        if spec.latent is not None:
            self.tensors = with_head_matrices(self.tensors, spec, spec.latent)
        missing = [gguf_name(wanted.name) for wanted in dense_tensors(spec) if wanted.name not in self.tensors]
        for layer_idx in spec.moe_layers:
            experts = f"model.layers.{layer_idx}.mlp.experts"
            for part, _, _ in expert_matrices(spec):
                fused = (f"{experts}.{part}_proj.weight", f"{experts}.gate_up_proj.weight")
                if fused[0] in self.tensors or (part != "down" and fused[1] in self.tensors):
                    continue
                names = [f"{experts}.{expert}.{part}_proj.weight" for expert in range(spec.num_experts)]
                missing += [gguf_name(name) for name in names if name not in self.tensors]
        missing = list(dict.fromkeys(missing))
        if missing:
            count = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
            raise CheckpointError(f"{self.path}: {count} missing, first {missing[0]}: download the file again")

    def requantized(self) -> str | None:
        """A line for the user if matrices of the file cannot be stored as they are."""
        kinds = {file.header.tensors[name].kind for file in self._files for name in file.header.tensors}
        others = sorted(kind.name for kind in kinds if kind not in NATIVE_KINDS and kind not in FLOAT_TYPES)
        if not others:
            return None
        return (
            f"{self.path.name}: {', '.join(others)} tensors are dequantized and quantized again;"
            " the original weights, or a Q4_0 or Q8_0 file, lose less"
        )


def convert_gguf(
    src: Path, dst: Path, options: ConvertOptions, notice: Notice, progress: Progress | None = None
) -> ConvertReport:
    """Convert the GGUF model `src` (any file of a split one) into `dst`; see conversion.convert_source."""
    source = GgufSource(src)
    try:
        requantized = source.requantized()
        if requantized is not None and {options.dense_kind(), options.expert_kind()} != {Kind.F32}:
            source.notices.append(requantized)
        for line in source.notices:
            notice(line)
        return convert_source(source, dst, options, notice, progress)
    finally:
        source.close()


def split_files(path: Path) -> Sequence[Path]:
    """All files of the model that `path` belongs to, by their numbering; CheckpointError lists the missing ones."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{path}: number {match['number']} of {match['count']}: not a file of a split model")
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} files of this split model missing: {', '.join(missing[:20])}"
        )
    return paths


def _check_split(files: Sequence[GgufFile], holders: Mapping[str, GgufFile]) -> None:
    """The counts in the metadata must agree with the files that were found."""
    for number, file in enumerate(files):
        expected: Mapping[str, int] = {Keys.Split.LLM_KV_SPLIT_COUNT: len(files), Keys.Split.LLM_KV_SPLIT_NO: number}
        for key, value in expected.items():
            default = None if len(files) > 1 else value
            found = file.header.metadata.get(key, default)
            if found != value and not (found in (0, 1) and len(files) == 1):
                raise CheckpointError(
                    f"{file.header.path}: key {key} is {found}, but the file names make it {value}:"
                    " keep the names NAME-00001-of-0000N.gguf that the files were published under"
                )
    total = files[0].header.metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if len(files) > 1 and total is not None and total != len(holders):
        path = files[0].header.path
        raise CheckpointError(
            f"{path}: {len(holders)} tensors in {len(files)} files, but split.tensors.count is {total}"
        )


def _holders(files: Sequence[GgufFile]) -> dict[str, GgufFile]:
    """Tensor name -> the file that holds it."""
    holders: dict[str, GgufFile] = {}
    for file in files:
        for name in file.header.tensors:
            if name in holders:
                other = holders[name].header.path.name
                raise CheckpointError(f"{file.header.path}: tensor {name} is also in {other}")
            holders[name] = file
    return holders


def _config(metadata: Metadata, shapes: Shapes, rope: RopeVectors) -> tuple[dict[str, Any], list[str]]:
    """As config_from_metadata, for every architecture."""
    if metadata.architecture in DEEPSEEK:
        return deepseek_config(metadata, shapes, rope)
    if metadata.architecture in GRANITE_ERNIE_PHI:
        return granite_ernie_phi_config(metadata, shapes, rope)
    if metadata.architecture == "gpt-oss":
        return gpt_oss_config(metadata, shapes, rope)
    return config_from_metadata(metadata, shapes, rope)


def _rope_vector(file: GgufFile, name: str) -> NDArray[np.float32]:
    info = file.header.tensors[name]
    if len(info.shape) != 1 or info.kind not in FLOAT_TYPES or info.shape[0] > 4096:
        raise CheckpointError(
            f"{file.header.path}: tensor {name}: expected a short vector of floats, found {list(info.shape)}"
            f" of {info.kind.name}"
        )
    return to_float32(file.read_rows(info, 0, 1), info.kind).reshape(-1)


def _token_ids(side_files: Mapping[str, Path | bytes]) -> Mapping[str, Any]:
    """bos and eos as generation_config.json has them."""
    text = side_files.get("generation_config.json")
    return json.loads(text) if isinstance(text, bytes) else {}
