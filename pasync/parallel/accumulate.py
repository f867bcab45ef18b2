"""Sums of gradients over a batch: in float32, or exactly.

Both hold one flat vector for all parameters, W n long, and give each rank its slice [n] of the sum over all ranks. Nothing here is a
collective but `reduce`. Letters: W ranks, n numbers of a slice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.errors import TrainingError
from pasync.parallel.ranks import Ranks

UNIT = 2.0**-40
LIMIT = 2.0**22
"""In units of 2^-40 an int64 holds sums below 2^23. Half of it is used, so that a sum is refused long before it wraps."""


class FloatSum:
    """float32: equal to the sum in any other order up to rounding."""

    def __init__(self, size: int, ranks: Ranks) -> None:
        self._ranks, self._total = ranks, torch.zeros(size, device=ranks.device)

    def add(self, at: int, gradient: Tensor) -> None:
        """Add one parameter's gradient, which begins at position `at` of the flat vector."""
        self._total[at : at + gradient.numel()] += gradient.flatten()

    def reduce(self, divisor: float) -> Tensor:
        """[n] float32: this rank's slice of the sum over all ranks, divided. A collective."""
        return _scattered(self._total, self._ranks).div_(divisor)

    def clear(self) -> None:
        """Start a new sum."""
        self._total.zero_()


class ExactSum:
    """Integers: the same bits in every order and on every number of ranks.

    Each gradient is rounded once to multiples of 2^-40, which is finer than float32 for every sum above 1e-5; integers then add
    without rounding, so the order cannot matter. What could leave the range is refused. Same use as `FloatSum`; int64, so twice its
    memory, and about five more passes over each gradient.
    """

    def __init__(self, size: int, ranks: Ranks) -> None:
        self._ranks, self._total = ranks, torch.zeros(size, dtype=torch.int64, device=ranks.device)
        self._bounds: dict[int, Tensor] = {}  # of each parameter: no sum of its numbers is larger

    def add(self, at: int, gradient: Tensor) -> None:
        """As in `FloatSum`."""
        exact = gradient.flatten().double()
        self._bounds[at] = self._bounds.get(at, 0.0) + exact.abs().max()
        self._total[at : at + gradient.numel()] += exact.div_(UNIT).round_().clamp_(-LIMIT / UNIT, LIMIT / UNIT).long()

    def reduce(self, divisor: float) -> Tensor:
        """As in `FloatSum`.

        Raises:
            TrainingError: on all ranks, if a sum may have left the range, or is not a number.
        """
        bound = torch.stack([*self._bounds.values(), torch.zeros((), dtype=torch.float64, device=self._total.device)]).max().cpu()
        dist.all_reduce(bound)
        if not bound < LIMIT:
            raise TrainingError(f"gradient sums up to {bound.item():.3g} do not fit parallel.accumulate=exact, the limit is {LIMIT:.3g}")
        return (_scattered(self._total, self._ranks).double() * UNIT).div_(divisor).float()

    def clear(self) -> None:
        """Start a new sum."""
        self._total.zero_()
        self._bounds = {}


def _scattered(total: Tensor, ranks: Ranks) -> Tensor:
    if ranks.size == 1:
        return total
    mine = torch.empty(len(total) // ranks.size, dtype=total.dtype, device=total.device)
    dist.reduce_scatter_tensor(mine, total)
    return mine
