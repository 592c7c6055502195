"""Take docs/page*.jpg: python scripts/page_pictures.py (needs playwright from PyPI and Debian's chromium).

Serves the built-in model with room for ten of 32 experts a layer, asks for an order with its schema as drafts.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
ORDER = "order 4102 by Anna Keller over 49.90 is paid, high priority."


def main() -> None:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path, "USAGE_SAVE": "0", "CAP": "10"}
    flags = ("--port", "0", "--ctx", "1024", "--temp", "0")
    command = [sys.executable, "-m", "coli", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            url = next(line for line in server.stderr if "serving" in line).split()[-1]
            for scheme, width, name in (
                ("light", 1200, "page.jpg"),
                ("dark", 1200, "page-dark.jpg"),
                ("dark", 360, "page-narrow.jpg"),
            ):
                take(url, scheme, width, ROOT / "docs" / name)
        finally:
            server.terminate()


def take(url: str, scheme: str, width: int, path: Path) -> None:
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 760}).new_page()
        page.goto(url)
        page.click("summary:has-text('Settings')")
        page.fill("#grammar", (ROOT / "coli" / "data" / "grammars" / "ndjson-order.schema.json").read_text())
        page.click("summary:has-text('Settings')")
        page.fill("#question", ORDER)
        page.keyboard.press("Enter")
        page.wait_for_selector(".said.assistant .note")
        page.wait_for_timeout(250)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=path, type="jpeg", quality=75, full_page=width < 500)
        browser.close()


if __name__ == "__main__":
    main()
