"""Execute the AVX-512 kernels on a computer without AVX-512: an emulated PC (Bochs) boots a small Linux that holds this
Python, this tree and kernels compiled on the host, and its hashes must equal those of the host's own instruction set.

python scripts/emulate_avx512.py WORK_FOLDER [--cpu corei7_icelake_u] [--only fingerprint|forward]

Needs Debian (apt-get download, dpkg, genisoimage's libraries), an x86-64 host with AVX2, one core, 3 GB of disk and
4 GB of memory. Nothing is installed: packages are unpacked in WORK_FOLDER. Not part of the tests.
"""

import argparse
import contextlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = (
    "bochs", "bochs-term", "bochsbios", "vgabios", "libltdl7", "libsamplerate0", "libgtk-3-0", "libcolord2",
    "libepoxy0", "libwayland-cursor0", "libwayland-egl1", "isolinux", "syslinux-common", "genisoimage",
)  # fmt: skip
KERNEL = "linux-image-cloud-amd64"
SITE = ("numpy", "numpy.libs", "numba", "llvmlite", "llvmlite.libs", "yaml")
UNUSED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "pydoc_data"}
# What LLVM calls Bochs's processors, and the features kernels are compiled for (a subset of what it reports there).
LLVM_NAMES = {"corei7_icelake_u": "icelake-client", "tigerlake": "tigerlake"}
AVX2_FEATURES = "+64bit,+avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,+popcnt,+sse4.2"
AVX512_FEATURES = AVX2_FEATURES + ",+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"
# Features Linux must not use, by Linux's numbers: xsavec, xsaves, pku, ospke (Bochs reports sizes of the saved state
# Linux refuses, and then no AVX at all) and fsrm (Bochs has no switch for fast strings: memmove would overrun).
HIDDEN = "321,323,515,516,580"
DONE = "EMULATION DONE"

INIT = r"""#!{python} -SB
import ctypes, json, os, subprocess, sys, time
libc = ctypes.CDLL(None)
for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")):
    os.makedirs(place, exist_ok=True)
    libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None)
def say(**what):
    print("RESULT " + json.dumps(what), flush=True)
plan = json.load(open("/plan.json"))
os.environ.update(plan["environment"])
info = open("/proc/cpuinfo").read()
flags = info[info.index("flags"):].split("\n")[0].split()
model = info[info.index("model name"):].split("\n")[0].split(": ")[-1]
say(step="processor", model=model, avx512=[f for f in flags if f.startswith("avx512")])
for step in plan["steps"]:
    began = time.monotonic()
    with open("/tmp/errors", "w+") as errors:
        run = subprocess.Popen([sys.executable, "-SB", *step["command"]], stdout=subprocess.PIPE, stderr=errors,
                               text=True, env=dict(os.environ, **step["environment"]))
        for line in run.stdout:
            say(step=step["name"], found=json.loads(line))
        status = run.wait()
        errors.seek(0)
        say(step=step["name"], status=status, seconds=round(time.monotonic() - began, 1), error=errors.read()[-900:])
say(step="{done}")
time.sleep(100_000)
"""


# ------------------------------------------------------------------ the emulator and its packages
def unpack(work: Path) -> Path:
    """The folder with the unpacked Debian packages."""
    system, debs = work / "system", work / "debs"
    if (system / "complete").exists():
        return system
    debs.mkdir(parents=True, exist_ok=True)
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    image = re.findall(r"Depends: (linux-image-\S+)", depends)[0]
    subprocess.run(["apt-get", "download", "-q", *PACKAGES, image], cwd=debs, check=True)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", deb, system], check=True)
    (system / "complete").touch()
    return system


def tool_environment(system: Path) -> dict[str, str]:
    libraries = system / "usr/lib/x86_64-linux-gnu"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "LTDL_LIBRARY_PATH": str(libraries / "bochs/plugins"),
        "BXSHARE": str(system / "usr/share/bochs"),
        "TERM": "linux",
    }


# ------------------------------------------------------------------ what the guest computes
def copy_tree(work: Path) -> Path:
    """This tree in the work folder, with whole seconds as times of change: an initramfs has no fractions, and Python
    compiles anew what is not as old as its bytecode says."""
    source, tree = Path(__file__).resolve().parents[1], work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("coli", "tests"):
        shutil.copytree(source / name, tree / name, ignore=skip)
    for path in tree.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree)], check=True, stdout=subprocess.DEVNULL)
    return tree


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def guest_variables(work: Path, tree: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "tests", tree / "tests/model", site_packages()))),
        "COLI_KERNEL_CACHE": str(work / "cache"),
        "HOME": "/tmp",
        "PYTHONHASHSEED": "0",
        # Bochs 2.7 gets SHA-1 with the SHA instructions wrong, and cached code is checked by a digest.
        "OPENSSL_ia32cap": ":~0x20000000",
    }


def processor_variables(cpu: str) -> dict[str, str]:
    return {"NUMBA_CPU_NAME": LLVM_NAMES[cpu], "NUMBA_CPU_FEATURES": AVX512_FEATURES}


COMPILE = """
import collections, json, re, sys
from coli.kernels import runtime
runtime.configure("auto", sys.argv[1], 1)
from coli.kernels import catalog, compiler, launch
counts = collections.Counter()
for stage in (*catalog.ALL, launch.TEAM, launch.LAUNCH_TEAM, launch.FROM_QUEUE, launch.LAUNCH_QUEUE):
    stage.address
    text = compiler.assembly(stage.function, stage.arguments)
    counts["lines with zmm"] += len(re.findall("\\n.*%zmm", text))
    counts["vpdpbusd on zmm"] += len(re.findall("\\n\\\\s*vpdpbusd.*%zmm", text))
    counts["fma on zmm"] += len(re.findall("\\n\\\\s*vfn?m(?:add|sub)\\\\d+[ps]s.*%zmm", text))
    counts["mask registers"] += len(re.findall("\\n.*%k[0-7]", text))
runtime._state.cache.set_complete()
print(json.dumps({"path": runtime.simd_path(), **counts}))
"""


def host_python(*command: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """The JSON lines the command prints."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "NPY_", "COLI_"))}
    executable = os.path.realpath(sys.executable)
    done = subprocess.run(
        [executable, "-SB", *command], env={**kept, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def containers(work: Path, tree: Path, variables: dict[str, str]) -> list[str]:
    """Containers of all oracle checkpoints, made by this tree."""
    folder = work / "containers"
    code = f"""
import json, pathlib, shutil, containers as c
folder = pathlib.Path({str(folder)!r})
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
for q in ("q4", "q8", "f32"):
    for n in c.FIXTURES:
        print(json.dumps({{"made": str(shutil.copytree(c.container(n, q), folder / f"{{n}}-{{q}}"))}}))
"""
    return [line["made"] for line in host_python("-c", code, variables=variables)]


# ------------------------------------------------------------------ the image
def python_files() -> Iterable[Path]:
    """Interpreter, standard library, packages; shared libraries are added by `with_libraries`."""
    yield Path(os.path.realpath(sys.executable))
    places = [Path(sysconfig.get_path("stdlib")), *(site_packages() / name for name in SITE)]
    for place in filter(Path.is_dir, places):
        for folder, names, files in os.walk(place):
            names[:] = [n for n in names if n not in UNUSED and not n.startswith("config-")]
            yield from (
                Path(folder, file)
                for file in files
                if not file.endswith((".a", ".pyi", ".h", ".opt-1.pyc", ".opt-2.pyc"))
            )


def with_libraries(files: list[Path]) -> list[Path]:
    elf = [str(f) for f in files if ".so" in f.name or f.parent.name == "bin"]
    told = subprocess.run(["ldd", *elf], capture_output=True, text=True, check=False).stdout
    found = {Path(p) for p in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", told, re.M)}
    found |= {Path(p) for name in ("libgcc_s.so.1", "libgomp.so.1") for p in Path("/lib").glob(f"*-gnu/{name}")}
    return files + sorted(found - set(files))


def cpio_entry(name: str, mode: int, body: bytes = b"", mtime: int = 0, device: tuple[int, int] = (0, 0)) -> bytes:
    """One entry of a newc archive."""
    path = name.encode() + b"\0"
    fields = [0, mode, 0, 0, 1, mtime, len(body), 0, 0, *device, len(path), 0]
    head = b"070701" + b"".join(b"%08X" % f for f in fields) + path
    return head + bytes(-len(head) % 4) + body + bytes(-len(body) % 4)


def write_initramfs(target: Path, files: list[Path], extra: dict[str, bytes]) -> None:
    folders: set[str] = set()
    with target.open("wb") as out:

        def parents(path: Path) -> None:
            for parent in reversed(path.parents):
                if parent != Path("/") and str(parent) not in folders:
                    folders.add(str(parent))
                    out.write(cpio_entry(str(parent)[1:], 0o40700))

        out.write(cpio_entry("dev", 0o40755))
        folders.add("/dev")
        out.write(cpio_entry("dev/console", 0o20600, device=(5, 1)))
        for name, body in extra.items():
            out.write(cpio_entry(name, 0o100755, body))
        for path in dict.fromkeys(files):
            parents(path)
            status = path.stat()
            mode = 0o100755 if os.access(path, os.X_OK) else 0o100644
            out.write(cpio_entry(str(path)[1:], mode, path.read_bytes(), int(status.st_mtime)))
        out.write(cpio_entry("TRAILER!!!", 0))


def write_iso(work: Path, system: Path, initramfs: Path) -> Path:
    iso, image = work / "iso", work / "boot.iso"
    shutil.rmtree(iso, ignore_errors=True)
    iso.mkdir()
    shutil.copy(system / "usr/lib/ISOLINUX/isolinux.bin", iso)
    shutil.copy(system / "usr/lib/syslinux/modules/bios/ldlinux.c32", iso)
    shutil.copy(next((system / "boot").glob("vmlinuz-*")), iso / "vmlinuz")
    os.link(initramfs, iso / "initrd")
    options = (
        f"console=ttyS0,115200 mitigations=off random.trust_cpu=on clearcpuid={HIDDEN} panic=-1 loglevel=5 audit=0"
    )
    (iso / "isolinux.cfg").write_text(f"DEFAULT l\nLABEL l\nKERNEL vmlinuz\nINITRD initrd\nAPPEND {options}\n")
    command = [
        str(system / "usr/bin/genisoimage"),
        "-quiet",
        "-r",
        "-b",
        "isolinux.bin",
        "-c",
        "boot.cat",
        "-no-emul-boot",
    ]
    command += ["-boot-load-size", "4", "-boot-info-table", "-o", str(image), str(iso)]
    subprocess.run(command, check=True, env=tool_environment(system))
    return image


# ------------------------------------------------------------------ running
def boot(work: Path, system: Path, image: Path, cpu: str, limit: float) -> list[dict[str, Any]]:
    """The RESULT lines of the guest, printed as they arrive."""
    serial = work / f"serial-{cpu}.txt"
    serial.write_bytes(b"")
    share = system / "usr/share"
    (work / "bochsrc").write_text(f"""
cpu: model={cpu}, count=1, ips=100000000, reset_on_triple_fault=0
memory: guest=1536, host=1536
romimage: file={share}/bochs/BIOS-bochs-latest
vgaromimage: file={share}/vgabios/vgabios.bin
display_library: term
clock: sync=none
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={serial}
log: {work}/bochs-{cpu}.log
panic: action=fatal
""")
    (work / "go").write_text("c\n")  # Debian's Bochs starts in its debugger
    emulator = [system / "usr/bin/bochs-bin", "-q", "-f", work / "bochsrc", "-rc", work / "go"]
    command = ["nice", "-n", "5", *map(str, emulator)]
    master, slave = pty.openpty()
    guest = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=tool_environment(system), cwd=work, start_new_session=True
    )
    os.close(slave)
    results: list[dict[str, Any]] = []
    seen, ends = 0, time.monotonic() + limit
    terminals, said = [master], b""
    try:
        while time.monotonic() < ends:
            for terminal in select.select(terminals, [], [], 2)[0]:
                with contextlib.suppress(OSError):
                    said = (said + os.read(terminal, 65536))[-10_000:]
            # The screen is a second terminal of Bochs; when nobody reads it, the emulator stands still.
            screen = re.search(rb'connected to screen "(/dev/pts/\d+)"', said)
            if screen and len(terminals) == 1:
                terminals.append(os.open(screen[1], os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
            text = serial.read_bytes().decode(errors="replace")
            lines = text[: text.rfind("\n") + 1].splitlines()
            for line in lines[seen:]:
                if line.startswith("RESULT "):
                    results.append({**json.loads(line[7:]), "host_seconds": round(limit - ends + time.monotonic())})
                    print(json.dumps(results[-1]), flush=True)
            seen = len(lines)
            if guest.poll() is not None or (results and results[-1]["step"] == DONE):
                break
    finally:
        guest.kill()
        guest.wait()
        for terminal in terminals:
            os.close(terminal)
    if not results or results[-1]["step"] != DONE:
        tail = serial.read_bytes().decode(errors="replace")[-2000:]
        print(f"the guest did not finish; see {serial} and {work}/bochs-{cpu}.log\n{tail}", file=sys.stderr)
    return results


# ------------------------------------------------------------------ the comparison
FORWARD = """
import contextlib, io, json, sys
from pathlib import Path
paths = [sys.argv.pop() for _ in sys.argv[3:]][::-1]
with contextlib.redirect_stdout(io.StringIO()):  # it prints the hashes of the containers in sys.argv
    import forward_hashes
from coli.kernels import runtime
for path in paths:
    for kv in ("f32", "f16"):
        found = {f"{Path(path).name} {kv}": forward_hashes.hashes(Path(path), kv)}
        print(json.dumps({"path": runtime.simd_path(), "hashes": found}), flush=True)
"""


def hashes(found: Iterable[dict[str, Any]]) -> dict[str, object]:
    return {name: value for part in found for name, value in part["hashes"].items()}


def refusals(fingerprint: list[str], variables: dict[str, str], names: dict[str, str]) -> str:
    """What this computer does with the compiled code, if it has no AVX-512: refuse when asked, die when forced."""
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        return "this computer has AVX-512 itself"
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "NPY_", "COLI_"))
    } | variables
    python = [os.path.realpath(sys.executable), "-SB", *fingerprint]
    asked = subprocess.run([*python, "avx512", "1"], env=base, capture_output=True, text=True, check=False)
    forced = subprocess.run([*python, "auto", "1"], env=base | names, capture_output=True, text=True, check=False)
    return f"asked for avx512: {asked.stderr.strip().splitlines()[-1]}; forced: exit status {forced.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--cpu", choices=sorted(LLVM_NAMES), default="corei7_icelake_u")
    parser.add_argument("--only", choices=("fingerprint", "forward"))
    parser.add_argument("--limit", type=float, default=7200, help="seconds until the emulator is stopped")
    parser.add_argument("--image", action="store_true", help="stop when the image is made")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    system, tree = unpack(work), copy_tree(work)
    variables, names = guest_variables(work, tree), processor_variables(options.cpu)
    shutil.rmtree(work / "cache", ignore_errors=True)
    print("compiled:", host_python("-c", COMPILE, str(work / "cache"), variables=variables | names)[0], flush=True)
    fingerprint = [str(tree / "tests/kernels/fingerprint.py")]
    print("here:", refusals(fingerprint, variables, names), flush=True)
    steps = {"fingerprint": fingerprint, "forward": ["-c", FORWARD]}
    arguments = {"fingerprint": [], "forward": containers(work, tree, variables)}
    if options.only:
        steps = {options.only: steps[options.only]}
    plan: list[dict[str, Any]] = []
    expected: dict[str, object] = {}
    for name, command in steps.items():
        expected |= hashes(host_python(*command, "auto", "1", *arguments[name], variables=variables))
        plan.append({"name": name, "environment": names, "command": [*command, "avx512", "1", *arguments[name]]})
    files = [
        path for folder in ("tree", "cache", "containers") for path in (work / folder).rglob("*") if path.is_file()
    ]
    write_initramfs(
        work / "initrd",
        with_libraries([*python_files()]) + files,
        {
            "init": INIT.replace("{python}", os.path.realpath(sys.executable)).replace("{done}", DONE).encode(),
            "plan.json": json.dumps({"environment": variables, "steps": plan}).encode(),
        },
    )
    image = write_iso(work, system, work / "initrd")
    if options.image:
        return
    results = boot(work, system, image, options.cpu, options.limit)
    parts = [line["found"] for line in results if "found" in line]
    found = hashes(parts)
    differ = sorted(name for name in found if found[name] != expected[name])
    paths = {part["path"] for part in parts}
    print(f"path {paths}: {len(found)} of {len(expected)} compared, {len(differ)} differ: {differ}")
    sys.exit(bool(differ) or len(found) < len(expected) or paths != {"avx512"})


if __name__ == "__main__":
    main()
