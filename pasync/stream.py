"""Finished groups -> what each rank trains on next, in completion order.

    producer (rank 0) --take what is ready--> shares, one per rank --broadcast--> every rank

Each round gives every rank one micro-batch, so all run the same number; a rank for which nothing is ready gets an empty one. The
trainer never waits for more once a group is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from pasync.config import Config
from pasync.data.packing import has_gradient
from pasync.messages import Group
from pasync.parallel.ranks import Ranks

_shares = msgspec.msgpack.Decoder(list[list[Group]])


class GroupSource(Protocol):
    """Where groups come from: `RolloutProducer` or `ReplayProducer`."""

    in_flight: int

    def next_group(self, version: int, *, wait: bool = True) -> Group | None: ...
    def wait_complete(self) -> None: ...


def stream_micro_batches(source: GroupSource | None, version: int, config: Config, ranks: Ranks) -> Iterator[list[Group]]:
    """Yield this rank's micro-batches until the iteration's whole batch was given out.

    Runs on every rank. Rank 0 waits for the source, the others for rank 0.

    Args:
        source: on rank 0; None elsewhere.
        version: the iteration, which every group must have been sampled by.

    Raises:
        RolloutError: on all ranks, whatever kept rank 0 from the next group.
    """
    left = config.algorithm.batch_groups
    held: list[Group] = []  # taken, but did not fit the round before

    def cost(group: Group) -> int:
        return group.num_tokens if has_gradient(group, kl_coef=config.algorithm.kl_coef) else 0

    def next_round() -> bytes:
        assert source is not None
        if config.schedule == "sync" and left == config.algorithm.batch_groups:
            source.wait_complete()
        if not held:
            held.extend(filter(None, [source.next_group(version)]))
        while source.in_flight and sum(map(cost, held)) < ranks.size * config.parallel.micro_batch_tokens:
            group = source.next_group(version, wait=False)
            if group is None:
                break
            held.append(group)
        shares, rest = share(held, ranks.size, config.parallel.micro_batch_tokens, cost)
        held[:] = rest
        return msgspec.msgpack.encode(shares)

    while left:
        shares = _shares.decode(ranks.from_first(next_round))
        left -= sum(map(len, shares))
        yield shares[ranks.rank]


def share(groups: list[Group], size: int, budget: int, cost: Callable[[Group], int]) -> tuple[list[list[Group]], list[Group]]:
    """Deal groups out to `size` ranks, the next largest to the least loaded, none beyond `budget` unless it is alone.

    Returns:
        (one list per rank, the groups that did not fit); at least one group is always given out.
    """
    shares: list[list[Group]] = [[] for _ in range(size)]
    loads = [0] * size
    rest: list[Group] = []
    for group in sorted(groups, key=cost, reverse=True):  # stable: equal costs stay in completion order
        rank = loads.index(min(loads))
        if loads[rank] and loads[rank] + cost(group) > budget:
            rest.append(group)
            continue
        shares[rank].append(group)
        loads[rank] += cost(group)
    return shares, rest
