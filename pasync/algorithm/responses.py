"""Sums over the tokens of each response. Letters: N response tokens of a micro-batch, S responses."""

from __future__ import annotations

import torch
from torch import Tensor


def response_sums(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Add up what belongs to the same response.

    Args:
        values: [N].
        owner: [N] int64, the response of each token.
        count: S.

    Returns:
        [S]; 0 for an empty response.
    """
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, owner, values)
