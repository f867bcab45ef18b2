"""AdamW on float32 master weights, dealt out by rows over the ranks of the data axis.

    end of batch:  gradients of my rows, of the whole model and all replicas -> divide once -> clip -> AdamW -> weights of the model

Where gradients add up meanwhile and how weights come back into the model differs: see `zero.py` and `fsdp.py`. The norm is added up row by
row, so that it does not depend on the number of replicas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pasync import device as devices
from pasync.errors import TrainingError
from pasync.parallel.ranks import Ranks
from pasync.parallel.slices import Slot
from pasync.sections import OptimizerConfig

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


class ShardedAdamW(ABC):
    """Adds up gradients from every backward pass and steps once per batch.

    Args:
        slots: which rows of every parameter are this rank's.
        masters: tensors that hold these rows, float32.
        copies: how parameters relate to other processes of the same replica.
    """

    def __init__(self, slots: list[Slot], masters: list[Tensor], config: OptimizerConfig, ranks: Ranks, copies: Copies) -> None:
        self.slots, self.ranks, self.mesh, self.copies, self.clip_norm = slots, ranks, ranks.mesh, copies, config.clip_norm
        self.masters = [nn.Parameter(master) for master in masters]
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay,
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
        gradients = self.summed(divisor)
        norm = self._norm(self.rows(gradients))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient's norm is {norm}; the weights of the last finished iteration are unchanged")
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.mul_(min(1.0, self.clip_norm / (norm + 1e-6)))
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        self.write_parameters()
        self.clear()
        return norm

    def summed(self, divisor: float) -> list[Tensor]:
        """The batch's gradient, of the whole model and all replicas, as `masters` hold the weights. A collective."""
        gradients = self.reduced(divisor)
        rows = self.rows(gradients)
        for name in sorted(rows.keys() & self.copies.partial):  # the same order everywhere
            dist.all_reduce(rows[name], group=self.mesh.tensor.group)
        if self.copies.tied and self.mesh.ends:
            dist.all_reduce(rows[self.copies.tied], group=self.mesh.ends.group)
        return gradients

    @abstractmethod
    def rows(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """By parameter, views of this rank's rows in tensors like `masters`."""

    @abstractmethod
    def reduced(self, divisor: float) -> list[Tensor]:
        """Sums of the gradients of all replicas, divided, as `masters` hold the weights. A collective."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether what this process has summed up so far is. Waits for the device; no collective."""

    @abstractmethod
    def clear(self) -> None:
        """Start a new sum."""

    @abstractmethod
    def write_parameters(self) -> None:
        """Bring the master weights of all ranks into the model. A collective."""

    def state(self) -> dict[str, Tensor]:
        """`<key>.<parameter>`: this rank's rows, views, of each of KEYS; "step": number of steps taken. Moments start at zero."""
        found = {f"master.{name}": rows for name, rows in self.rows([master.detach() for master in self.masters]).items()}
        moments = [self._moments(master) for master in self.masters]
        for key in KEYS[1:]:
            found |= {f"{key}.{name}": rows for name, rows in self.rows([of_one[key] for of_one in moments]).items()}
        return found | {"step": moments[0]["step"]}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` gave. A collective."""
        for key, rows in self.state().items():
            rows.copy_(state[key])
        for master in self.masters:
            self._moments(master)["step"].copy_(state["step"])
        self.write_parameters()

    def _moments(self, master: nn.Parameter) -> dict[str, Tensor]:
        """Those of AdamW, made as AdamW itself would on its first step."""
        moments = self.adamw.state[master]
        if not moments:
            moments |= {"step": torch.zeros((), device=self.ranks.device)}
            moments |= {key: torch.zeros_like(master) for key in KEYS[1:]}
        return moments

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Over all processes, copies counted once. fsum rounds once, so nothing depends on how rows were spread over replicas."""
        squares = torch.cat(list(self._squares(gradients))).cpu()  # [rows of a slice] float64
        parts = [torch.empty_like(squares) for _ in self.mesh.data.ranks]
        dist.all_gather(parts, squares, group=self.mesh.data.group)
        total = torch.tensor(math.fsum(torch.cat(parts).tolist()), dtype=torch.float64)
        for axis in (self.mesh.tensor, self.mesh.pipeline):
            if axis.size > 1:
                dist.all_reduce(total, group=axis.group)
        return math.sqrt(total)

    def _squares(self, gradients: dict[str, Tensor]) -> Iterator[Tensor]:
        """[chunk] squared norm of each row of a parameter; zero beyond its end, and where another process counts it."""
        for slot in self.slots:
            squares = torch.zeros(slot.chunk, dtype=torch.float64, device=self.ranks.device)
            replica = slot.name in self.copies.replicated and not self.mesh.tensor.is_first
            copy = slot.name == self.copies.tied and not self.mesh.pipeline.is_first
            if not replica and not copy:
                rows = gradients[slot.name]
                norms = torch.linalg.vector_norm(rows.reshape(len(rows), slot.width), dim=1, dtype=torch.float64)
                squares[: len(rows)] = norms.square()
            yield squares


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
