"""`coli corpus download` against a local server: whole, in pieces, killed in between, and refused."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.file_server import COMMIT, Site, serving

from coli.errors import DownloadError, OptionError, WriteError
from coli.tools import corpus_download
from coli.tools.corpus_download import DATASET, DownloadOptions, RangeReader, download_wikipedia

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")


def table(first: int, count: int, columns: tuple[str, ...] = ("id", "url", "title", "text")) -> bytes:
    """A Parquet file of articles number first.. in row groups of 40, every tenth one empty."""
    import pyarrow

    rows = [
        {
            "id": str(i),
            "url": f"https://en.wikipedia.org/wiki/{i}",
            "title": f"Title {i}",
            "text": "" if i % 10 == 3 else f"Article {i} is long. " * 200,
        }
        for i in range(first, first + count)
    ]
    buffer = io.BytesIO()
    chosen = [{name: row[name] for name in columns} for row in rows]
    parquet.write_table(
        pyarrow.Table.from_pylist(chosen), buffer, row_group_size=40, compression="none", use_dictionary=False
    )
    return buffer.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {
        "20231101.en/train-00000-of-00002.parquet": table(0, 100),
        "20231101.en/train-00001-of-00002.parquet": table(100, 60),
        "20231101.de/train-00000-of-00001.parquet": table(500, 5),
        "README.md": b"about",
    }


@pytest.fixture
def site(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    from huggingface_hub import constants

    with serving(Site(datasets={DATASET: files})) as site:
        monkeypatch.setattr(constants, "ENDPOINT", site.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", site.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(corpus_download, "BATCH_ROWS", 16)
        yield site


def fetch(target: Path, max_docs: int, **options: str) -> tuple[list[str], list[tuple[str, int, int]]]:
    """(notices, progress)."""
    notices: list[str] = []
    progress: list[tuple[str, int, int]] = []
    download_wikipedia(
        target,
        DownloadOptions(max_docs, **options),  # type: ignore[arg-type]
        notices.append,
        lambda *line: progress.append(line),
        lambda seconds: None,
    )
    return notices, progress


def ids(path: Path) -> list[int]:
    return [int(json.loads(line)["id"]) for line in path.read_text().splitlines()]


WANTED = [i for i in range(160) if i % 10 != 3]


@pytest.mark.parametrize("count", [1, 16, 37, 90, 91, 130, 1000])
def test_so_many_articles_arrive_with_their_licence(site: Site, tmp_path: Path, count: int):
    target = tmp_path / "wikipedia.jsonl"
    notices, progress = fetch(target, count, token="hf_secret")
    assert ids(target) == WANTED[:count]
    assert set(json.loads(target.read_text().splitlines()[0])) == {"id", "url", "title", "text"}
    record = json.loads((tmp_path / "wikipedia.jsonl.licence.json").read_text())
    assert record["licences"] == ["cc-by-sa-3.0", "gfdl"]
    assert (record["dataset"], record["config"], record["revision"]) == (DATASET, "20231101.en", COMMIT)
    assert record["documents"] == min(count, len(WANTED))
    assert any("cc-by-sa-3.0" in line for line in notices)
    assert progress[-1] == ("articles", min(count, len(WANTED)), count)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wikipedia.jsonl", "wikipedia.jsonl.licence.json"]
    ranges = [headers for path, headers in site.requests if "/resolve/" in path]
    assert all(headers["authorization"] == "Bearer hf_secret" for headers in ranges)


def test_a_few_articles_do_not_read_the_whole_file(site: Site, files: dict[str, bytes], tmp_path: Path):
    fetch(tmp_path / "w.jsonl", 5)
    wanted = [
        headers["range"].removeprefix("bytes=").split("-") for path, headers in site.requests if "/resolve/" in path
    ]
    read = sum(int(last) - int(first) + 1 for first, last in wanted)
    assert read < len(files["20231101.en/train-00000-of-00002.parquet"]) * 0.6
    assert all("00000" in path for path, _ in site.requests if "/resolve/" in path)


@pytest.mark.parametrize("after", [1, 3, 6, 9])
def test_an_interrupted_download_goes_on_where_it_was(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
):
    target, steps = tmp_path / "w.jsonl", []

    def killed(path: Path, value: dict[str, object]) -> None:
        steps.append(1)
        if len(steps) > after:
            raise KeyboardInterrupt
        usual(path, value)

    usual = corpus_download._write
    with monkeypatch.context() as patch:
        patch.setattr(corpus_download, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(target, 1000)
    assert not target.exists()
    notices, _ = fetch(target, 1000)
    assert any("going on behind" in line for line in notices)
    assert ids(target) == WANTED


def test_broken_connections_are_taken_up_again(site: Site, tmp_path: Path):
    site.break_after = 5000
    fetch(tmp_path / "w.jsonl", 30)
    assert ids(tmp_path / "w.jsonl") == WANTED[:30]
    site.failures = 2
    reader = RangeReader(f"{site.address}/datasets/{DATASET}/resolve/{COMMIT}/README.md", 5, None, lambda seconds: None)
    assert reader.read() == b"about"


def test_what_is_there_is_not_fetched_again_and_not_overwritten(site: Site, tmp_path: Path):
    target = tmp_path / "w.jsonl"
    fetch(target, 20)
    before = len(site.requests)
    notices, _ = fetch(target, 20)
    assert "there already" in notices[0]
    assert len(site.requests) == before
    with pytest.raises(OptionError, match="fewer articles"):
        fetch(target, 30)
    with pytest.raises(OptionError, match="other"):
        fetch(target, 5, language="de")


def test_what_cannot_be_is_one_error(site: Site, tmp_path: Path):
    with pytest.raises(OptionError, match=r"no edition 20231101\.xx; there are 20231101\.de, 20231101\.en"):
        fetch(tmp_path / "w.jsonl", 5, language="xx")
    with pytest.raises(OptionError, match="language"):
        fetch(tmp_path / "w.jsonl", 5, language="../x")
    site.datasets[DATASET] = {"20231101.en/a.parquet": table(0, 9, ("id", "text"))}
    with pytest.raises(DownloadError, match="no column 'title'"):
        fetch(tmp_path / "w.jsonl", 5)
    site.datasets[DATASET] = {"20231101.en/a.parquet": b"PAR1 but nothing else"}
    with pytest.raises(DownloadError, match=r"a\.parquet: not a Parquet file"):
        fetch(tmp_path / "w.jsonl", 5)
    site.ranges = False
    with pytest.raises(DownloadError, match="does not send ranges"):
        fetch(tmp_path / "w.jsonl", 5)
    site.datasets.clear()
    with pytest.raises(DownloadError, match=DATASET):
        fetch(tmp_path / "w.jsonl", 5)
    assert not (tmp_path / "w.jsonl").exists()


def test_a_full_disk_is_one_error_and_nothing_half_written(site: Site, tmp_path: Path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "w.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"w\.jsonl: cannot be written"):
        fetch(tmp_path / "w.jsonl", 5)
    assert not (tmp_path / "w.jsonl").exists()


def test_the_command_fetches_and_a_graph_is_built_of_it(site: Site, tmp_path: Path):
    environment = {**os.environ, "HF_ENDPOINT": site.address, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "coli", "corpus", "download", "wikipedia", "--max-docs", "25"]
    done = subprocess.run([*command, "-o", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "licence: cc-by-sa-3.0, gfdl" in done.stderr
    assert ids(tmp_path / "wikipedia.jsonl") == WANTED[:25]
    build = [
        sys.executable,
        "-m",
        "coli",
        "graph",
        "build",
        str(tmp_path / "wikipedia.jsonl"),
        "-o",
        str(tmp_path / "g"),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "25 documents" in done.stderr


def test_a_place_that_cannot_be_written_is_found_before_anything_is_asked_for(site: Site, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "name.part").mkdir()
    (tmp_path / "pipe").symlink_to("/dev/null")
    for target, error, words in (
        (tmp_path / "folder", OptionError, "is a folder"),
        (tmp_path / "absent" / "w.jsonl", OptionError, "does not exist"),
        (tmp_path / "pipe", OptionError, "pipe or a device"),
        (tmp_path / "name", WriteError, "cannot be written"),
    ):
        with pytest.raises(error, match=words):
            fetch(target, 5)
    assert site.requests == []
    (tmp_path / "link.jsonl").symlink_to("folder/real.jsonl")
    fetch(tmp_path / "link.jsonl", 5)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert ids(tmp_path / "folder" / "real.jsonl") == WANTED[:5]
