"""Attention of a packed row, in two ways that agree up to rounding: (q, k, v, layout, scale) -> out.

`merged`: the layout's two parts, each by a flash kernel, merged by log-sum-exp. With a and x the log-sum-exps of a row in the own and the
cross part, softmax over both sets of keys has lse = logaddexp(a, x) and out = lerp(out_a, out_x, sigmoid(x - a)). Backward, the kernels'
formula with merged lse and out gives each part's exact gradient, and these add up. No key or value is copied.

`concat`: plain scaled-dot-product attention over copies of the prompt's keys; autograd does the rest. For every device.

Letters: T packed tokens, H query heads, G key/value heads, D head size, K responses of a group, P prompt and R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pasync.data.layout import Layout
from pasync.model.backends import Backend


def merged(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, *, backend: Backend) -> Tensor:
    """[T, H, D] from q [T, H, D] and k, v [T, G, D]."""
    return _Merged.apply(q, k, v, layout, scale, backend)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, backend: Backend) -> Tensor:
        out, lse = backend.part_forward(q, k, v, layout.own, scale)
        if end := layout.first_response:
            cross, cross_lse = backend.part_forward(q[end:], k[:end], v[:end], layout.cross, scale)
            own, own_lse = out[end:], lse[end:]
            weight = torch.sigmoid(cross_lse - own_lse)[..., None]  # [rows, H, 1] share of the prompt
            own.copy_(torch.lerp(own.to(lse.dtype), cross.to(lse.dtype), weight))
            own_lse.copy_(torch.logaddexp(own_lse, cross_lse))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.backend = layout, scale, backend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out, (q, k, v, out, lse) = grads[0], ctx.saved_tensors
        part_backward, layout, scale = ctx.backend.part_backward, ctx.layout, ctx.scale
        d_q, d_k, d_v = part_backward(d_out, q, k, v, out, lse, layout.own, scale)
        if end := layout.first_response:
            cross = part_backward(d_out[end:], q[end:], k[:end], v[:end], out[end:], lse[end:], layout.cross, scale)
            for total, part in zip((d_q[end:], d_k[:end], d_v[:end]), cross, strict=True):
                total += part
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), None, None, None


def concat(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """As `merged`. Per group one call for its prompt and one for its responses, padded to the longest."""
    lengths = iter(layout.own.rows.lengths)
    alone = layout.first_response or layout.own.rows.end  # rows that see nothing but their own segment
    parts, at = [], 0
    while at < alone:
        segment = slice(at, at + next(lengths))
        parts.append(_causal(q[segment], k[segment], v[segment], scale))
        at = segment.stop
    for rows, prompt in zip(pairwise(layout.cross.rows.offsets), pairwise(layout.cross.keys.offsets), strict=True):
        own, shared = slice(alone + rows[0], alone + rows[1]), slice(*prompt)
        sizes = _take(lengths, rows[1] - rows[0])
        parts.append(_over_prompt(q[own], k[own], v[own], k[shared], v[shared], sizes, scale))
    return torch.cat(parts)


def _take(lengths: Iterator[int], total: int) -> list[int]:
    """The next lengths, up to their given sum."""
    taken: list[int] = []
    while sum(taken) < total:
        taken.append(next(lengths))
    return taken


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H|G, rows, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _over_prompt(q: Tensor, k: Tensor, v: Tensor, k_prompt: Tensor, v_prompt: Tensor, lengths: list[int], scale: float) -> Tensor:
    """[rows, H, D] of the responses of one group."""
    longest, prompt = max(lengths), len(k_prompt)
    real = torch.arange(longest, device=q.device) < torch.tensor(lengths, device=q.device)[:, None]  # [K, R]

    def padded(x: Tensor) -> Tensor:  # [rows, H, D] -> [K, R, H, D]
        return x.new_zeros(*real.shape, *x.shape[1:]).masked_scatter(real[..., None, None], x)

    def joined(shared: Tensor, x: Tensor) -> Tensor:  # -> [K, G, P + R, D]
        return torch.cat([shared.expand(len(lengths), -1, -1, -1), padded(x)], dim=1).transpose(1, 2)

    # As keys, rows beyond a response's end lie after all of its real rows, so the mask hides them.
    mask = torch.ones(longest, prompt + longest, dtype=torch.bool, device=q.device).tril(prompt)  # [R, P + R]
    inputs = padded(q).transpose(1, 2), joined(k_prompt, k), joined(v_prompt, v)
    out = F.scaled_dot_product_attention(*inputs, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])  # [K, H, R, D]
    return out.transpose(1, 2)[real]
