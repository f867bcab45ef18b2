"""Losses as unnormalised sums, and what to divide them by at the end.

A gradient that is accumulated while groups still arrive cannot know the batch's totals. So every micro-batch adds
sum_i w_i * loss_i, and the sum is divided once, before the optimizer step, by the total of the WHOLE batch. The result does not
depend on arrival order or on how groups were packed (DESIGN.md invariant 2).

Letters: N response tokens of a micro-batch, S responses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasync.algorithm.responses import response_sums
from pasync.sections import Normalizer, PolicyLoss


def policy_loss(
    kind: PolicyLoss, logp: Tensor, old_logp: Tensor, advantages: Tensor, owner: Tensor, lengths: Tensor, *,
    clip_low: float, clip_high: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Policy-gradient loss of each token: one of `ppo`, `gspo`, `cispo`, `reinforce` below.

    All have the same gradient, -A grad logp, while the policy is the one that sampled. All are linear in a positive factor of A.

    Args:
        logp: [N] log-probs under the policy, with gradient.
        old_logp: [N] log-probs under the policy that sampled, without gradient.
        advantages: [N] advantage of the response that each token belongs to.
        owner: [N] int64, the response of each token.
        lengths: [S] int64, tokens of each response.
        clip_low, clip_high: ratios are clipped to 1 - clip_low .. 1 + clip_high.

    Returns:
        ([N] losses, to be weighted and summed; [N] bool, tokens whose ratio was clipped, which in ppo and gspo costs them their gradient).
    """
    if kind == "reinforce":
        return reinforce(logp, advantages), torch.zeros_like(logp, dtype=torch.bool)
    log_ratio = logp - old_logp  # [N]
    if kind == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, owner, lengths)
    ratio = torch.exp(log_ratio)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":
        return cispo(logp, bounded, advantages), bounded != ratio
    return clipped_surrogate(ratio, bounded, advantages), bounded * advantages < ratio * advantages


def clipped_surrogate(ratio: Tensor, bounded: Tensor, advantages: Tensor) -> Tensor:
    """[N] -min(ratio * A, bounded * A): PPO, arXiv 1707.06347 eq. 7, with the ratio of each token, exp(logp - old_logp)."""
    return -torch.minimum(ratio * advantages, bounded * advantages)


def sequence_log_ratio(log_ratio: Tensor, owner: Tensor, lengths: Tensor) -> Tensor:
    """[N] mean over the response of logp - old_logp, at each of its tokens: GSPO, arXiv 2507.18071 eq. 7.

    Clipped as in PPO, a response is kept or left out as a whole. The paper's loss has the normaliser `sequence` and clips at 3e-4 and 4e-4.
    """
    means = response_sums(log_ratio, owner, len(lengths)) / lengths.clamp(min=1)  # [S]
    return means[owner]


def cispo(logp: Tensor, bounded: Tensor, advantages: Tensor) -> Tensor:
    """[N] -bounded * A * logp, with no gradient through the clipped ratio: CISPO, arXiv 2506.13585 eq. 4. No token loses its gradient."""
    return -bounded.detach() * advantages * logp


def reinforce(logp: Tensor, advantages: Tensor) -> Tensor:
    """[N] -A * logp: REINFORCE (Williams 1992). Right only for samples of the policy itself, so for one update per batch."""
    return -advantages * logp


def token_weights(lengths: Tensor, owner: Tensor, normalizer: Normalizer) -> Tensor:
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


def denominator(normalizer: Normalizer, *, responses: int, tokens: int, max_tokens: int) -> float:
    """What the summed loss of the whole batch is divided by.

    "sequence": responses (GRPO, arXiv 2402.03300); "token": all response tokens (DAPO, arXiv 2503.14476);
    "constant": responses x max_tokens (Dr. GRPO, arXiv 2503.20783).

    Args:
        responses, tokens: totals of the whole batch over all ranks, groups without gradient included.
    """
    totals = {"sequence": responses, "token": tokens, "constant": responses * max_tokens}
    return float(max(totals[normalizer], 1))
