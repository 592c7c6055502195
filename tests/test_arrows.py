"""Who may import whom, and who may read the environment (design: Arrows)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "coli"

# layer -> the parts of coli it may import, itself aside. errors is open to all.
ALLOWED = {
    "errors": set(),
    "impostors": set(),
    "setting_values": set(),
    "settings_table": {"setting_values"},
    "options": {"settings_table"},
    "kernels": set(),
    "store": {"options", "kernels", "impostors"},
    "model": {"kernels", "store"},
    "grammar": {"kernels", "impostors"},
    "drafts": {"kernels", "grammar", "options", "impostors"},
    "engine": {"kernels", "model", "drafts", "options"},
    "text": {"impostors"},
    "convert": {"kernels", "store", "model", "text", "impostors", "process_use", "processors"},
    "session_file": {"engine", "model", "store"},
    "server": {
        "llm",
        "generation",
        "engine",
        "drafts",
        "grammar",
        "text",
        "store",
        "options",
        "builtin",
        "session_file",
    },
    "speculant": {"llm", "tools", "drafts", "text", "options", "settings_table", "builtin"},
    "report": {"engine", "store", "drafts", "process_use"},
}
# engine takes SamplerOptions and other frozen values; a flag or path never reaches it
ENGINE_OPTIONS = {"SamplerOptions", "GenerateOptions"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(dotted name, tree) of every module; rglob does not follow the link coli/kernels."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())
    for path in sorted((ROOT / "kernels").glob("*.py")):
        yield f"coli.kernels.{path.stem}", ast.parse(path.read_text())


MODULES = list(modules())


def part(module: str) -> str:
    """coli.model.moe -> model"""
    return module.split(".")[1] if "." in module else ""


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Every absolute module name imported anywhere in `tree`; `from coli import x` counts as coli.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


IMPORTS = [(module, target) for module, tree in MODULES for target in imports(module, tree)]


def importers(*names: str) -> set[str]:
    return {m for m, target in IMPORTS if any(target == name or target.startswith(f"{name}.") for name in names)}


def test_the_package_is_found():
    assert {"coli.options", "coli.cli.main", "coli.kernels.__init__"} <= {module for module, _ in MODULES}


def test_only_kernels_import_numba():
    assert {part(module) for module in importers("numba", "llvmlite")} <= {"kernels"}


def test_only_the_command_line_imports_click():
    assert {part(module) for module in importers("click", "rich")} <= {"cli"}


def test_only_text_imports_tokenizers_and_jinja():
    assert {part(module) for module in importers("tokenizers", "jinja2")} <= {"text", "convert"}


def test_only_options_reads_the_environment():
    readers = set()
    for module, tree in MODULES:
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
            name = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (name and any(a.name in ("environ", "environb", "getenv") for a in node.names)):
                readers.add(module)
    assert readers <= {"coli.options", "coli.kernels.target"}  # the latter what numba itself reads: NUMBA_CPU_*


@pytest.mark.parametrize("layer", ALLOWED)
def test_layer_imports_only_what_lies_below_it(layer):
    found = {
        f"{module} -> {target}"
        for module, target in IMPORTS
        if part(module) == layer
        and target.startswith("coli.")
        and part(target) not in ALLOWED[layer] | {layer, "errors", "__version__"}
    }
    assert not found


def test_nobody_below_imports_the_top():
    for top, also in (("cli", ""), ("server", "tools.batch")):  # a batch's rows are requests
        found = [module for module in importers(f"coli.{top}") if not also or not module.startswith(f"coli.{also}")]
        assert {part(module) for module in found} <= {top, "cli", "__main__"}
    above = {"llm", "cli", "conversation", "server", "tools", "speculant"}
    assert {part(module) for module in importers("coli.llm")} <= above


def test_drafts_never_import_model_or_store():
    assert "drafts" not in {part(module) for module in importers("coli.model", "coli.store")}


def test_store_never_imports_the_model():
    assert "store" not in {part(module) for module in importers("coli.model")}


def test_engine_sees_no_path_and_no_flag():
    seen = set()
    for module, tree in MODULES:
        if part(module) != "engine":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "coli.options":
                seen |= {f"{module} -> {alias.name}" for alias in node.names if alias.name not in ENGINE_OPTIONS}
    seen |= {f"{module} -> {t}" for module, t in IMPORTS if part(module) == "engine" and t.split(".")[0] == "pathlib"}
    assert not seen


def test_kernels_is_a_link_to_the_top_level_folder():
    assert (PACKAGE / "kernels").resolve() == ROOT / "kernels"
