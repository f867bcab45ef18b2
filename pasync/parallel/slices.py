"""Which numbers of each parameter belong to which rank of the data axis: whole rows (of its first dimension), in equal chunks.

Rank w of W owns rows w c to (w + 1) c of every parameter, c = ceil(rows / W), so the last ranks may own fewer, or none. All slices
have the same length n, with room for c rows of each parameter; what is beyond the end of a parameter stays zero. This is how torch's
distributed tensors cut along a dimension, so a checkpoint can describe a slice as one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in every slice."""

    name: str
    shape: tuple[int, ...]
    """Of the parameter on this process: of its shard, if it is cut over the tensor axis."""
    start: int
    chunk: int
    """Rows that a rank owns at most."""

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])

    @property
    def stop(self) -> int:
        return self.start + self.chunk * self.width

    def rows(self, rank: int) -> int:
        """How many rows a rank owns."""
        return min(max(self.shape[0] - rank * self.chunk, 0), self.chunk)

    def own(self, piece: Tensor, rank: int) -> Tensor:
        """[rows, ...] of rank's slice [n], a view."""
        rows = self.rows(rank)
        return piece[self.start : self.start + rows * self.width].view(rows, *self.shape[1:])

    def rows_of(self, parameter: Tensor, rank: int) -> Tensor:
        """[rows, ...] of the parameter that a rank owns, a view."""
        start = rank * self.chunk
        return parameter[start : start + self.rows(rank)]

    def pieces(self, slices: Tensor, parameter: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(place in the slices [W, n], rows of the parameter) of every rank."""
        for rank in range(len(slices)):
            yield self.own(slices[rank], rank), self.rows_of(parameter, rank)


def plan(shapes: list[tuple[str, tuple[int, ...]]], ranks: int) -> list[Slot]:
    """Slots of parameters, one after the other."""
    slots: list[Slot] = []
    for name, shape in shapes:
        slots.append(Slot(name, shape, slots[-1].stop if slots else 0, -(-shape[0] // ranks)))
    return slots
