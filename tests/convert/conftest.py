from collections.abc import Callable
from pathlib import Path

import pytest

from coli.convert import ConvertOptions, ConvertReport, convert


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., ConvertReport]:
    """Convert a folder into tmp_path/model; notices end up in `run.notices`."""

    def convert_quietly(source: Path, destination: Path | None = None, **options: object) -> ConvertReport:
        chosen = ConvertOptions(**({"quant": "f32"} | options))  # type: ignore[arg-type]
        return convert(source, destination or tmp_path / "model", chosen, notices.append)

    notices: list[str] = []
    convert_quietly.notices = notices  # type: ignore[attr-defined]
    return convert_quietly
