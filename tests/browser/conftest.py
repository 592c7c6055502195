"""A headless Chromium on a real server; left out of the default run (marker `browser`, see .ci/run)."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from browser.waiting import until

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

# the server's fixtures, under another name than this conftest's
_spec = importlib.util.spec_from_file_location(
    "server_conftest", Path(__file__).parent.parent / "server" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_fixtures = sys.modules["server_conftest"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
start = _fixtures.start


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium: install Debian's package or name one in CHROMIUM")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """open_page(server, **context): a tab that fails the test on any error, and on any request to elsewhere."""
    contexts, wrong = [], []

    def opened(server, expect_errors: bool = False, wait: bool = True, **context):
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(300_000)
        page.on(
            "request", lambda request: wrong.append(request.url) if not request.url.startswith(server.url) else None
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        if not expect_errors:
            page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(server.url)
        if wait:
            until(page, "document.getElementById('model').textContent !== 'loading'")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
