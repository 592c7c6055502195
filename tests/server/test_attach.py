import pytest

from coli.options import GenerateOptions, SamplerOptions
from coli.remote import RemoteConversation, RemoteError

OPTIONS = GenerateOptions(max_tokens=12, sampler=SamplerOptions(temperature=0.9, seed=4))


def test_an_attached_chat_says_what_the_server_says_and_errors_keep_the_conversation(server):
    remote = RemoteConversation(server.url, None, {"temp", "seed"})
    said = "".join(remote.ask("hello", OPTIONS))
    answer = server.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], temperature=0.9, seed=4, max_tokens=12
    )
    assert said == answer.choices[0].message.content
    assert len(remote.messages) == 2
    with pytest.raises(RemoteError, match="the context is 512"):
        list(remote.ask("long " * 600, OPTIONS))
    assert len(remote.messages) == 2


def test_a_server_that_is_not_there_is_one_line():
    remote = RemoteConversation("http://127.0.0.1:9", None, ())
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:9"):
        list(remote.ask("hello", OPTIONS))
    assert remote.messages == []
