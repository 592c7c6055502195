"""From an open Source to a container on disk: plan, stream every portion through the quantizer, verify, publish.

Row blocks are read ahead on two threads; the calling thread quantizes (kernels have threads of their own) and writes
them in order, so that peak memory is a handful of blocks whatever the size of the model. Nothing here knows a format.
A source whose files are still to come is converted file by file as they arrive (`Delivery`).
"""

import hashlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coli import __version__
from coli.convert.matching import match
from coli.convert.options import ConvertOptions, ConvertReport
from coli.convert.placing import Placed, Portion, portions
from coli.convert.plan import Encode, FilePlan, Pad, Plan, Vector
from coli.convert.quantize import encode, pack
from coli.convert.source import Delivery, QuantizedRows, Source
from coli.convert.work import WorkFolder, refuse_destination
from coli.convert.writer import FileWriter, file_digest, header_bytes, write_file
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
    source: Source,
    destination: Path,
    options: ConvertOptions,
    notice: Notice,
    progress: Progress | None,
    delivery: Delivery | None = None,
) -> ConvertReport:
    """Write `source` as a container into `destination`, which appears whole or not at all.

    delivery: brings the source's files one by one; None: they are all there.

    Raises OptionError for a destination in use or unknown options, UnsupportedModelError and CheckpointError for the
    source, WriteError for the disk, and what `delivery` raises. After an interruption the same call goes on behind the
    last finished portion.
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
        steps = portions(plan, source.files)
        counts = Counter(portion.file.name for portion in steps)
        left = [portion for portion in steps if not _is_written(portion, work)]
        if len(left) < len(steps):
            notice(f"continuing an interrupted conversion: {_complete(steps, left, resumed, plan)}")
        shipping = _Shipping(delivery or _AllThere(), source.files, left)
        side_bytes = sum(_nbytes(item) for item in source.side_files.values())
        headers = sum(
            len(header_bytes(file.entries)) for file in {portion.file.name: portion.file for portion in left}.values()
        )
        work.check_space(side_bytes + headers + sum(portion.nbytes for portion in left) + shipping.room())
        if calibration is not None and left:
            plan.importance = calibration.measure(signature)
            left = [portion for portion in portions(plan, source.files) if not _is_written(portion, work)]
        meter = _Meter(steps, left, progress)
        with ThreadPoolExecutor(READERS, "convert-read") as pool:
            for portion in left:
                name = portion.file.name
                shipping.bring(portion)
                fresh = not work.portions(name)
                digest = _write(portion, work.path, fresh, pool, options.num_threads(), meter)
                if digest is not None:
                    work.record(name, digest)
                else:
                    work.record_portion(name, portion.number)
                    if len(work.portions(name)) == counts[name]:
                        work.record(name, file_digest(work.path / name))
                shipping.written(portion)
        for file in plan.files:
            if file.name not in work.finished:  # killed behind its last portion
                work.record(file.name, file_digest(work.path / file.name))
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


def _is_written(portion: Portion, work: WorkFolder) -> bool:
    name = portion.file.name
    return name in work.finished or portion.number in work.portions(name)


def _complete(steps: Sequence[Portion], left: Sequence[Portion], resumed: Sequence[FilePlan], plan: Plan) -> str:
    if len(steps) == len(plan.files):
        return f"{len(resumed)} of {len(plan.files)} files are complete"
    return f"{len(steps) - len(left)} of {len(steps)} portions are written"


class _Meter:
    """Counts source bytes as their output is written."""

    def __init__(self, steps: Sequence[Portion], left: Sequence[Portion], progress: Progress | None) -> None:
        self._progress = progress
        self.total = sum(portion.source_bytes for portion in steps)
        self._done = 0
        self.add(self.total - sum(portion.source_bytes for portion in left))

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)


class _AllThere:
    """The delivery of a source whose files are all there."""

    def room(self) -> int:
        return 0

    def bring(self, name: str) -> None:
        pass

    def spent(self, name: str) -> None:
        pass


class _Shipping:
    """Asks for the files that portions need, and says when nothing needs them any more."""

    def __init__(self, delivery: Delivery, files: Sequence[str], left: Sequence[Portion]) -> None:
        self._delivery = delivery
        self._users = Counter(name for portion in left for name in portion.needs)
        for name in files:
            if not self._users[name]:
                delivery.spent(name)

    def room(self) -> int:
        return self._delivery.room()

    def bring(self, portion: Portion) -> None:
        for name in portion.needs:
            self._delivery.bring(name)

    def written(self, portion: Portion) -> None:
        self._users.subtract(portion.needs)
        for name in portion.needs:
            if not self._users[name]:
                self._delivery.spent(name)


def _write(
    portion: Portion, folder: Path, fresh: bool, pool: ThreadPoolExecutor, threads: int, meter: _Meter
) -> str | None:
    """Write one portion into its file; returns the file's sha256 if that is all of it."""
    with FileWriter(folder / portion.file.name, portion.file.entries, fresh=fresh) as writer:
        for placed, block in _in_order(pool, READERS + 1, _read, iter(portion.steps)):
            match placed.step:
                case Encode(kind=kind, rows=rows, importance=importance):
                    assert block is not None
                    if isinstance(block, QuantizedRows):
                        encoded = pack(kind, block)
                    else:
                        encoded = encode(kind, block, rows.tensor.name, threads, importance)
                    assert encoded.weights.nbytes == placed.nbytes, rows.tensor.name
                    writer.write(encoded.weights.data, placed.at)
                    if encoded.scales is not None:
                        assert encoded.scales.nbytes == placed.scales_bytes, rows.tensor.name
                        writer.write(encoded.scales.data, placed.scales_at)
                case Vector(length=length):
                    assert isinstance(block, np.ndarray)
                    values = np.zeros(length, np.float32)
                    values[: block.size] = block.reshape(-1)
                    writer.write(values.data, placed.at)
                case Pad():
                    writer.zeros(placed.nbytes, placed.at)
            meter.add(placed.source_bytes)
        return writer.finish()


def _read(placed: Placed) -> NDArray[np.float32] | QuantizedRows | None:
    """The source rows a step needs; runs on a reader thread."""
    match placed.step:
        case Encode(kind=kind, rows=rows, start=start, stop=stop):
            return rows.read_native(start, stop) if kind is rows.native_kind else rows.read(start, stop)
        case Vector(rows=rows):
            return rows.read(0, rows.rows)
        case _:
            return None


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
