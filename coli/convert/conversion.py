"""From an open Source to a container on disk: plan, stream every file through the quantizer, verify, publish.

Row blocks are read ahead on two threads; the calling thread quantizes (kernels have threads of their own) and writes
them in order, so that peak memory is a handful of blocks whatever the size of the model. Nothing here knows a format.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coli import __version__
from coli.convert.matching import match
from coli.convert.options import ConvertOptions, ConvertReport
from coli.convert.plan import Encode, FilePlan, Held, Operation, Pad, Plan, Scales, Vector
from coli.convert.quantize import encode, pack
from coli.convert.source import QuantizedRows, Source
from coli.convert.work import WorkFolder, refuse_destination
from coli.convert.writer import FileWriter, header_bytes, write_file
from coli.errors import CheckpointError, OptionError
from coli.model.families import spec_from_config
from coli.model.tensors import container_spec
from coli.process_use import peak_memory_bytes
from coli.store.container import Container
from coli.store.manifest import FORMAT_VERSION, MANIFEST, Manifest, container_fingerprint
from coli.store.strict_json import read_text_file

Notice = Callable[[str], None]
READERS = 2
MAX_SIDE_FILE_BYTES = 256 << 20
Progress = Callable[[int, int], None]  # source bytes done, source bytes in all
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def convert_source(
    source: Source, destination: Path, options: ConvertOptions, notice: Notice, progress: Progress | None
) -> ConvertReport:
    """Write `source` as a container into `destination`, which appears whole or not at all.

    Raises OptionError for a destination in use or unknown options, UnsupportedModelError and CheckpointError for the
    source, WriteError for the disk. After an interruption the same call continues where files were finished.
    """
    started = time.monotonic()
    destination = Path(os.path.abspath(destination))  # so that "." and "x/.." have a name and a parent
    options.dense_kind(), options.expert_kind()  # refuses unknown names before anything is read
    refuse_destination(source.path, destination)
    spec = spec_from_config(source.config, source.config_path)
    for assumption in spec.assumed:
        key = assumption.split()[0]
        notice(f"{source.config_path.name} has no {key}: using {assumption}, the default of {spec.model_type}")
    matched = match(source, spec)
    if matched.note is not None:
        notice(matched.note)
    plan = Plan(matched, options)
    signature = source.signature()
    identity = [FORMAT_VERSION, __version__, plan.kinds(), signature]
    calibration = options.calibration
    if calibration is not None:
        if not plan.chooses_q4_scales():
            raise OptionError(
                "--calibrate: weights the scales of q4 matrices, but none is made here: add --quant q4 or leave it out"
            )
        identity.append(calibration.signature)
        plan.quantization["calibration"] = calibration.description
    job = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    with WorkFolder(destination, job) as work:
        resumed = [file for file in plan.files if file.name in work.finished]
        remaining = [file for file in plan.files if file.name not in work.finished]
        if resumed:
            notice(f"continuing an interrupted conversion: {len(resumed)} of {len(plan.files)} files are complete")
        side_bytes = sum(_nbytes(item) for item in source.side_files.values())
        work.check_space(side_bytes + sum(len(header_bytes(file.entries)) + file.data_bytes for file in remaining))
        if calibration is not None and remaining:
            plan.importance = calibration.measure(signature)
        meter = _Meter(plan, progress, resumed)
        with ThreadPoolExecutor(READERS, "convert-read") as pool:
            for file in remaining:
                work.record(file.name, _write(plan, file, work.path, pool, options.num_threads(), meter))
        digests = {file.name: work.finished[file.name].sha256 for file in plan.files}
        for name, item in source.side_files.items():
            digests[name] = write_file(work.path / name, _content(item))
        digests["config.json"] = write_file(work.path / "config.json", source.config_text)
        if source.signature() != signature:
            raise CheckpointError(f"{source.path}: changed while it was being converted: convert again")
        digests = dict(sorted(digests.items()))
        layers = plan.layers()
        manifest = Manifest(source.description, plan.quantization, plan.tensors, spec.num_experts, layers, digests)
        fingerprint = container_fingerprint(source.config_text, digests)
        text = json.dumps(manifest.to_json(fingerprint), indent=1)
        write_file(work.path / MANIFEST, text.encode())
        container_spec(Container.load(work.path))
        work.publish()
    written = sum(path.stat().st_size for path in destination.iterdir())
    return ConvertReport(
        path=destination,
        source_bytes=meter.total,
        container_bytes=written,
        files=len(digests) + 1,
        resumed_files=len(resumed),
        seconds=time.monotonic() - started,
        peak_memory_bytes=peak_memory_bytes(),
    )


def _nbytes(item: Path | bytes) -> int:
    return len(item) if isinstance(item, bytes) else item.stat().st_size


def _content(item: Path | bytes) -> bytes:
    return item if isinstance(item, bytes) else read_text_file(item, MAX_SIDE_FILE_BYTES)


class _Meter:
    """Counts source bytes as their output is written."""

    def __init__(self, plan: Plan, progress: Progress | None, resumed: Sequence[FilePlan]) -> None:
        self._progress = progress
        sizes = {file.name: sum(_source_bytes(step) for step in plan.stream(file)) for file in plan.files}
        self.total = sum(sizes.values())
        self._done = 0
        self.add(sum(sizes[file.name] for file in resumed))

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)


def _write(plan: Plan, file: FilePlan, folder: Path, pool: ThreadPoolExecutor, threads: int, meter: _Meter) -> str:
    """Write one file of the plan; returns its sha256."""
    pending: list[NDArray[Any]] = []
    held: dict[str, NDArray[Any]] = {}
    with FileWriter(folder / file.name, file.entries) as writer:
        for step, block in _in_order(pool, READERS + 1, _read, plan.stream(file)):
            match step:
                case Encode(kind=kind):
                    assert block is not None
                    if isinstance(block, QuantizedRows):
                        encoded = pack(kind, block)
                    else:
                        encoded = encode(kind, block, step.rows.tensor.name, threads, step.importance)
                    writer.write(encoded.weights.data)
                    if encoded.scales is not None:
                        pending.append(encoded.scales)
                case Scales(hold=name):
                    scales, pending = np.concatenate(pending), []
                    if name is None:
                        writer.write(scales.data)
                    else:
                        held[name] = scales
                case Held(name=name):
                    writer.write(held.pop(name).data)
                case Vector():
                    assert isinstance(block, np.ndarray)
                    values = np.zeros(step.length, np.float32)
                    values[: block.size] = block.reshape(-1)
                    writer.write(values.data)
                case Pad():
                    writer.pad(step.end)
            meter.add(_source_bytes(step))
        return writer.finish()


def _read(step: Operation) -> NDArray[np.float32] | QuantizedRows | None:
    """The source rows a step needs; runs on a reader thread."""
    match step:
        case Encode(kind=kind) if kind is step.rows.native_kind:
            return step.rows.read_native(step.start, step.stop)
        case Encode():
            return step.rows.read(step.start, step.stop)
        case Vector():
            return step.rows.read(0, step.rows.rows)
        case _:
            return None


def _source_bytes(step: Operation) -> int:
    if isinstance(step, Encode):
        return (step.stop - step.start) * step.rows.tensor.row_bytes
    return step.rows.rows * step.rows.tensor.row_bytes if isinstance(step, Vector) else 0


def _in_order(
    pool: ThreadPoolExecutor, window: int, work: Callable[[_Item], _Result], items: Iterator[_Item]
) -> Iterator[tuple[_Item, _Result]]:
    """(item, work(item)) in the order of `items`, with at most `window` of them in memory at a time."""
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= window:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
