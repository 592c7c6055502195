"""A Hugging Face model folder as a Source: one safetensors file, shards with or without index, hub-cache snapshots.

Links are followed, never written. Every header is checked before the first tensor is read; tensors are read by pread
in row blocks, so a file that shrinks meanwhile is an error and not a signal.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.convert.conversion import Notice, Progress, convert_source
from coli.convert.fp8 import E4M3, NUMBERS, block_size, with_scales
from coli.convert.mxfp4 import with_mxfp4
from coli.convert.options import ConvertOptions, ConvertReport
from coli.errors import CheckpointError, OptionError, UnsupportedModelError
from coli.store.manifest import MANIFEST
from coli.store.safetensors_file import SafetensorsFile, SafetensorsHeader, TensorInfo
from coli.store.strict_json import parse_object, read_object, read_text_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_UNFINISHED = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".tmp")
_ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, E4M3: 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """One tensor of a safetensors file; see source.SourceTensor."""

    file: SafetensorsFile
    info: TensorInfo

    @property
    def name(self) -> str:
        return f"{self.info.name} in {self.file.header.path}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * self._item_bytes

    @property
    def files(self) -> frozenset[str]:
        return frozenset((self.file.header.path.name,))

    @property
    def native(self) -> None:
        return None  # numbers only

    @property
    def _item_bytes(self) -> int:
        if self.info.dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(
                f"{self.file.header.path}: tensor {self.info.name}: dtype {self.info.dtype} is not supported;"
                f" supported: {', '.join(_ITEM_BYTES)}"
            )
        return _ITEM_BYTES[self.info.dtype]

    def read_bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start..stop-1 of the last axis as bytes; see mxfp4.ByteTensor."""
        return self.file.read(self.info, start * self.row_bytes, (stop - start) * self.row_bytes).reshape(
            stop - start, -1
        )

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        raw = self.read_bytes(start, stop).reshape(-1)
        if self.info.dtype == "U8":
            raise UnsupportedModelError(f"tensor {self.name}: bytes, expected numbers")
        if self.info.dtype == E4M3:  # still to be scaled
            return NUMBERS[raw].reshape(stop - start, -1)
        if self.info.dtype == "BF16":  # the upper half of a float32
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(stop - start, -1)
        dtype = "<f4" if self.info.dtype == "F32" else "<f2"
        return raw.view(dtype).astype(np.float32, copy=False).reshape(stop - start, -1)


class HuggingFaceSource:
    """An open Hugging Face folder; see source.Source.

    `coming`: headers of weight files, by name in reading order, that a delivery brings during the conversion, with
    what tells these weights from any others.
    """

    def __init__(self, path: Path, coming: tuple[Mapping[str, SafetensorsHeader], str] | None = None) -> None:
        self.path = path
        self.config_path = path / "config.json"
        _refuse_what_is_no_folder(path)
        _follow(self.config_path)
        if not self.config_path.is_file():
            raise CheckpointError(f"{self.config_path}: missing, so this is not a Hugging Face model folder")
        self.config_text = read_text_file(self.config_path)
        self.config: Mapping[str, Any] = parse_object(self.config_text, str(self.config_path))
        headers: Mapping[str, SafetensorsHeader] = coming[0] if coming else {}
        self._identity = coming[1] if coming else None
        names = list(headers) or find_shards(path)
        self._files = [SafetensorsFile(path / name, headers.get(name)) for name in names]
        self.files: Sequence[str] = names
        tensors = _tensors_by_name(self._files)
        _check_index(path, tensors, names)
        fp8 = frozenset(name for name, tensor in tensors.items() if tensor.info.dtype == E4M3)
        self.tensors = with_scales(with_mxfp4(tensors), fp8, block_size(self.config, self.config_path))
        self._side_paths = _side_files(path)
        self.side_files: Mapping[str, Path | bytes] = {file.name: file for file in self._side_paths}
        self.description: Mapping[str, Any] = {"format": "huggingface", "name": _model_name(path)}

    def signature(self) -> str:
        digest = hashlib.sha256(self.config_text)
        weights = [file.header.path for file in self._files]
        if self._identity is not None:  # weights come and go
            digest.update(self._identity.encode())
            weights = []
        for file in [*weights, *self._side_paths]:
            try:
                status = file.stat()
            except OSError:
                raise CheckpointError(f"{file}: gone while it was being converted") from None
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def file(self, name: str) -> SafetensorsFile:
        """The weight file of that name."""
        return self._files[self.files.index(name)]

    def close(self) -> None:
        for file in self._files:
            file.close()


def convert_hf(
    src: Path, dst: Path, options: ConvertOptions, notice: Notice, progress: Progress | None = None
) -> ConvertReport:
    """Convert the Hugging Face folder `src` into the container folder `dst`; see conversion.convert_source."""
    source = HuggingFaceSource(src)
    try:
        return convert_source(source, dst, options, notice, progress)
    finally:
        source.close()


def find_shards(folder: Path) -> list[str]:
    """Names of the weight files to read, complete and present; CheckpointError lists every one that is missing.

    As transformers does: model.safetensors, else what the index names, else a complete run of numbered shards.
    `consolidated.*` (another layout of the same weights) is never read.
    """
    _follow(folder / SINGLE)
    names = shards_of(folder, sorted(path.name for path in folder.glob("*.safetensors")))
    missing = [name for name in names if not _follow(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files missing: {', '.join(missing)}: {_download(folder)}"
        )
    for name in names:
        for suffix in _UNFINISHED:
            if (folder / (name + suffix)).exists():
                raise CheckpointError(f"{folder / (name + suffix)}: download of {name} unfinished: {_download(folder)}")
    return names


def shards_of(folder: Path, found: Sequence[str]) -> list[str]:
    """Which of the weight files `found` are the model's, by the index in `folder` if there is one; some may miss."""
    if SINGLE in found:
        return [SINGLE]
    if _follow(folder / INDEX):
        return sorted(set(weight_map(folder).values()))
    return _numbered_shards(folder, found)


def _numbered_shards(folder: Path, found: Sequence[str]) -> list[str]:
    """Without an index: one file, or one run of NAME-00001-of-0000N, checked to be complete by its numbering."""
    names = [name for name in found if not name.startswith("consolidated")]
    if not names:
        raise CheckpointError(f"{folder}: no weights: {_instead_of_weights(folder, found)}")
    runs = {(match["stem"], match["count"]) for name in names if (match := _SHARD.fullmatch(name))}
    if not runs and len(names) == 1:
        return names
    if len(runs) != 1 or any(_SHARD.fullmatch(name) is None for name in names):
        raise CheckpointError(f"{folder}: no {INDEX} to say which of these belong together: {', '.join(names[:8])}")
    ((stem, count),) = runs
    if int(count) > 100_000:
        raise CheckpointError(f"{folder / names[0]}: {int(count)} shards are more than any model has")
    return [f"{stem}-{number:0{len(count)}}-of-{count}.safetensors" for number in range(1, int(count) + 1)]


def _instead_of_weights(folder: Path, found: Iterable[str]) -> str:
    if any(found):
        return "only consolidated.*.safetensors, another layout; expected model*.safetensors"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "only PyTorch pickle files; expected safetensors (pickles are not read)"
    return f"expected {SINGLE} or {INDEX}: {_download(folder)}"


def weight_map(folder: Path) -> Mapping[str, str]:
    """Tensor name -> shard name, from the index."""
    shards = read_object(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        found = "none" if shards in (None, {}) else f"a {type(shards).__name__}"
        raise CheckpointError(
            f"{folder / INDEX}: weight_map: expected an object of tensor names, found {found}: download the file again"
        )
    for tensor, name in shards.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX}: weight_map: {tensor}: {name!r} is no safetensors file name")
    return shards


def _tensors_by_name(files: Iterable[SafetensorsFile]) -> Mapping[str, HuggingFaceTensor]:
    tensors: dict[str, HuggingFaceTensor] = {}
    for file in files:
        for name, info in file.header.tensors.items():
            if name in tensors:
                other = tensors[name].file.header.path.name
                raise CheckpointError(f"{file.header.path}: tensor {name} is also in {other}")
            tensors[name] = HuggingFaceTensor(file, info)
    return tensors


def _check_index(folder: Path, tensors: Mapping[str, HuggingFaceTensor], names: Sequence[str]) -> None:
    """Every tensor of the index must be in the shard it names (stray files of another download would not be)."""
    if names == [SINGLE] or not (folder / INDEX).is_file():
        return
    for name, shard in weight_map(folder).items():
        if name not in tensors or tensors[name].file.header.path.name != shard:
            raise CheckpointError(f"{folder / INDEX}: tensor {name} is not in {shard}: {_download(folder)}")


def _side_files(folder: Path) -> Sequence[Path]:
    """Files to copy; those that should be JSON are parsed now, not when the converted model is first run."""
    found = [folder / name for name in SIDE_FILES if _follow(folder / name)]
    for path in found:
        if path.suffix == ".json":
            text = read_text_file(path, MAX_INDEX_BYTES)
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path}: not valid JSON ({error}): {_download(folder)}") from None
    return found


def _follow(path: Path) -> bool:
    """Whether the file is there, links followed; a link to nothing is a download that did not finish."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path}: link to a missing file, download unfinished: {_download(path.parent)}")
    return path.is_file()


def _download(folder: Path) -> str:
    repository = _repository(folder)
    return f"run hf download {repository}" if repository else "download it again"


def _repository(folder: Path) -> str | None:
    """owner/name of a folder inside the hub cache (models--owner--name/snapshots/commit)."""
    for part in folder.absolute().parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return None


def _model_name(folder: Path) -> str:
    return _repository(folder) or folder.absolute().name


def _refuse_what_is_no_folder(path: Path) -> None:
    if not path.is_dir():
        what = "a file; give the folder that holds it" if path.is_file() else "no such folder"
        raise OptionError(f"{path}: {what}")
    if (path / MANIFEST).exists():
        raise OptionError(f"{path}: already a coli model, nothing to convert")
    snapshots = path / "snapshots"
    if snapshots.is_dir() and not (path / "config.json").exists():
        found = sorted(snapshots.iterdir())
        hint = f"give a snapshot: {found[-1]}" if found else f"it holds no snapshot: {_download(path)}"
        raise OptionError(f"{path}: a hub cache folder; {hint}")
