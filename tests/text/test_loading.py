import pytest
from text import build

from coli.errors import TokenizerError
from coli.text.loading import load_meanwhile
from coli.text.tokenizer import Tokenizer


def test_the_tokenizer_is_the_folder_s(tmp_path):
    build.folder(tmp_path, build.byte_level())
    tokenizer = load_meanwhile(tmp_path)()
    assert tokenizer.fingerprint == Tokenizer.load(tmp_path).fingerprint


def test_what_is_wrong_with_it_is_raised_where_it_is_asked_for(tmp_path):
    tokenizer = load_meanwhile(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: missing"):
        tokenizer()
