"""One iteration's groups on their way from the source to the ranks (rank 0 only).

    source --next_group--> [no use, or its reward failed? leave it out; sample another prompt instead?] --take--> stream

A group that is left out counts as its prompt's answer, in `arrived` and in recordings; only nothing is trained on it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from pasync.data.prompts import Prompt
from pasync.errors import RewardError
from pasync.messages import Group
from pasync.preemption import preemption

log = logging.getLogger(__name__)


class GroupSource(Protocol):
    """Where groups come from: `RolloutProducer` or `ReplayProducer`."""

    in_flight: int
    taken: list[tuple[Group, float]]

    @property
    def stranded(self) -> bool: ...

    def extend(self, prompts: list[Prompt]) -> None: ...
    def next_group(self, version: int, *, wait: bool = True) -> Group | None: ...


class Batch:
    """The batch that was submitted to the source last. Methods belong to rank 0's main thread.

    Refill (dynamic sampling, DAPO, arXiv 2503.14476): each group of equal rewards is left out and one more prompt is sampled for it.
    The set trained on is the first n prompts among which B are of use, so it does not depend on the order of arrival.

    Args:
        version: that sampled it.
        refill: further prompts, at most as many as may be added; empty if groups of equal rewards stay in the batch.
        on_error: `rewards.on_error`.
    """

    def __init__(self, source: GroupSource, version: int, refill: Iterator[Prompt], *, refills: bool, on_error: str = "zero") -> None:
        self.version, self.submitted = version, time.time()
        self.waits_s: list[float] = []
        """Each wait for a group, the first one included."""
        self.refilled = 0
        self.dropped = 0
        """Groups left out because their reward failed."""
        self._source, self._refill, self._refills, self._on_error = source, refill, refills, on_error
        self._held: deque[Group] = deque()
        self._complete = False

    @property
    def left(self) -> bool:
        """Whether there may be more to take."""
        return bool(self._held) or (not self._complete and self._source.in_flight > 0)

    @property
    def stranded(self) -> bool:
        """Whether nothing more comes until a server gets the weights again, because all that held them are lost."""
        return not self._held and not self._complete and self._source.stranded

    def hold(self) -> None:
        """Wait until all groups are there, or no more come (`stranded`), and keep them; a complete batch frees the source for the next."""
        if not self._complete:
            while (group := self._next(wait=True)) is not None:
                self._held.append(group)
            self.taken, self._complete = self._source.taken, not self._source.stranded

    def take(self, *, wait: bool) -> Group | None:
        """The next group to train on, in the order of arrival; None if there is none any more, or with `wait=False` none yet."""
        if self._held:
            return self._held.popleft()
        return None if self._complete else self._next(wait=wait)

    def arrived(self) -> list[tuple[Group, float]]:
        """Every group taken so far, those of no use included, with the unix times of arrival."""
        return self.taken if self._complete else self._source.taken

    def _next(self, *, wait: bool) -> Group | None:
        """As `take`. Raises RewardError."""
        while self._source.in_flight:
            began = time.perf_counter()
            with preemption.ends_wait():
                group = self._source.next_group(self.version, wait=wait)
            if wait:
                self.waits_s.append(time.perf_counter() - began)
            if group is None or not (self._drops(group) or (self._refills and not _teaches(group))):
                return group
            self._replace()
        if self.dropped and self.dropped == len(self.arrived()):
            raise RewardError(f"the reward function failed on all {self.dropped} groups of version {self.version}, none is left to train")
        return None

    def _drops(self, group: Group) -> bool:
        """Whether its reward failed and `rewards.on_error` leaves it out."""
        if self._on_error == "raise":
            require_reward(group)
        if self._on_error != "drop" or not group.reward_failure:
            return False
        self.dropped += 1
        log.warning("left out group %d of version %d, its reward failed: %s", group.group_id, group.version, group.reward_failure)
        return True

    def _replace(self) -> None:
        prompt = next(self._refill, None)
        if prompt is not None:
            self.refilled += 1
            self._source.extend([prompt])


def _teaches(group: Group) -> bool:
    """Whether rewards differ, and there is a token to learn from."""
    return group.num_response_tokens > 0 and len(set(group.rewards)) > 1


def require_reward(group: Group) -> None:
    """Raise RewardError, with the cause, if the reward function failed on a response."""
    if group.reward_failure:
        raise RewardError(f"the reward function failed on group {group.group_id} of version {group.version}, {group.reward_failure}")
