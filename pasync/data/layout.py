"""The rule of a packed row: which tokens lie where, what each attends to, and which row predicts which token.

    shared:      [p1 | p2 | .. | r11 r12 .. r1K | r21 r22 .. r2K | ..]      every prompt once, before all responses
    not shared:  [p1 r11 | p1 r12 | .. | p2 r21 | ..]                       a prompt for every response

Two parts make the attention of a row:

    own:    each segment (prompt, response, or both where nothing is shared) attends causally to itself
    cross:  the responses of group g attend to all of prompt g

With all prompts first, both parts take queries, keys and values as slices of the row: nothing is gathered or copied. The position of
a response's first token is its prompt's length. Letters: T packed tokens, N response tokens, S responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """Segments that follow one another: segment i is offsets[i] to offsets[i + 1]. None is empty."""

    offsets: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class Reach:
    """Who attends to whom: each segment of `rows` to the segment of `keys` of the same number, to all of it or causally."""

    rows: Bounds
    keys: Bounds
    causal: bool


@dataclass(frozen=True)
class Layout:
    """Of one packed row. A group without any response token takes no rows: nobody would look at its prompt. A row without any is its
    prompts alone: it predicts nothing, but a process can go through the model with it when others do."""

    own: Reach
    """The causal part, over all T rows."""
    cross: Reach
    """The cross part: keys are the prompts, from row 0; rows are each group's responses, counted from `first_response`."""
    positions: Tensor
    """[T] int64."""
    rows: Tensor
    """[N] int64: the row that predicts each response token. The first token's is the last one of its prompt."""
    owner: Tensor
    """[N] int64: which response each token belongs to, empty ones counted."""

    @property
    def first_response(self) -> int:
        """The row after the prompts that are shared; 0 where none is."""
        return self.cross.keys.end

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tensors on `device`."""
        return replace(self, positions=self.positions.to(device), rows=self.rows.to(device), owner=self.owner.to(device))


def lay_out(shapes: Sequence[tuple[int, Sequence[int]]], *, shared: bool) -> Layout:
    """Place groups in one row, in the order given.

    Args:
        shapes: of each group, tokens of its prompt (at least one) and of each of its responses (zero or more).
        shared: prompts once, or once per response.
    """
    lengths = _ints([n for _, responses in shapes for n in responses])  # [S]
    if not lengths.any():
        return _prompts_alone([tokens for tokens, _ in shapes])
    prompt = _ints([tokens for tokens, responses in shapes for _ in responses])  # [S]
    owner = np.repeat(np.arange(len(lengths)), lengths)  # [N]
    if shared:
        kept = [(tokens, sum(responses)) for tokens, responses in shapes if sum(responses)]
        prompts, responses = (_bounds(n for n, _ in kept), _bounds(n for _, n in kept))
        ends = np.cumsum([tokens if sum(responses) else 0 for tokens, responses in shapes], dtype=np.int64)
        last = np.repeat(ends, [len(responses) for _, responses in shapes]) - 1  # [S] row of the prompt's last token
        start = prompts.end + np.cumsum(lengths) - lengths  # [S] first row of each response
        segments = [n for n, _ in kept] + lengths.tolist()
        positions = np.concatenate([_ramps(prompts.lengths), np.repeat(prompt, lengths) + _ramps(lengths)])
    else:
        prompts = responses = _bounds(())
        whole = np.where(lengths > 0, prompt + lengths, 0)  # [S]
        start = np.cumsum(whole) - lengths
        last = start - 1
        segments = whole.tolist()
        positions = _ramps(whole)
    within = _ramps(lengths)  # [N]
    rows = np.where(within == 0, last[owner], start[owner] + within - 1)
    own = _bounds(segments)
    tensors = (torch.from_numpy(x) for x in (positions, rows, owner))
    return Layout(Reach(own, own, causal=True), Reach(responses, prompts, causal=False), *tensors)


def _prompts_alone(prompts: list[int]) -> Layout:
    own, nothing = _bounds(prompts), torch.zeros(0, dtype=torch.int64)
    no_cross = Reach(_bounds(()), _bounds(()), causal=False)
    return Layout(Reach(own, own, causal=True), no_cross, torch.from_numpy(_ramps(prompts)), nothing, nothing)


def _bounds(lengths: Iterable[int]) -> Bounds:
    return Bounds(tuple(accumulate((n for n in lengths if n), initial=0)))


def _ramps(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """0 .. n-1 for each n, one after the other."""
    lengths = _ints(lengths)
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _ints(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64)
