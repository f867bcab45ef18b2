"""The server's log-probs are not quite the trainer's: other kernels, other types. Letters: N response tokens, S responses."""

from __future__ import annotations

import torch
from torch import Tensor

from pasync.algorithm.responses import response_sums


def engine_ratios(old_logp: Tensor, engine_logp: Tensor, owner: Tensor, count: int, *, of_responses: bool) -> Tensor:
    """How much more often the trainer's policy would have sampled what the server sampled: exp(old - engine), without gradient.

    Cut at a cap and multiplied with the loss they are truncated importance sampling (Ionides 2008; for this use
    https://fengyao.notion.site/off-policy-rl), which makes the gradient the trainer's policy's own but for what is cut. Of tokens: a biased
    gradient of low variance; of responses, the product over their tokens: unbiased below the cap, of high variance in long ones.

    Args:
        old_logp: [N] of the trainer, under the weights that sampled.
        engine_logp: [N] of the server.
        owner: [N] int64, the response of each token.
        count: S.
        of_responses: give each token the ratio of its whole response.

    Returns:
        [N], at most exp(20), which a sum of squares still holds.
    """
    gap = old_logp - engine_logp  # [N]
    if of_responses:
        gap = response_sums(gap, owner, count)[owner]
    return torch.exp(gap.clamp(max=20.0))
