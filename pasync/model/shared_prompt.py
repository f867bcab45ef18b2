"""Attention over packed groups: each response sees its prompt and itself, the prompt is computed once.

Registered with transformers' attention interface and driven by one forward keyword, so models stay unmodified.

    model(input_ids, position_ids, shared_prompt=layout)  --every layer-->  attention(query, key, value, shared_prompt=layout)

Cost O(P^2 + K R (P + R)) for a prompt of P and K responses of R tokens, instead of O(K (P + R)^2).

Letters: T packed tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from pasync.data.layout import Layout, lay_out
from pasync.errors import ConfigError
from pasync.model.attention import concat, merged
from pasync.model.backends import Backend, CpuFlash, CudaFlash, NpuFusion

FAMILIES = ("qwen2", "qwen3", "llama")
KINDS = ("auto", "merged", "concat")
BACKENDS: dict[str, type[Backend]] = {"cpu": CpuFlash, "cuda": CudaFlash, "npu": NpuFusion}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative difference between two correct ways to compute the same."""

log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
"""(q, k, v, layout, scale) -> out, see `pasync.model.attention`."""


def implementation(kind: str) -> str:
    """Name for transformers' `attn_implementation` of one of KINDS."""
    return f"pasync_{kind}"


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
    shared_prompt: Layout | None = None,
    *,
    kind: str = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function; `shared_prompt` comes through the model's forward keywords.

    Args:
        query: [1, H, T, D]; key, value: [1, G, T, D].
        shared_prompt: the row's layout.
        kind: one of KINDS.
        others: what transformers passes besides.

    Returns:
        [1, T, H, D], and no attention weights.

    Raises:
        ConfigError: the layer asks for something else than plain softmax attention.
    """
    assert shared_prompt is not None, "the model was called without shared_prompt=layout"
    assert attention_mask is None and dropout == 0.0 and query.shape[0] == 1
    for name in ("sliding_window", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise ConfigError(f"model.path: the model's attention has {name}={others[name]}, which packed groups do not support")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H|G, D]
    attend = choose(kind, q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
    return attend(q, k, v, shared_prompt, scaling if scaling is not None else q.shape[2] ** -0.5)[None], None


@lru_cache
def choose(kind: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int) -> Attend:
    """The attention for these sizes: `merged` if the device's backend computes correctly there, else `concat`.

    Raises:
        ConfigError: kind is `merged`, and it does not.
    """
    if kind == "concat":
        return concat
    backend = BACKENDS[device.type]() if device.type in BACKENDS else None
    wrong = self_test(backend, device, dtype, heads, kv_heads, head_size) if backend else f"there is none for {device.type}"
    sizes = f"{device.type}, {dtype}, {heads} and {kv_heads} heads of {head_size}"
    if backend is None or wrong:
        if kind == "merged":
            raise ConfigError(f"model.attention=merged: no backend for {sizes} ({wrong}), use concat or auto")
        log.warning("attention: concat, no backend for %s (%s)", sizes, wrong)
        return concat
    log.info("attention: merged, %s for %s", backend.name, sizes)
    return partial(merged, backend=backend)


def self_test(backend: Backend, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int) -> str | None:
    """What is wrong with a backend there; None if output and gradients of a small row are those of `concat`."""
    layout = lay_out([(5, (3, 1, 3)), (1, (4,))], shared=True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(layout.own.rows.end, h, head_size) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    results = []
    try:
        for attend in (concat, partial(merged, backend=backend)):
            inputs = a, b, c = [x.clone().requires_grad_() for x in (q, k, v)]
            # inside a checkpointed layer too: what is saved here must not be counted among the layer's own
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is):
                out = attend(a, b, c, layout, head_size**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, d_out)])
    except (RuntimeError, AttributeError) as error:  # the kernel refuses these sizes, or this torch does not have it
        return str(error).splitlines()[0]
    for name, right, ours in zip(("output", "d_q", "d_k", "d_v"), *results, strict=True):
        off = ((ours - right).norm() / right.norm()).item()
        if not off <= TOLERANCE[dtype]:
            return f"its {name} is off by {off:.1e}"
    return None


def _as_is(x: Tensor) -> Tensor:
    return x


for _kind in KINDS:
    AttentionInterface.register(implementation(_kind), partial(attention, kind=_kind))
