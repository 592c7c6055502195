"""`coli plan`: the same sizes from a container, a checkpoint and a config alone, and a forecast that makes sense."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from containers import MTP_FIXTURE, ORACLE, container

from coli.tools.forecast import forecast
from coli.tools.sizes import model_sizes

SIZES = ("dense_bytes", "experts_bytes", "record_bytes", "bytes_per_token_cycle", "kv_bytes_per_token")
NAMES = (
    "olmoe-base", "mixtral-base", "qwen2_moe-sparse-step", "qwen3-base", "llama-bias-sharded", MTP_FIXTURE,
    "deepseek_v2-lite-group", "glm4_moe-base", "glm_moe_dsa-sparse",
)  # fmt: skip


def plan(coli, *args: object) -> dict:
    done = coli("plan", "--json", "--no-probe", *args)
    assert done.status == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_planned_as_it_will_be_converted(coli, name, tmp_path):
    converted = plan(coli, container(name, None))
    assert {key: plan(coli, ORACLE / name)[key] for key in SIZES} == {key: converted[key] for key in SIZES}
    shutil.copy(ORACLE / name / "config.json", tmp_path)
    alone = plan(coli, tmp_path)
    assert {key: alone[key] for key in SIZES} == {key: converted[key] for key in SIZES}
    assert "config.json alone" in alone["source"]


def test_the_container_s_files_have_the_planned_sizes():
    path = container("olmoe-base", None)
    sizes = model_sizes(path)
    files = sum(file.stat().st_size for file in sizes.files)
    assert sizes.experts_bytes <= files < sizes.experts_bytes + 10_000
    assert sizes.dense_bytes <= (path / "dense.safetensors").stat().st_size < sizes.dense_bytes + 50_000


def test_budgets_are_in_order_and_the_machine_s_arithmetic_is_shown(coli):
    facts = plan(coli)
    assert facts["smallest_budget_bytes"] < facts["cliff_budget_bytes"] < facts["everything_budget_bytes"]
    done = coli("plan", "--no-probe")
    assert "for experts" in done.out
    assert "a token cycle" in done.out
    assert facts["forecasts"] is None


def test_a_budget_that_is_too_small_is_part_of_the_plan(coli):
    facts = plan(coli, "--ram", "50MB")
    assert facts["this_machine"]["fits"] is False
    assert "experts need at least" in facts["this_machine"]["arithmetic"]


def test_the_smallest_budget_runs():
    """In processes of their own, as a user has them: memory that a longer process has grown does not count."""

    def coli(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "coli", *args], capture_output=True, text=True, check=False)

    planned = json.loads(coli("plan", "--json", "--no-probe", "--ctx", "64").stdout)
    smallest = -(-planned["smallest_budget_bytes"] // 10_000_000) / 100
    done = coli("run", "--ctx", "64", "--ram", str(smallest), "--ngen", "1", "--quiet", "Hello")
    assert done.returncode == 0, done.stderr


def test_a_longer_context_needs_a_larger_cache_and_f32_twice_as_much(coli):
    short, long = plan(coli, "--ctx", 100), plan(coli, "--ctx", 1000)
    assert long["cliff_budget_bytes"] - short["cliff_budget_bytes"] > 800 * short["kv_bytes_per_token"]
    assert plan(coli, "--kv", "f32")["kv_bytes_per_token"] == 2 * short["kv_bytes_per_token"]


def test_the_probe_reads_the_disk_and_the_memory(coli):
    done = coli("plan", "--json")
    assert done.status == 0
    facts = json.loads(done.out)
    assert facts["disk"]["bytes_per_s"] > 0
    assert facts["memory_bytes_per_s"] > 1e8
    budgets = [one["budget_bytes"] for one in facts["forecasts"]]
    assert budgets == sorted(budgets)
    for one in facts["forecasts"]:
        assert 0 < one["tps"][0] <= one["tps"][1]
        assert 0 <= one["hit_rate"][0] <= one["hit_rate"][1] <= 1


def test_without_weights_there_is_no_forecast_and_a_reason(coli, tmp_path):
    shutil.copy(ORACLE / "olmoe-base" / "config.json", tmp_path)
    done = coli("plan", tmp_path)
    assert done.status == 0
    assert "no forecast: there are no weights" in done.out


def test_more_memory_is_never_slower():
    sizes = model_sizes(container("olmoe-base", None))
    steps = [forecast(sizes, sizes.experts_bytes * i // 20, 1e9, 20e9) for i in range(21)]
    for less, more in itertools.pairwise(steps):
        assert less.slow_tps <= more.slow_tps
        assert less.fast_tps <= more.fast_tps
    assert steps[-1].slow_tps == pytest.approx(steps[-1].fast_tps)


@pytest.mark.parametrize("what", ["nothing", "file", "folder"])
def test_what_is_no_model_is_status_2(coli, tmp_path: Path, what):
    target = tmp_path / what
    if what == "file":
        target.write_text("x")
    elif what == "folder":
        target.mkdir()
    done = coli("plan", target)
    assert done.status == 2
    assert str(target) in done.err
    assert done.err.count("\n") == 1


def test_an_index_of_wrong_type_is_named(coli, tmp_path):
    shutil.copyfile(ORACLE / "olmoe-base" / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    done = coli("plan", "--no-probe", tmp_path)
    assert done.status == 1
    assert "index.json: weight_map: expected an object" in done.err


def test_an_unknown_family_is_refused_by_name(coli, tmp_path):
    config = json.loads((ORACLE / "olmoe-base" / "config.json").read_text()) | {"model_type": "newmoe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = coli("plan", tmp_path)
    assert done.status == 2
    assert "newmoe" in done.err
