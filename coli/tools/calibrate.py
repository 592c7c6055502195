"""`coli convert --calibrate TEXT`: which input columns of each matrix matter, measured by running the model on a text.

The source becomes a q8 container in a hidden folder beside the destination, reads the text in windows, and the mean
square of what every column multiplies is kept. Rows come in a fixed order into float64 sums, so the result is the same
on every machine. The folder goes when the conversion is done, and stays for the next try when it was interrupted.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli import __version__
from coli.convert import ConvertOptions, ConvertReport, Notice, Progress, convert
from coli.convert.importance import Importance
from coli.errors import OptionError, WriteError
from coli.llm import LLM
from coli.model.loader import AttentionWeights, LatentWeights, LayerWeights, Linear, ModelWeights, MoeWeights
from coli.options import EngineOptions

MAX_TEXT_BYTES = 4 << 20  # what lies behind is not read
MAX_TOKENS = 32_768
MIN_TOKENS = 512  # fewer say little of thousands of columns
WINDOW = 1024
CHUNK = 512
SINK_ROWS = 1  # first rows of a window, which are not counted: they hold the attention sink, a thousand times larger
PRIOR_ROWS = 64  # an expert counts as if it had seen so many rows of its layer's mean too
FLOOR = 0.01  # of the matrix's mean: a column the text did not use matters a little
RULES = ("q8", "heads", MAX_TEXT_BYTES, MAX_TOKENS, WINDOW, SINK_ROWS, PRIOR_ROWS, FLOOR)

Sums = NDArray[np.float64]


def convert_calibrated(
    source: Path,
    destination: Path,
    options: ConvertOptions,
    text: Path,
    notice: Notice,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert as `coli.convert.convert` does, q4 scales weighted by what matters on the text in file `text`.

    Raises OptionError for a text that is missing, too short or not UTF-8, and what `convert` raises.
    """
    destination = Path(os.path.abspath(destination))
    folder = destination.with_name(f".{destination.name}.calibration")
    measuring = _TextCalibration(source, folder, options, read_text(text), notice, progress)
    try:
        report = convert(source, destination, replace(options, calibration=measuring), notice, progress)
    except (WriteError, KeyboardInterrupt):
        raise
    except BaseException:
        measuring.discard()
        raise
    measuring.discard()
    return report


def read_text(path: Path) -> str:
    """The beginning of a UTF-8 file; OptionError says in one line why there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise OptionError(f"--calibrate: {path}: {error.strerror or error}; give a file of plain text") from None
    try:
        # a character may be cut at the end of what is read, not at the end of the file
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=len(data) < MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise OptionError(f"--calibrate: {path}: not UTF-8 at byte {error.start}; give a file of plain text") from None
    if not text.strip():
        raise OptionError(f"--calibrate: {path}: no text in it; at least {MIN_TOKENS} tokens are needed")
    return text


class _TextCalibration:
    """coli.convert.importance.Calibration over a text; works in `folder`."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        options: ConvertOptions,
        text: str,
        notice: Notice,
        progress: Progress | None,
    ) -> None:
        self._source, self._folder, self._text = source, folder, text
        self._options = ConvertOptions(
            quant="q8", threads=options.threads, simd=options.simd, kernel_cache=options.kernel_cache
        )
        self._notice, self._progress = notice, progress
        self._digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def signature(self) -> str:
        return json.dumps([self._digest, *RULES])

    @property
    def description(self) -> str:
        return f"text sha256:{self._digest[:16]}"

    def measure(self, source_signature: str) -> Importance:
        job = hashlib.sha256(json.dumps([__version__, source_signature, self.signature]).encode()).hexdigest()
        kept, marker, model = self._folder / "importance.npz", self._folder / "job", self._folder / "model"
        try:
            if not marker.exists() or marker.read_text() != job:
                self.discard()
                self._folder.mkdir()
                marker.write_text(job)
        except OSError as error:
            raise WriteError(f"{self._folder}: {error.strerror or error}") from None
        if not kept.exists():
            if not (model / "coli.json").exists():
                self._notice("calibrating: a q8 model first, in a hidden folder beside the destination")
                convert(self._source, model, self._options, lambda line: None, self._progress)
            _save(kept, self._run(model))
        with np.load(kept) as arrays:
            return _importance(dict(arrays))

    def discard(self) -> None:
        """Remove the folder, if it is ours."""
        if (self._folder / "job").exists():
            shutil.rmtree(self._folder)

    def _run(self, model: Path) -> dict[str, NDArray[np.float32]]:
        engine = EngineOptions(
            threads=self._options.threads, kv="f32", simd=self._options.simd, kernel_cache=self._options.kernel_cache,
            pin="off", usage_save=False,
        )  # fmt: skip
        with LLM.open(model, engine, self._notice) as llm:
            ids = llm.tokenizer.encode(self._text)[:MAX_TOKENS]
            if len(ids) < MIN_TOKENS:
                raise OptionError(f"--calibrate: the text has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
            beyond = max(ids)
            if beyond >= llm.spec.vocab_size:
                raise OptionError(
                    f"--calibrate: the tokenizer gives id {beyond}, the model has {llm.spec.vocab_size}: "
                    "tokenizer and weights do not belong together"
                )
            self._notice(f"calibrating: {len(ids)} tokens of text")
            return mean_squares(llm, ids, self._progress)


def mean_squares(
    llm: LLM, ids: Sequence[int], progress: Callable[[int, int], None] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Mean squared activations by tensor name (cols,), of matrices per head (N, cols), and by `layers.L.experts.PART`
    (E, cols) for experts."""
    prefix = list(llm.tokenizer.prefix_ids)
    window = min(WINDOW, llm.spec.max_position_embeddings)
    loaded = llm.load(window)
    sums = _Sums(loaded.model.weights, llm)
    body = window - len(prefix)
    cache = loaded.new_cache(window)
    for start in range(0, len(ids), body):
        piece = np.array([*prefix, *ids[start : start + body]], np.int64)
        cache.rewind(0)
        for at in range(0, len(piece), CHUNK):
            sums.skip = max(0, SINK_ROWS - at)
            loaded.model.watch(cache, piece[at : at + CHUNK], sums)
        if progress is not None:
            progress(min(start + body, len(ids)), len(ids))
    return sums.means()


class _Sums:
    """coli.model.sight.Look: sums of squares by column."""

    def __init__(self, weights: ModelWeights, llm: LLM) -> None:
        self.skip = 0
        self._names = {linear.weights: name for name, linear in _matrices(weights)}
        self._dense: dict[str, tuple[Sums, int]] = {}
        self._num_experts = llm.spec.num_experts
        self._experts: dict[str, Sums] = {}
        self._seen: dict[int, NDArray[np.int64]] = {}  # by layer: rows of each expert

    def dense(self, linears: tuple[Linear, ...], x: NDArray[np.float32]) -> None:
        squares = _squares(x[self.skip :])
        for linear in linears:
            name = self._names.get(linear.weights)
            if name is not None:
                before, rows = self._dense.get(name, (np.zeros(x.shape[1:]), 0))
                self._dense[name] = before + squares, rows + len(x) - self.skip

    def expert(
        self,
        layer_idx: int,
        expert_id: int,
        rows: NDArray[np.int64],
        x: NDArray[np.float32],
        hidden: NDArray[np.float32],
    ) -> None:
        counted = rows >= self.skip
        seen = self._seen.setdefault(layer_idx, np.zeros(self._num_experts, np.int64))
        seen[expert_id] += int(counted.sum())
        for part, values in (("gate", x), ("down", hidden)):
            name = f"layers.{layer_idx}.experts.{part}"
            if name not in self._experts:
                self._experts[name] = np.zeros((self._num_experts, values.shape[1]))
            self._experts[name][expert_id] += _squares(values[counted])

    def means(self) -> dict[str, NDArray[np.float32]]:
        """Means, experts drawn to their layer's where they saw few rows, none below a share of the matrix's mean."""
        found = {name: _floored(total / max(rows, 1)) for name, (total, rows) in self._dense.items()}
        for name, total in self._experts.items():
            seen = self._seen[int(name.split(".")[1])][:, None]
            layer = total.sum(axis=0) / max(int(seen.sum()), 1)
            means = _floored((total + PRIOR_ROWS * layer) / (seen + PRIOR_ROWS))
            found[name] = means
            if name.endswith(".gate"):
                found[name.removesuffix("gate") + "up"] = means
        return found


def _squares(x: NDArray[np.float32]) -> Sums:
    """(n, cols) -> (cols,), or (n, N, cols) -> (N, cols): sums of squares in float64, row after row."""
    total = np.zeros(x.shape[1:])
    for row in x.astype(np.float64):
        total += row * row
    return total


def _floored(means: Sums) -> NDArray[np.float32]:
    """(..., cols), each row scaled to a mean of 1 and kept away from 0; all ones where nothing was ever active."""
    average = means.mean(axis=-1, keepdims=True)
    scaled = np.divide(means, average, out=np.ones_like(means), where=average > 0)
    floored: NDArray[np.float32] = np.maximum(scaled, FLOOR).astype(np.float32)
    return floored


def _matrices(weights: ModelWeights) -> list[tuple[str, Linear]]:
    """Every dense matrix that multiplies activations, by tensor name."""
    tied = weights.lm_head is weights.embed_tokens
    found = [("model.embed_tokens.weight" if tied else "lm_head.weight", weights.lm_head)]
    for layer in weights.layers:
        found += _layer_matrices(layer)
    return found


def _layer_matrices(layer: LayerWeights) -> list[tuple[str, Linear]]:
    prefix = f"model.layers.{layer.spec.layer_idx}"
    found = [(f"{prefix}.self_attn.{name}.weight", linear) for name, linear in _attention_matrices(layer.attention)]
    mlp, where = layer.mlp, f"{prefix}.mlp"
    if isinstance(mlp, MoeWeights):
        if mlp.shared_expert is None:
            return found
        mlp, where = mlp.shared_expert, f"{where}.shared_expert"
    matrices = (("gate", mlp.gate_proj), ("up", mlp.up_proj), ("down", mlp.down_proj))
    return found + [(f"{where}.{name}_proj.weight", linear) for name, linear in matrices]


def _attention_matrices(weights: AttentionWeights | LatentWeights) -> list[tuple[str, Linear]]:
    if isinstance(weights, AttentionWeights):
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        return [(name, getattr(weights, name)) for name in names]
    found = [(name, getattr(weights, name)) for name in ("kv_a_proj_with_mqa", "k_up", "v_up", "o_proj")]
    if weights.indexer is not None:
        found += [(f"indexer.{name}", getattr(weights.indexer, name)) for name in ("wq_b", "wk", "weights_proj")]
    if weights.q_b_proj is None:
        return [("q_proj", weights.q_proj), *found]
    return [("q_a_proj", weights.q_proj), ("q_b_proj", weights.q_b_proj), *found]


def _importance(arrays: dict[str, NDArray[np.float32]]) -> Importance:
    dense: dict[str, NDArray[np.float32]] = {}
    experts: dict[int, dict[str, NDArray[np.float32]]] = {}
    for name, columns in arrays.items():
        head, *rest = name.split(".")
        if head == "layers":
            experts.setdefault(int(rest[0]), {})[rest[2]] = columns
        else:
            dense[name] = columns
    return Importance(dense, experts)


def _save(path: Path, arrays: dict[str, NDArray[np.float32]]) -> None:
    """One file, whole or not at all."""
    partial = path.with_name("partial.npz")
    try:
        np.savez(partial, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from None
