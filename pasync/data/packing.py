"""Groups -> micro-batches: packed rows of at most so many tokens, with all that the loss needs beside them.

Letters: T packed tokens, N response tokens, S responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from pasync.algorithm.advantages import group_advantages
from pasync.data.layout import Layout, lay_out
from pasync.messages import Group, Response, int_bytes


class Part(msgspec.Struct, frozen=True):
    """A group, or some of its responses where all of them would not fit. Pipeline stages send these to one another."""

    prompt_ids: bytes
    """int32 [P]."""
    responses: list[Response]
    """Without text."""
    advantages: list[float]
    """[responses] among all responses of the group."""
    group_id: int = -1
    """Of the group; -1 of none."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(r.ids) // 4 for r in self.responses]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward takes."""

    layout: Layout
    input_ids: Tensor
    """[T] int64."""
    targets: Tensor
    """[N] int64: the response tokens."""
    lengths: Tensor
    """[S] int64: tokens of each response."""
    advantages: Tensor
    """[S] float32."""
    engine_logprobs: Tensor
    """[N] float32: what the server sampled with."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        return MicroBatch(
            self.layout.to(device),
            *(x.to(device) for x in (self.input_ids, self.targets, self.lengths, self.advantages, self.engine_logprobs)),
        )


def rows(groups: Iterable[Group], *, budget: int, normalize_std: bool, shared_prompt: bool) -> Iterator[list[Part]]:
    """What to pack into one row each: groups in the order given, up to `budget` tokens a row.

    A group that is larger is cut between responses, and its prompt computed once per piece. Gradients of the pieces add up to the
    group's own: advantages and weights do not depend on the cut. A response alone may exceed the budget.

    Args:
        normalize_std: see `group_advantages`.
        shared_prompt: see `lay_out`.
    """
    row: list[Part] = []
    for group in groups:
        for piece in _pieces(_whole(group, normalize_std), budget, shared_prompt):
            if row and _tokens([*row, piece], shared_prompt) > budget:
                yield row
                row = []
            row.append(piece)
    if row:
        yield row


def pack(parts: list[Part], *, shared_prompt: bool) -> MicroBatch:
    """Lay out all parts in one row."""
    responses = [r for part in parts for r in part.responses]
    layout = lay_out([(part.prompt_tokens, part.lengths) for part in parts], shared=shared_prompt)
    if not any(r.ids for r in responses):
        ids = [part.prompt_ids for part in parts]
    elif shared_prompt:
        ids = [part.prompt_ids for part in parts if sum(part.lengths)] + [r.ids for r in responses]
    else:
        ids = [x for part in parts for r in part.responses if r.ids for x in (part.prompt_ids, r.ids)]
    return MicroBatch(
        layout=layout,
        input_ids=_tensor(ids, "<i4").long(),
        targets=_tensor([r.ids for r in responses], "<i4").long(),
        lengths=torch.tensor([n for part in parts for n in part.lengths], dtype=torch.int64),
        advantages=torch.tensor([a for part in parts for a in part.advantages], dtype=torch.float32),
        engine_logprobs=_tensor([r.logprobs for r in responses], "<f4"),
    )


def empty_row() -> list[Part]:
    """What a process packs that has nothing to train on while others do: one token, none predicted, so no gradient."""
    return [Part(int_bytes([0]), [], [])]


def has_gradient(group: Group, *, kl_coef: float) -> bool:
    """Whether a group adds anything to the gradient: equal rewards give zero advantages, empty responses no tokens."""
    return group.num_response_tokens > 0 and (kl_coef > 0 or len(set(group.rewards)) > 1)


def _whole(group: Group, normalize_std: bool) -> Part:
    advantages = group_advantages(torch.tensor(group.rewards, dtype=torch.float32), normalize_std=normalize_std)
    return Part(group.prompt_ids, [msgspec.structs.replace(r, text="") for r in group.responses], advantages.tolist(), group.group_id)


def _pieces(part: Part, budget: int, shared_prompt: bool) -> Iterator[Part]:
    """The part itself if it fits, else as many of its responses at a time as fit, at least one."""
    start = 0
    while start < len(part.responses):
        stop = start + 1
        while stop < len(part.responses) and _tokens([_cut(part, start, stop + 1)], shared_prompt) <= budget:
            stop += 1
        yield _cut(part, start, stop)
        start = stop


def _cut(part: Part, start: int, stop: int) -> Part:
    return Part(part.prompt_ids, part.responses[start:stop], part.advantages[start:stop], part.group_id)


def _tokens(parts: list[Part], shared_prompt: bool) -> int:
    """Length of their row."""
    total = 0
    for part in parts:
        prompts = min(1, sum(part.lengths)) if shared_prompt else sum(n > 0 for n in part.lengths)
        total += prompts * part.prompt_tokens + sum(part.lengths)
    return total


def _tensor(arrays: list[bytes], dtype: str) -> Tensor:
    """Little-endian arrays, one after the other."""
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(arrays)), dtype))
