"""Data parallelism by ZeRO-1: every replica holds the whole model, each rank owns a slice of the optimizer.

    backward --hook--> sum of gradients [W, n]   (no collective inside a batch, so ranks may do different amounts of work)
    end of batch:  reduce-scatter -> my slice [n] -> AdamW on fp32 master slice -> all-gather -> model

A slice holds whole rows of every parameter (`slices.py`; arXiv 1910.02054, stage 1). Letters: W data-parallel ranks, n numbers of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pasync.parallel.accumulate import ExactSum, FloatSum
from pasync.parallel.optimizer import Copies, ShardedAdamW
from pasync.parallel.ranks import Ranks
from pasync.parallel.slices import plan
from pasync.sections import OptimizerConfig


class ZeroAdamW(ShardedAdamW):
    """`ShardedAdamW` with one master tensor [n], a slice of all parameters.

    Parameters may be stored in any type.

    Args:
        parameters: names and parameters of this process, none twice.
        exact: add up gradients exactly (see `parallel.accumulate`).
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, ranks: Ranks, copies: Copies, *, exact: bool = False
    ) -> None:
        self.parameters, self.axis = dict(parameters), ranks.mesh.data
        slots = plan([(name, tuple(p.shape)) for name, p in self.parameters.items()], self.axis.size)
        self.gradient = (ExactSum if exact else FloatSum)(slots[-1].stop, self.axis, ranks.device)
        super().__init__(slots, [torch.zeros(slots[-1].stop, device=ranks.device)], config, ranks, copies)
        mine = self.rows([self.masters[0].detach()])
        for slot, p in zip(slots, self.parameters.values(), strict=True):
            mine[slot.name].copy_(slot.rows_of(p.detach(), self.axis.index))
            p.register_post_accumulate_grad_hook(self._adder(slot.name))

    def rows(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """By parameter, this rank's rows in a slice [n]."""
        return {slot.name: slot.own(tensors[0], self.axis.index) for slot in self.slots}

    def reduced(self, divisor: float) -> list[Tensor]:
        """This rank's slice [n] of the sum over all replicas, divided. A collective."""
        return [self.gradient.reduce(divisor)]

    def is_finite(self) -> bool:
        """Whether what this replica has summed up so far is."""
        return self.gradient.is_finite()

    def clear(self) -> None:
        """Start a new sum."""
        self.gradient.clear()

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the master weights of all ranks into the model. A collective."""
        dtype = next(iter(self.parameters.values())).dtype
        for p, whole in zip(self.parameters.values(), self.whole(self.masters[0].detach().to(dtype)), strict=True):
            p.copy_(whole)

    def whole(self, mine: Tensor) -> Iterator[Tensor]:
        """Every parameter's numbers from the slices [n] of all ranks of the data axis. A collective."""
        slices = mine[None]
        if self.axis.size > 1:
            slices = torch.empty(self.axis.size, len(mine), dtype=mine.dtype, device=mine.device)  # [W, n]
            dist.all_gather_into_tensor(slices.view(-1), mine, group=self.axis.group)
        for slot in self.slots:
            yield slices[:, slot.start : slot.stop].reshape(-1, *slot.shape[1:])[: slot.shape[0]]

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        slot = next(slot for slot in self.slots if slot.name == name)

        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.gradient.add(slot, parameter.grad)
            parameter.grad = None

        return add
