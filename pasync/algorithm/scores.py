"""Scores of a held-out set from several responses to each problem: avg@k, pass@j, maj@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RIGHT = 1.0
"""A response is right from this reward on."""


@dataclass(frozen=True)
class Answered:
    """One problem and its k responses."""

    rewards: list[float]
    answers: list[str]
    """What each response votes for; "" is no vote."""


def scores(problems: Sequence[Answered]) -> dict[str, float]:
    """Mean over problems, each with the same number k of responses.

    Returns:
        `avg@k`; with k > 1 also `pass@j` for j = 2, 4, 8, .. and k, and `maj@k`.
    """
    k = len(problems[0].rewards)
    values = {f"avg@{k}": fmean(fmean(p.rewards) for p in problems)}
    if k > 1:
        right = [sum(r >= RIGHT for r in p.rewards) for p in problems]
        for j in sorted({*(1 << i for i in range(1, k.bit_length())), k}):
            values[f"pass@{j}"] = fmean(pass_at(j, k, c) for c in right)
        values[f"maj@{k}"] = fmean(majority(p) for p in problems)
    return values


def pass_at(j: int, samples: int, right: int) -> float:
    """Estimate without bias the probability that one of j responses is right.

    1 - C(n - c, j) / C(n, j), for c right ones among n samples (arXiv 2107.03374, eq. 1)
    """
    return 1.0 - math.comb(samples - right, j) / math.comb(samples, j)


def majority(problem: Answered) -> float:
    """Reward of the answer that most responses give (self-consistency, arXiv 2203.11171); the mean of those that tie, 0 without a vote."""
    votes: dict[str, list[float]] = {}
    for answer, reward in zip(problem.answers, problem.rewards, strict=True):
        if answer:
            votes.setdefault(answer, []).append(reward)
    most = max(map(len, votes.values()), default=0)
    return fmean(fmean(rewards) for rewards in votes.values() if len(rewards) == most) if votes else 0.0
