import dataclasses
import math
from pathlib import Path

import pytest

from coli import options
from coli.errors import OptionError
from coli.options import resolve
from coli.setting_values import Bounds, parse_value, utf8
from coli.settings_table import BY_NAME, TABLE, EnvName, Setting


def value(name, flag=None, **environ):
    resolved = resolve({name: flag}, environ, names=[name])
    return resolved[name], resolved.values[name].origin


@pytest.fixture
def released(monkeypatch):
    """Every setting's feature is there."""
    for setting in TABLE:
        monkeypatch.setitem(BY_NAME, setting.name, dataclasses.replace(setting, later=""))


# --- precedence


def test_flag_beats_environment_beats_default():
    assert value("ngen", "5", NGEN="6") == (5, "flag")
    assert value("ngen", None, NGEN="6") == (6, "environment NGEN")
    assert value("ngen") == (256, "default")


def test_first_variable_of_a_setting_wins():
    assert value("temp", None, COLI_TEMP="0.5", TEMP="1") == (0.5, "environment COLI_TEMP")


def test_empty_variable_is_unset():
    assert value("temp", None, COLI_TEMP="", TEMP="1") == (1.0, "environment TEMP")
    assert value("ngen", None, NGEN="") == (256, "default")


def test_bad_variable_is_not_read_when_a_flag_is_given():
    assert value("ngen", "5", NGEN="many") == (5, "flag")


def test_settings_a_command_does_not_use_cannot_stop_it():
    assert resolve({}, {"NGEN": "many"}, names=["threads"])["threads"] is None


def test_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("NGEN", "17")
    assert resolve({}, names=["ngen"])["ngen"] == 17


def test_report_says_where_each_value_came_from(tmp_path):
    report = resolve({"ngen": "5", "json": "out.json"}, {"SEED": "3"}).report()
    assert report["ngen"] == {"value": 5, "from": "flag"}
    assert report["seed"] == {"value": 3, "from": "environment SEED"}
    assert report["temp"] == {"value": 0.0, "from": "default"}
    assert report["json"]["value"] == "out.json"


# --- variables with rules of their own


@pytest.mark.parametrize("text", ["0.7", "1", ".5", "2.", "1e-1", "0"])
def test_temp_counts_when_it_is_wholly_numeric(text):
    assert value("temp", None, TEMP=text) == (float(text), "environment TEMP")


@pytest.mark.parametrize("text", ["/tmp", "C:\\Temp", "1x", "0.7 ", "nan", "inf"])
def test_temp_that_is_a_folder_is_ignored(text):
    assert value("temp", None, TEMP=text) == (0.0, "default")


def test_numeric_temp_out_of_bounds_is_refused():
    with pytest.raises(OptionError, match=r"TEMP: '-1' is not allowed; allowed: a number from 0 to 100"):
        value("temp", None, TEMP="-1")


@pytest.mark.parametrize("held", ["coli.json", "config.json"])
def test_snap_counts_when_it_holds_a_model(tmp_path, held):
    assert value("model", None, SNAP=str(tmp_path)) == (None, "default")
    (tmp_path / held).write_text("{}")
    assert value("model", None, SNAP=str(tmp_path)) == (str(tmp_path), "environment SNAP")
    assert value("model", None, SNAP=str(tmp_path), COLI_MODEL="m") == ("m", "environment COLI_MODEL")


@pytest.mark.parametrize(("environ", "mode"), [({"DIRECT": "1"}, "direct"), ({"COLI_MMAP": "1"}, "mmap")])
def test_read_mode_switches(released, environ, mode):
    assert value("io", None, **environ)[0] == mode
    assert value("io", None, **dict.fromkeys(environ, "0"))[0] == "auto"
    assert value("io", "pread", **environ) == ("pread", "flag")


def test_two_read_modes_at_once_are_refused_unless_a_flag_decides(released):
    with pytest.raises(OptionError, match="DIRECT and COLI_MMAP are both set"):
        value("io", None, DIRECT="1", COLI_MMAP="1")
    assert value("io", None, DIRECT="0", COLI_MMAP="1")[0] == "mmap"
    assert value("io", "pread", DIRECT="1", COLI_MMAP="1") == ("pread", "flag")


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("2", True), ("0", False), ("yes", True), ("off", False)])
def test_tokens_variable_is_a_switch(text, wanted):
    assert value("tokens", None, TOKENS=text)[0] is wanted


@pytest.mark.parametrize(
    ("name", "variable", "text", "wanted"),
    [
        ("corpus_k", "COLI_CORPUS_K", "49", 48),
        ("corpus_k", "COLI_CORPUS_K", "100000", 48),
        ("grammar_draft", "GRAMMAR_DRAFT", "99", 48),
        ("grammar_draft", "GRAMMAR_DRAFT", "0", 24),
        ("grammar_draft", "GRAMMAR_DRAFT", "-7", 24),
    ],
)
def test_capped_settings_are_capped_with_one_notice(released, name, variable, text, wanted):
    resolved = resolve({}, {variable: text}, names=[name])
    assert resolved[name] == wanted
    (notice,) = resolved.notices
    assert variable in notice
    assert f"using {wanted}" in notice


def test_values_within_the_cap_give_no_notice(released):
    assert resolve({}, {"COLI_CORPUS_K": "48"}, names=["corpus_k"]).notices == ()


def test_corpus_k_below_one_is_refused(released):
    with pytest.raises(OptionError, match=r"COLI_CORPUS_K: '0' .* from 1 to 48"):
        resolve({}, {"COLI_CORPUS_K": "0"}, names=["corpus_k"])


def test_no_color_turns_colour_off_and_the_flag_wins():
    assert value("color", None, NO_COLOR="1")[0] == "never"
    assert value("color", "always", NO_COLOR="1")[0] == "always"


# --- unknown and future settings


def test_unknown_own_variables_are_named_once_each():
    notices = resolve({}, {"COLI_THREAD": "2", "SPECULANT_X": "1", "OTHER": "1", "COLI_EMPTY": ""}).notices
    assert len(notices) == 2
    assert "COLI_THREAD" in notices[0]
    assert "did you mean COLI_THREADS?" in notices[0]
    assert "SPECULANT_X" in notices[1]


def test_known_variables_are_not_called_unknown():
    environ = {env.name: "1" for setting in TABLE for env in setting.env if env.name != "COLI_KV"}
    assert not [n for n in resolve({}, environ, names=[]).notices if "unknown" in n]


LATER = Setting("x", "drafts", "int", 8, "an effect", "--x", (EnvName("COLI_X"),), Bounds(1, 9), later="x drafts")


def test_flag_of_a_feature_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(BY_NAME, "x", LATER)
    with pytest.raises(OptionError, match=r"--x: this version does not have x drafts yet"):
        resolve({"x": "3"}, {}, names=["x"])


def test_variable_of_a_feature_that_is_not_there_is_noticed_and_checked(monkeypatch):
    monkeypatch.setitem(BY_NAME, "x", LATER)
    monkeypatch.setattr(options, "TABLE", (*TABLE, LATER))
    resolved = resolve({}, {"COLI_X": "3"}, names=["x"])
    assert (resolved["x"], resolved.values["x"].origin) == (8, "default")
    assert resolved.notices == ("COLI_X is set, but this version does not have x drafts yet: no effect",)
    assert resolve({}, {"COLI_X": "8"}, names=["x"]).notices == ()
    with pytest.raises(OptionError, match="COLI_X"):
        resolve({}, {"COLI_X": "ten"}, names=["x"])


# --- values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6", 6 * 10**9),
        ("6.5", 65 * 10**8),
        ("800MB", 8 * 10**8),
        ("800 mb", 8 * 10**8),
        ("2GiB", 2**31),
        ("512MiB", 2**29),
        ("1GB", 10**9),
        ("auto", None),
    ],
)
def test_ram_sizes(text, size):
    assert value("ram", text)[0] == size


@pytest.mark.parametrize("text", ["0", "-1", "GB", "1 parsec", "1e3", "99999999999999999999", "1GBs", ""])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(OptionError, match=r"--ram: .* is not allowed; allowed: auto or a size"):
        value("ram", text)


def test_pin_gb_takes_all(released):
    assert value("pin_gb", "all")[0] == math.inf
    assert resolve({"pin_gb": "all"}, {}, names=["pin_gb"]).report()["pin_gb"]["value"] == "all"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ngen", "0"),
        ("ngen", "1.5"),
        ("ngen", "9" * 40),
        ("seed", "-1"),
        ("seed", str(2**64)),
        ("top_p", "1.01"),
        ("min_p", "-0.1"),
        ("temp", "nan"),
        ("temp", "1e999"),
        ("kv", "f64"),
        ("threads", "0"),
        ("prompt_ids", ""),
        ("prompt_ids", "1,x"),
        ("prompt_ids", "-1"),
        ("stop", ("",)),
        ("repeat_penalty", "0"),
    ],
)
def test_bad_values_name_setting_value_and_what_is_allowed(name, text):
    with pytest.raises(OptionError) as caught:
        value(name, text)
    message = str(caught.value)
    assert message.startswith(BY_NAME[name].flag)
    assert "allowed: " in message
    assert len(message) < 250


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "1, 2,3,"])
def test_prompt_ids(text):
    assert value("prompt_ids", text)[0] == (1, 2, 3)


def test_switch_flags_and_their_negation():
    assert value("think", True)[0] is True
    assert value("think", False) == (False, "flag")
    assert value("raw", False) == (False, "default")


def test_excluded_lower_bound():
    bounds = Bounds(0, 1, above=True)
    assert parse_value("float", bounds, "1", "X") == 1.0
    with pytest.raises(OptionError, match=r"from 0 \(excluded\) to 1"):
        parse_value("float", bounds, "0", "X")


# --- the objects


def test_option_objects_carry_the_values(released):
    flags = {"ngen": "7", "temp": "0.5", "stop": ("a", "b"), "ram": "1", "ctx": "64", "corpus": "c.txt", "draft": "3"}
    resolved = resolve(flags, {}, names=[setting.name for setting in TABLE])
    generate = options.generate_options(resolved)
    assert (generate.max_tokens, generate.stop, generate.sampler.temperature) == (7, ("a", "b"), 0.5)
    engine = options.engine_options(resolved)
    assert (engine.memory_budget_bytes, engine.context) == (10**9, 64)
    drafts = options.draft_options(resolved)
    assert (drafts.corpus, drafts.draft, drafts.enabled) == (Path("c.txt"), 3, True)


def test_defaults_of_the_table_and_of_the_objects_agree(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    resolved = resolve({}, {})
    assert options.generate_options(resolved) == options.GenerateOptions()
    assert options.engine_options(resolved) == options.EngineOptions()
    assert options.draft_options(resolved) == options.DraftOptions()


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.name)
def test_every_setting_can_be_set_has_an_effect_and_a_valid_default(setting):
    assert setting.flag or setting.env
    assert setting.effect
    assert setting.counter or setting.name in ("quiet", "verbose", "color", "debug")
    if setting.default not in (None, ()) and setting.kind not in ("flag", "bool"):
        assert setting.parse(str(setting.default), "x") == setting.default


def test_names_flags_and_variables_are_unique():
    flags = [part for setting in TABLE for part in setting.flag.split("/") if part]
    variables = [env.name for setting in TABLE for env in setting.env]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)
    assert len(BY_NAME) == len(TABLE)


# --- folders


def test_model_home(monkeypatch, tmp_path):
    def home(environ):
        return options.model_home(resolve({}, environ, names=["home"]))

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert home({}) == tmp_path / "data" / "coli"
    assert home({"COLI_HOME": "/models"}) == Path("/models")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert home({}).is_relative_to(tmp_path)


def test_no_home_folder_is_no_error(monkeypatch):
    def none():
        raise RuntimeError

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert options.model_home(resolve({}, {}, names=["home"])) is None


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("yes", True), ("0", False), ("", False), ("off", False)])
def test_debug_variable(monkeypatch, text, wanted):
    monkeypatch.setenv("COLI_DEBUG", text)
    assert options.debug_wanted() is wanted


def test_utf8_is_read_where_the_locale_cannot():
    assert utf8("\udcc3\udca9 x") == "é x"
    with pytest.raises(ValueError, match="utf-8"):
        utf8("\udcff")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, None),
        ({"XDG_CACHE_HOME": "/caches"}, Path("/caches/coli")),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({"XDG_CACHE_HOME": "/caches", "COLI_KERNEL_CACHE": "here"}, Path("here")),
    ],
)
def test_the_kernel_cache_is_where_the_variables_say(monkeypatch, environ, folder):
    for name in ("XDG_CACHE_HOME", "COLI_KERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert options.engine_options(options.resolve({})).kernel_cache == folder
