"""Attention of packed rows against one dense float64 softmax with the mask written out."""

from functools import partial

import npu_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pasync.data.layout import Reach, lay_out
from pasync.errors import ConfigError
from pasync.model import shared_prompt
from pasync.model.attention import concat, merged
from pasync.model.backends import CpuFlash, CudaFlash, NpuFusion

SHAPES = st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(0, 200), min_size=1, max_size=16)), min_size=1, max_size=4)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6)])
EDGES = [
    [(1, [1])],
    [(1, [1, 1]), (1, [1])],
    [(7, [3, 5, 2]), (1, [1, 0, 4]), (12, [0, 0]), (5, [6, 6, 6])],
    [(64, [130, 1, 33])],
    [(300, [600])],
    [(2, [0, 9]), (2, [9, 0])],
]
WAYS = {"merged": partial(merged, backend=CpuFlash()), "concat": concat, "npu": partial(merged, backend=NpuFusion())}


def visible(shapes, shared: bool) -> torch.Tensor:
    """[T, T] bool, from the rule alone: a token sees itself and what came before it in its own sequence, prompt included."""
    tokens = []  # of each row: (group, response or None for a shared prompt, position)
    if shared:
        used = [(g, p, r) for g, (p, r) in enumerate(shapes) if sum(r)]
        tokens += [(g, None, i) for g, p, _ in used for i in range(p)]
        tokens += [(g, k, p + i) for g, p, lengths in used for k, n in enumerate(lengths) for i in range(n)]
    else:
        tokens += [(g, k, i) for g, (p, lengths) in enumerate(shapes) for k, n in enumerate(lengths) if n for i in range(p + n)]
    group, response, position = (torch.tensor([-1 if t[i] is None else t[i] for t in tokens]) for i in range(3))
    same = (group[:, None] == group) & ((response[:, None] == response) | (response == -1))
    return same & (position <= position[:, None])


def dense(q, k, v, mask, scale):
    """[T, H, D], the softmax written out."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def tensors(rows: int, heads, size: int = 8, seed: int = 0, spread: float = 1.0):
    """q, k, v that want gradients and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, h, size, generator=generator, dtype=torch.float64) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [(x * spread).requires_grad_() for x in made[:3]], made[3]


def errors(way, shapes, heads, shared=True, spread=1.0) -> list[float]:
    """Relative error of out, d_q, d_k, d_v."""
    layout = lay_out(shapes, shared=shared)
    inputs, d_out = tensors(layout.own.rows.end, heads, spread=spread)
    results = []
    for out in (WAYS[way](*inputs, layout, 0.3), dense(*inputs, visible(shapes, shared), 0.3)):
        results.append([out, *torch.autograd.grad(out, inputs, d_out)])
    return [((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", EDGES)
@pytest.mark.usefixtures("npu")
def test_edge_cases_equal_the_dense_softmax_in_float64(shapes, way, shared):
    assert max(errors(way, shapes, (4, 2), shared)) < 1e-12


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["merged", "concat"])
@settings(max_examples=15, deadline=None)
@given(shapes=SHAPES.filter(lambda s: any(sum(r) for _, r in s)), heads=HEADS)
def test_any_layout_equals_the_dense_softmax_in_float64(way, shapes, heads):
    assert max(errors(way, shapes, heads)) < 1e-12


@pytest.mark.parametrize("way", ["merged", "concat"])
def test_scores_of_hundreds_neither_overflow_nor_lose_the_rest(way):
    assert max(errors(way, EDGES[2], (4, 2), spread=15.0)) < 1e-8  # scores up to about 1000


@pytest.mark.parametrize("way", ["merged", "concat"])
def test_gradients_are_the_derivatives_of_the_output(way):
    layout = lay_out([(3, [2, 1]), (1, [3])], shared=True)
    inputs, _ = tensors(layout.own.rows.end, (2, 1), size=2)
    assert torch.autograd.gradcheck(lambda q, k, v: WAYS[way](q, k, v, layout, 0.7), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["merged", "concat"])
def test_lower_precision_is_as_close_to_float64_as_plain_attention_over_copies(way, dtype):
    """Plain: every response with its prompt in one causal call, as an unpacked model computes it."""
    shapes = [(40, [30, 7, 50]), (9, [64])]
    layout, repeated = lay_out(shapes, shared=True), lay_out(shapes, shared=False)
    inputs, d_out = tensors(layout.own.rows.end, (4, 2), size=32)
    rows = torch.cat([torch.tensor(s) for s in sequences(shapes)])  # rows of the shared layout in the repeated one
    truth = dense(*inputs, visible(shapes, True), 0.2)
    narrow = [x.detach().to(dtype).requires_grad_() for x in inputs]
    ours = WAYS[way](*narrow, layout, 0.2)
    plain = concat(*(x[rows] for x in narrow), repeated, 0.2)

    # each response row has one copy; prompt rows have several equal ones
    back = torch.full((layout.own.rows.end,), -1)
    back[rows] = torch.arange(len(rows))
    outputs = [(x - truth).norm() for x in (ours, plain[back])]
    gradients = [torch.autograd.grad(x, xs, d_out.to(x.dtype)) for x, xs in ((truth, inputs), (ours, narrow), (plain[back], narrow))]
    off = [sum((g - t).norm() for g, t in zip(gs, gradients[0], strict=True)) for gs in gradients[1:]]
    assert outputs[0] < 1.5 * outputs[1] and off[0] < 1.5 * off[1]


def sequences(shapes) -> list[list[int]]:
    """Rows of each whole sequence, prompt and response, in the shared layout; groups must have no empty response."""
    found, prompt, response = [], 0, sum(p for p, _ in shapes)
    for tokens, lengths in shapes:
        for n in lengths:
            found.append([*range(prompt, prompt + tokens), *range(response, response + n)])
            response += n
        prompt += tokens
    return found


@pytest.mark.parametrize("way", ["merged", "concat"])
def test_local_heads_of_tensor_parallelism_compute_their_part_of_the_whole(way):
    layout = lay_out([(9, [4, 6]), (5, [3])], shared=True)
    (q, k, v), _ = tensors(layout.own.rows.end, (6, 2))
    whole = WAYS[way](q, k, v, layout, 0.3)
    halves = [WAYS[way](q[:, 3 * i : 3 * i + 3], k[:, i : i + 1], v[:, i : i + 1], layout, 0.3) for i in range(2)]
    assert torch.allclose(torch.cat(halves, 1), whole, atol=1e-14)


def test_merged_attention_copies_no_key_and_concat_does():
    """The largest tensor that each makes, in keys of the prompt."""
    layout = lay_out([(512, [4] * 16)], shared=True)
    (q, k, v), d_out = tensors(layout.own.rows.end, (2, 2))
    biggest = {}
    for way in ("merged", "concat"):
        sizes = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, sizes=sizes):
                result = func(*args, **(kwargs or {}))
                outputs = result if isinstance(result, tuple | list) else [result]
                sizes.extend(x.untyped_storage().nbytes() for x in outputs if isinstance(x, torch.Tensor))
                return result

        with Watch():
            torch.autograd.grad(WAYS[way](q, k, v, layout, 0.3), (q, k, v), d_out)
        biggest[way] = max(sizes) / k[:512].nbytes
    assert biggest["merged"] < 1.2 and biggest["concat"] > 15


def test_the_cpu_is_given_the_merged_attention_and_other_devices_what_works_there():
    sizes = (torch.float32, 4, 2, 16)
    assert shared_prompt.choose("auto", torch.device("cpu"), *sizes).func is merged
    assert shared_prompt.choose("concat", torch.device("cpu"), *sizes) is concat
    assert shared_prompt.choose("auto", torch.device("meta"), *sizes) is concat
    with pytest.raises(ConfigError, match="attention=merged.*meta.*use concat or auto"):
        shared_prompt.choose("merged", torch.device("meta"), *sizes)


class Wrong(CpuFlash):
    """A kernel after an update that changed what its log-sum-exp means."""

    def part_forward(self, *args):
        out, lse = super().part_forward(*args)
        return out, lse * 1.4427


class Gone(CpuFlash):
    """An operator that the installed torch does not have."""

    def part_backward(self, *args):
        return torch.ops.aten.no_such_operator(*args)


@pytest.mark.parametrize(("backend", "problem"), [(Wrong, "output is off by"), (Gone, "no_such_operator")])
def test_a_backend_that_computes_wrongly_is_not_used(monkeypatch, caplog, backend, problem):
    monkeypatch.setitem(shared_prompt.BACKENDS, "cpu", backend)
    shared_prompt.choose.cache_clear()
    assert shared_prompt.choose("auto", torch.device("cpu"), torch.float32, 4, 2, 16) is concat
    assert problem in caplog.text
    with pytest.raises(ConfigError, match=problem):
        shared_prompt.choose("merged", torch.device("cpu"), torch.float32, 4, 2, 16)
    shared_prompt.choose.cache_clear()


@pytest.fixture
def npu():
    with npu_reference.operators():
        yield


@pytest.mark.usefixtures("npu")
def test_the_npu_backend_splits_what_has_more_segments_than_its_kernel_takes(monkeypatch):
    monkeypatch.setattr(NpuFusion, "most_segments", 3)
    assert max(errors("npu", EDGES[2], (4, 2))) < 1e-12


def test_the_cuda_backend_calls_operators_that_exist_with_arguments_and_shapes_that_fit():
    """On the meta device: torch's own shape functions of the cuda kernels, no numbers."""
    layout = lay_out([(7, [3, 5]), (4, [6])], shared=True)
    q, k, d_out = (torch.empty(layout.own.rows.end, h, 64, dtype=torch.bfloat16, device="meta") for h in (4, 2, 4))
    q.requires_grad_()
    out = merged(q, k, k, layout, 0.1, backend=CudaFlash())
    assert out.shape == q.shape
    assert torch.autograd.grad(out, q, d_out)[0].shape == q.shape
    lse = CudaFlash().part_forward(q.detach(), k, k, layout.own, 0.1)[1]
    assert lse.shape == q.shape[:2] and lse.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")
@pytest.mark.parametrize("shapes", EDGES)
def test_the_cuda_backend_passes_its_self_test_and_equals_the_dense_softmax(shapes):
    device, layout = torch.device("cuda"), lay_out(shapes, shared=True)
    assert shared_prompt.self_test(CudaFlash(), device, torch.bfloat16, 4, 2, 64) is None
    inputs, d_out = tensors(layout.own.rows.end, (4, 2), size=64)
    truth = dense(*inputs, visible(shapes, True), 0.2)
    narrow = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in inputs]
    ours = merged(*narrow, layout, 0.2, backend=CudaFlash())
    pairs = [(truth, ours), *zip(torch.autograd.grad(truth, inputs, d_out), torch.autograd.grad(ours, narrow, d_out.to(ours)), strict=True)]
    assert all((a - b.cpu().double()).norm() / a.norm() < 2e-2 for a, b in pairs)


def test_a_part_says_which_rows_attend_to_which_keys():
    layout = lay_out([(7, [3, 0, 2]), (1, [0]), (5, [4])], shared=True)
    assert layout.own.rows.offsets == (0, 7, 12, 15, 17, 21)
    assert layout.cross == Reach(*(type(layout.own.rows)(o) for o in ((0, 5, 9), (0, 7, 12))), causal=False)
    assert layout.first_response == 12
    alone = lay_out([(7, [3, 0, 2]), (1, [0]), (5, [4])], shared=False)
    assert alone.own.rows.offsets == (0, 10, 19, 28) and alone.first_response == 0
