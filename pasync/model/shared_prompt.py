"""Attention over packed groups: each response sees its prompt and itself, the prompt is computed once.

Registered with transformers' attention interface and driven by one forward keyword, so models stay unmodified. For a group with
prompt P and K responses two scaled-dot-product calls do it:

    prompt:     causal over P
    responses:  K rows of queries over [prompt | own response], the prompt's keys expanded (not recomputed) K times

Cost O(P^2 + K R (P + R)) instead of O(K (P + R)^2). Letters: H query heads, G key/value heads, D head size, T packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from pasync.data.packing import Segment
from pasync.errors import ConfigError

NAME = "pasync_shared_prompt"
FAMILIES = ("qwen2", "qwen3", "llama")


def check_supported(config: PretrainedConfig) -> None:
    """Refuse models whose attention this module would compute wrongly. Raises ConfigError."""
    if config.model_type not in FAMILIES:
        raise ConfigError(f"model.path: model type {config.model_type} is not supported, must be one of {', '.join(FAMILIES)}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ConfigError("model.path: the model has sliding-window layers, which packed groups do not support")
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError(f"model.path: attention_dropout={config.attention_dropout} makes log-probs random, must be 0")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prompt: tuple[Segment, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function; `shared_prompt` comes through the model's forward keywords.

    Args:
        query: [1, H, T, D]; key, value: [1, G, T, D].
        shared_prompt: the micro-batch's segments.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    assert shared_prompt is not None, "the model was called without shared_prompt=segments"
    assert attention_mask is None and dropout == 0.0
    parts = []
    for segment in shared_prompt:
        q, k, v = (x[:, :, segment.start : segment.end] for x in (query, key, value))
        parts.append(group_attention(segment, q, k, v, scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def group_attention(segment: Segment, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of one group.

    Args:
        query: [1, H, L, D]; key, value: [1, G, L, D], L the group's packed length.

    Returns:
        [1, H, L, D].
    """
    prompt = segment.prompt_tokens
    grouped = query.shape[1] != key.shape[1]
    q_prompt, k_prompt, v_prompt = (x[:, :, :prompt] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q_prompt, k_prompt, v_prompt, is_causal=True, scale=scaling, enable_gqa=grouped)
    if query.shape[2] == prompt:
        return out
    index, unpad = _pad_index(segment.response_tokens, query.device)
    q, k, v = (_padded(x[:, :, prompt:], index) for x in (query, key, value))  # [K, H|G, R, D]
    num, longest = q.shape[0], q.shape[2]
    k = torch.cat([k_prompt.expand(num, -1, -1, -1), k], dim=2)  # [K, G, P + R, D]
    v = torch.cat([v_prompt.expand(num, -1, -1, -1), v], dim=2)
    # Rows beyond a response's end are computed and dropped; as keys they lie after every real row, so the mask hides them.
    mask = torch.ones(longest, prompt + longest, dtype=torch.bool, device=q.device).tril(prompt)  # [R, P + R]
    own = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)  # [K, H, R, D]
    flat = own.transpose(0, 1).reshape(1, query.shape[1], num * longest, -1)
    return torch.cat([out, flat.index_select(2, unpad)], dim=2)


def _pad_index(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[K, R] packed index of each padded cell, and [sum R] padded index of each packed token."""
    size = torch.tensor(lengths)  # [K]
    column = torch.arange(max(lengths))  # [R]
    real = column < size[:, None]  # [K, R]
    index = ((size.cumsum(0) - size)[:, None] + column).where(real, torch.zeros(()).long())
    return index.to(device), real.flatten().nonzero()[:, 0].to(device)


def _padded(x: Tensor, index: Tensor) -> Tensor:
    """[1, H, sum R, D] -> [K, H, R, D]."""
    return x[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)


AttentionInterface.register(NAME, attention)
