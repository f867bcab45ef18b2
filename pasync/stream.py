"""Finished groups -> what each rank trains on next, in completion order.

    batch (rank 0) --take what is ready--> shares, one per rank --broadcast--> every rank

Each round gives every rank one micro-batch, so all run the same number; a rank for which nothing is ready gets an empty one. The
trainer never waits for more once a group is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pasync.algorithm.overlong import shaped
from pasync.batch import Batch
from pasync.config import Config
from pasync.data.packing import has_gradient
from pasync.messages import Group
from pasync.parallel.ranks import Ranks
from pasync.rollout.admission import share


class Round(msgspec.Struct):
    """What rank 0 tells all."""

    shares: list[list[Group]]
    """Groups of each replica."""
    more: bool
    """Whether another round follows."""


_decoder = msgspec.msgpack.Decoder(Round)


def stream_micro_batches(batch: Batch | None, config: Config, ranks: Ranks) -> Iterator[list[Group]]:
    """Yield this rank's micro-batches until the iteration's whole batch was given out, or all servers are lost (`Batch.stranded`).

    Runs on every rank of the first pipeline stage. Rank 0 waits for the batch's groups, the others for rank 0. Shards of a replica get
    the same groups.

    Args:
        batch: on rank 0; None elsewhere.

    Raises:
        RolloutError: on all ranks, whatever kept rank 0 from the next group.
    """
    held: list[Group] = []  # taken, but did not fit the round before
    given = [0] * ranks.mesh.data.size  # tokens of each replica so far

    def cost(group: Group) -> int:
        return group.num_tokens if has_gradient(group, config.algorithm) else 0

    def next_round() -> bytes:
        assert batch is not None
        if config.schedule == "sync":
            batch.hold()
        while batch.left and sum(map(cost, held)) < len(given) * config.parallel.micro_batch_tokens:
            group = batch.take(wait=not held)
            if group is None:
                break
            held.append(shaped(group, config.rollout.max_tokens, config.algorithm.overlong_tokens))
        shares, held[:] = share(held, given, config.parallel.micro_batch_tokens, cost)
        for rank, part in enumerate(shares):
            given[rank] += sum(map(cost, part))
        return msgspec.msgpack.encode(Round(shares, bool(held) or (batch.left and not batch.stranded)))

    more = True
    while more:
        round_ = _decoder.decode(ranks.from_first(next_round, ranks.mesh.stage))
        more = round_.more
        yield round_.shares[ranks.mesh.data.index]
