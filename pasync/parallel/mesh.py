"""The training processes as a grid: pipeline stages x data-parallel replicas x tensor-parallel shards.

    rank = (stage * replicas + replica) * shards + shard        tensor ranks are neighbours, stages are furthest apart

An axis of one costs nothing: it has a group of one process. Every process makes all groups, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid as this process sees it: the processes that differ from it in this dimension only."""

    index: int
    """Place of this process among `ranks`."""
    ranks: tuple[int, ...]
    """Global ranks, in order."""
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """This process's place on the grid."""

    pipeline: Axis
    data: Axis
    tensor: Axis


def make_mesh(*, pipeline: int, tensor: int) -> Mesh:
    """Arrange all processes of the default group. A collective.

    Raises:
        ValueError: their number is not a multiple of pipeline x tensor.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    if world % (pipeline * tensor):
        raise ValueError(f"{world} processes cannot be {pipeline} stages x {tensor} shards, must be a multiple of {pipeline * tensor}")
    data = world // (pipeline * tensor)

    def rank(stage: int, replica: int, shard: int) -> int:
        return (stage * data + replica) * tensor + shard

    lines = [
        [tuple(rank(s, d, t) for s in range(pipeline)) for d in range(data) for t in range(tensor)],
        [tuple(rank(s, d, t) for d in range(data)) for s in range(pipeline) for t in range(tensor)],
        [tuple(rank(s, d, t) for t in range(tensor)) for s in range(pipeline) for d in range(data)],
    ]
    axes = []
    for parallel in lines:
        made = [(line, dist.new_group(list(line))) for line in parallel]
        line, group = next((line, group) for line, group in made if me in line)
        axes.append(Axis(line.index(me), line, group))
    return Mesh(*axes)
