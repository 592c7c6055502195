"""What tests of faults wait for."""

import threading


def settled(server) -> bool:
    """Wait until no slot is in use; False after a while."""
    ticks = threading.Event()
    for _ in range(3000):  # a busy machine, kernels to compile
        if server.worker.free_slots == server.worker.num_slots and not server.worker.waiting:
            return True
        ticks.wait(0.02)
    return False
