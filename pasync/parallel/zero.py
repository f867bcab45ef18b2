"""Data parallelism by ZeRO-1: every rank holds the whole model, each owns a slice of the optimizer.

    backward --hook--> sum of gradients [W n]   (no collective inside a batch, so ranks may do different amounts of work)
    end of batch:  reduce-scatter -> my slice [n] -> divide once -> clip -> AdamW on fp32 master slice -> all-gather -> model

All parameters lie one after the other in one flat vector, cut into W equal slices (arXiv 1910.02054, stage 1). Slices are whole
blocks, and the norm is added up block by block, so that it does not depend on the number of ranks. Letters: W ranks, n numbers of a
slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pasync import device as devices
from pasync.config import OptimizerConfig
from pasync.errors import TrainingError
from pasync.parallel.accumulate import ExactSum, FloatSum
from pasync.parallel.ranks import Ranks

BLOCK = 4096


class ShardedAdamW:
    """Adds up gradients from every backward pass and steps once per batch.

    Parameters may be stored in any type; the master copy and both moments are float32.

    Args:
        exact: add up gradients exactly (see `parallel.accumulate`).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, ranks: Ranks, *, exact: bool = False) -> None:
        self.parameters, self.ranks, self.clip_norm = list(parameters), ranks, config.clip_norm
        self.num_parameters = sum(p.numel() for p in self.parameters)
        self.slice_size = math.ceil(self.num_parameters / (ranks.size * BLOCK)) * BLOCK
        self.gradient = (ExactSum if exact else FloatSum)(ranks.size * self.slice_size, ranks)
        start = ranks.rank * self.slice_size
        flat = torch.zeros(ranks.size * self.slice_size, device=ranks.device)  # [W n]
        at = 0
        for p in self.parameters:
            flat[at : at + p.numel()] = p.detach().flatten()
            p.register_post_accumulate_grad_hook(self._adder(at))
            at += p.numel()
        self.master = nn.Parameter(flat[start : start + self.slice_size].clone())  # [n]
        self.adamw = torch.optim.AdamW(
            [self.master], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay,
            **devices.adamw_flags(ranks.device),
        )

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
        gradient = self.gradient.reduce(divisor)  # [n]
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

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the master weights of all ranks into the model. A collective."""
        flat = self.master.detach().to(self.parameters[0].dtype)  # [n]
        if self.ranks.size > 1:
            mine, flat = flat, torch.empty(self.ranks.size * self.slice_size, dtype=flat.dtype, device=flat.device)  # [W n]
            dist.all_gather_into_tensor(flat, mine)
        at = 0
        for p in self.parameters:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def state(self) -> dict[str, Tensor]:
        """This rank's slices, each [n] float32, and the number of steps taken."""
        moments = self.adamw.state.get(self.master, {})
        zeros = torch.zeros_like(self.master)
        return {
            "master": self.master.detach(),
            "exp_avg": moments.get("exp_avg", zeros),
            "exp_avg_sq": moments.get("exp_avg_sq", zeros),
            "step": torch.as_tensor(moments.get("step", 0.0), dtype=torch.float32).reshape(1),
        }

    def load_state(self, slices: list[dict[str, Tensor]]) -> None:
        """Continue from the states of all ranks of an earlier run, in rank order; their number may differ from now. A collective."""
        start = self.ranks.rank * self.slice_size
        mine = {}
        for key in ("master", "exp_avg", "exp_avg_sq"):
            whole = torch.cat([s[key] for s in slices])[: self.num_parameters]
            part = torch.zeros(self.slice_size)
            kept = whole[start : start + self.slice_size]
            part[: len(kept)] = kept
            mine[key] = part.to(self.ranks.device)
        self.master.data.copy_(mine.pop("master"))
        self.adamw.state[self.master] = {"step": slices[0]["step"].reshape(()).clone().to(self.ranks.device), **mine}
        self.write_parameters()

    def _adder(self, at: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.gradient.add(at, parameter.grad)
            parameter.grad = None

        return add

    def _norm(self, gradient: Tensor) -> float:
        """Norm over all ranks' slices. fsum rounds once, so nothing depends on how blocks were spread."""
        squares = torch.linalg.vector_norm(gradient.view(-1, BLOCK), dim=1, dtype=torch.float64).square().cpu()  # [n / BLOCK]
        parts = [torch.empty_like(squares) for _ in range(self.ranks.size)]
        dist.all_gather(parts, squares)
        return math.sqrt(math.fsum(torch.cat(parts).tolist()))


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
