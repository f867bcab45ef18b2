"""Groups on disk, and a stand-in for the producer that trains from them without any server.

    <run>/rollouts/iteration-00000.msgpack: the groups of one iteration in the order in which the trainer took them
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType

from pasync.data.prompts import Prompt
from pasync.errors import RolloutError
from pasync.messages import Group, Sampling, pack_groups, unpack_groups


def record(run: Path, version: int, groups: list[Group]) -> None:
    """Keep one iteration's groups."""
    path = _path(run, version)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack_groups(groups))


class ReplayProducer:
    """Gives back what `record` kept, at once and in the recorded order; same use as `RolloutProducer`."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.in_flight = 0
        self.taken: list[tuple[Group, float]] = []
        self._groups: deque[Group] = deque()

    def __enter__(self) -> ReplayProducer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def submit(self, prompts: list[Prompt], version: int, sampling: Sampling) -> None:
        """Read the groups recorded for this iteration. Raises RolloutError if they are not those of the batch."""
        path = _path(self.run, version)
        if not path.exists():
            raise RolloutError(f"iteration {version} was not recorded: {path} does not exist")
        self._groups = deque(unpack_groups(path.read_bytes()))
        if len(self._groups) != len(prompts):
            raise RolloutError(f"{path} holds {len(self._groups)} groups, the batch has {len(prompts)}")
        self.in_flight, self.taken = len(prompts), []

    def next_group(self, version: int, *, wait: bool = True) -> Group | None:
        """The next recorded group."""
        group = self._groups.popleft()
        self.in_flight -= 1
        self.taken.append((group, time.time()))
        return group

    def wait_complete(self) -> None:
        """All recorded groups are there already."""


def _path(run: Path, version: int) -> Path:
    return run / "rollouts" / f"iteration-{version:05d}.msgpack"
