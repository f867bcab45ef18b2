"""torch_npu's two attention operators in plain torch, under their real schemas, so that the code that calls them runs on cpu.

Schemas: libtorch_npu.so 2.10.0.post4. Meaning: op-plugin's documentation of npu_fusion_attention (TND: cumulative ends, True hides,
softmax maximum and sum as [T, N, 8] float32; here in the inputs' precision, so that float64 tests can be sharp).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FORWARD = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, '
    "Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
BACKWARD = (
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, "
    "Tensor? attention_in=None, float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
)


@contextmanager
def operators() -> Iterator[None]:
    """Have torch.ops.npu while in the block."""
    library = torch.library.Library("npu", "DEF")
    for schema, function in ((FORWARD, forward), (BACKWARD, backward)):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def segments(query, key, ends_q, ends_k, atten_mask, sparse_mode, head_num, input_layout):
    """(rows, keys, [rows, keys] bool of what is hidden) of each sequence."""
    assert input_layout == "TND" and query.shape[1] == head_num and head_num % key.shape[1] == 0
    assert len(ends_q) == len(ends_k) <= 1000 and ends_q[-1] == len(query) and ends_k[-1] == len(key)
    r = c = 0
    for end_q, end_k in zip(ends_q, ends_k, strict=True):
        rows, keys = end_q - r, end_k - c
        hidden = torch.zeros(rows, keys, dtype=torch.bool)
        if atten_mask is not None:
            assert sparse_mode in (2, 3) and torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
            hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + (keys - rows if sparse_mode == 3 else 0))
        yield slice(r, end_q), slice(c, end_k), hidden
        r, c = end_q, end_k


def expanded(x, heads):
    return x.repeat_interleave(heads // x.shape[1], 1)


def forward(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
            pre_tockens=0, next_tockens=0, inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,
            gen_mask_parallel=True, sync=False, softmax_layout="", sink=None, dropout_mask=None, seed=0, offset=0):  # fmt: skip
    assert softmax_layout == "TND"  # else the statistics come as [N, T, 8]
    out, peak, total = torch.empty_like(query), query.new_empty(*query.shape[:2], 8), query.new_empty(*query.shape[:2], 8)
    for r, c, hidden in segments(query, key, actual_seq_qlen, actual_seq_kvlen, atten_mask, sparse_mode, head_num, input_layout):
        scores = torch.einsum("qhd,khd->qhk", query[r], expanded(key[c], head_num)) * scale
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        peak[r] = scores.amax(-1, keepdim=True)
        weights = (scores - peak[r][..., :1]).exp()
        total[r] = weights.sum(-1, keepdim=True)
        out[r] = torch.einsum("qhk,khd->qhd", weights / total[r][..., :1], expanded(value[c], head_num))
    return out, peak, total, query.new_empty(0), 0, 0, 0


def backward(query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None,
             softmax_sum=None, softmax_in=None, attention_in=None, scale_value=1.0, keep_prob=1.0, pre_tockens=0, next_tockens=0,
             inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,
             gen_mask_parallel=True, sync=False, softmax_layout="", sink=None):  # fmt: skip
    assert softmax_layout == "TND" and softmax_max.shape == softmax_sum.shape == (*query.shape[:2], 8)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for r, c, hidden in segments(query, key, actual_seq_qlen, actual_seq_kvlen, atten_mask, sparse_mode, head_num, input_layout):
        k, v = expanded(key[c], head_num), expanded(value[c], head_num)
        scores = (torch.einsum("qhd,khd->qhk", query[r], k) * scale_value).masked_fill(hidden[:, None], -torch.inf)
        p = (scores - softmax_max[r][..., :1]).exp() / softmax_sum[r][..., :1]
        delta = (dy[r] * attention_in[r]).sum(-1, keepdim=True)
        d_s = p * (torch.einsum("qhd,khd->qhk", dy[r], v) - delta) * scale_value
        grads[0][r] = torch.einsum("qhk,khd->qhd", d_s, k)
        for i, (a, b) in enumerate(((d_s, query[r]), (p, dy[r])), 1):
            whole = torch.einsum("qhk,qhd->khd", a, b)
            grads[i][c] = whole.unflatten(1, (key.shape[1], -1)).sum(2)
    return *grads, query.new_empty(0), query.new_empty(0)
