"""What the package carries: a small sparse model that turns short English texts into JSON, and the grammars."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "data" / "demo"
GRAMMARS = Path(__file__).parent / "data" / "grammars"  # the project's grammars/


def is_builtin(path: Path) -> bool:
    """Whether the model at `path` is the package's own, whose folder nothing is ever written to."""
    return path.resolve() == DEMO_MODEL.resolve()
