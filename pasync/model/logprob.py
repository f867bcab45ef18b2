"""Log-probs and entropy of sampled tokens without ever holding [N, V] in float32.

Letters: N response tokens, E hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 512


class _ChunkedLogprob(torch.autograd.Function):
    """Keeps only the log-sum-exp [N] for the backward pass and recomputes each chunk's logits there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logp, entropy, lse = (torch.empty(len(targets), device=hidden.device, dtype=_wide(hidden)) for _ in range(3))
        for at in range(0, len(targets), CHUNK_TOKENS):
            cut = slice(at, at + CHUNK_TOKENS)
            logits = _logits(hidden[cut], weight, temperature)  # [C, V]
            lse[cut] = logits.logsumexp(-1)
            logp[cut] = logits.gather(-1, targets[cut, None])[:, 0] - lse[cut]
            entropy[cut] = lse[cut] - (torch.softmax(logits, -1) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        grad = grads[0]  # [N]
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, device=weight.device, dtype=_wide(weight))
        for at in range(0, len(targets), CHUNK_TOKENS):
            cut = slice(at, at + CHUNK_TOKENS)
            # d logp / d logits = onehot(target) - softmax(logits)
            p = torch.exp(_logits(hidden[cut], weight, ctx.temperature) - lse[cut, None])  # [C, V]
            d_logits = p.neg_().scatter_add_(1, targets[cut, None], torch.ones_like(p[:, :1]))
            d_logits = (d_logits * (grad[cut, None] / ctx.temperature)).to(hidden.dtype)
            d_hidden[cut] = d_logits @ weight
            d_weight += d_logits.T @ hidden[cut]
        return d_hidden, d_weight.to(weight.dtype), None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and the entropy there.

    Peak memory is one chunk of logits, CHUNK_TOKENS x V float32 (two while entropy or gradients are computed), plus d_weight.

    Args:
        hidden: [N, E] the rows that predict the targets.
        weight: [V, E] of the LM head.
        targets: [N] int64.
        temperature: of the sampling distribution.

    Returns:
        ([N] log-probs, differentiable in hidden and weight; [N] entropies in nats, not differentiable), float32 (float64 for float64).
    """
    return _ChunkedLogprob.apply(hidden, weight, targets, temperature)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T).to(_wide(hidden)) / temperature  # [C, V]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
