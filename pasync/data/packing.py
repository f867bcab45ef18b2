"""Groups -> micro-batches: packed rows of at most so many tokens, with all that the loss needs beside them.

Letters: T packed tokens, N response tokens, S responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from pasync.algorithm.advantages import group_advantages
from pasync.data.layout import Layout, lay_out
from pasync.messages import Group, Response, int_bytes
from pasync.sections import AlgorithmConfig


class Part(msgspec.Struct, frozen=True):
    """A group, or some of its responses where all of them would not fit. Pipeline stages send these to one another."""

    prompt_ids: bytes
    """int32 [P]."""
    responses: list[Response]
    """Without text."""
    credit: list[float]
    """[responses] advantages; with the KL in the reward, from which they are taken later, rewards."""
    group_id: int = -1
    """Of the group; -1 of none."""
    first: int = 0
    """Place of the first response among those of the group."""
    forward_only: bool = False
    """Its log-probs are needed for what comes later; it has no gradient."""

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
    credit: Tensor
    """[S] float32: advantages, or rewards (see `Part`)."""
    engine_logprobs: Tensor
    """[N] float32: what the server sampled with."""
    parts: list[Part]
    """Where the responses come from."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def forward_only(self) -> bool:
        """Whether no gradient is wanted."""
        return any(part.forward_only for part in self.parts)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        names = ("input_ids", "targets", "lengths", "credit", "engine_logprobs")
        return replace(self, layout=self.layout.to(device), **{name: getattr(self, name).to(device) for name in names})


def rows(groups: Iterable[Group], algorithm: AlgorithmConfig, *, budget: int, shared_prompt: bool) -> Iterator[list[Part]]:
    """What to pack into one row each: groups in the order given, up to `budget` tokens a row.

    A group that is larger is cut between responses, and its prompt computed once per piece. Gradients of the pieces add up to the
    group's own: advantages and weights do not depend on the cut. A response alone may exceed the budget.

    With the KL in the reward an advantage needs the log-probs of the whole group. Where it is cut, all pieces but the first go through the
    models twice: first in rows of their own, without gradient, which are to be computed before all others, and again in their turn.

    Args:
        shared_prompt: see `lay_out`.
    """
    row: list[Part] = []
    for group in groups:
        pieces = list(_pieces(_whole(group, algorithm), budget, shared_prompt))
        if algorithm.kl_in_reward:
            yield from ([msgspec.structs.replace(piece, forward_only=True)] for piece in pieces[1:])
        for piece in pieces:
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
        credit=torch.tensor([a for part in parts for a in part.credit], dtype=torch.float32),
        engine_logprobs=_tensor([r.logprobs for r in responses], "<f4"),
        parts=parts,
    )


def empty_row() -> list[Part]:
    """What a process packs that has nothing to train on while others do: one token, none predicted, so no gradient."""
    return [Part(int_bytes([0]), [], [])]


def counts(response: Response, algorithm: AlgorithmConfig) -> bool:
    """Whether a response takes part in gradient and denominator: all do, or all that were not cut at max_tokens."""
    return response.ended or not algorithm.mask_truncated


def has_gradient(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether a group adds anything to the gradient: equal rewards give zero advantages, empty responses no tokens."""
    differ = algorithm.equal_rewards_teach or len(set(group.rewards)) > 1
    return differ and any(r.ids and counts(r, algorithm) for r in group.responses)


def _whole(group: Group, algorithm: AlgorithmConfig) -> Part:
    credit = group.rewards
    if not algorithm.kl_in_reward:
        lengths = torch.tensor([len(r.ids) // 4 for r in group.responses])
        credit = group_advantages(torch.tensor(credit, dtype=torch.float32), lengths, algorithm.advantage).tolist()
    kept = [(msgspec.structs.replace(r, text=""), c) for r, c in zip(group.responses, credit, strict=True) if counts(r, algorithm)]
    return Part(group.prompt_ids, [r for r, _ in kept], [c for _, c in kept], group.group_id)


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
    return Part(part.prompt_ids, part.responses[start:stop], part.credit[start:stop], part.group_id, part.first + start)


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
