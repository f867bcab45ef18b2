"""Flash attention of many segments at once, forward with log-sum-exp and backward from it: one class per kind of device.

Each is a handful of private operators, so none is trusted: `passes` compares it once with the portable path, on the device and with
the sizes in question. Letters: T query rows, U key rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from pasync.data.layout import Bounds, Reach

Triple = tuple[Tensor, Tensor, Tensor]


class Backend(Protocol):
    """Attention of one part of a layout.

    Shapes: q, out and their gradients [T, H, D]; k, v and theirs [U, G, D], H a multiple of G; lse [T, H], float32 (float64 for
    float64). Results may be wider than the inputs. Causal parts have the same segments of rows and keys.
    """

    name: str

    def part_forward(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
        """Returns out = softmax(scale q k^T) v and lse = log sum exp(scale q k^T)."""
        ...

    def part_backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, scale: float) -> Triple:
        """Returns d_q, d_k, d_v of this part: with P = exp(scale q k^T - lse) and delta = rowsum(d_out * out),
        d_v = P^T d_out and d_s = P (d_out v^T - delta). `out` and `lse` may be those of a softmax over more keys than these."""
        ...


class CpuFlash:
    """torch's flash kernel for CPU; consecutive segments of equal lengths go as one batch of views.

    It computes in float32 at least: without matrix units the kernel takes twice as long in bfloat16.
    """

    name = "flash-cpu"

    def part_forward(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = map(_wide, (q, k, v))
        out, lse = [], []
        for n, r, c in _runs(reach):
            o, s = forward(_batch(q[r], n), _batch(k[c], n), _batch(v[c], n), 0.0, reach.causal, scale=scale)
            out.append(_rows(o))
            lse.append(s.transpose(1, 2).flatten(0, 1))
        return _cat(out), _cat(lse)

    def part_backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, scale: float) -> Triple:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_out, q, k, v, out = map(_wide, (d_out, q, k, v, out))
        grads: list[list[Tensor]] = [[], [], []]
        for n, r, c in _runs(reach):
            inputs = (_batch(x, n) for x in (d_out[r], q[r], k[c], v[c], out[r]))
            batched_lse = lse[r].unflatten(0, (n, -1)).transpose(1, 2)  # [n, H, rows]
            for kept, grad in zip(grads, backward(*inputs, batched_lse, 0.0, reach.causal, scale=scale), strict=True):
                kept.append(_rows(grad))
        return _cat(grads[0]), _cat(grads[1]), _cat(grads[2])


class CudaFlash:
    """torch's FlashAttention-2 for variable lengths: float16 and bfloat16."""

    name = "flash-cuda"

    def part_forward(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *self._where(reach, q.device), False, scale=scale)
        return out, lse.T  # from [H, T]

    def part_backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, scale: float) -> Triple:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of a dropout that there is none of
        return torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, lse.T.contiguous(), *self._where(reach, q.device), unused, unused[:0], scale=scale
        )  # fmt: skip

    def _where(self, reach: Reach, device: torch.device) -> tuple[Any, ...]:
        rows, keys = reach.rows, reach.keys
        return _offset_tensor(rows, device), _offset_tensor(keys, device), rows.longest, keys.longest, 0.0, reach.causal


class NpuFusion:
    """Ascend's FlashAttentionScore in TND layout, https://www.hiascend.com: torch_npu.npu_fusion_attention and its gradient.

    The kernel wants ends instead of offsets, a mask where True hides, and gives (maximum, sum) of the softmax instead of their
    log-sum-exp, eight copies of each; (lse, 1) is the same softmax.
    """

    name = "fusion-npu"
    most_segments = 1000
    """Longer lists are refused by the kernel; they go in several calls."""

    def part_forward(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for r, c, where in self._calls(reach, q.device):
            o, peak, total, *_ = torch.ops.npu.npu_fusion_attention(q[r], k[c], v[c], q.shape[1], "TND", scale=scale, **where)
            out.append(o)
            lse.append(peak[..., 0] + total[..., 0].log())
        return _cat(out), _cat(lse)

    def part_backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Reach, scale: float) -> Triple:
        grads: list[list[Tensor]] = [[], [], []]
        peak = lse[..., None].expand(-1, -1, 8).contiguous()  # [T, H, 8]
        for r, c, where in self._calls(reach, q.device):
            given = {"softmax_max": peak[r], "softmax_sum": torch.ones_like(peak[r]), "attention_in": out[r], "scale_value": scale}
            results = torch.ops.npu.npu_fusion_attention_grad(q[r], k[c], v[c], d_out[r], q.shape[1], "TND", **given, **where)
            for kept, grad in zip(grads, results[:3], strict=True):
                kept.append(grad)
        return _cat(grads[0]), _cat(grads[1]), _cat(grads[2])

    def _calls(self, reach: Reach, device: torch.device) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """(rows, keys, arguments that say who attends to whom) of each call."""
        # without a mask the kernel ignores the mode and lets everything attend to everything
        causal: dict[str, Any] = {"atten_mask": _upper_triangle(device), "sparse_mode": 3} if reach.causal else {}
        for at in range(0, len(reach.rows.lengths), self.most_segments):
            r, c = (bounds.offsets[at : at + self.most_segments + 1] for bounds in (reach.rows, reach.keys))
            ends = {"actual_seq_qlen": [x - r[0] for x in r[1:]], "actual_seq_kvlen": [x - c[0] for x in c[1:]]}
            yield slice(r[0], r[-1]), slice(c[0], c[-1]), {"softmax_layout": "TND", **ends, **causal}


@lru_cache(maxsize=64)
def _runs(reach: Reach) -> list[tuple[int, slice, slice]]:
    """(number of segments, their rows, their keys) of consecutive segments of equal lengths."""
    runs, r, c = [], 0, 0
    for (length, width), same in groupby(zip(reach.rows.lengths, reach.keys.lengths, strict=True)):
        n = len(list(same))
        runs.append((n, slice(r, r + n * length), slice(c, c + n * width)))
        r, c = r + n * length, c + n * width
    return runs


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _batch(x: Tensor, n: int) -> Tensor:
    """[n * rows, H, D] -> [n, H, rows, D], a view."""
    return x.unflatten(0, (n, -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[n, H, rows, D] -> [n * rows, H, D], a view of what the kernel laid out so."""
    return x.transpose(1, 2).flatten(0, 1)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=64)
def _offset_tensor(bounds: Bounds, device: torch.device) -> Tensor:
    return torch.tensor(bounds.offsets, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _upper_triangle(device: torch.device) -> Tensor:
    """The one compressed mask that the kernel's causal modes take."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
