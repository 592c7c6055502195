"""The page of `coli serve` in a browser: what people do with it, and that it shows what the engine counts."""

import os
import time

import httpx
import pytest
from browser.waiting import until
from server.faults import PATIENCE, held, job_of, settled
from server.faults import until as happens

from coli.options import DraftOptions, GenerateOptions, SamplerOptions

pytestmark = pytest.mark.browser

ORDER = "List as NDJSON. Orders: 3 lamps for Ana at 20 each. 2 cups for Bo at 7 each."
SCHEMA = """{"type": "object", "properties": {"customer": {"type": "string"}, "item": {"type": "string"}},
    "required": ["customer", "item"]}"""
DEFAULTS = GenerateOptions(max_tokens=48, sampler=SamplerOptions(temperature=0.0))
ENDED = ".said.assistant:last-child .note"


@pytest.fixture(scope="session")
def server(start):
    return start(drafts=DraftOptions(draft=6, gate="always"), defaults=DEFAULTS)


def say(page, text: str) -> None:
    page.fill("#question", text)
    page.keyboard.press("Enter")


def answer(page, text: str) -> str:
    """Say `text`; the whole answer."""
    before = page.locator(".said.assistant .note").count()
    say(page, text)
    until(page, "n => document.querySelectorAll('.said.assistant .note').length > n", before)
    return page.locator(".said.assistant .text").last.evaluate(
        "body => [...body.childNodes].filter(n => n.className !== 'rejected').map(n => n.textContent).join('')"
    )


def asked(server, *messages: str) -> str:
    said = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(messages)]
    return server.client.chat.completions.create(model="demo", messages=said).choices[0].message.content


def test_an_answer_is_the_servers_and_drafted_text_is_marked(server, open_page):
    page = open_page(server)
    first = answer(page, ORDER)
    assert first == asked(server, ORDER)
    assert page.locator(".draft").count() > 0
    assert page.locator(".draft").first.get_attribute("title") == "drafted by ngram"
    assert "forwards" in page.inner_text(ENDED)
    assert answer(page, "And 4 pens for Cy at 2 each.") == asked(server, ORDER, first, "And 4 pens for Cy at 2 each.")


def test_a_schema_in_the_settings_drafts(server, open_page):
    page = open_page(server)
    page.click("summary:has-text('Settings')")
    page.fill("#grammar", SCHEMA)
    page.fill("#max_tokens", "30")
    answer(page, ORDER)
    assert page.locator(".draft[data-source=grammar]").count() > 0
    until(page, "document.getElementById('drafts').textContent.includes('grammar')")
    page.fill("#grammar", "{ no schema")
    say(page, ORDER)
    until(page, "document.getElementById('error').textContent.includes('JSON Schema')")


def test_stop_keeps_what_was_said_and_the_next_message_works(server, open_page):
    page = open_page(server)
    page.click("summary:has-text('Settings')")
    page.fill("#max_tokens", "100000")
    page.fill("#temperature", "30")
    cancelled = server.worker.counts.cancelled
    with held(server, steps=60):  # of an answer that cannot end before it is stopped
        say(page, "hello")
        until(page, "document.querySelector('.said.assistant .text')?.textContent.length > 20")
        job = job_of(server)
        page.click("#stop")
        page.wait_for_selector(".note:has-text('stopped')")
        happens(lambda: job.cancelled)
    assert page.evaluate("document.activeElement.id") == "question"
    assert page.is_enabled("#send")
    happens(lambda: server.worker.counts.cancelled == cancelled + 1)
    page.fill("#max_tokens", "5")
    assert answer(page, "hello again")


def test_escape_stops_and_the_keyboard_reaches_everything(server, open_page):
    page = open_page(server)
    page.click("summary:has-text('Settings')")
    page.fill("#max_tokens", "100000")
    page.fill("#temperature", "30")
    with held(server, steps=60):
        say(page, "hello")
        until(page, "document.querySelector('.said.assistant .text')?.textContent.length > 5")
        page.keyboard.press("Escape")
        page.wait_for_selector(".note:has-text('stopped')")
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    for wanted in ("skip", "log", "question", "send", "clear", "temperature", "system", "grammar", "map"):
        assert wanted in reached
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#cell").startswith("Layer 1, expert 1: cached, used")


def test_a_reload_finds_the_conversation_again(server, open_page):
    page = open_page(server)
    first = answer(page, ORDER)
    page.reload()
    assert page.locator(".said .text").all_inner_texts() == [ORDER, first]
    second = answer(page, "And 4 pens for Cy at 2 each.")
    assert second == asked(server, ORDER, first, "And 4 pens for Cy at 2 each.")
    page.click("#clear")
    page.reload()
    assert page.locator(".said").count() == 0


def test_an_error_is_said_and_gives_the_question_back(server, open_page):
    page = open_page(server, expect_errors=True)
    long = "long " * 600
    say(page, long)
    until(page, "document.getElementById('error').textContent.includes('the context is 512')")
    assert page.input_value("#question") == long
    assert page.locator(".said").count() == 0
    page.fill("#question", "")
    assert answer(page, ORDER) == asked(server, ORDER)
    assert page.inner_text("#error") == ""


def test_markup_in_texts_stays_text(server, open_page):
    page = open_page(server)
    answer(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator(".said.user .text").inner_text() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.locator("#log img, #log b").count() == 0


def test_a_server_with_a_key_asks_for_it(start, open_page):
    page = open_page(start(api_key="secret", slots=1, defaults=DEFAULTS), expect_errors=True, wait=False)
    page.wait_for_selector("#key", state="visible")
    for key in ("wrong", "secret"):
        page.fill("#key", key)
        with page.expect_response(lambda answer, wrong=key == "wrong": (answer.status == 401) == wrong):
            page.keyboard.press("Enter")
        page.wait_for_selector("#key", state="visible" if key == "wrong" else "hidden")
    until(page, "document.getElementById('model').textContent.startsWith('demo')")
    assert answer(page, ORDER)


PIXELS = """([rows, columns]) => {
  const canvas = document.getElementById("map"), context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const names = {};
  for (const [name, code] of [["disk", "."], ["cached", "c"], ["pinned", "p"]]) {
    probe.fillStyle = style.getPropertyValue(`--${name}`).trim();
    probe.fillRect(0, 0, 1, 1);
    names[[...probe.getImageData(0, 0, 1, 1).data].join()] = code;
  }
  const found = [];
  for (let y = 0; y < rows; y += 1) {
    let row = "";
    for (let x = 0; x < columns; x += 1) {
      const at = [(x + 0.4) * canvas.width / columns, (y + 0.4) * canvas.height / rows].map(Math.floor);
      row += names[[...context.getImageData(...at, 1, 1).data].join()] ?? "?";
    }
    found.push(row);
  }
  return found;
}"""
LAYERS = "() => [...document.getElementById('layers').rows].map(r => [...r.cells].map(c => Number(c.textContent)))"


@pytest.fixture(scope="module")
def streaming(start, tmp_path_factory):
    """The demo model with room for a third of its experts, some of them pinned."""
    from coli.options import EngineOptions

    folder = tmp_path_factory.mktemp("history")
    options = EngineOptions(cap=8, usage_save=False, gate_save=False, usage=folder / "usage.json")
    return start(defaults=DEFAULTS, engine=options)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_heat_map_shows_what_the_engine_counts(streaming, open_page, scheme):
    page = open_page(streaming, color_scheme=scheme)
    page.click("summary:has-text('as a table')")
    answer(page, ORDER)
    assert settled(streaming)
    state = httpx.get(f"{streaming.url}/engine", timeout=PATIENCE).json()
    wanted = state["map"]["state"]
    until(page, "document.getElementById('tps').textContent === '0'")  # rates fall
    for _ in range(1000):  # flashes fade
        if page.evaluate(PIXELS, [len(wanted), len(wanted[0])]) == wanted:
            break
        page.wait_for_timeout(100)
    rows = [
        [layer, places.count("p"), places.count("c"), places.count("."), sum(used)]
        for layer, places, used in zip(state["model"]["layers"], wanted, state["map"]["used"], strict=True)
    ]
    assert page.evaluate(LAYERS) == rows
    assert page.evaluate(PIXELS, [len(wanted), len(wanted[0])]) == wanted
    assert 0 < sum(row.count(".") for row in wanted) < sum(map(len, wanted))
    store = streaming.worker._llm.load(0).store
    assert wanted == ["".join("c" if address else "." for address in row) for row in store.residency]
    assert state["experts"]["misses"] == store.stats().misses
    assert state["experts"]["bytes_read"] == store.stats().bytes_read
    assert page.inner_text("#tps") == "0"


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_screens_in_light_and_dark(server, open_page, width, scheme):
    page = open_page(server, color_scheme=scheme, viewport={"width": width, "height": 700})
    answer(page, ORDER)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")


def test_long_streaming_does_not_grow_the_tab(server, open_page):
    """Thousands of drafted and rejected parts, hundreds of messages: nodes and heap stay bounded."""
    page = open_page(server)
    sizes = page.evaluate("""async () => {
      const { Log } = await import("/page/answer.js");
      const log = new Log(document.getElementById("log"));
      const sizes = [];
      for (let round = 0; round < 120; round += 1) {
        log.add("user", "question");
        const answer = log.add("assistant");
        for (let at = 0; at < 200; at += 1) {
          answer.write([{ text: "drafted ", source: "ngram" }, { text: "own ", source: null, rejected: at % 3 }]);
          if (at % 50 === 0) answer.flush();
        }
        answer.flush();
        sizes.push(document.querySelectorAll("*").length);
      }
      return sizes;
    }""")
    assert max(sizes[10:]) <= 1500
    assert max(sizes[60:]) <= max(sizes[:60]) * 1.1


CONTRAST = """() => {
  const channel = (value) => value <= 10.31 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
  const back = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const gone = ["SCRIPT", "NOSCRIPT"].includes(element.tagName) || element.closest("button:disabled");
    if (!walker.currentNode.data.trim() || gone || !element.checkVisibility()) continue;
    const [a, b] = [numbers(getComputedStyle(element).color), back(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push([walker.currentNode.data, ratio]);
  }
  return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_everything_that_takes_the_focus_has_a_name(server, open_page, scheme):
    page = open_page(server, color_scheme=scheme)
    for summary in page.locator("summary").all():
        summary.click()
    answer(page, ORDER)
    assert page.evaluate(CONTRAST) == []
    tools = page.context.new_cdp_session(page)
    nodes = tools.send("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in nodes
        if any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", []))
        and node["role"]["value"] != "RootWebArea"
    ]
    assert len(focusable) > 12
    assert [node["role"] for node in focusable if not node.get("name", {}).get("value")] == []
    named = {node["name"]["value"] for node in nodes if node["role"]["value"] == "image"}
    assert any("6 layers by 32 experts" in name for name in named)


@pytest.mark.parametrize("seconds", [int(os.environ.get("COLI_TEST_STREAM_SECONDS", "15"))])
def test_streaming_on_and_on_does_not_grow_the_tab(start, open_page, seconds):
    """Answer after answer, now and then a new conversation; COLI_TEST_STREAM_SECONDS says how long."""
    server = start(slots=1, context=2048, drafts=DraftOptions(draft=6, gate="always"), defaults=DEFAULTS)
    page = open_page(server, expect_errors=True)
    page.click("summary:has-text('Settings')")
    page.fill("#max_tokens", "400")
    page.fill("#temperature", "3")
    tools = page.context.new_cdp_session(page)
    sizes, began, tokens = [], time.monotonic(), 0
    while time.monotonic() - began < seconds or len(sizes) < 4:
        for turn in range(4):
            answer(page, f"{ORDER} {turn}")
        page.click("#clear")
        tools.send("HeapProfiler.collectGarbage")
        heap = tools.send("Runtime.getHeapUsage")["usedSize"]
        sizes.append((heap, page.evaluate("document.querySelectorAll('*').length")))
        tokens = server.worker.counts.generated_tokens
    print(f"{tokens} tokens in {time.monotonic() - began:.0f} s; heap and nodes: {sizes[:2]} ... {sizes[-2:]}")
    assert max(nodes for _, nodes in sizes) < 400
    assert min(heap for heap, _ in sizes[-2:]) < sizes[1][0] + 1_000_000
