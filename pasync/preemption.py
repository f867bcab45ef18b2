"""SIGTERM on a training rank: noted at once, acted on where nothing is half done.

    scheduler --SIGTERM--> launcher --SIGTERM--> every rank        some schedulers send it to every process themselves
    rank 0: Preempted, when an iteration begins or while it waits for servers or groups  --Ranks.from_first--> all ranks

Weights do not change before the optimizer step, so a checkpoint written there continues with the iteration that was cut short.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pasync.errors import Preempted


class Preemption:
    """The wish to end of this process. All of it runs on the main thread, as signal handlers do."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False

    def listen(self) -> None:
        """From now on SIGTERM does not end this process."""
        signal.signal(signal.SIGTERM, self._note)

    def check(self) -> None:
        """Raise Preempted if SIGTERM has come."""
        if self.requested:
            raise Preempted("SIGTERM")

    @contextmanager
    def ends_wait(self) -> Iterator[None]:
        """Inside, SIGTERM raises Preempted at any moment: for waits on rank 0 that change nothing and in which no other rank takes part."""
        self._waiting = True
        try:
            self.check()
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._waiting:
            self._waiting = False  # once: a second signal must not interrupt what follows from the first
            raise Preempted("SIGTERM")


preemption = Preemption()
"""A process has one SIGTERM."""
