import os

import psutil
import pytest

from coli.processors import usable_cores


def cgroup(root, lines, **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cores(root):
    return usable_cores(root, physical=32, affinity=24)


def test_the_smaller_of_cores_and_affinity_counts(tmp_path):
    assert usable_cores(tmp_path, physical=32, affinity=4) == 4
    assert usable_cores(tmp_path, physical=2, affinity=4) == 2


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [("max 100000", 24), ("400000 100000", 4), ("250000 100000", 2), ("20000 100000", 1), ("", 24), ("x y", 24)],
)
def test_a_quota_of_our_group_counts_in_whole_processors(tmp_path, quota, wanted):
    assert cores(cgroup(tmp_path, "0::/a/b\n", a__b__cpu_dot_max=quota)) == wanted


def test_the_tightest_group_above_us_counts(tmp_path):
    root = cgroup(tmp_path, "0::/a/b\n", a__b__cpu_dot_max="800000 100000", a__cpu_dot_max="300000 100000")
    assert cores(root) == 3


def test_a_container_s_mount_is_its_own_group(tmp_path):
    assert cores(cgroup(tmp_path, "0::/\n", cpu_dot_max="200000 100000")) == 2
    assert cores(cgroup(tmp_path / "x", "0::/not/visible\n", cpu_dot_max="200000 100000")) == 2


def test_version_1_quotas_count(tmp_path):
    files = {"cpu__a__cpu_dot_cfs_quota_us": "300000", "cpu__a__cpu_dot_cfs_period_us": "100000"}
    assert cores(cgroup(tmp_path, "4:cpu:/a\n3:memory:/m\n", **files)) == 3
    files["cpu__a__cpu_dot_cfs_quota_us"] = "-1"
    assert cores(cgroup(tmp_path / "x", "4:cpu:/a\n", **files)) == 24


def test_this_machine_has_cores():
    assert usable_cores() >= 1


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_one_core_count_once(tmp_path, name):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / name).write_text(f"{siblings}\n")
    assert usable_cores(tmp_path, affinity=8) == 2


def test_the_system_s_cores_are_those_psutil_counts(tmp_path):
    assert usable_cores(affinity=10_000) <= (psutil.cpu_count(logical=False) or 10_000)
    assert usable_cores(tmp_path, affinity=10_000) == (psutil.cpu_count(logical=False) or os.cpu_count() or 1)
