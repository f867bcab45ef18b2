"""Where a loader puts each weight: learned while it loads, so that the next version can arrive there.

vLLM's loader maps names of the checkpoint onto parts of fused parameters. Most of what it then does is to copy a tensor as it is. Watching
for such copies takes no knowledge of the names and layouts of its models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Places(TorchDispatchMode):
    """As a context, sees what this thread does with the tensors that `watched` yields.

    Attributes:
        known: by name, the memory into which the whole tensor was copied, once and as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Tensor] = {}
        self._given: Tensor | None = None
        self._copies: list[Tensor] = []

    def watched(self, weights: Iterable[tuple[str, Tensor]], held: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The same weights. What is done before the next one is asked for is taken for what the loader does with one.

        Args:
            weights: not begun before places that are no longer parts of `held` are forgotten.
            held: tensors of which places are parts; a copy to elsewhere may be one on the way.
        """
        memory = set(map(_memory, held))
        self.known = {name: place for name, place in self.known.items() if _memory(place) in memory}
        for name, given in weights:
            self._given, self._copies = given, []
            yield name, given
            if len(self._copies) == 1 and _same_layout(place := self._copies[0], given) and _memory(place) in memory:
                self.known[name] = place
        self._given, self._copies = None, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_given(args[1]):
            self._copies.append(args[0].detach())
        return func(*args, **(kwargs or {}))

    def _is_given(self, source: Tensor) -> bool:
        """Whether it is the tensor that was yielded last, or begins where that does."""
        return self._given is not None and source.data_ptr() == self._given.data_ptr()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_layout(place: Tensor, given: Tensor) -> bool:
    """Whether a copy between them is one of plain bytes."""
    same = place.shape == given.shape and place.dtype == given.dtype and place.device == given.device
    return same and place.is_contiguous() and given.is_contiguous()
