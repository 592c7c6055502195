"""A conversation saved and loaded goes on with the bits it had, whatever its cache looks like."""

from pathlib import Path

import numpy as np
import pytest
from containers import MTP_FIXTURE, container

from coli.conversation import Conversation
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions

OPTIONS = GenerateOptions(12, ignore_eos=True)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", ["olmoe-base", "glm_moe_dsa-sparse", "gpt_oss-base", MTP_FIXTURE])
def test_a_loaded_conversation_goes_on_as_the_saved_one(tmp_path: Path, name: str, kv: str) -> None:
    with LLM.open(container(name, "f32"), EngineOptions(kv=kv, usage_save=False), lambda line: None) as llm:
        first, second = (Conversation(llm, 200, DraftOptions()) for _ in range(2))
        "".join(first.ask("The river", OPTIONS))
        first.save(tmp_path / "session")
        second.load(tmp_path / "session")
        assert first._session is not None
        assert second._session is not None
        length = second._session.cache.length
        assert length == first._session.cache.length > 15
        saved = [each._session.cache.saved(length) for each in (first, second)]  # type: ignore[union-attr]
        assert saved[0].keys() == saved[1].keys()
        for part, mine in saved[0].items():
            loaded = saved[1][part]
            assert mine.any() or not mine.size or part.startswith("base")
            assert np.array_equal(mine, loaded)
        answers = ["".join(each.ask("Why?", OPTIONS)) for each in (first, second)]
        assert answers[0] == answers[1]
