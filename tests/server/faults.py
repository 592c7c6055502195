"""What tests of faults wait for, and an engine that stands still while they prepare it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coli.server.worker import Job

PATIENCE = 300.0  # seconds until something is taken for broken, on a busy machine with kernels to compile


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until it holds. Raises AssertionError should it never."""
    ticks = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise AssertionError("waited in vain")


def settled(server) -> bool:
    """Wait until no slot is in use; False after a while."""
    worker = server.worker
    try:
        until(lambda: worker.free_slots == worker.num_slots and not worker.waiting)
    except AssertionError:
        return False
    return True


@contextmanager
def held(server, steps: int = 0) -> Iterator[threading.Event]:
    """An engine that takes so many steps with jobs on its slots, and stands still before the next until the event is
    set, at the end at the latest: whatever the clients do meanwhile finds the answers unfinished."""
    let_go, left, step = threading.Event(), [steps], server.worker._step

    def wait_and_step() -> None:
        if server.worker.slots.active:
            if not left[0]:
                let_go.wait()
            left[0] -= bool(left[0])
        step()

    server.worker._step = wait_and_step
    try:
        yield let_go
    finally:
        let_go.set()
        del server.worker._step


def job_of(server) -> Job:
    """The one that runs, as soon as it does."""
    until(lambda: server.worker.slots.active)
    (active,) = server.worker.slots.active
    return active.job
