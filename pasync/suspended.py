"""Processes that were stopped (SIGSTOP, Ctrl-Z) and would keep all others waiting in silence.

    guard --looks at--> launcher --looks at--> every process of the run: ranks, servers, engines, reward workers, torchrun, guard

The kernel says who is stopped, so nobody has to send signs of life: a long computation, a model that is being loaded or a checkpoint
that is being written cannot be taken for it, nor can a process under a debugger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

LOOK_S = 1.0
"""Between two looks."""


class SuspensionWatch:
    """Finds processes that are stopped for `limit_s`.

    Looks are counted and not seconds: a scheduler may stop a whole job and let it go on much later, the observer with it.
    """

    def __init__(self, limit_s: float, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self.limit_s, self._processes = limit_s, processes
        self._looks: dict[psutil.Process, int] = {}
        self._looked_at = float("-inf")

    def overdue(self) -> list[psutil.Process]:
        """Those that were stopped at every look of the last `limit_s`; call it as often as you like."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return []
        self._looked_at = time.monotonic()
        self._looks = {p: self._looks.get(p, 0) + 1 for p in self._processes() if _is_stopped(p)}
        return [p for p, looks in self._looks.items() if (looks - 1) * LOOK_S >= self.limit_s]


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False
