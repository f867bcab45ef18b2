"""Credit of each response. Letters: K responses per group."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Credit each response against the other responses to its prompt.

    A_k = r_k - mean(r)            (divided by std(r) + 1e-6 if `normalize_std`)

    GRPO, arXiv 2402.03300 section 4.1.2, with the unbiased standard deviation; without the division Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards: [K] float32, the rewards of one group.
        normalize_std: True for GRPO; False gives no weight to how hard a prompt is.

    Returns:
        [K] float32. Exactly zero if all rewards are equal: such a group has no policy gradient.

    Raises:
        ValueError: if K < 2; a group of one has no baseline.
    """
    if rewards.numel() < 2:
        raise ValueError(f"a group needs at least 2 responses to have a baseline, this one has {rewards.numel()}")
    if bool((rewards == rewards[0]).all()):  # the mean of equal numbers may differ from them by rounding
        return torch.zeros_like(rewards)
    centered = rewards - rewards.mean()  # [K]
    return centered / (rewards.std() + 1e-6) if normalize_std else centered
