"""Losses as unnormalised sums, and what to divide them by at the end.

A gradient that is accumulated while groups still arrive cannot know the batch's totals. So every micro-batch adds
sum_i w_i * loss_i, and the sum is divided once, before the optimizer step, by the total of the WHOLE batch. The result does not
depend on arrival order or on how groups were packed (DESIGN.md invariant 2).

Letters: N response tokens of a micro-batch, S responses.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Clipped policy-gradient loss of each token (PPO, arXiv 1707.06347 eq. 7).

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = exp(logp - old_logp)

    Args:
        logp: [N] log-probs under the policy, with gradient.
        old_logp: [N] log-probs under the policy that sampled, without gradient.
        advantages: [N] advantage of the response that each token belongs to.

    Returns:
        [N] losses, to be weighted and summed.
    """
    ratio = torch.exp(logp - old_logp)  # [N]
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def clipped(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """[N] bool: tokens without gradient because their ratio has left the range on the side that their advantage pushes to."""
    ratio = torch.exp(logp - old_logp)  # [N]
    return torch.where(advantages > 0, ratio > 1 + clip_high, (ratio < 1 - clip_low) & (advantages < 0))


def kl_k3(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """Non-negative estimate of KL(policy || reference) at each sampled token: exp(d) - d - 1, d = reference - policy.

    http://joschu.net/blog/kl-approx.html. d is bounded at 20, where exp(d) is 5e8: beyond it the estimate grows only linearly,
    so one token that the policy has all but forgotten cannot make the gradient infinite.

    Args:
        logp: [N], with gradient.
        reference_logp: [N], without.

    Returns:
        [N], at least 0.
    """
    d = reference_logp - logp  # [N]
    return torch.exp(d.clamp(max=20.0)) - d - 1


def token_weights(lengths: Tensor, owner: Tensor, normalizer: str) -> Tensor:
    """Weight of each token's loss in the sum.

    Args:
        lengths: [S] int64, tokens of each response.
        owner: [N] int64, the response of each token.
        normalizer: "sequence" weighs each token 1 / length of its response; "token" and "constant" weigh all alike.

    Returns:
        [N] float32.
    """
    if normalizer == "sequence":
        return (1.0 / lengths.float())[owner]  # [N]; an empty response owns no token
    return torch.ones(owner.shape, device=owner.device)


def denominator(normalizer: str, *, responses: int, tokens: int, max_tokens: int) -> float:
    """What the summed loss of the whole batch is divided by.

    "sequence": responses (GRPO, arXiv 2402.03300); "token": all response tokens (DAPO, arXiv 2503.14476);
    "constant": responses x max_tokens (Dr. GRPO, arXiv 2503.20783).

    Args:
        responses, tokens: totals of the whole batch over all ranks, groups without gradient included.
    """
    totals = {"sequence": responses, "token": tokens, "constant": responses * max_tokens}
    return float(max(totals[normalizer], 1))
