"""Groups -> one packed micro-batch, prompt once, nothing padded.

    group 1: [prompt | r1 | r2 | .. rK]  group 2: [prompt | r1 | .. rK]  ...      one row of T tokens

Positions of every response restart at its prompt's length. The first token of a response is predicted by the prompt's last row,
every other by the row before it. Letters: T packed tokens, N response tokens, S responses.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasync.algorithm.advantages import group_advantages
from pasync.messages import Group


@dataclass(frozen=True)
class Segment:
    """Where one group lies in the packed row."""

    start: int
    prompt_tokens: int
    response_tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.prompt_tokens + sum(self.response_tokens)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward takes."""

    segments: tuple[Segment, ...]
    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    rows: Tensor
    """[N] int64: the packed row whose output predicts each response token."""
    targets: Tensor
    """[N] int64: the response tokens."""
    owner: Tensor
    """[N] int64: which response each token belongs to."""
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
        moved: dict[str, Any] = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "segments"}
        return replace(self, **moved)


def pack(groups: list[Group], *, normalize_std: bool) -> MicroBatch:
    """Lay groups out in one row, in the order given.

    Args:
        groups: any number of groups with at least one prompt token each; an empty list gives a micro-batch of zero tokens.
        normalize_std: see `group_advantages`.
    """
    segments: list[Segment] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    lengths: list[int] = []
    advantages: list[Tensor] = []
    start = 0
    for group in groups:
        prompt = np.frombuffer(group.prompt_ids, "<i4")
        parts["ids"].append(prompt)
        parts["positions"].append(np.arange(len(prompt)))
        at = start + len(prompt)
        for response in group.responses:
            tokens = response.token_ids
            parts["ids"].append(tokens)
            parts["positions"].append(len(prompt) + np.arange(len(tokens)))
            parts["rows"].append(np.concatenate([[start + len(prompt) - 1], at + np.arange(len(tokens) - 1)])[: len(tokens)])
            parts["targets"].append(tokens)
            parts["owner"].append(np.full(len(tokens), len(lengths)))
            lengths.append(len(tokens))
            parts["logprobs"].append(response.token_logprobs)
            at += len(tokens)
        advantages.append(group_advantages(torch.tensor(group.rewards, dtype=torch.float32), normalize_std=normalize_std))
        segments.append(Segment(start, len(prompt), tuple(len(r.ids) // 4 for r in group.responses)))
        start = at
    return MicroBatch(
        segments=tuple(segments),
        input_ids=_ints(parts["ids"]),
        position_ids=_ints(parts["positions"]),
        rows=_ints(parts["rows"]),
        targets=_ints(parts["targets"]),
        owner=_ints(parts["owner"]),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        advantages=torch.cat(advantages) if advantages else torch.zeros(0),
        engine_logprobs=torch.from_numpy(np.concatenate([*parts["logprobs"], np.zeros(0, np.float32)])),
    )


def has_gradient(group: Group, *, kl_coef: float) -> bool:
    """Whether a group adds anything to the gradient: equal rewards give zero advantages, empty responses no tokens."""
    return group.num_response_tokens > 0 and (kl_coef > 0 or len(set(group.rewards)) > 1)


def _ints(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.int64)]))
