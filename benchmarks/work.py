"""Work whose amount is chosen: a model that never ends a response by itself, prompts with a given length of response, rewards that differ.

What is sampled is random, but prompts, number and lengths of responses are the same in every iteration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pasync.model.tiny import END, SPECIAL, new_model, save_model


def endless_model(folder: Path, hidden: int, layers: int) -> None:
    """Save a random model that never samples an end token.

    Dimension 0 of the residual stream is a constant that no layer writes to, and the head turns it into a large negative logit of
    every special token.
    """
    torch.manual_seed(0)
    model: Any = new_model(
        "qwen2", hidden=hidden, layers=layers, heads=hidden // 64, intermediate=3 * hidden, positions=1024, tied=False
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[: SPECIAL.index(END) + 1, 0] = -1e4
    save_model(model, folder)


def write_rows(path: Path, lengths: list[int], prompt_tokens: int) -> None:
    """One prompt per length; its responses have exactly so many tokens."""
    rows = [{"question": f"{i:>{prompt_tokens}}", "answer": "", "tokens": n} for i, n in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward(prompt: str, response: str, token_ids: list[int], sample: dict[str, Any]) -> float:
    """Some number that differs between responses, so that every group has a gradient."""
    return sum((i + 1) * token for i, token in enumerate(token_ids)) % 1009 / 1009


END_UNUSED = (4, "<reponame>")
"""A token of SmolLM2 that its training data hardly has: as the end token it lets every response grow to its full length."""


def text_reward(response: str) -> float:
    """Some number that differs between responses."""
    return sum((i + 1) * ord(c) for i, c in enumerate(response)) % 1009 / 1009


def scored(prompt: str, response: str, token_ids: list[int], sample: dict[str, Any]) -> float:
    """`text_reward` as a reward function."""
    return text_reward(response)
