"""The training processes as a grid: pipeline stages x data-parallel replicas x tensor-parallel shards.

    rank = (stage * replicas + replica) * shards + shard        tensor ranks are neighbours, stages are furthest apart

An axis of one costs nothing: it has a group of one process. Every process makes all groups, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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


def make_mesh(*, pipeline: int = 1, tensor: int = 1, deadline_s: float) -> Mesh:
    """Arrange all processes of the default group. A collective.

    Args:
        deadline_s: longest wait in a collective of an axis; groups do not inherit the default one's.

    Raises:
        ValueError: their number is not a multiple of pipeline x tensor.
    """
    world = dist.get_world_size()
    if world % (pipeline * tensor):
        raise ValueError(f"{world} processes cannot be {pipeline} stages x {tensor} shards, must be a multiple of {pipeline * tensor}")
    grid = torch.arange(world).view(pipeline, -1, tensor).transpose(1, 2)  # [pipeline, tensor, data]
    lines = {name: grid.movedim(dim, -1).flatten(0, 1) for dim, name in enumerate(NAMES)} | {"stage": grid.flatten(1)}
    axes = {name: _axis(every.tolist(), deadline_s) for name, every in lines.items()}
    ends = _axis(torch.stack([grid[0], grid[-1]], -1).flatten(0, 1).tolist(), deadline_s) if pipeline > 1 else None
    # as a list: torch 2.11 slices a mesh only if strides descend, and those of `grid` need not, on axes of one
    return Mesh(**axes, ends=ends, hosts=DeviceMesh("cpu", grid.tolist(), mesh_dim_names=NAMES))


def _axis(lines: list[list[int]], deadline_s: float) -> Any:
    """The line that this process is on, None if it is on none; makes a group for every one. A collective."""
    mine, me = None, dist.get_rank()
    for line in lines:
        group = dist.new_group(line, timedelta(seconds=deadline_s))
        if me in line:
            mine = Axis(line.index(me), tuple(line), group)
    return mine
