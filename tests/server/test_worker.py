"""The engine's thread, step by step in the test's own: who is computed when."""

from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.server.worker import Done, Event, Failed, Job, Worker

CONTEXT, CHUNK = 512, 32


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.open(DEMO_MODEL, EngineOptions(usage_save=False, gate_save=False, pin="off"), print) as opened:
        yield opened


def worker_of(llm: LLM, slots: int = 3) -> Worker:
    worker = Worker(llm, DraftOptions(enabled=False), context=CONTEXT, slots=slots, queue=8)
    worker.slots.open(slots, lambda: llm.new_session(CONTEXT, slots))
    llm.load(CONTEXT).engine.prefill_chunk = CHUNK
    return worker


class Heard(list[Event]):
    """What one job was told."""

    def __init__(self, worker: Worker, prompt: int, tokens: int, salt: int) -> None:
        ids = [5 + (salt + 7 * at) % 60 for at in range(prompt)]
        self.job = Job(ids, GenerateOptions(tokens, ignore_eos=True), self.append)
        worker.submit(self.job)

    def ids(self) -> tuple[int, ...]:
        assert isinstance(self[-1], Done)
        return self[-1].token_ids


def test_answers_go_on_while_a_long_prompt_is_read_and_a_short_one_does_not_wait_for_it(llm):
    worker = worker_of(llm)
    Heard(worker, 10, 60, 0)
    worker._admit()
    worker._step()
    running = worker.slots.active[0].running
    long, short = Heard(worker, 300, 4, 1), Heard(worker, 20, 2, 2)
    worker._admit()
    steps, both = 0, worker.slots.active[1:]
    while both[0].running.reading:
        before = running.stats.generated_tokens
        read = both[0].slot.session.cache.length
        worker._step()
        steps += 1
        assert running.stats.generated_tokens == before + 1
        assert both[0].slot.session.cache.length >= read + CHUNK // 2
        assert steps < 2 or short
    assert isinstance(short[-1], Done)
    assert not long or not isinstance(long[-1], Failed)
    assert -(-300 // CHUNK) <= steps <= 1 + -(-320 // CHUNK)


def test_prompts_that_come_together_are_read_in_one_forward_and_give_what_they_give_alone(llm):
    shapes = [(9, 5, 3), (7, 6, 4), (11, 3, 5)]
    alone = []
    for shape in shapes:
        worker = worker_of(llm, 1)
        heard = Heard(worker, *shape)
        while not heard or not isinstance(heard[-1], Done):
            worker._admit()
            worker._step()
        alone.append(heard.ids())
    worker = worker_of(llm)
    crowd = [Heard(worker, *shape) for shape in shapes]
    worker._admit()
    worker._step()
    assert not any(active.running.reading for active in worker.slots.active)
    while worker.slots.active:
        worker._step()
    assert [heard.ids() for heard in crowd] == alone


def test_an_error_of_a_shared_reading_ends_those_who_took_part_and_leaves_the_slots_usable(llm, monkeypatch):
    from coli.errors import ReadError

    worker = worker_of(llm)
    crowd = [Heard(worker, 10 + at, 3, at) for at in range(2)]
    worker._admit()
    model = llm.load(CONTEXT).model
    with monkeypatch.context() as broken:

        def fails(*args: object, **more: object) -> None:
            raise ReadError("the disk is gone")

        broken.setattr(model, "forward_many", fails)
        worker._step()
    assert all(isinstance(heard[-1], Failed) for heard in crowd)
    assert (worker.slots.free, worker.counts.failed) == (3, 2)
    again = Heard(worker, 10, 3, 0)
    worker._admit()
    while worker.slots.active:
        worker._step()
    assert len(again.ids()) == 3


def test_a_prompt_left_half_read_leaves_the_rows_it_has(llm):
    worker = worker_of(llm, 1)
    long = Heard(worker, 100, 3, 1)
    worker._admit()
    worker._step()
    long.job.cancelled = True
    worker._step()
    session = worker.slots._all[0].session
    assert len(session.token_ids) == session.cache.length == CHUNK
    again = Heard(worker, 100, 3, 1)
    worker._admit()
    while worker.slots.active:
        worker._step()
    assert again[-1].cached_tokens == CHUNK


def test_between_answers_every_forward_is_counted_for_onlookers(llm):
    worker = worker_of(llm, 1)
    for salt in range(2):  # of the second answer's experts most are in memory
        heard = Heard(worker, 1, 20, salt)
        while not heard or not isinstance(heard[-1], Done):
            worker._admit()
            worker._step()
        glance, stats = worker.glance(), llm.load(CONTEXT).store.stats()
        assert (glance.hits, glance.misses) == (stats.hits, stats.misses)
        assert glance.hits + glance.misses == worker.counts.steps * 6 * 4
        assert (glance.usage == llm.load(CONTEXT).store.policy.usage.reshape(glance.usage.shape)).all()


def test_a_job_keeps_its_place_in_the_queue_until_it_has_its_slot(llm, monkeypatch):
    worker = worker_of(llm, 1)
    begin, seen = worker._begin, []

    def watched(job: Job):
        seen.append((worker.waiting, worker.free_slots))
        return begin(job)

    monkeypatch.setattr(worker, "_begin", watched)
    Heard(worker, 10, 3, 0)
    worker._admit()
    assert seen == [(1, 1)]
    assert (worker.waiting, worker.free_slots) == (0, 0)
