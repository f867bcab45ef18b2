"""The training processes as a grid: pipeline stages x data-parallel replicas x tensor-parallel shards.

    rank = (stage * replicas + replica) * shards + shard        tensor ranks are neighbours, stages are furthest apart

An axis of one costs nothing: it has a group of one process. Every process makes all groups, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

NAMES = ("pipeline", "tensor", "data")


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
    tensor: Axis
    data: Axis
    stage: Axis
    """All processes of the same pipeline stage."""
    ends: Axis | None
    """The same replica and shard on the first and on the last stage, for what both hold; None on stages between, and with one stage."""
    hosts: DeviceMesh
    """The same grid for torch's own distributed tensors, in host memory; dimensions NAMES."""


def make_mesh(*, pipeline: int = 1, tensor: int = 1) -> Mesh:
    """Arrange all processes of the default group. A collective.

    Raises:
        ValueError: their number is not a multiple of pipeline x tensor.
    """
    world = dist.get_world_size()
    if world % (pipeline * tensor):
        raise ValueError(f"{world} processes cannot be {pipeline} stages x {tensor} shards, must be a multiple of {pipeline * tensor}")
    grid = torch.arange(world).view(pipeline, -1, tensor).transpose(1, 2)  # [pipeline, tensor, data]
    hosts = DeviceMesh("cpu", grid, mesh_dim_names=NAMES)
    p, t, d = (grid == dist.get_rank()).nonzero()[0].tolist()
    lines = zip(NAMES, (p, t, d), (grid[:, t, d], grid[p, :, d], grid[p, t]), strict=True)
    axes = {name: Axis(index, tuple(line.tolist()), hosts.get_group(name)) for name, index, line in lines}
    stage = _axis(grid.flatten(1).tolist())
    assert stage is not None
    return Mesh(**axes, stage=stage, ends=_axis(_ends(grid)), hosts=hosts)


def _ends(grid: torch.Tensor) -> list[list[int]]:
    """Pairs of ranks on the first and the last stage."""
    return [] if len(grid) == 1 else torch.stack([grid[0], grid[-1]], -1).flatten(0, 1).tolist()


def _axis(lines: list[list[int]]) -> Axis | None:
    """The line that this process is on, if any; makes a group for every one. A collective."""
    mine, me = None, dist.get_rank()
    for line in lines:
        group = dist.new_group(line)
        if me in line:
            mine = Axis(line.index(me), tuple(line), group)
    return mine
