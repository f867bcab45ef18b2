"""Real signals to this process."""

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from workers import run_ranks

from pasync.errors import Preempted
from pasync.parallel.ranks import Ranks
from pasync.preemption import Preemption


@pytest.fixture
def preemption() -> Iterator[Preemption]:
    before = signal.getsignal(signal.SIGTERM)
    found = Preemption()
    found.listen()
    yield found
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("wait", [lambda: queue.SimpleQueue().get(timeout=30), lambda: time.sleep(30)], ids=["queue", "sleep"])
def test_a_signal_ends_a_wait_at_once(preemption, wait):
    began = time.monotonic()
    threading.Timer(0.2, terminate).start()
    with pytest.raises(Preempted), preemption.ends_wait():
        wait()
    assert time.monotonic() - began < 10


def test_elsewhere_a_signal_is_only_noted_and_ends_the_next_wait_before_it_begins(preemption):
    terminate()
    assert preemption.requested
    with pytest.raises(Preempted):
        preemption.check()
    with pytest.raises(Preempted), preemption.ends_wait():
        raise AssertionError("this wait began")
    terminate()  # what follows is not disturbed by a second one


def test_without_a_signal_nothing_happens_and_after_the_wait_nothing_is_interrupted(preemption):
    with preemption.ends_wait():
        preemption.check()
    terminate()
    assert preemption.requested


def rank(ranks: Ranks) -> str:
    preemption = Preemption()
    preemption.listen()

    def wait() -> bytes:
        threading.Timer(0.2, terminate).start()
        with preemption.ends_wait():
            queue.SimpleQueue[None]().get(timeout=30)
        return b""

    try:
        ranks.from_first(wait)
    except Preempted:
        return f"{ranks.rank} preempted"
    return "nothing"


def test_all_ranks_leave_by_the_signal_to_the_first():
    assert run_ranks(rank, 2) == ["0 preempted", "1 preempted"]
