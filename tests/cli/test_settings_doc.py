from cli.scripts import load

from coli.settings_table import TABLE


def test_settings_page_is_current():
    script = load("make_settings_doc")
    assert script.DOC.read_text() == script.document(), "run python scripts/make_settings_doc.py"


def test_every_flag_and_variable_is_on_the_page():
    page = load("make_settings_doc").document()
    names = [part for s in TABLE for part in s.flag.split("/") if part] + [e.name for s in TABLE for e in s.env]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_group_has_a_title():
    assert {setting.group for setting in TABLE} == set(load("make_settings_doc").GROUPS)
