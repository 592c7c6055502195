"""The page's files and the engine as an onlooker sees it: complete, closed to the outside, equal to the counters."""

import json
import re

import httpx
import numpy as np
import pytest
from server.faults import PATIENCE

from coli.builtin import DEMO_MODEL
from coli.options import DraftOptions, EngineOptions
from coli.server.page import FOLDER, PATHS
from coli.store.container import Container
from coli.store.usage import UsageFile

ORDER = [{"role": "user", "content": "List as NDJSON. Orders: 3 lamps for Ana at 20 each. 2 cups for Bo at 7 each."}]


@pytest.mark.parametrize("path", sorted(PATHS))
def test_files_are_sent_with_a_policy_that_allows_this_server_only(server, path):
    answer = httpx.get(f"{server.url}{path}", timeout=PATIENCE)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_no_file_names_another_place_or_holds_inline_code():
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]|innerHTML|eval\(|\son[a-z]+=|style=", text), path.name
    used = set(re.findall(r'(?:src|href)="(/page/[^"]+)"', (FOLDER / "index.html").read_text()))
    imported = {
        f"/page/{name}" for path in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())
    }
    assert used | imported == set(PATHS) - {"/"}


def test_the_page_needs_no_key_but_the_engine_does(start):
    server = start(api_key="secret", slots=1)
    assert all(httpx.get(server.url + path, timeout=PATIENCE).status_code == 200 for path in PATHS)
    for path in ("/engine", "/engine/events"):
        assert httpx.get(server.url + path, timeout=PATIENCE).status_code == 401
    assert (
        httpx.get(f"{server.url}/engine", headers={"Authorization": "Bearer secret"}, timeout=PATIENCE).status_code
        == 200
    )


def small_server(start, tmp_path_factory):
    """Room for a quarter of the experts, two of layer 0 pinned."""
    pins = tmp_path_factory.mktemp("pins") / "pins.json"
    container = Container.open(DEMO_MODEL)
    counts = np.zeros((6, 32), np.int64)
    counts[0, [3, 9]] = 1000
    UsageFile(pins, container.fingerprint, 6, 32).save(counts)
    record = container.expert_layout(0).record_bytes
    engine = EngineOptions(
        cap=8, pin=str(pins), pin_bytes=2 * record, usage_save=False, gate_save=False, usage=pins.with_name("u")
    )
    return start(engine=engine, drafts=DraftOptions(draft=6, gate="always"))


@pytest.fixture(scope="module")
def small(start, tmp_path_factory):
    return small_server(start, tmp_path_factory)


def ask(server, **more):
    arguments = {"model": "demo", "messages": ORDER, "temperature": 0, "max_tokens": 24, **more}
    return server.client.chat.completions.create(**arguments)


def test_what_is_seen_equals_the_counters(start, tmp_path_factory):
    small = small_server(start, tmp_path_factory)
    answers = [ask(small), ask(small, max_tokens=9)]
    seen = httpx.get(f"{small.url}/engine", timeout=PATIENCE).json()
    store = small.worker._llm.load(0).store
    stats = store.stats()
    assert {name: seen["experts"][name] for name in ("hits", "pinned_hits", "misses", "reads", "bytes_read")} == {
        name: getattr(stats, name) for name in ("hits", "pinned_hits", "misses", "reads", "bytes_read")
    }
    assert seen["memory"]["expert_resident_bytes"] == stats.resident_bytes
    pinned, cached = store.policy.pinned, set(store.policy.resident())
    assert len(pinned) == 2
    for at, (places, used) in enumerate(zip(seen["map"]["state"], seen["map"]["used"], strict=True)):
        keys = [32 * seen["model"]["layers"][at] + expert for expert in range(32)]
        assert places == "".join("p" if key in pinned else "c" if key in cached else "." for key in keys)
        assert used == [int(store.policy.usage[key]) for key in keys]
    tokens = [answer.usage.completion_tokens for answer in answers]
    assert seen["tokens"]["generated"] == sum(tokens)
    assert seen["tokens"]["decoded"] == sum(tokens) - 2
    assert seen["forwards"]["responses"] == sum(answer.coli["forwards"] for answer in answers)
    for kind in ("proposed", "judged", "accepted"):
        assert seen["drafts"]["ngram"][kind] == sum(answer.coli["drafts"]["ngram"][kind] for answer in answers)
    uses = sum(map(sum, seen["map"]["used"]))
    rows = sum(answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
    assert uses >= 6 * 4 * rows  # four experts in each of six layers for every row that was kept


def test_events_come_when_something_changes_and_end_with_the_server(small):
    with httpx.stream("GET", f"{small.url}/engine/events", timeout=PATIENCE) as watching:
        lines = (line for line in watching.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines).removeprefix("data: "))
        ask(small, max_tokens=12)
        later = json.loads(next(lines).removeprefix("data: "))
        # not every expert fits: the disk is measured, when nobody runs
        while later["requests"]["finished"] == first["requests"]["finished"] or later["disk"] is None:
            later = json.loads(next(lines).removeprefix("data: "))
    assert later["tokens"]["generated"] == first["tokens"]["generated"] + 12
    assert later["time_s"] > first["time_s"]
    assert later["disk"]["bytes_per_s"] > 0


def test_drafted_text_is_told_apart_in_a_stream_that_asks_for_it(small):
    whole = ask(small)
    chunks = list(ask(small, stream=True, stream_options={"include_usage": True}, extra_body={}))
    assert all(getattr(chunk, "coli", None) is None for chunk in chunks[:-1])
    more = {"stream_options": {"include_usage": True, "include_drafts": True}}
    chunks = list(ask(small, stream=True, extra_body=more))
    parts = [part for chunk in chunks[:-1] for part in (getattr(chunk, "coli", None) or {}).get("parts", [])]
    assert "".join(part["text"] for part in parts) == whole.choices[0].message.content
    counts = chunks[-1].coli["drafts"]["ngram"]
    assert sum(part["source"] == "ngram" for part in parts) == counts["accepted"] > 0
    assert {part["source"] for part in parts} == {"ngram", None}
    assert sum(part["rejected"] for part in parts) <= counts["proposed"] - counts["accepted"]
