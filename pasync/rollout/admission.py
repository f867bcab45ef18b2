"""Which group next, to which server, and to which rank: pure functions of what is known when the question comes up.

    fifo           the whole batch at once, dealt out evenly; the engine's own queue holds what it cannot sample yet
    group_first    in the order of the batch, floor(slots / K) groups at a time: groups finish one after the other, so training
                   starts early
    longest_first  the same, longest expected first: a long group that starts last would keep servers and ranks waiting

With the latter two a server holds as many groups again that wait for slots, so that none stays empty, whatever becomes free at once.
Tail rule: once those left are no more than the servers could sample at once, each goes where it can start at once, to the server with
the least to do; waiting at a busy server while another one runs dry would keep everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pasync.data.prompts import Prompt
from pasync.messages import Group

Work = TypeVar("Work")


@dataclass(frozen=True)
class Load:
    """One server at this moment."""

    slots: int
    """Responses it samples at once."""
    free: int
    """Responses it could start to sample now; negative if some wait for a slot."""
    groups: int
    """Groups it was given and has not answered."""
    expected_tokens: float
    """Expected longest responses of these groups, added up."""


def order(admission: str, expected: Sequence[float]) -> list[int]:
    """In which order to hand out groups.

    Args:
        expected: expected tokens of the longest response of each group, in the order of the batch.

    Returns:
        A permutation of range(len(expected)); equals stay in the order of the batch.
    """
    positions = range(len(expected))
    return sorted(positions, key=lambda i: -expected[i]) if admission == "longest_first" else list(positions)


def choose(admission: str, loads: Sequence[Load], responses: int, left: int) -> int | None:
    """The server that gets the next group, or None if it has to wait.

    Args:
        loads: of every server.
        responses: K of the group.
        left: groups that no server has yet, this one included.
    """
    servers = range(len(loads))
    if admission == "fifo":
        return min(servers, key=lambda i: loads[i].groups, default=None)
    if len(loads) > 1 and left * responses <= sum(load.slots for load in loads):
        ready = [i for i in servers if loads[i].free >= responses]
        return min(ready, key=lambda i: loads[i].expected_tokens, default=None)
    ready = [i for i in servers if loads[i].free - responses >= -loads[i].slots]
    return max(ready, key=lambda i: loads[i].free, default=None)


def share(groups: list[Work], given: list[int], budget: int, cost: Callable[[Work], int]) -> tuple[list[list[Work]], list[Work]]:
    """Deal groups out to the ranks, none beyond `budget` unless it is alone.

    The next largest group goes to the rank with the least in this round, among equals to the one with the least so far.

    Args:
        given: tokens that each rank was given in earlier rounds.

    Returns:
        (one list per rank, the groups that did not fit); at least one group is always given out.
    """
    shares: list[list[Work]] = [[] for _ in given]
    loads = [0] * len(given)
    rest: list[Work] = []
    for group in sorted(groups, key=cost, reverse=True):  # stable: equal costs stay in completion order
        rank = min(range(len(given)), key=lambda r: (loads[r], given[r]))
        if loads[rank] and loads[rank] + cost(group) > budget:
            rest.append(group)
            continue
        shares[rank].append(group)
        loads[rank] += cost(group)
    return shares, rest


class Credit:
    """Slots of a server that came free and that the trainer does not know of yet. Belongs to one thread."""

    def __init__(self) -> None:
        self._slots = 0

    def free(self, enough: int) -> int:
        """Count an ended response; slots to tell of now: none before there is room for a whole group."""
        self._slots += 1
        return self.take() if self._slots >= enough else 0

    def take(self) -> int:
        """All of them; a finished group tells of them in any case."""
        slots, self._slots = self._slots, 0
        return slots


class Lengths:
    """What earlier responses say about a prompt's next ones. Belongs to one thread."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], float] = {}
        self._prompt_tokens = self._longest_tokens = 0

    def expect(self, prompt: Prompt, max_tokens: int) -> float:
        """Expected tokens of the longest response to a prompt.

        What it was the last time; for a prompt not seen yet, its length times the mean ratio of all that were (1 before the first).
        """
        ratio = self._longest_tokens / self._prompt_tokens if self._prompt_tokens else 1.0
        return min(self._seen.get(prompt.ids, len(prompt.ids) * ratio), prompt.max_tokens or max_tokens, max_tokens)

    def learn(self, prompt: Prompt, group: Group) -> None:
        """Remember a finished group."""
        longest = max(len(r.ids) // 4 for r in group.responses)
        self._seen[prompt.ids] = longest
        self._prompt_tokens += len(prompt.ids)
        self._longest_tokens += longest

    def state(self) -> bytes:
        """All that was learned, for a checkpoint; may be asked for on another thread."""
        return msgspec.msgpack.encode((list(self._seen.items()), self._prompt_tokens, self._longest_tokens))

    def restore(self, state: bytes) -> None:
        """Know what `state` knew."""
        seen, self._prompt_tokens, self._longest_tokens = msgspec.msgpack.decode(
            state, type=tuple[list[tuple[tuple[int, ...], float]], int, int]
        )
        self._seen = dict(seen)
