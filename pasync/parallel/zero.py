"""Data parallelism by ZeRO-1: every replica holds the whole model, each rank owns a slice of the optimizer.

    backward --hook--> sum of gradients [W, n]   (no collective inside a batch, so ranks may do different amounts of work)
    end of batch:  reduce-scatter -> my slice [n] -> divide once -> clip -> AdamW on fp32 master slice -> all-gather -> model

A slice holds whole rows of every parameter (`slices.py`; arXiv 1910.02054, stage 1). The norm is added up row by row, so that it does
not depend on the number of replicas. Letters: W data-parallel ranks, n numbers of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pasync import device as devices
from pasync.config import OptimizerConfig
from pasync.errors import TrainingError
from pasync.parallel.accumulate import ExactSum, FloatSum
from pasync.parallel.ranks import Ranks
from pasync.parallel.slices import Slot, plan

KEYS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Copies:
    """Names of parameters of which more than one process of a replica holds a copy or a part of the gradient."""

    replicated: frozenset[str] = frozenset()
    """The same on every shard of the tensor axis: count once."""
    partial: frozenset[str] = frozenset()
    """Of these, those whose gradient every shard has a part of: add up."""
    tied: str | None = None
    """The head that is the embedding: on the first and on the last stage, each with a part of the gradient."""


class ShardedAdamW:
    """Adds up gradients from every backward pass and steps once per batch.

    Parameters may be stored in any type; the master copy and both moments are float32.

    Args:
        parameters: names and parameters of this process, none twice.
        copies: how they relate to other processes of the same replica.
        exact: add up gradients exactly (see `parallel.accumulate`).
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, ranks: Ranks, *,
        copies: Copies = Copies(), exact: bool = False,
    ) -> None:  # fmt: skip
        self.parameters, self.ranks, self.mesh, self.copies = dict(parameters), ranks, ranks.mesh, copies
        self.clip_norm, self.axis = config.clip_norm, ranks.mesh.data
        self.slots = plan([(name, tuple(p.shape)) for name, p in self.parameters.items()], self.axis.size)
        self.gradient = (ExactSum if exact else FloatSum)(self.slots[-1].stop, self.axis, ranks.device)
        self.master = nn.Parameter(torch.zeros(self.slots[-1].stop, device=ranks.device))  # [n]
        for slot, p in zip(self.slots, self.parameters.values(), strict=True):
            slot.own(self.master.data, self.axis.index).copy_(slot.rows_of(p.detach(), self.axis.index))
            p.register_post_accumulate_grad_hook(self._adder(slot))
        self.adamw = torch.optim.AdamW(
            [self.master], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay,
            **devices.adamw_flags(ranks.device),
        )  # fmt: skip

    def step(self, *, lr: float, divisor: float) -> float:
        """Divide the summed gradient, clip it, update the weights on all ranks, and start a new sum.

        A collective: all ranks must call it.

        Args:
            lr: learning rate of this step.
            divisor: the whole batch's denominator (see `algorithm.losses.denominator`).

        Returns:
            Norm of the divided gradient before clipping.

        Raises:
            TrainingError: on all ranks, if the gradient is not finite; weights are unchanged then.
        """
        gradient = self.summed(divisor)  # [n]
        norm = self._norm(gradient)
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient's norm is {norm}; the weights of the last finished iteration are unchanged")
        gradient.mul_(min(1.0, self.clip_norm / (norm + 1e-6)))
        self.master.grad = gradient
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.master.grad = None
        self.write_parameters()
        self.gradient.clear()
        return norm

    def summed(self, divisor: float) -> Tensor:
        """[n] this rank's slice of the batch's gradient, of the whole model and all replicas. A collective."""
        gradient = self.gradient.reduce(divisor)
        for slot in sorted(self.slots, key=lambda slot: slot.name):  # the same order everywhere
            if slot.name in self.copies.partial:
                dist.all_reduce(gradient[slot.start : slot.stop], group=self.mesh.tensor.group)
        if self.copies.tied and self.mesh.ends:
            slot = next(slot for slot in self.slots if slot.name == self.copies.tied)
            dist.all_reduce(gradient[slot.start : slot.stop], group=self.mesh.ends.group)
        return gradient

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the master weights of all ranks into the model. A collective."""
        dtype = next(iter(self.parameters.values())).dtype
        for p, whole in zip(self.parameters.values(), self.whole(self.master.detach().to(dtype)), strict=True):
            p.copy_(whole)

    def whole(self, mine: Tensor) -> Iterator[Tensor]:
        """Every parameter's numbers from the slices [n] of all ranks of the data axis. A collective."""
        slices = mine[None]
        if self.axis.size > 1:
            slices = torch.empty(self.axis.size, len(mine), dtype=mine.dtype, device=mine.device)  # [W, n]
            dist.all_gather_into_tensor(slices.view(-1), mine, group=self.axis.group)
        for slot in self.slots:
            yield slices[:, slot.start : slot.stop].reshape(-1, *slot.shape[1:])[: slot.shape[0]]

    def state(self) -> dict[str, Tensor]:
        """This rank's slices of KEYS, each [n] float32, and the number of steps taken. Moments start at zero."""
        moments = self.adamw.state[self.master]
        if not moments:  # as AdamW itself would on its first step
            moments |= {"step": torch.zeros((), device=self.ranks.device)}
            moments |= {key: torch.zeros_like(self.master) for key in KEYS[1:]}
        return {"master": self.master.detach(), **moments}

    def _adder(self, slot: Slot) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.gradient.add(slot, parameter.grad)
            parameter.grad = None

        return add

    def _norm(self, gradient: Tensor) -> float:
        """Over all processes, copies counted once. fsum rounds once, so nothing depends on how rows were spread over replicas."""
        squares = torch.cat([self._squares(slot, gradient) for slot in self.slots]).cpu()  # [rows of a slice] float64
        parts = [torch.empty_like(squares) for _ in range(self.axis.size)]
        dist.all_gather(parts, squares, group=self.axis.group)
        total = torch.tensor(math.fsum(torch.cat(parts).tolist()), dtype=torch.float64)
        for axis in (self.mesh.tensor, self.mesh.pipeline):
            if axis.size > 1:
                dist.all_reduce(total, group=axis.group)
        return math.sqrt(total)

    def _squares(self, slot: Slot, gradient: Tensor) -> Tensor:
        """[chunk] squared norm of each row; zero where another process counts it."""
        rows = gradient[slot.start : slot.stop].view(slot.chunk, -1)
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        replica = slot.name in self.copies.replicated and not self.mesh.tensor.is_first
        copy = slot.name == self.copies.tied and not self.mesh.pipeline.is_first
        return squares.zero_() if replica or copy else squares


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """Rate of one step: linear warm-up to `lr`, then constant, or down to 0 after the last iteration.

    Args:
        iteration: 0-based.
        iterations: of the whole run.
    """
    if iteration < config.warmup_iterations:
        return config.lr * (iteration + 1) / config.warmup_iterations
    left = 1 - (iteration - config.warmup_iterations) / max(1, iterations - config.warmup_iterations)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left)))}
    return config.lr * shape[config.schedule]
