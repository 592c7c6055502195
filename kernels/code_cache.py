"""Machine code of routines on disk, and how it gets into memory.

A file per routine and target, below a folder named by a hash of everything the code depends on: the sources of all
kernels, the compiler's version and Python's. A file begins with the digest of what follows, so that what a crash or a
full disk has damaged is compiled anew. It holds an image (image.py), or where there are none an object file, which
LLVM's loader puts into memory; nothing is unpickled.
"""

import contextlib
import functools
import hashlib
import os
import stat
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from coli.kernels import image
from coli.kernels.target import Target, ask_llvm, identity

CACHE_BYTES = 4 << 20  # room the compiled kernels need
DIGEST_BYTES = 32


class CodeCache:
    """Machine code for one target in `folder`; None: nothing is kept."""

    def __init__(self, folder: Path | None, target: Target) -> None:
        self.folder = folder
        self._key = hashlib.sha256(repr(tuple(target)).encode()).hexdigest()[:16]

    def get(self, name: str) -> bytes | None:
        """That of the routine of this name, None where it is missing or damaged."""
        if self.folder is None:
            return None
        try:
            content = self._file(name).read_bytes()
        except OSError:
            return None
        digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def put(self, name: str, code: bytes) -> None:
        """Keep it for other processes, if that can be done."""
        if self.folder is None:
            return
        _write(self._file(name), hashlib.sha256(code).digest() + code)

    @property
    def complete(self) -> bool:
        """Whether somebody has said so."""
        return self.folder is not None and self._marker(self.folder).exists()

    def set_complete(self) -> None:
        """Say that everything a run needs is there."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._marker(self.folder).touch()

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self._key}-{name}.code"

    def _marker(self, folder: Path) -> Path:
        return folder / f"complete-{self._key}"


def host_target(folder: Path | None) -> Target:
    """This processor as LLVM describes it; remembered in `folder`, since LLVM takes its time to load."""
    found = identity()
    if folder is None or found is None:
        return ask_llvm()
    path = folder / f"host-{hashlib.sha256(found.encode()).hexdigest()[:16]}"
    with contextlib.suppress(OSError, ValueError):
        name, features = path.read_text().splitlines()
        return Target(name, features)
    target = ask_llvm()
    _write(path, f"{target.name}\n{target.features}\n".encode())
    return target


def _write(path: Path, content: bytes) -> None:
    """The file as a whole, if that can be done."""
    with contextlib.suppress(OSError):
        descriptor, place = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(place, path)
        except BaseException:
            os.unlink(place)
            raise


# ------------------------------------------------------------------ the folder
def choose_folder(cache_dir: Path | str | None) -> tuple[Path | None, str | None]:
    """(the folder of compiled code, one line where it is not the one wanted); cache_dir None: ~/.cache/coli."""
    name = f"kernels-{_source_hash()}"
    try:
        base = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "coli"
    except RuntimeError as problem:  # no home directory
        reason = str(problem)
    else:
        try:
            return _private_folder(base / name), None
        except OSError as problem:
            reason = f"{base}: {problem.strerror or problem}"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder: Path | None
    try:
        folder = _private_folder(Path(tempfile.gettempdir()) / f"coli-{user}" / name)
    except OSError:
        folder = _fresh_folder()
    place = (
        f"using {folder}" if folder else "nor can a temporary folder be written: kernels are compiled at every start"
    )
    return folder, f"kernel cache: {reason}; {place}"


def _fresh_folder() -> Path | None:
    with contextlib.suppress(OSError):
        return _private_folder(Path(tempfile.mkdtemp(prefix="coli-kernels-")) / "kernels")
    return None


def _private_folder(folder: Path) -> Path:
    """The folder, made if need be and writable. Compiled code is loaded from it, so nobody else may own or write it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder, folder.parent):
        status = place.stat()
        if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH):
            raise PermissionError(13, f"{place} belongs to or can be written by another user")
    with tempfile.TemporaryFile(dir=folder) as file:
        if not any(folder.glob("complete-*")):
            file.write(bytes(CACHE_BYTES))
            file.flush()  # on a full disk this fails here and not after the compilation
        return folder


def _source_hash() -> str:
    """One hash over everything compiled code depends on but the target."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = _version("numba"), _version("llvmlite"), np.__version__, sys.version
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> bytes:
    """What tells its versions apart, without importing it."""
    found = util.find_spec(package)
    if found is not None and found.origin:
        with contextlib.suppress(OSError):
            return Path(found.origin).with_name("_version.py").read_bytes()
    from importlib import metadata  # 25 ms

    return metadata.version(package).encode()


# ------------------------------------------------------------------ into memory
def load(code: bytes, symbol: str) -> int:
    """Address of the function `symbol` of an object file, or of an image's entry; loaded for good."""
    if code.startswith(image.MAGIC):
        return image.load(code)
    from llvmlite import binding

    engine = _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


@functools.cache
def _engine() -> Any:
    """LLVM's loader."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_process_triple()
    module = binding.parse_assembly(f'target triple = "{triple}"')
    machine = binding.Target.from_triple(triple).create_target_machine(jit=True)
    return binding.create_mcjit_compiler(module, machine)
