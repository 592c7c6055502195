"""The MTP head guesses what the reference guesses, however its rows came to be, and keeps up with rewinds and trees."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import MTP_FIXTURE, container, expected, random_head, variant
from convert.checkpoints import copy_fixture, edit_config, read_tensors, write_tensors
from forward_runs import Runner
from numpy.typing import NDArray

from coli.convert import ConvertOptions, convert
from coli.kernels import elementwise
from coli.model.kv_cache import KVCache, mtp_cache_spec, new_cache
from coli.model.mtp import WINDOW, MtpMemory, Predictor

WANT = expected(MTP_FIXTURE)
IDS: list[int] = WANT["prompt_ids"] + WANT["greedy_ids"]
DRAFTS: list[int] = WANT["mtp"]["draft_argmax"]
NONE = np.array([], np.int64)
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe-base", {}),
    ("glm_moe_dsa-sparse", {}),
    ("glm_moe_dsa-sparse", {"shared": "FSS", "topk": 5}),
]


class Sequence:
    """One sequence of the fixture with its head; keeps the logits of the last guess."""

    def __init__(self, runner: Runner | None = None, capacity: int = 128) -> None:
        self.runner = runner or Runner(container(MTP_FIXTURE, "f32"))
        spec = self.runner.spec
        assert spec.mtp is not None
        assert self.runner.model.mtp is not None
        self.cache: KVCache = self.runner.cache(capacity)
        self.memory = MtpMemory(new_cache(mtp_cache_spec(spec, spec.mtp), capacity + 64, "f32"), spec.hidden_size)
        self.cache.follower = self.memory
        self.logits: NDArray[np.float32] = np.empty(0, np.float32)
        self.predictor = Predictor(self.runner.model.mtp, self.memory, self._choose)

    def feed(self, ids: list[int], parents: list[int] | None = None, *, prefill: bool = False) -> None:
        start = self.cache.length
        depth = np.arange(len(ids))
        for row, parent in enumerate(parents or ()):
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
        tree = None if parents is None else np.array(parents)
        self.runner.model.forward(self.cache, np.array(ids), start + depth, tree, NONE, prefill=prefill)

    def guess(self, newest: int, extension: tuple[int, ...] = (), limit: int = 1) -> list[int]:
        return self.predictor.predict(newest, extension, limit)

    def _choose(self, logits: NDArray[np.float32], position: int) -> int:
        self.logits = logits.copy()
        return int(np.argmax(logits))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_guesses_are_the_references(chunk: int) -> None:
    sequence, positions = Sequence(), WANT["mtp"]["positions"]
    for start in range(0, len(IDS) - 1, chunk):
        sequence.feed(IDS[start : start + chunk][: len(IDS) - 1 - start], prefill=chunk > 1)
        length = sequence.cache.length
        assert sequence.guess(IDS[length]) == [DRAFTS[length - 1]]
        if length - 1 in positions:
            values = WANT["mtp"]["logits"][positions.index(length - 1)]
            assert np.abs(sequence.logits - np.array(values, np.float32)).max() < 1e-3


def test_rows_left_undone_by_many_forwards_are_made_up_for() -> None:
    sequence = Sequence()
    for token_id in IDS[:-1]:
        sequence.feed([token_id])
    assert sequence.guess(IDS[-1]) == [DRAFTS[-1]]
    assert sequence.memory.positions == list(range(len(IDS) - 1))


def test_a_kept_path_of_a_tree_and_a_rewind_give_the_guesses_of_the_chain() -> None:
    sequence = Sequence()
    sequence.feed(IDS[:10], prefill=True)
    sequence.guess(IDS[10], limit=3)
    # rows 1, 3 and 4 go on as the text does, rows 0, 2 and 5 do not
    sequence.feed([1, IDS[10], 2, IDS[11], IDS[12], 3], [-1, -1, 1, 1, 3, 3])
    sequence.cache.keep_path(10, [1, 3, 4])
    assert sequence.guess(IDS[13]) == [DRAFTS[12]]
    sequence.feed(IDS[13:30])
    sequence.guess(7)
    sequence.cache.rewind(20)
    assert sequence.guess(IDS[20]) == [DRAFTS[19]]
    sequence.cache.rewind(12)
    sequence.feed(IDS[12:25])
    assert sequence.guess(IDS[25]) == [DRAFTS[24]]
    assert sequence.memory.positions == list(range(25))


def test_going_on_behind_its_own_guesses_is_guessing_further() -> None:
    sequence = Sequence()
    sequence.feed(IDS[:20], prefill=True)
    further = sequence.guess(IDS[20], limit=5)
    for count in range(1, 5):
        assert sequence.guess(IDS[20], tuple(further[:count]), limit=5 - count) == further[count:]
    assert sequence.memory.cache.length == 20


def test_a_copied_prefix_has_the_rows_of_the_original() -> None:
    first, second = Sequence(), Sequence()
    first.feed(IDS[:30], prefill=True)
    first.guess(IDS[30])
    second.cache.copy_prefix(first.cache, 20)
    assert second.guess(IDS[20]) == [DRAFTS[19]]
    second.feed(IDS[20:25])
    assert second.guess(IDS[25]) == [DRAFTS[24]]


def test_what_was_never_asked_for_leaves_a_gap_and_no_error() -> None:
    sequence = Sequence(capacity=WINDOW + 200)
    ids = (IDS * 20)[: WINDOW + 100]
    for start in range(0, len(ids), 20):
        sequence.feed(ids[start : start + 20])
    assert len(sequence.guess(5, limit=2)) == 2
    assert sequence.memory.positions == list(range(100, len(ids)))
    sequence.cache.rewind(50)
    assert sequence.guess(5) == []
    sequence.feed(ids[50:60])
    assert len(sequence.guess(5)) == 1
    assert sequence.memory.positions == list(range(50, 60))


def test_rows_that_came_from_elsewhere_are_done_without() -> None:
    sequence = Sequence()
    sequence.feed(IDS[:10], prefill=True)
    sequence.cache.length = 15  # as a saved session leaves it
    sequence.feed(IDS[15:30])
    assert len(sequence.guess(IDS[30])) == 1


def test_weights_that_are_no_numbers_end_the_guessing_only() -> None:
    sequence = Sequence()
    weights = sequence.runner.model.weights.mtp
    assert weights is not None
    weights.hnorm[:] = np.nan
    sequence.feed(IDS[:10], prefill=True)
    assert sequence.memory.is_broken
    assert sequence.guess(IDS[10]) == []


def test_threads_and_budgets_do_not_change_a_guess() -> None:
    few = Sequence(Runner(container(MTP_FIXTURE, "f32"), slots=10, threads=2))
    few.feed(IDS[:20], prefill=True)
    much = Sequence()
    much.feed(IDS[:20], prefill=True)
    assert few.guess(IDS[20], limit=4) == much.guess(IDS[20], limit=4)
    assert np.array_equal(few.logits, much.logits)


@pytest.mark.parametrize(("name", "parts"), OTHERS)
def test_heads_of_other_families_guess_alike_whatever_the_cuts_paths_and_memory(
    name: str, parts: dict[str, Any]
) -> None:
    path = variant(name, "q4", head=True, **parts)
    runner, few = Runner(path), Runner(path, slots=10, threads=2, io="pread", prefetch=True)

    def guessed(sequence: Sequence) -> tuple[list[int], NDArray[np.float32]]:
        return sequence.guess(IDS[30], limit=4), sequence.logits

    whole = Sequence(runner)
    whole.feed(IDS[:30], prefill=True)
    ids, logits = guessed(whole)
    one_by_one, streamed, moved = Sequence(runner), Sequence(few), Sequence(runner)
    for at in range(30):
        one_by_one.feed(IDS[at : at + 1])
        one_by_one.guess(IDS[at + 1], limit=2)
    for start in (0, 13, 26):
        streamed.feed(IDS[start : start + 13][: 30 - start], prefill=start != 13)
    moved.feed(IDS[:12], prefill=True)
    moved.guess(IDS[12], limit=3)
    moved.feed([1, IDS[12], 2, IDS[13], IDS[14], 3], [-1, -1, 1, 1, 3, 3])
    moved.cache.keep_path(12, [1, 3, 4])
    moved.feed(IDS[15:40])
    moved.guess(7)
    moved.cache.rewind(20)
    moved.feed(IDS[20:30])
    for sequence in (one_by_one, streamed, moved):
        again = guessed(sequence)
        assert again[0] == ids
        assert np.array_equal(again[1], logits)


@pytest.mark.parametrize("name", ["deepseek_v3-yarn", "glm4_moe-base", "glm_moe_dsa-sparse"])
def test_a_head_that_reads_embeddings_alone_is_a_model_of_one_layer(name: str, tmp_path: Path) -> None:
    """Its first row stands at position 1; an indexer of its own chooses as the model's does."""
    with_head, alone = (copy_fixture(name, tmp_path / folder) for folder in ("with-head", "alone"))
    tensors = {key: values.astype(np.float32) for key, values in read_tensors(with_head).items()}
    tensors |= random_head(tensors, 3)
    hidden, head = len(tensors["model.norm.weight"]), "model.layers.3."
    tensors[f"{head}eh_proj.weight"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1, dtype=np.float32)
    write_tensors(with_head / "model.safetensors", tensors)
    edit_config(with_head, num_nextn_predict_layers=1)
    convert(with_head, tmp_path / "a", ConvertOptions(quant="f32"), lambda line: None)
    owner = Sequence(Runner(tmp_path / "a"))

    embedding = np.empty_like(tensors["model.embed_tokens.weight"])
    eps = owner.runner.spec.rms_norm_eps
    elementwise.rms_norm(tensors["model.embed_tokens.weight"], tensors[f"{head}enorm.weight"], eps, embedding)
    kept = {key: values for key, values in tensors.items() if not key.startswith("model.layers.")}
    own = {key: values for key, values in tensors.items() if key.startswith((f"{head}self", f"{head}mlp"))}
    norms = [f"{head}{part}_layernorm.weight" for part in ("input", "post_attention")]
    kept |= {key.replace(head, "model.layers.0."): values for key, values in own.items()}
    kept |= {key.replace(head, "model.layers.0."): tensors[key] for key in norms}
    kept |= {"model.embed_tokens.weight": embedding, "model.norm.weight": tensors[f"{head}shared_head.norm.weight"]}
    write_tensors(alone / "model.safetensors", kept)
    edit_config(alone, num_hidden_layers=1, first_k_dense_replace=0)
    convert(alone, tmp_path / "b", ConvertOptions(quant="f32"), lambda line: None)
    runner, ids = Runner(tmp_path / "b"), np.array(IDS[:30])
    cache, rows = runner.cache(), np.arange(29)
    logits = runner.model.forward(cache, ids[1:], rows + 1, None, rows, prefill=True)
    for at, length in enumerate((1, 8, 9, 20, 29)):
        owner.feed(IDS[owner.cache.length : length], prefill=at % 2 == 0)
        assert owner.guess(IDS[length]) == [int(np.argmax(logits[length - 1]))]
        assert np.array_equal(owner.logits, logits[length - 1]), length
