"""`coli pull hf:` of a model in many files: converted as they come, on little disk, and never twice."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from containers import ORACLE
from safetensors.numpy import save
from tools.file_server import Site, hub, serving

SHARDS = 10
BIG = ("hf:org/big", "--download-mode", "default")  # no questions of the hub's accelerators in between
HIDDEN, INTER, EXPERTS, LAYERS, VOCAB, HEAD = 128, 64, 24, 6, 384, 32


def _tensors() -> dict[str, np.ndarray]:
    """Of a qwen3_moe whose experts are most of it, 16 MB in float32."""
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.input_layernorm": (HIDDEN,), f"{stem}.post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"{stem}.self_attn.{name}_norm": (HEAD,) for name in "qk"}
        shapes |= {f"{stem}.self_attn.q_proj": (3 * HEAD, HIDDEN), f"{stem}.self_attn.o_proj": (HIDDEN, 3 * HEAD)}
        shapes |= {f"{stem}.self_attn.{name}_proj": (HEAD, HIDDEN) for name in "kv"}
        shapes[f"{stem}.mlp.gate"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes |= {f"{stem}.mlp.experts.{expert}.{name}_proj": (INTER, HIDDEN) for name in ("gate", "up")}
            shapes[f"{stem}.mlp.experts.{expert}.down_proj"] = (HIDDEN, INTER)
    draw = np.random.default_rng(5)
    return {f"{name}.weight": draw.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def _files() -> dict[str, bytes]:
    """A repository whose matrices of one expert and layer lie in several files."""
    names = sorted(tensors := _tensors())
    shards = [names[number::SHARDS] if number % 2 else [] for number in range(SHARDS)]  # some thinly spread
    rest = sorted(set(names) - {name for shard in shards for name in shard})
    for number in range(0, SHARDS, 2):  # some dense
        shards[number] = rest[len(rest) * number // SHARDS : len(rest) * (number + 2) // SHARDS]
    source = ORACLE / "qwen3_moe-padvocab"
    config = json.loads((source / "config.json").read_text()) | {
        "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "num_experts": EXPERTS, "num_hidden_layers": LAYERS,
    }  # fmt: skip
    texts = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files = {name: (source / name).read_bytes() for name in texts if (source / name).exists()}
    files["config.json"] = json.dumps(config).encode()
    titles = [f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors" for number in range(SHARDS)]
    files |= {t: save({name: tensors[name] for name in shard}) for t, shard in zip(titles, shards, strict=True)}
    weight_map = {name: t for t, shard in zip(titles, shards, strict=True) for name in shard}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return _files()


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory) -> dict[str, bytes]:
    """The container of `coli convert` on the same files lying in a folder."""
    from coli.convert import ConvertOptions, convert

    folder = tmp_path_factory.mktemp("pull") / "big"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    convert(folder, folder.parent / "container", ConvertOptions(threads=1), lambda line: None)
    return contents(folder.parent / "container")


@pytest.fixture
def site(files):
    with serving(Site(repositories={"org/big": dict(files)})) as site:
        yield site


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "pull.json"}


def used(folder: Path) -> int:
    """Bytes on the disk, what vanishes meanwhile left out (os.walk passes over a folder that is gone, rglob raises)."""
    total = 0
    for place, folders, names in os.walk(folder):
        for name in folders + names:
            try:
                found = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            # blocks, since files may have holes; no more than the size, since some file systems give out more ahead
            total += min(found.st_blocks * 512, -(-found.st_size // 4096) * 4096)
    return total


def weights(files: dict[str, bytes]) -> list[int]:
    return [len(data) for name, data in files.items() if name.endswith(".safetensors")]


def fetched(site: Site) -> list[str]:
    """Weight files asked for, from a byte behind their headers or in whole."""
    asked = [(path, headers.get("range", "")) for path, headers in site.requests if path.endswith(".safetensors")]
    return [path.rpartition("/")[2] for path, wanted in asked if not wanted.startswith("bytes=0-")]


def test_it_is_converted_as_it_comes_and_the_source_goes(site, files, whole, tmp_path):
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], used(tmp_path))

    thread = threading.Thread(target=watch)
    thread.start()
    done = hub(site, tmp_path, *BIG, "--delete-source", "--threads", "1")
    stop.set()
    thread.join()
    peak[0] = max(peak[0], used(tmp_path))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "big") == whole
    assert not (tmp_path / ".downloads" / "big").exists()
    container = sum(map(len, whole.values()))
    assert container < peak[0] < container + max(weights(files)) + 600_000
    assert peak[0] < sum(weights(files)) / 2
    assert sorted(fetched(site)) == sorted(name for name in files if name.endswith(".safetensors"))


@pytest.mark.slow
def test_without_delete_source_the_files_stay_for_another_conversion(site, files, whole, tmp_path):
    done = hub(site, tmp_path, *BIG, "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "big") == whole
    assert "--delete-source removes it" in done.stderr
    shutil.rmtree(tmp_path / "big")
    site.requests.clear()
    assert hub(site, tmp_path, *BIG, "--threads", "1").returncode == 0
    assert contents(tmp_path / "big") == whole
    assert fetched(site) == []


def test_a_wrong_hash_is_named_and_what_was_converted_stays(site, files, whole, tmp_path):
    names = sorted(name for name in files if name.endswith(".safetensors"))
    site.wrong_hashes = names[6][5:]
    done = hub(site, tmp_path, *BIG, "--delete-source", "--threads", "1")
    assert done.returncode == 1
    assert f"{names[6]}: wrong hash: expected sha256" in done.stderr
    assert not (tmp_path / "big").exists()
    site.requests.clear()
    site.wrong_hashes = None
    done = hub(site, tmp_path, *BIG, "--delete-source", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "continuing an interrupted conversion" in done.stderr
    assert fetched(site) == names[6:]
    assert contents(tmp_path / "big") == whole


@pytest.mark.slow
def test_a_server_without_ranges_that_breaks_off_is_enough(site, whole, tmp_path):
    site.ranges, site.etags = False, False
    assert hub(site, tmp_path, *BIG, "--delete-source", "--threads", "1").returncode == 0
    assert contents(tmp_path / "big") == whole


@pytest.mark.slow
def test_a_repository_that_changes_meanwhile_is_begun_anew(site, files, tmp_path):
    names = sorted(name for name in files if name.endswith(".safetensors"))
    site.wrong_hashes = names[3][5:]
    assert hub(site, tmp_path, *BIG, "--delete-source").returncode == 1
    site.wrong_hashes = None
    site.repositories["org/big"][names[5]] = files[names[4]]
    done = hub(site, tmp_path, *BIG, "--delete-source")
    assert done.returncode == 1
    assert names[5] in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "big").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Makes `tmp_path/disk` a file system of so many bytes, again and again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = False

    def size(nbytes: int) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", f"{'remount,' if mounted else ''}size={nbytes}", "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a file system")
        mounted = True
        return disk

    yield size
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_holds_the_container_and_one_file_is_enough(site, files, whole, small_disk):
    container, slack = sum(map(len, whole.values())), (4 << 20) + 600_000
    disk = small_disk(container + max(weights(files)) + slack)
    done = hub(site, disk, *BIG, "--delete-source", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert contents(disk / "big") == whole
    kept = hub(site, disk, *BIG, "--name", "other")
    assert kept.returncode == 1
    assert "free some space" in kept.stderr


def test_a_disk_that_somebody_else_fills_leaves_nothing_broken(site, files, whole, small_disk):
    names = sorted(name for name in files if name.endswith(".safetensors"))
    container, slack = sum(map(len, whole.values())), (4 << 20) + 600_000
    disk = small_disk(container + max(weights(files)) + slack)
    room = 2 * max(weights(files))

    def fill() -> None:
        if fetched(site)[-1:] == [names[5]] and not (disk / "filler").exists():
            free = shutil.disk_usage(disk).free
            (disk / "filler").write_bytes(bytes(max(free - room // 8, 0)))

    site.asked = fill
    done = hub(site, disk, *BIG, "--delete-source", "--threads", "1")
    assert done.returncode == 1, done.stderr
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (disk / "big").exists()
    (disk / "filler").unlink()
    site.asked = lambda: None
    site.requests.clear()
    done = hub(site, disk, *BIG, "--delete-source", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert contents(disk / "big") == whole
    assert not set(fetched(site)) & set(names[:5])


PROGRAM = """
import io, os, signal, sys
import huggingface_hub
from coli.cli.main import main
from coli.tools import download, pull

download.CHUNK = 1 << 16
names, left = ("write", "fsync", "replace", "rename", "unlink", "ftruncate", "mkdir"), int(sys.argv[1])
owners = (type(os), io.FileIO, io.BufferedWriter, io.TextIOWrapper)

def watch(frame, event, function):
    global left
    if event == "c_call" and function.__name__ in names and isinstance(function.__self__, owners):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(watch)
try:
    main(["pull", "hf:org/big", "--download-mode", "default", "--delete-source", "--threads", "1", "--quiet"])
finally:
    sys.setprofile(None)
    print(int(sys.argv[1]) - left)
"""


def dying(site: Site, home: Path, calls: int) -> subprocess.CompletedProcess[str]:
    """`coli pull` that is killed in front of the `calls`-th of its calls that change something on the disk."""
    pytest.importorskip("huggingface_hub")
    environment = {**os.environ, "COLI_HOME": str(home), "HF_ENDPOINT": site.address, "HF_HOME": str(home / "hf")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # which would be such calls too, the first time
    command = [sys.executable, "-c", PROGRAM, str(calls)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def total(files, whole, tmp_path_factory) -> int:
    """How many such calls a pull takes that nobody kills."""
    home = tmp_path_factory.mktemp("never")
    with serving(Site(repositories={"org/big": dict(files)})) as site:
        done = dying(site, home, 10**9)
    assert done.returncode == 0, done.stderr
    assert contents(home / "big") == whole
    return int(done.stdout)


@pytest.mark.slow
def test_killed_again_and_again_it_gets_there(site, whole, total, tmp_path):
    draw = random.Random(11)
    for trial in range(4):
        home, kills = tmp_path / str(trial), 0
        while (done := dying(site, home, draw.randrange(1, total))).returncode == -signal.SIGKILL:
            kills += 1
            if (home / "big").exists():  # behind the last renaming, with what only a finished pull removes
                assert contents(home / "big").items() >= whole.items()
        assert done.returncode == 0, done.stderr
        assert contents(home / "big") == whole
        assert not (home / ".big.partial").exists()
        assert kills


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_a_kill_costs_no_more_than_the_file_in_hand(site, whole, total, tmp_path, share):
    done = dying(site, tmp_path, int(total * share))
    assert done.returncode == -signal.SIGKILL, done.stderr
    site.requests.clear()
    assert hub(site, tmp_path, *BIG, "--delete-source", "--threads", "1").returncode == 0
    assert contents(tmp_path / "big") == whole
    assert len(fetched(site)) <= SHARDS * (1 - share) + 2
