"""A Hugging Face repository becomes a container file by file: each weight file is fetched, converted, and may go again.

Only the headers of all weight files are needed to begin; they are fetched first. What was converted stays converted
when the pull is interrupted, so a weight file that was deleted is not fetched again. A complete snapshot in the hub's
own cache is converted where it lies. Called by `pull`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coli.convert import ConvertOptions, Notice, convert
from coli.convert import Progress as Converting
from coli.convert.conversion import convert_source
from coli.convert.hf import INDEX, HuggingFaceSource, shards_of
from coli.errors import CheckpointError, DownloadError, OptionError, WriteError
from coli.model.families import spec_from_config
from coli.options import set_for_libraries
from coli.store.safetensors_file import SafetensorsHeader, header_length, read_header
from coli.store.strict_json import read_object
from coli.tools.download import MAX_BYTES, Progress, Remote, beginning, download, file_sha256

HEAD_BYTES = 256 << 10  # of a weight file: most headers fit
_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
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


def parse_repository(spec: str) -> tuple[str, str | None]:
    """ORG/REPO and the revision of ORG/REPO[@REVISION]."""
    found = _REPO.fullmatch(spec)
    if found is None:
        raise OptionError(f"hf:{spec}: expected hf:ORG/REPO or hf:ORG/REPO@REVISION")
    return found[1], found[2]


class Repository:
    """One repository on its way into a container; `work` keeps what is fetched."""

    def __init__(self, spec: str, work: Path, options: PullOptions, notice: Notice, fetching: Progress) -> None:
        self._spec, self._work, self._options = spec, work, options
        self._notice, self._fetching = notice, fetching
        self._repo, self._revision = parse_repository(spec)
        if options.download_mode == "hf_transfer":  # what the hub's library and its accelerators look for
            for name in ("HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER"):
                set_for_libraries(name, "1")
        self._hub = _hub()
        self._commit = ""

    def convert(self, target: Path, converting: Converting) -> None:
        """Fetch and convert it into the container folder `target`."""
        cached = _cached(self._hub, self._repo, self._revision)
        if self._hub.constants.is_offline_mode():
            if cached is None:
                raise DownloadError(
                    f"hf:{self._spec}: offline mode is on (HF_HUB_OFFLINE), and the hub's cache does not hold it"
                )
            convert(cached, target, self._options.convert, self._notice, converting)
            return
        commit, files = _listing(self._hub, self._repo, self._revision, self._options)
        if cached is not None and cached.name == commit and all((cached / name).exists() for name in files):
            self._notice(f"{cached}: already in the hub's cache")
            convert(cached, target, self._options.convert, self._notice, converting)
            return
        self._begin(commit)
        for name, remote in files.items():
            if not name.endswith(".safetensors"):
                self.fetch(name, remote)
            if name == "config.json":  # first of all: an unknown family costs no gigabytes
                spec_from_config(read_object(self._work / name), self._work / name)
        names = shards_of(self._work, [name for name in files if name.endswith(".safetensors")])
        if missing := [name for name in names if name not in files]:
            raise CheckpointError(f"hf:{self._repo}: {INDEX} names files that are not there: {', '.join(missing[:5])}")
        headers = {name: self._header(name, files[name]) for name in names}
        source = HuggingFaceSource(self._work, (headers, commit))
        arrivals = _Arrivals(source, self._work, files, self._options.delete_source, self.fetch)
        try:
            convert_source(source, target, self._options.convert, self._notice, converting, arrivals)
        finally:
            source.close()

    def fetch(self, name: str, remote: Remote) -> None:
        """Bring one file into the work folder, through the hub's library where its accelerators are wanted."""
        if self._accelerated(name, remote):
            self._fetch_by_hub(name, remote)
        else:
            download(remote, self._work / name, self._notice, self._fetching)

    def _accelerated(self, name: str, remote: Remote) -> bool:
        """Whether the hub's own library fetches this file. Small files gain nothing from its accelerators."""
        mode = self._options.download_mode
        if mode == "default" or remote.sha256 is None or (self._work / name).exists():
            return False
        if mode == "hf_transfer":
            return True
        if importlib.util.find_spec("hf_xet") is None or (self._work / f"{name}.part").exists():
            return False  # without it, or with a part of our own, there is nothing to gain
        try:
            metadata = self._hub.get_hf_file_metadata(remote.url, token=remote.token)
        except Exception:  # whatever it has to say: then it is fetched plainly
            return False
        return getattr(metadata, "xet_file_data", None) is not None

    def _fetch_by_hub(self, name: str, remote: Remote) -> None:
        way = "hf_xet" if self._options.download_mode == "auto" else "huggingface_hub's high-bandwidth mode"
        self._notice(f"fetching {name} through {way}")
        try:
            self._hub.hf_hub_download(
                self._repo, name, revision=self._commit, local_dir=self._work, token=remote.token or False
            )
        except Exception as error:  # the hub's, its HTTP library's, the accelerator's and the network's own kinds
            reason = str(error).strip().splitlines() or [type(error).__name__]
            text = f"hf:{self._repo}: {name}: {reason[0]}; --download-mode default goes without"
            raise DownloadError(text) from None
        found = file_sha256(self._work / name)
        if found != remote.sha256:
            (self._work / name).unlink()
            raise DownloadError(f"{name}: wrong hash: expected sha256 {remote.sha256}, found {found}")

    def _begin(self, commit: str) -> None:
        """Empty the work folder of another revision's files."""
        self._commit = commit
        marker = self._work / "commit"
        if marker.exists() and marker.read_text() != commit:
            shutil.rmtree(self._work)
            self._work.mkdir()
        try:
            marker.write_text(commit)
        except OSError as error:
            raise WriteError(f"{marker}: {error.strerror}: free some space") from None

    def _header(self, name: str, remote: Remote) -> SafetensorsHeader:
        """The header of a weight file, from the file if it is there, else from its beginning, which is kept."""
        path, head = self._work / name, self._work / f"{name}.head"
        if path.exists():
            return read_header(path)
        if not head.exists() or remote.size is None:
            data, size = beginning(remote, name, HEAD_BYTES)
            wanted = 8 + header_length(data, path)
            if wanted > len(data) and len(data) < size:
                data, size = beginning(remote, name, wanted)
            remote = replace(remote, size=size)
            part = self._work / f"{name}.head.part"
            try:
                part.write_bytes(data[:wanted])
                os.replace(part, head)
            except OSError as error:
                part.unlink(missing_ok=True)
                raise WriteError(f"{part}: {error.strerror}: free some space") from None
        try:
            return replace(read_header(head, remote.size), path=path)
        except CheckpointError:
            head.unlink()
            raise


class _Arrivals:
    """Brings weight files of a conversion one by one; see source.Delivery."""

    def __init__(
        self,
        source: HuggingFaceSource,
        work: Path,
        remotes: Mapping[str, Remote],
        delete: bool,
        fetch: Callable[[str, Remote], None],
    ) -> None:
        self._source, self._work, self._remotes, self._delete = source, work, remotes, delete
        self._fetch = fetch
        self._wanted = dict.fromkeys(source.files)

    def room(self) -> int:
        sizes = [self._source.file(name).header.file_bytes - self._there(name) for name in self._wanted]
        return max(sizes, default=0) if self._delete else sum(sizes)

    def bring(self, name: str) -> None:
        path, file = self._work / name, self._source.file(name)
        if file.is_open:
            return
        self._fetch(name, self._remotes[name])
        found = read_header(path)
        if (found.tensors, found.file_bytes) != (file.header.tensors, file.header.file_bytes):
            for each in (path, self._work / f"{name}.head"):
                each.unlink(missing_ok=True)
            raise CheckpointError(f"{name}: its header is another one than was fetched before: pull again")
        file.open()

    def spent(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._source.file(name).close()
        if self._delete:
            for suffix in ("", ".part", ".part.json"):
                (self._work / (name + suffix)).unlink(missing_ok=True)

    def _there(self, name: str) -> int:
        for path in (self._work / name, self._work / f"{name}.part"):
            if path.exists():
                return path.stat().st_size
        return 0


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


def _listing(hub: Any, repo: str, revision: str | None, options: PullOptions) -> tuple[str, dict[str, Remote]]:
    """The commit, and the files wanted, config.json first; sizes and hashes as the hub tells them."""
    try:
        info = hub.HfApi(library_name="coli", token=options.token).model_info(
            repo, revision=revision, files_metadata=True
        )
    except Exception as error:  # the hub's, its HTTP library's and the network's own kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(f"hf:{repo}: {reason[0]}") from None
    token, commit, files = options.token or hub.get_token(), str(info.sha), dict[str, Remote]()
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
        files[name] = remote
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        ggufs = [str(s.rfilename) for s in info.siblings or [] if str(s.rfilename).endswith(".gguf")]
        hint = f"; give the URL of one of its GGUF files: {', '.join(ggufs[:5])}" if ggufs else ""
        raise CheckpointError(f"hf:{repo}: no config.json with safetensors in it{hint}")
    total = sum(remote.size or 0 for remote in files.values())
    if total > options.max_bytes:
        raise OptionError(f"hf:{repo}: {total} bytes are more than the {options.max_bytes} allowed (--max-size)")
    return commit, {name: files[name] for name in sorted(files, key=lambda name: (name != "config.json", name))}
