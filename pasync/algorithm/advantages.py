"""Credit of each response among the responses to the same prompt. Letters: K responses of a group."""

from __future__ import annotations

import math

from torch import Tensor

from pasync.sections import Advantage


def group_advantages(rewards: Tensor, lengths: Tensor, kind: Advantage) -> Tensor:
    """Credit each response against the others of its group: A_k = (r_k - b) / scale.

    kind         b                        scale        source
    grpo         mean r                   std r + 1e-6 GRPO, arXiv 2402.03300 section 4.1.2 (the unbiased standard deviation)
    dr_grpo      mean r                   1            Dr. GRPO, arXiv 2503.20783: no weight to how hard a prompt is
    rloo         mean of the others' r    1            RLOO, arXiv 2402.14740 eq. 7; K / (K - 1) times dr_grpo
    opo          sum l_k r_k / sum l_k    1            OPO, arXiv 2505.23585: the baseline of least variance if a response's
                                                       gradient goes with the root of its length l_k
    reinforce++  mean r                   1            REINFORCE++ with baseline, arXiv 2501.03262; `batch_scale` divides at the end

    Nothing here needs another group, so a group can be trained on as soon as it is there.

    Args:
        rewards: [K] float32, the rewards of one group.
        lengths: [K], tokens of each response.

    Returns:
        [K] float32. Exactly zero if all rewards are equal: such a group has no policy gradient.

    Raises:
        ValueError: if K < 2; a group of one has no baseline.
    """
    count = rewards.numel()
    if count < 2:
        raise ValueError(f"a group needs at least 2 responses to have a baseline, this one has {count}")
    baseline = rewards.mean()
    if kind == "opo":
        baseline = (lengths * rewards).sum() / lengths.sum().clamp(min=1)
    centered = rewards - baseline  # [K]
    if kind == "grpo":
        centered = centered / (rewards.std() + 1e-6)
    if kind == "rloo":
        centered = centered * (count / (count - 1))
    return centered.where(rewards.max() > rewards.min(), 0)  # the mean of equal numbers may differ from them by rounding


def batch_scale(kind: Advantage, squares: float, responses: int) -> float:
    """What the whole batch's advantages are divided by besides: sqrt(mean A^2) + 1e-6 for reinforce++, else 1.

    REINFORCE++ (arXiv 2501.03262) normalises by mean and standard deviation over the batch. Advantages around their group's mean have mean
    zero, so only a positive number is left, known once the last group is there. Every policy loss is linear in a positive factor of the
    advantages (clipping looks at their sign only), so dividing the summed gradient by it is exact.

    Args:
        squares: sum of A^2 over the responses of the whole batch.
        responses: their number, those without gradient included.
    """
    return math.sqrt(squares / max(responses, 1)) + 1e-6 if kind == "reinforce++" else 1.0
