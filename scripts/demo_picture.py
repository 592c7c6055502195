"""The picture of `coli demo` in docs/demo.svg: python scripts/demo_picture.py [OUT.svg]. Run it on a quiet machine."""

import argparse
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coli.builtin import DEMO_MODEL
from coli.cli.demo import ORDERS, compare, table
from coli.cli.streams import Streams
from coli.options import EngineOptions

WIDTH = 112
OUT = Path(__file__).parent.parent / "docs" / "demo.svg"


def picture(text: str) -> str:
    """SVG without the web fonts that rich points to: it shows the same wherever it is opened, and asks nobody."""
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    options = parser.parse_args()
    answer, rows = compare(EngineOptions(pin="off", usage_save=False), Streams())
    console = Console(record=True, width=WIDTH, file=sys.stderr)
    console.print(Text("$ coli demo", style="bold"))
    console.print(Text(f"{ORDERS}\n"))
    console.print(Text(f"{answer}\n", style="green"), no_wrap=True, overflow="ignore")
    console.print(table(rows))
    options.out.write_text(picture(console.export_svg(title=f"coli demo ({DEMO_MODEL.name} model)")))
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
