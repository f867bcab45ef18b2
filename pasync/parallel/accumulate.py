"""Sums of gradients over a batch: in float32, or exactly.

Both hold the slices of all ranks of the data axis, [W, n]; `reduce` gives each rank its own of the sum over all. Nothing else here is a
collective. Letters: W data-parallel ranks, n numbers of a slice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.errors import TrainingError
from pasync.parallel.mesh import Axis
from pasync.parallel.slices import Slot

UNIT = 2.0**-40
LIMIT = 2.0**22
"""In units of 2^-40 an int64 holds sums below 2^23. Half of it is used, so that a sum is refused long before it wraps."""


class FloatSum:
    """float32: equal to the sum in any other order up to rounding."""

    def __init__(self, size: int, axis: Axis, device: torch.device) -> None:
        self._axis, self._total = axis, torch.zeros(axis.size, size, device=device)

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add one parameter's gradient."""
        for total, part in slot.pieces(self._total, gradient):
            total += part

    def reduce(self, divisor: float) -> Tensor:
        """[n] float32: this rank's slice of the sum over all ranks, divided. A collective. The sum is used up: `clear` comes next."""
        return _scattered(self._total, self._axis).div_(divisor)

    def is_finite(self) -> bool:
        """Whether what was added on this rank is."""
        return bool(self._total.isfinite().all())

    def clear(self) -> None:
        """Start a new sum."""
        self._total.zero_()


class ExactSum:
    """Integers: the same bits in every order and on every number of ranks.

    Each gradient is rounded once to multiples of 2^-40, which is finer than float32 for every sum above 1e-5; integers then add
    without rounding, so the order cannot matter. What could leave the range is refused. Same use as `FloatSum`; int64, so twice its
    memory, and about five more passes over each gradient.
    """

    def __init__(self, size: int, axis: Axis, device: torch.device) -> None:
        self._axis, self._total = axis, torch.zeros(axis.size, size, dtype=torch.int64, device=device)
        self._bounds: dict[Slot, Tensor] = {}  # of each parameter: no sum of its numbers is larger

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """As in `FloatSum`."""
        exact = gradient.double()
        self._bounds[slot] = self._bounds.get(slot, 0.0) + exact.abs().max()
        integers = exact.div_(UNIT).round_().clamp_(-LIMIT / UNIT, LIMIT / UNIT).long()
        for total, part in slot.pieces(self._total, integers):
            total += part

    def reduce(self, divisor: float) -> Tensor:
        """As in `FloatSum`.

        Raises:
            TrainingError: on all ranks, if a sum may have left the range, or is not a number.
        """
        bound = self._bound()
        dist.all_reduce(bound)
        if not bound < LIMIT:
            raise TrainingError(f"gradient sums up to {bound.item():.3g} do not fit parallel.accumulate=exact, the limit is {LIMIT:.3g}")
        return (_scattered(self._total, self._axis).double() * UNIT).div_(divisor).float()

    def is_finite(self) -> bool:
        """Whether what was added on this rank is a number within the range."""
        return bool(self._bound() < LIMIT)

    def clear(self) -> None:
        """Start a new sum."""
        self._total.zero_()
        self._bounds = {}

    def _bound(self) -> Tensor:
        """No sum of this rank is larger."""
        return torch.stack([*self._bounds.values(), torch.zeros((), dtype=torch.float64, device=self._total.device)]).max().cpu()


def _scattered(total: Tensor, axis: Axis) -> Tensor:
    """[n]"""
    if axis.size == 1:
        return total[0]
    mine = torch.empty_like(total[0])
    dist.reduce_scatter_tensor(mine, total.view(-1), group=axis.group)
    return mine
