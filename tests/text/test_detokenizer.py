from hypothesis import given
from hypothesis import strategies as st

from coli.text.detokenizer import Detokenizer


class Bytes:
    """Ids that index into a list of byte strings."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def stream(pieces):
    detokenizer = Detokenizer(Bytes(pieces))
    return [*(detokenizer.push(i) for i in range(len(pieces))), detokenizer.flush()]


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_pieces_join_to_the_text_of_all_bytes(pieces):
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=10))
def test_text_cut_into_bytes_comes_out_whole_characters_at_a_time(text):
    clean = text.encode("utf-8", "replace")
    out = stream([clean[i : i + 1] for i in range(len(clean))])
    assert "".join(out) == clean.decode()
    assert "�" not in "".join(out) or "�" in clean.decode()


def test_unfinished_character_is_held_back_and_flushed_as_replacement():
    assert stream([b"a\xf0", b"\x9f", b"\x98"]) == ["a", "", "", "�"]


def test_character_appears_with_its_last_byte():
    assert stream([b"\xf0\x9f", b"\x98", b"\x80!"]) == ["", "", "😀!", ""]
