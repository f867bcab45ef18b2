"""Log-probs and entropy of sampled tokens without ever holding [N, V].

The vocabulary is gone through block by block, all tokens at once, like the keys of flash attention: forward keeps a running maximum and
sums, backward takes each block's logits, kept or computed again, and finishes that block's part of the weight's gradient at once. So
the head's weight is read twice, and no float32 copy of its gradient is ever needed.

With a vocabulary cut over several processes each goes through its own slice; then their running values merge as two blocks do:

    every process: hidden [N, E] + slice [V / n, E]  -->  peak, mass, moment, chosen [N]  ==max, sum==>  log-prob, entropy [N] on all
    backward:      its slice's gradient, no message;      part of d_hidden [N, E]         ==sum==>       d_hidden on all

Letters: N response tokens, E hidden size, V vocabulary, C tokens of the vocabulary in a block, n processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from pasync import device as devices

SMALLEST_BLOCK = 256
KEPT_BYTES = 768 << 20
"""Logits of the first blocks are kept for the backward pass up to so much; only what is beyond is computed again."""


class Peers(Protocol):
    """The processes that hold a vocabulary in equal slices, in order. All must call the same methods in the same order."""

    @property
    def index(self) -> int:
        """Place of this process's slice."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        ...


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, keep: bool, peers: Peers | None
    ) -> tuple[Tensor, Tensor]:
        targets = targets - peers.index * len(weight) if peers else targets
        mass, moment, chosen = (hidden.new_zeros(len(targets), dtype=_wide(hidden)) for _ in range(3))
        # over the blocks so far, with s = logit - peak: sum of e^s, sum of s e^s, and the target's logit
        peak, kept, room = mass - 1e30, [], KEPT_BYTES if keep else 0
        for at, block in _blocks(weight, len(targets)):
            raw = hidden @ block.T  # [N, C]
            room -= raw.nbytes
            if room >= 0:
                kept.append(raw)
            logits = _scaled(raw, temperature)
            inside, column = _column(targets, at, len(block))
            chosen = torch.where(inside, logits.gather(-1, column[:, None])[:, 0], chosen)
            before, peak = peak, torch.maximum(peak, logits.amax(-1))
            s = logits.sub_(peak[:, None])
            e = s.exp()
            mass, moment = _shifted(mass, moment, before - peak)
            moment = moment + torch.linalg.vecdot(e, s)
            mass = mass + e.sum(-1)
        if peers:
            before, peak = peak, peers.max(peak.clone())
            mass, moment, chosen = peers.sum(torch.stack([*_shifted(mass, moment, before - peak), chosen]))
        lse, entropy = peak + mass.log(), mass.log() - moment / mass
        ctx.save_for_backward(hidden, weight, targets, lse, *kept)
        ctx.temperature, ctx.peers = temperature, peers
        ctx.mark_non_differentiable(entropy)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, *kept = ctx.saved_tensors
        grad = grads[0] / ctx.temperature  # [N]
        d_hidden = hidden.new_zeros(hidden.shape, dtype=_wide(hidden))
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for (at, block), raw in zip_longest(_blocks(weight, len(targets)), kept):
            logits = _scaled(hidden @ block.T if raw is None else raw, ctx.temperature)  # [N, C]
            # d logp / d logits = onehot(target) - softmax(logits)
            d_logits = logits.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
            inside, column = _column(targets, at, len(block))
            d_logits.scatter_add_(1, column[:, None], torch.where(inside, grad, 0)[:, None])
            narrow = d_logits.to(hidden.dtype)
            d_hidden += narrow @ block
            if d_weight is not None:
                torch.mm(narrow.T, hidden, out=d_weight[at : at + len(block)])
        if ctx.peers:
            ctx.peers.sum(d_hidden)  # each slice of the vocabulary gave a part; summed before it is rounded
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, peers: Peers | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and the entropy there.

    Peak memory beside inputs and gradients: KEPT_BYTES, three blocks of N x C numbers (see `device.LOGITS_BLOCK`), and [N, E] float32.

    Args:
        hidden: [N, E] the rows that predict the targets.
        weight: [V, E] of the LM head; with peers this process's slice, [V / n, E].
        targets: [N] int64, in the whole vocabulary.
        temperature: of the sampling distribution.
        peers: who holds the other slices. All give the same hidden and targets, get the same results, and then the same, whole
            gradient of hidden; this is a collective, and so is its backward pass.

    Returns:
        ([N] log-probs, differentiable in hidden and weight; [N] entropies in nats, not differentiable), float32 (float64 for float64).
    """
    return _TokenLogprob.apply(hidden, weight, targets, temperature, torch.is_grad_enabled(), peers)


def _blocks(weight: Tensor, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """(first token, [C, E] rows) of each block of the vocabulary."""
    size = max(SMALLEST_BLOCK, devices.LOGITS_BLOCK[weight.device.type] // max(tokens, 1))
    return ((at, weight[at : at + size]) for at in range(0, len(weight), size))


def _shifted(mass: Tensor, moment: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The sums for a peak that is higher by -shift."""
    return shift.exp() * mass, shift.exp() * (moment + shift * mass)


def _column(targets: Tensor, at: int, size: int) -> tuple[Tensor, Tensor]:
    """[N] whether the target lies in the block, and [N] its column there (0 where not)."""
    column = targets - at
    inside = (column >= 0) & (column < size)
    return inside, column.where(inside, 0)


def _scaled(raw: Tensor, temperature: float) -> Tensor:
    """A wide copy, for work in place."""
    return raw.to(_wide(raw), copy=True).div_(temperature)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
