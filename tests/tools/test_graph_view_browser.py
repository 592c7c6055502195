"""The page of `coli graph view` in a real browser: text that looks like markup does nothing. Needs chromium."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from drafts.test_index import build

from coli.tools.graph_view import page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = [
    "<script>document.title='seen'</script>",
    "<img src=x onerror=\"document.title='seen'\">",
    '"><svg onload="document.title=\'seen\'">',
    "</title></svg><script>document.title='seen'</script>",
    "<a href='javascript:0'>&lt;b&gt;",
]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path):
    assert BROWSER is not None
    index = build(tmp_path / "index", [[i % 5 for i in range(60)], [0, 2, 4, 1, 3] * 9])
    text = page(index, lambda ids: "".join(HOSTILE[token_id % 5] for token_id in ids), 60, 0.0)
    (tmp_path / "page.html").write_text(text)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "page.html").as_uri()
    shot = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={shot}", address], check=True, timeout=600, capture_output=True)
    done = subprocess.run([*command, "--dump-dom", address], check=True, timeout=600, capture_output=True, text=True)
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000
    seen = done.stdout
    assert "<title>index: " in seen
    used = {name.lower() for name in re.findall(r"<([a-zA-Z]+)", seen)}
    assert used <= {"html", "head", "meta", "title", "style", "body", "h", "p", "svg", "circle", "path", "text", "g"}
    assert seen.count("<circle") == text.count("<circle") > 10
    assert "&lt;script&gt;" in seen
