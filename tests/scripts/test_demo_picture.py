"""The picture of `coli demo` shows every column and fetches nothing."""

import re

from cli.scripts import SCRIPTS

from coli.cli.demo import COLUMNS

PICTURE = (SCRIPTS.parent / "docs" / "demo.svg").read_text()


def test_it_shows_every_column():
    shown = " ".join(re.findall(r">([^<]+)</text>", PICTURE)).replace("&#160;", " ")
    assert all(column in shown for column in COLUMNS)


def test_it_asks_no_server_for_fonts():
    assert "@font-face" not in PICTURE
    assert "url(http" not in PICTURE
