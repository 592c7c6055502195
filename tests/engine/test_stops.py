"""StopMatcher: nothing of a stop string is ever shown, everything else is."""

import random

import pytest

from coli.engine.stops import StopMatcher


def run(stops: list[bytes], chunks: list[bytes]) -> tuple[bytes, bool]:
    matcher = StopMatcher(stops)
    shown = b""
    for chunk in chunks:
        shown += matcher.push(chunk)
        if matcher.matched:
            return shown, True
    return shown + matcher.flush(), False


def test_without_stops_bytes_pass_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push(b"abc") == b"abc"
    assert matcher.kept_bytes == 3


def test_a_possible_beginning_is_held_back_and_released_when_it_was_none() -> None:
    matcher = StopMatcher([b"END"])
    assert matcher.push(b"xE") == b"x"
    assert matcher.push(b"N") == b""
    assert matcher.push(b"O") == b"ENO"
    assert not matcher.matched


def test_stop_split_over_tokens_is_cut_out() -> None:
    matcher = StopMatcher([b" ha ha ha"])
    assert [matcher.push(b) for b in (b"well", b" ha", b" ha", b" ha")] == [b"well", b"", b"", b""]
    assert matcher.matched
    assert matcher.kept_bytes == 4


def test_flush_gives_what_was_held() -> None:
    assert run([b"abc"], [b"xab"]) == (b"xab", False)


@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_a_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        text = bytes(rng.choice(b"ab") for _ in range(rng.randint(0, 14)))
        stops = [bytes(rng.choice(b"ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 6)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        # chunk by chunk the first match in time wins; with one byte a chunk that is the match that ends first
        shown, matched = run(stops, [bytes([b]) for b in text])
        ends = [text.find(s) + len(s) for s in stops if s in text]
        if ends:
            first_end = min(ends)
            starts = [first_end - len(s) for s in stops if text[:first_end].endswith(s)]
            assert (shown, matched) == (text[: min(starts)], True)
        else:
            assert (shown, matched) == (text, False)
        whole = run(stops, chunks)
        assert whole[1] == matched
        assert not any(stop in whole[0] for stop in stops)
        assert whole == run(stops, [text]) or matched
