"""Every choice of the algorithm section as its paper writes it: response by response, all at once, plain autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pasync.config import Config


@dataclass
class Sample:
    """One response; each tensor is [R] float64."""

    logp: Tensor
    entropy: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor
    reward: float
    ended: bool


def estimate(kind: str, logp: Tensor, reference: Tensor) -> Tensor:
    ratio = torch.exp(reference - logp)
    return {"k1": -torch.log(ratio), "k2": torch.log(ratio) ** 2 / 2, "k3": ratio - 1 - torch.log(ratio)}[kind]


def advantages(c: Config, group: list[Sample]) -> list[float]:
    a, longest, rewards = c.algorithm, c.rollout.max_tokens, []
    for sample in group:
        reward, tokens = sample.reward, len(sample.logp)
        if a.overlong_tokens and tokens > longest - a.overlong_tokens:
            reward += ((longest - a.overlong_tokens) - tokens) / a.overlong_tokens
        if a.kl_coef and a.kl_in == "reward":
            reward -= a.kl_coef * estimate(a.kl_estimate, sample.old, sample.reference).sum().item()
        rewards.append(reward)
    n, mean = len(rewards), sum(rewards) / len(rewards)
    if a.advantage == "grpo":
        std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
        return [(r - mean) / (std + 1e-6) for r in rewards]
    if a.advantage == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if a.advantage == "opo":
        lengths = [len(s.logp) for s in group]
        best = sum(r * tokens for r, tokens in zip(rewards, lengths, strict=True)) / max(1, sum(lengths))
        return [r - best for r in rewards]
    assert a.advantage in ("dr_grpo", "reinforce++")
    return [r - mean for r in rewards]


def token_losses(c: Config, s: Sample, advantage: float) -> Tensor:
    a = c.algorithm
    ratio = torch.exp(s.logp - s.old)
    if a.loss == "gspo":
        ratio = torch.exp((s.logp - s.old).mean()).expand(len(ratio))
    bounded = torch.clip(ratio, 1 - a.clip_low, 1 + a.clip_high)
    if a.loss == "reinforce":
        loss = -advantage * s.logp
    elif a.loss == "cispo":
        loss = -bounded.detach() * advantage * s.logp
    else:
        loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if a.kl_in == "loss":
        loss = loss + a.kl_coef * estimate(a.kl_estimate, s.logp, s.reference)
    loss = loss - a.entropy_coef * s.entropy
    if a.importance == "none":
        return loss
    gap = s.old - s.engine
    weight = torch.exp(gap.sum() if a.importance == "response" else gap)
    return loss * torch.minimum(weight, torch.tensor(a.importance_cap))


def algorithm_loss(c: Config, groups: list[list[Sample]]) -> Tensor:
    """Of a whole batch."""
    a = c.algorithm
    credit = [(s, advantage) for group in groups for s, advantage in zip(group, advantages(c, group), strict=True)]
    credit = [(s, advantage) for s, advantage in credit if s.ended or not a.mask_truncated]
    if a.advantage == "reinforce++":
        deviation = (sum(advantage**2 for _, advantage in credit) / len(credit)) ** 0.5
        credit = [(s, advantage / (deviation + 1e-6)) for s, advantage in credit]
    losses = [token_losses(c, s, advantage) for s, advantage in credit]
    if a.normalizer == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).sum() / (sum(map(len, losses)) if a.normalizer == "token" else len(losses) * c.rollout.max_tokens)
