"""One file over HTTP: resumed where it broke off, never longer than allowed, checked by size and hash, whole or absent.

The bytes arrive in NAME.part with NAME.part.json beside it; both survive a kill, and NAME appears only when everything
agrees. Called by `pull`, from one thread. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from io import FileIO
from pathlib import Path
from typing import IO, Any

from coli import __version__
from coli.errors import DownloadError, OptionError, WriteError
from coli.impostors import impostor

Notice = Callable[[str], None]
Progress = Callable[[int, int | None], None]  # bytes there, bytes in all
CHUNK = 1 << 20
TRIES = 5  # in a row that bring nothing new
TIMEOUT_S = 60.0
MAX_BYTES = 4 << 40
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Remote:
    """What to fetch and what is known of it. `blob` is git's hash, of files that are not in large-file storage."""

    url: str
    size: int | None = None
    sha256: str | None = None
    blob: str | None = None
    token: str | None = None
    max_bytes: int = MAX_BYTES


def download(
    remote: Remote,
    target: Path,
    notice: Notice,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Bring `remote` to `target`; nothing is fetched when it is there already.

    Raises DownloadError (server, size, hash; names the file), WriteError (disk), OptionError (URL, size cap, in use).
    """
    scheme = urllib.parse.urlsplit(remote.url).scheme
    if scheme not in ("http", "https"):
        raise OptionError(f"{remote.url}: expected an http or https address")
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    with _locked(part) as file:
        transfer = _Transfer(remote, target, part, file, progress)
        failures, most = 0, transfer.have
        while not transfer.complete:
            try:
                transfer.attempt()
                reason = f"the connection ended after {transfer.have} of {transfer.size} bytes"
            except (OSError, http.client.HTTPException) as error:
                reason = _reason(error)
            if transfer.complete:
                break
            failures = 0 if transfer.have > most else failures + 1  # starting over must not go on for ever
            most = max(most, transfer.have)
            if failures >= TRIES:
                raise DownloadError(f"{target.name}: {reason}; the same command goes on from there")
            if failures:
                pause(2.0 ** (failures - 1))
        transfer.finish(notice)


def beginning(remote: Remote, name: str, nbytes: int, pause: Callable[[float], None] = time.sleep) -> tuple[bytes, int]:
    """The first `nbytes` bytes of `remote`, fewer if it has fewer, and its size; for looking, not for keeping.

    Raises DownloadError that names the file.
    """
    for failures in range(TRIES):
        if failures:
            pause(2.0 ** (failures - 1))
        try:
            with _ask(remote, {"Range": f"bytes=0-{nbytes - 1}"}, name)[0] as response:
                found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
                length = response.headers.get("Content-Length", "")
                whole = int(found[3]) if found else int(length) if length.isdigit() else None
                size = remote.size if remote.size is not None else whole
                if size is None or (whole is not None and whole != size):
                    raise DownloadError(
                        f"{name}: expected {size} bytes, the server announces {whole}: "
                        "the file there is another one than was listed"
                    )
                data = response.read(min(nbytes, size))
                if len(data) == min(nbytes, size):
                    return data, size
                reason = f"the connection ended after {len(data)} bytes"
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
    raise DownloadError(f"{name}: {reason}; the same command tries again")


def _ask(
    remote: Remote, headers: Mapping[str, str], name: str, have: int = 0
) -> tuple[http.client.HTTPResponse, _Redirects]:
    """The response to a request for `remote`; OSError for what may pass, DownloadError for what will not."""
    request = urllib.request.Request(remote.url, headers={"User-Agent": f"coli/{__version__}", **headers})
    request.add_header("Accept-Encoding", "identity")
    if remote.token:
        request.add_unredirected_header("Authorization", f"Bearer {remote.token}")
    redirects = _Redirects()
    try:
        return urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_S), redirects
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:
                raise _TooFarError(errno.EPROTO, "the server has less than is here already") from None
            if error.code in (408, 425, 429) or error.code >= 500:
                raise OSError(errno.EAGAIN, f"the server answers {error.code} {error.reason}") from None
            hint = {401: ": a token is needed (HF_TOKEN)", 403: ": access is not granted", 404: ": no such file"}
            text = f"{name}: the server answers {error.code} {error.reason}{hint.get(error.code, '')}"
            raise DownloadError(text) from None


class _TooFarError(OSError):
    """There is no such byte."""


class _Transfer:
    """One file on its way; `have` bytes are in the .part file."""

    def __init__(self, remote: Remote, target: Path, part: Path, file: FileIO, progress: Progress) -> None:
        self.remote, self.target, self.part, self.file, self.progress = remote, target, part, file, progress
        self.notes = part.with_name(f"{part.name}.json")
        known = self._known()
        self.etag: str | None = known.get("etag")
        self.size: int | None = remote.size if remote.size is not None else known.get("size")
        self.sha256: str | None = remote.sha256 or known.get("sha256")
        self.have = os.fstat(file.fileno()).st_size if known else 0
        self.ended = known.get("ended") == self.have > 0  # a body without a length, read to its end
        if self.size is not None and self.have > self.size:
            self._restart()

    @property
    def complete(self) -> bool:
        return self.ended if self.size is None else self.have == self.size

    def attempt(self) -> None:
        """Ask for what is missing and append what comes."""
        if self.have and not (self.etag or self.sha256 or self.remote.blob):
            self._restart()  # nothing would tell whether the rest belongs to it
        headers = {"Range": f"bytes={self.have}-"} if self.have else {}
        if self.have and self.etag:
            headers["If-Range"] = self.etag
        try:
            response, redirects = _ask(self.remote, headers, self.target.name, self.have)
        except _TooFarError:
            self._restart()
            raise
        with response:
            self._linked(redirects.linked)
            self._begin(response)
            self._append(response)

    def _begin(self, response: http.client.HTTPResponse) -> None:
        """Check what the response says of itself, and put the file where its bytes begin."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError(f"{self.target.name}: the server sent it compressed, which was not asked for")
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        if response.status == 206:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != self.have:
                self._restart()
                raise OSError(errno.EPROTO, "the server sent another range than asked for")
            total = int(found[3])
        elif self.have:
            self._restart()
        if total is not None and self.size is not None and total != self.size:
            if self.remote.size is None and self.have:
                self._restart()
                raise OSError(errno.EPROTO, "the file has changed on the server")
            raise DownloadError(
                f"{self.target.name}: expected {self.size} bytes, the server announces {total}: "
                "the file there is another one than was listed"
            )
        self.size = total if self.size is None else self.size
        if self.size is not None and self.size > self.remote.max_bytes:
            raise OptionError(
                f"{self.target.name}: {self.size} bytes are more than the {self.remote.max_bytes} allowed (--max-size)"
            )
        if self.size is not None:
            check_space(self.part.parent, self.size - self.have, self.target.name)
        etag = response.headers.get("ETag")
        self.etag = etag if etag and not etag.startswith("W/") else None
        self._note()

    def _append(self, response: http.client.HTTPResponse) -> None:
        self.file.seek(self.have)
        while block := response.read(CHUNK):
            if self.have + len(block) > (self.remote.max_bytes if self.size is None else self.size):
                raise DownloadError(f"{self.target.name}: the server sends more than {self.size or 'allowed'} bytes")
            try:
                written = 0
                while written < len(block):
                    written += self.file.write(block[written:])
            except OSError as error:
                raise _disk(self.part, error) from None
            finally:
                self.have += written
            self.progress(self.have, self.size)
        if self.size is None:  # a body without a length ends with the connection, or with its last chunk
            self.ended = True
            self._note()

    def finish(self, notice: Notice) -> None:
        """Check the whole file and give it its name."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise _disk(self.part, error) from None
        self.file.seek(0)
        if what := impostor(self.file.read(64)):
            self._remove()
            raise DownloadError(f"{self.target.name}: {what}")
        digest, blob = self._digests()
        for expected, found, kind in ((self.sha256, digest, "sha256"), (self.remote.blob, blob, "git blob")):
            if expected is not None and expected != found:
                self._remove()
                raise DownloadError(
                    f"{self.target.name}: wrong hash: expected {kind} {expected}, found {found}; "
                    "the download was deleted, get it again or from elsewhere"
                )
        if self.sha256 is None and self.remote.blob is None:
            notice(f"{self.target.name}: nobody told its hash, so only its size was checked; its sha256 is {digest}")
        os.replace(self.part, self.target)
        self.notes.unlink(missing_ok=True)

    def _digests(self) -> tuple[str, str]:
        digest, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.have)
        self.file.seek(0)
        while block := self.file.read(CHUNK):
            digest.update(block)
            if self.remote.blob is not None:
                blob.update(block)
        return digest.hexdigest(), blob.hexdigest()

    def _linked(self, linked: tuple[str | None, int | None]) -> None:
        """What a hub said of the file before it sent us elsewhere for it."""
        sha256, size = linked
        if sha256 and self.sha256 and sha256 != self.sha256:
            if self.remote.sha256:
                raise DownloadError(
                    f"{self.target.name}: wrong hash: expected sha256 {self.sha256}, the server announces {sha256}"
                )
            self._restart()
        self.sha256 = self.sha256 or sha256
        self.size = self.size if self.size is not None else size

    def _known(self) -> dict[str, Any]:
        """What an earlier process noted of this very download; empty: start afresh."""
        try:
            known = json.loads(self.notes.read_text())
        except (OSError, ValueError):
            return {}
        right = isinstance(known, dict) and known.get("url") == self.remote.url
        kinds = {"etag": str, "size": int, "sha256": str, "ended": int}
        return (
            {k: v for k, v in known.items() if k == "url" or (k in kinds and isinstance(v, kinds[k]))} if right else {}
        )

    def _note(self) -> None:
        notes = {"url": self.remote.url, "etag": self.etag, "size": self.size, "sha256": self.sha256}
        text = json.dumps(notes | ({"ended": self.have} if self.ended else {}))
        try:
            fresh = self.notes.with_name(f"{self.notes.name}.new")
            fresh.write_text(text)
            os.replace(fresh, self.notes)
        except OSError as error:
            raise _disk(self.notes, error) from None

    def _restart(self) -> None:
        self.file.truncate(0)
        self.have, self.etag, self.ended = 0, None, False
        if self.remote.size is None:
            self.size = None
        if self.remote.sha256 is None:
            self.sha256 = None

    def _remove(self) -> None:
        for path in (self.part, self.notes):
            path.unlink(missing_ok=True)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http(s) only, never from https to http; a token goes on to the same host only."""

    def __init__(self) -> None:
        self.linked: tuple[str | None, int | None] = (None, None)

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme != "https"):
            raise DownloadError(f"{req.full_url}: the server redirects to {new.scheme}: refused")
        self.linked = _linked_facts(headers) if self.linked == (None, None) else self.linked
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following


def _linked_facts(headers: Mapping[str, str] | Message) -> tuple[str | None, int | None]:
    etag, size = (headers.get("X-Linked-Etag") or "").strip('"'), headers.get("X-Linked-Size") or ""
    return (etag if _SHA256.fullmatch(etag) else None), (int(size) if size.isdigit() else None)


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[FileIO]:
    """The .part file, open to read and write and ours alone; unbuffered, so that a full disk is met where we write."""
    try:
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644), "r+b", 0)
    except OSError as error:
        raise _disk(part, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OptionError(f"{part}: another process is downloading it; wait for that one") from None
        yield file


def check_space(folder: Path, wanted: int, name: str) -> None:
    """WriteError when `folder`'s disk has less than `wanted` bytes left."""
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise WriteError(f"{name}: {wanted} more bytes are needed, {folder} has {free} left: free some space")


def file_sha256(path: Path) -> str:
    """Of a whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk(path: Path, error: OSError) -> WriteError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = ": free some space and give the same command again, it goes on from there" if full else ""
    return WriteError(f"{path}: {error.strerror}{remedy}")


def _reason(error: OSError | http.client.HTTPException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
