"""The model inside the package: small, sparse, turns short English texts into JSON (docs/demo_model.md)."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "data" / "demo"


def is_builtin(path: Path) -> bool:
    """Whether the model at `path` is the package's own, whose folder nothing is ever written to."""
    return path.resolve() == DEMO_MODEL.resolve()
