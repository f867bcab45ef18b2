"""Estimates of how far the policy has moved from the reference. Letters: N response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pasync.sections import KlEstimate


def kl_estimate(logp: Tensor, reference_logp: Tensor, kind: KlEstimate) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, with d = reference - policy (http://joschu.net/blog/kl-approx.html).

    k1 = -d    k2 = d^2 / 2    k3 = exp(d) - d - 1

    As values, k1 and k3 are unbiased, k2 is not. What counts is the gradient, of samples from the policy itself (arXiv 2510.01555):

         in the loss                                        in the reward (the value, times grad log-prob of the response)
    k1   expectation 0: grad log-prob, without a factor     exactly that of KL(policy || reference) of whole responses
    k2   exactly that of KL(policy || reference) per token  biased
    k3   exactly that of KL(reference || policy) per token  biased

    "Per token" leaves out that a token changes which tokens follow. d is bounded at 20 in exp, where k3 is 5e8: beyond it k3 grows only
    linearly, so one token that the policy has all but forgotten cannot make the gradient infinite.

    Args:
        logp: [N], with gradient in the loss.
        reference_logp: [N], without.

    Returns:
        [N]; k2 and k3 at least 0.
    """
    d = reference_logp - logp  # [N]
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return torch.exp(d.clamp(max=20.0)) - d - 1
