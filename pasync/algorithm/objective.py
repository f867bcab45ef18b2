"""The loss of a micro-batch as the configuration composes it, and what the metrics need of it.

    policy loss (+ KL) (- entropy), each token times its weight (x importance)  --sum-->  scalar

Letters: N response tokens, S responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasync.algorithm.importance import engine_ratios
from pasync.algorithm.kl import kl_estimate
from pasync.algorithm.losses import policy_loss, token_weights
from pasync.sections import AlgorithmConfig

STATISTICS = ("loss", "kl", "entropy", "gap", "clipped", "ratios", "squared_ratios", "capped", "squared_advantages")
"""Keys of `statistics`."""
UNIT = 2.0**-40
"""Sums of multiples of it below 2^12 are exact in float64, so they have the same bits in any order."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch's response tokens. Only `logp` and `entropy` have a gradient."""

    logp: Tensor
    """[N] under the policy."""
    entropy: Tensor
    """[N] of the policy, in nats."""
    old: Tensor
    """[N] under the weights that sampled."""
    reference: Tensor | None
    """[N] under the starting weights."""
    engine: Tensor
    """[N] what the server sampled with."""
    advantages: Tensor
    """[S]"""
    owner: Tensor
    """[N] int64, the response of each token."""
    lengths: Tensor
    """[S] int64, tokens of each response."""


def objective(a: AlgorithmConfig, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed, weighted token losses, to be divided once by the whole batch's `denominator` and `batch_scale`.

    Returns:
        (scalar to differentiate, sums for STATISTICS).
    """
    loss, clipped = policy_loss(
        a.loss, t.logp, t.old, t.advantages[t.owner], t.owner, t.lengths, clip_low=a.clip_low, clip_high=a.clip_high
    )  # [N], [N]
    if a.kl_in_loss:
        assert t.reference is not None
        loss = loss + a.kl_coef * kl_estimate(t.logp, t.reference, a.kl_estimate)
    if a.entropy_coef:
        loss = loss - a.entropy_coef * t.entropy
    weights = token_weights(t.lengths, t.owner, a.normalizer)  # [N]
    ratios = engine_ratios(t.old, t.engine, t.owner, len(t.lengths), of_responses=a.importance == "response")  # [N]
    capped = ratios > (a.importance_cap if a.importance != "none" else math.inf)
    if a.importance != "none":
        weights = weights * ratios.clamp(max=a.importance_cap)
    weighted = (loss * weights).sum()
    return weighted, statistics(a, t, {"loss": weighted, "clipped": clipped, "ratios": ratios, "capped": capped})


@torch.no_grad()
def statistics(a: AlgorithmConfig, t: Tokens, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the micro-batch, on its device."""
    found |= {"entropy": t.entropy, "gap": (t.logp - t.engine).abs(), "squared_ratios": found["ratios"].square()}
    if a.kl_coef and t.reference is not None:
        found["kl"] = kl_estimate(t.logp, t.reference, "k3")
    if a.advantage == "reinforce++":
        found["squared_advantages"] = (t.advantages.double().square().sum() / UNIT).round() * UNIT
    return {key: values.sum() for key, values in found.items()}
