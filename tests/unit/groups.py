"""Groups made by hand, for tests."""

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from pasync.data.packing import MicroBatch, pack, rows
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.model.stage import Stage
from pasync.sections import AlgorithmConfig

GRPO = AlgorithmConfig(batch_groups=1, group_responses=2)


def make_group(rng: np.random.Generator, prompt: int, responses: list[int], *, rewards: list[float] | None = None, group_id: int = 0,
               version: int = 0, vocabulary: int = 264) -> Group:  # fmt: skip
    """A group of random tokens with the given lengths."""
    rewards = rewards if rewards is not None else rng.integers(0, 2, len(responses)).astype(float).tolist()
    made = [
        Response(int_bytes(rng.integers(0, vocabulary, n)), float_bytes(-rng.random(n)), "text", True, r)
        for n, r in zip(responses, rewards, strict=True)
    ]
    return Group(version, group_id, int_bytes(rng.integers(0, vocabulary, prompt)), made, 0.0, 1.0)


def make_batch(groups: list[Group], *, shared_prompt: bool = True) -> MicroBatch:
    """All groups in one row."""
    [row] = rows(groups, GRPO, budget=1 << 30, shared_prompt=shared_prompt)
    return pack(row, shared_prompt=shared_prompt)


def response_logprobs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Of a whole model, as a pipeline of one stage computes them."""
    return Stage(model, 0, 1).logprobs(batch, temperature=temperature)
