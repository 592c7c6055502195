"""What a command does not import, so that its first token comes soon: the time to it is mostly imports."""

import os
import subprocess
import sys

from containers import container

# Of a dense model drafted by n-grams, from a warm kernel cache.
UNUSED_BY_RUN = {
    *("numba", "llvmlite", "rich", "psutil", "safetensors", "gguf", "huggingface_hub", "matplotlib", "starlette"),
    *("coli.convert", "coli.server", "coli.grammar", "coli.tools.doctor", "coli.kernels.simd"),
    *("coli.drafts.corpus", "coli.drafts.grammar", "coli.drafts.graph"),
    *("coli.model.latent_attention", "coli.model.moe", "coli.model.mtp"),
    *("coli.store.expert_store", "coli.store.opening", "coli.store.usage"),
}
UNUSED_BY_HELP = {"numpy", "numba", "tokenizers", "jinja2", "coli.llm", "coli.kernels", "importlib.metadata"}
SHOWN = """
import sys
from coli.cli import main
status = main.run(sys.argv[2:])
print(*sorted(set(sys.argv[1].split(",")) & sys.modules.keys()), file=sys.stderr)
sys.exit(status)
"""


def imported(names: set[str], *args: str) -> str:
    """Which of these modules `coli ARGS` imports."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, ",".join(sorted(names)), *args], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_dense_run_imports_nothing_it_does_not_use(monkeypatch):
    folder = container("llama-bias-sharded", "q8")
    for name in list(os.environ):
        if name.startswith("NUMBA_"):
            monkeypatch.delenv(name)
    run = ("run", "--quiet", "--model", str(folder), "--prompt-ids", "5,6,7", "--ngen", "2", "--ignore-eos")
    imported(UNUSED_BY_RUN, *run)  # compiles what is not in the cache yet
    assert imported(UNUSED_BY_RUN, *run) == ""


def test_version_and_help_import_next_to_nothing():
    assert imported(UNUSED_BY_HELP, "--version") == ""
    assert imported(UNUSED_BY_HELP, "run", "--help") == ""
