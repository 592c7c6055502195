"""Downloads from a server that breaks off, lies and redirects: the right bytes, or an error that names the file."""

import hashlib
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tools.file_server import Site, serving

from coli.errors import DownloadError, OptionError, WriteError
from coli.tools import download as downloading
from coli.tools.download import Remote, download

CONTENT = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def site():
    with serving(Site(files={"/f.bin": CONTENT})) as site:
        yield site


def fetch(site: Site, target: Path, path: str = "/f.bin", **facts: object) -> list[str]:
    notices: list[str] = []
    remote = Remote(site.address + path, **facts)  # type: ignore[arg-type]
    download(remote, target, notices.append, lambda done, total: None, pause=lambda seconds: None)
    return notices


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_appears_and_nothing_else(site, tmp_path):
    assert fetch(site, tmp_path / "f", sha256=SHA256) == []
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert left(tmp_path) == ["f"]


def test_without_a_hash_the_one_found_is_told(site, tmp_path):
    assert SHA256 in fetch(site, tmp_path / "f")[0]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("etags", [True, False])
def test_a_server_that_breaks_off_is_asked_again(site, tmp_path, ranges, etags):
    site.break_after, site.ranges, site.etags = 70_001, ranges, etags
    if ranges:
        fetch(site, tmp_path / "f", sha256=SHA256)
        assert (tmp_path / "f").read_bytes() == CONTENT
        assert len(site.requests) == 5
    else:
        with pytest.raises(DownloadError, match=r"f: the connection ended after 70001 of 300000"):
            fetch(site, tmp_path / "f", sha256=SHA256)
        assert not (tmp_path / "f").exists()


def test_busy_answers_are_waited_out(site, tmp_path):
    site.failures = 3
    fetch(site, tmp_path / "f", sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_length_that_differs_from_the_listed_one_is_refused(site, tmp_path, offset):
    site.length_offset = offset
    with pytest.raises(DownloadError, match=r"f: expected 300000 bytes, the server announces"):
        fetch(site, tmp_path / "f", size=len(CONTENT))
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("offset", [-1000, 1000])
def test_a_lie_about_the_length_never_makes_a_file(site, tmp_path, offset):
    site.length_offset = offset
    with pytest.raises(DownloadError, match=r"^f: "):
        fetch(site, tmp_path / "f", sha256=SHA256)
    assert not (tmp_path / "f").exists()


def test_a_wrong_hash_is_refused_and_named_and_not_kept(site, tmp_path):
    with pytest.raises(DownloadError, match=f"f: wrong hash: expected sha256 {'0' * 64}, found {SHA256}"):
        fetch(site, tmp_path / "f", sha256="0" * 64)
    assert left(tmp_path) == []


def test_a_file_that_changed_meanwhile_is_fetched_anew(site, tmp_path):
    site.break_after = 100_000
    site.ranges = False
    with pytest.raises(DownloadError):
        fetch(site, tmp_path / "f")
    site.files["/f.bin"] = other = CONTENT[::-1] + b"more"
    site.break_after, site.ranges = None, True
    fetch(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == other


def test_redirects_are_followed_and_what_the_hub_says_of_the_file_counts(site, tmp_path):
    site.redirects["/hub"] = "/f.bin"
    site.linked["/hub"] = SHA256
    assert fetch(site, tmp_path / "f", "/hub") == []
    site.linked["/hub"] = "1" * 64
    with pytest.raises(DownloadError, match="wrong hash"):
        fetch(site, tmp_path / "g", "/hub")


def test_redirects_elsewhere_than_http_and_endless_ones_are_refused(site, tmp_path):
    site.redirects |= {"/file": "file:///etc/passwd", "/ftp": "ftp://127.0.0.1/x", "/loop": "/loop"}
    for path in ("/file", "/ftp", "/loop"):
        with pytest.raises(DownloadError):
            fetch(site, tmp_path / "f", path)
    with pytest.raises(OptionError, match="http"):
        download(Remote("file:///etc/passwd"), tmp_path / "f", print, lambda done, total: None)
    assert not (tmp_path / "f").exists()


def test_a_token_is_for_its_own_host_only(site, tmp_path):
    with serving(Site(files={"/f.bin": CONTENT})) as other:
        site.redirects |= {"/away": f"{other.address}/f.bin", "/here": "/f.bin"}
        fetch(site, tmp_path / "f", "/away", token="secret", sha256=SHA256)
        fetch(site, tmp_path / "g", "/here", token="secret", sha256=SHA256)
        assert all(headers["authorization"] == "Bearer secret" for _, headers in site.requests)
        assert ["authorization" in headers for _, headers in other.requests] == [False]


def test_more_than_allowed_is_refused_before_it_comes(site, tmp_path):
    with pytest.raises(OptionError, match="max-size"):
        fetch(site, tmp_path / "f", max_bytes=299_999)
    assert not (tmp_path / "f").exists()


def test_more_than_the_disk_holds_is_refused_before_it_comes(site, tmp_path, monkeypatch):
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 299_999}))
    with pytest.raises(WriteError, match="free some space"):
        fetch(site, tmp_path / "f", sha256=SHA256)
    assert not (tmp_path / "f").exists()


def test_a_web_page_is_no_model(site, tmp_path):
    site.files["/page"] = b"<!DOCTYPE html><p>Log in"
    with pytest.raises(DownloadError, match="f: a web page"):
        fetch(site, tmp_path / "f", "/page")
    assert left(tmp_path) == []


def test_what_another_process_is_fetching_is_left_alone(site, tmp_path):
    with downloading._locked(tmp_path / "f.part"), pytest.raises(OptionError, match="another process"):
        fetch(site, tmp_path / "f")


def process(site: Site, target: Path, prologue: str, act: str) -> subprocess.CompletedProcess[bytes]:
    """A download in a process of its own; `act` runs with `done` bytes there."""
    program = f"""
        import os, signal, resource
        from pathlib import Path
        from coli.errors import ColiError
        from coli.tools import download as d
        d.CHUNK = 4096
        {prologue}
        def progress(done, total):
            {act}
        try:
            d.download(d.Remote({site.address + "/f.bin"!r}), Path({str(target)!r}), print, progress)
        except ColiError as error:
            print(type(error).__name__, error)
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=False)


@pytest.mark.parametrize("count", [1, 5000, 299_000])
def test_a_kill_at_any_byte_is_survived_and_resumed(site, tmp_path, count):
    done = process(site, tmp_path / "f", "", f"done < {count} or os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -9
    assert not (tmp_path / "f").exists()
    there = (tmp_path / "f.part").stat().st_size
    assert there >= count
    fetch(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert site.requests[-1][1]["range"] == f"bytes={there}-" or there == len(CONTENT)


def test_a_full_disk_leaves_no_file_and_the_rest_comes_later(site, tmp_path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"
    done = process(site, tmp_path / "f", limit, "pass")
    assert done.returncode == 0
    assert b"WriteError" in done.stdout
    assert b"free some space" in done.stdout
    assert not (tmp_path / "f").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] != 100_000
    fetch(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
