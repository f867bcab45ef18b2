"""Models cut over real processes against the same model in one process."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_batch, make_group, response_logprobs
from test_logprob import problem, textbook
from test_model import FAMILIES, HEADS, SIZES, packing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workers import run_ranks

from pasync import device
from pasync.data.packing import MicroBatch
from pasync.errors import ConfigError
from pasync.model import logprob
from pasync.model.logprob import token_logprobs
from pasync.model.prepare import tensor_problems
from pasync.parallel.mesh import Axis, make_mesh
from pasync.parallel.ranks import Ranks
from pasync.parallel.tensor import AxisPeers, cut, whole

pytestmark = pytest.mark.timeout(240)  # whichever test comes first waits for the processes to start, which may share one core


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    tensor: int
    checkpointing: bool = False
    biases: bool = False
    """Also where the family has none by default: behind the layers that are cut by inputs, too."""
    dtype: torch.dtype = torch.float32


CASES = [
    Case("qwen2", tied=True, tensor=2),
    Case("qwen2", tied=False, tensor=2, checkpointing=True),
    Case("qwen3", tied=True, tensor=2, checkpointing=True),
    Case("qwen3", tied=False, tensor=2),
    Case("llama", tied=True, tensor=2, checkpointing=True, biases=True),
    Case("llama", tied=False, tensor=2),
    Case("qwen2", tied=True, tensor=4, checkpointing=True),
    Case("qwen3", tied=False, tensor=4),
    Case("llama", tied=True, tensor=4, biases=True),
]
PADDING = 200  # an embedding's row that does not learn from being looked up; not on the first process
NARROW = [Case("qwen3", tied=True, tensor=2, dtype=torch.bfloat16), Case("qwen2", tied=False, tensor=4, dtype=torch.bfloat16)]


def build(case: Case):
    """A model over packed rows, the same in every process; norms and biases are random too."""
    torch.manual_seed(0)
    model, config = FAMILIES[case.family]
    heads = HEADS | ({"num_key_value_heads": 4} if case.tensor == 4 else {})
    biases = {"attention_bias": True, "mlp_bias": True} if case.biases else {}
    oracle = model(config(**SIZES | {"pad_token_id": PADDING}, **heads, **biases, tie_word_embeddings=case.tied))
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
            p.copy_(p.bfloat16())  # what both types hold
    return packing(oracle, case.checkpointing).to(case.dtype)


def micro_batches() -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    batches = [make_batch([make_group(rng, p, r) for p, r in shapes]) for shapes in ([(7, [3, 5, 2]), (30, [9, 4])], [(20, [25, 6, 8])])]
    for batch in batches:
        batch.input_ids[2] = PADDING
    return batches


def accumulate(model) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all micro-batches; their gradients add up in the model."""
    logps, entropies = [], []
    for batch in micro_batches():
        logp, entropy = response_logprobs(model, batch, temperature=0.7)
        (logp * torch.randn(len(logp), generator=torch.Generator().manual_seed(1))).sum().backward()
        logps.append(logp.detach())
        entropies.append(entropy.detach())
    return torch.cat(logps), torch.cat(entropies)


def on_one(case: Case) -> dict[str, Any]:
    model = build(case)
    logp, entropy = accumulate(model)
    return {"logp": logp, "entropy": entropy, "gradients": {name: p.grad for name, p in model.named_parameters()}}


def on_many(case: Case, axis: Axis) -> dict[str, Any]:
    model = build(case)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shards = cut(model, axis)
    parameters = dict(model.named_parameters())
    logp, entropy = accumulate(model)
    for name in shards.partial:
        torch.distributed.all_reduce(parameters[name].grad, group=axis.group)
    with torch.no_grad():
        of_copy, _ = response_logprobs(copy.deepcopy(model), micro_batches()[0], temperature=0.7)
    return {
        "logp": logp,
        "entropy": entropy,
        "gradients": {name: whole(p.grad, shards.dims[name], axis) for name, p in parameters.items()},
        "restored": all(torch.equal(whole(p, shards.dims[name], axis), before[name]) for name, p in parameters.items()),
        "copied": torch.equal(of_copy, logp[: len(of_copy)]),
        "dims": dict(shards.dims),
        "partial": shards.partial,
        "held": sum(p.numel() for p in parameters.values()) / sum(p.numel() for p in before.values()),
    }


class Collectives(TorchDispatchMode):
    """The names of all collectives inside."""

    def __enter__(self):
        self.names: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def collectives(axis: Axis) -> tuple[list[str], list[str]]:
    """In forward and backward of one micro-batch through two layers."""
    model = build(CASES[3])
    cut(model, axis)
    with Collectives() as forward:
        logp, _ = response_logprobs(model, micro_batches()[0], temperature=1.0)
    with Collectives() as backward:
        logp.sum().backward()
    return forward.names, backward.names


def vocabulary_in_slices(axis: Axis, tokens: int, scale: float) -> list[Tensor]:
    """Log-probs, entropies and gradients in float64, with several blocks in each slice."""
    hidden, weight, targets, grad = problem(tokens, vocabulary=36)
    mine = weight.detach().chunk(axis.size)[axis.index].clone().requires_grad_()
    logp, entropy = token_logprobs(hidden * scale, mine, targets, temperature=0.8, peers=AxisPeers(axis))
    d_hidden, d_mine = torch.autograd.grad(logp + 0.3 * entropy, (hidden, mine), grad)
    return [logp.detach(), entropy.detach(), d_hidden, whole(d_mine, 0, axis)]


PROBLEMS = [(0, 1.0), (7, 1.0), (7, 1000.0)]


def everything(ranks: Ranks) -> dict[Any, Any]:
    """All that needs processes, as these take longer to start than to do it. Two shards are made twice, side by side."""
    axes = {n: make_mesh(pipeline=1, tensor=n, deadline_s=20).tensor for n in (2, 4)}
    found: dict[Any, Any] = {case: on_many(case, axes[case.tensor]) for case in CASES + NARROW}
    found["collectives"] = collectives(axes[2])
    device.LOGITS_BLOCK["cpu"], logprob.SMALLEST_BLOCK, logprob.KEPT_BYTES = 1, 4, 300
    return found | {p: vocabulary_in_slices(axes[4], *p) for p in PROBLEMS}


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_ranks(everything, 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_entropies_and_gradients_are_those_of_one_process(results, case):
    expected = on_one(case)
    for result in (r[case] for r in results):
        assert (result["logp"] - expected["logp"]).abs().max() < 1e-5  # float32
        assert (result["entropy"] - expected["entropy"]).abs().max() < 1e-5
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            off = (result["gradients"][name] - gradient).norm()
            # a bias of keys shifts all scores of a row alike: its gradient is zero but for rounding
            assert off < (1e-5 if name.endswith("k_proj.bias") else 2e-6 * gradient.norm()), (name, off / gradient.norm())


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_bfloat16_is_about_as_close_to_float32_as_one_process(results, case):
    truth = on_one(Case(case.family, case.tied, case.tensor))
    for key in ("logp", "gradients"):
        exact, one, many = (flat(x[key]) for x in (truth, on_one(case), results[0][case]))
        assert (many - exact).norm() <= 1.3 * (one - exact).norm()


def flat(x: Tensor | dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten().float() for g in x.values()]) if isinstance(x, dict) else x


@pytest.mark.parametrize("case", CASES + NARROW, ids=str)
def test_all_processes_have_the_same_bits_where_they_hold_the_same(results, case):
    first, *others = (r[case] for r in results)
    for other in others:
        assert torch.equal(first["logp"], other["logp"]) and torch.equal(first["entropy"], other["entropy"])
        assert all(torch.equal(g, other["gradients"][name]) for name, g in first["gradients"].items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_small_and_make_up_the_checkpoint_and_a_copied_model_works(results, case):
    for result in (r[case] for r in results):
        assert result["restored"] and result["copied"]
        assert result["held"] < 1 / case.tensor + 0.01  # only norms and a few biases are whole


def test_names_are_those_of_the_checkpoint_and_norms_of_heads_are_summed(results):
    of = {case.family: results[0][case] for case in CASES if not case.biases}
    layer = "model.layers.1.self_attn."
    assert of["qwen3"]["partial"] == tuple(f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "kq")
    assert of["qwen2"]["partial"] == of["llama"]["partial"] == ()
    dims = of["qwen2"]["dims"]
    assert list(dims) == [name for name, _ in build(CASES[0]).named_parameters()]
    assert [dims[layer + n] for n in ("q_proj.weight", "q_proj.bias", "o_proj.weight")] == [0, 0, 1]
    assert [dims[n] for n in ("model.embed_tokens.weight", "model.norm.weight")] == [0, None]


def test_a_layer_takes_two_all_reduces_forward_and_two_backward(results):
    layers = SIZES["num_hidden_layers"]
    # besides: forward the embedding, and the head's maximum and sums; backward the head's hidden rows
    assert results[0]["collectives"] == (["c10d::allreduce_"] * (2 * layers + 3), ["c10d::allreduce_"] * (2 * layers + 1))


@pytest.mark.parametrize(("tokens", "scale"), PROBLEMS)
def test_a_vocabulary_in_slices_has_the_log_probs_entropy_and_gradients_of_the_whole(results, tokens, scale):
    hidden, weight, targets, grad = problem(tokens, vocabulary=36)
    logp, entropy = textbook(hidden * scale, weight, targets, 0.8)
    expected = [logp.detach(), entropy.detach(), *torch.autograd.grad(logp + 0.3 * entropy, (hidden, weight), grad)]
    for result in results:
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(result[tokens, scale], expected, strict=True))


def axis_of(size: int) -> Axis:
    return Axis(0, tuple(range(size)), None)  # type: ignore[arg-type]  # nothing is sent


def test_what_cannot_be_cut_is_refused_with_what_is_allowed():
    settings = build(CASES[0]).config.to_dict()
    assert tensor_problems(settings, 1) == tensor_problems(settings, 2) == []
    assert tensor_problems(settings, 4) == ["parallel.tensor=4: must divide the model's key/value heads, 2; allowed are 1, 2"]
    assert [text.split("model's ")[1] for text in tensor_problems(settings | {"vocab_size": 265, "intermediate_size": 98}, 3)] == [
        "attention heads, 4; allowed are 1",
        "key/value heads, 2; allowed are 1",
        "intermediate size, 98; allowed are 1",
        "vocabulary, 265; allowed are 1",
    ]
    with pytest.raises(ConfigError, match="parallel.tensor=4: must divide the model's key/value heads, 2"):
        cut(build(CASES[0]), axis_of(4))


def test_a_plan_that_says_something_unknown_is_refused():
    model = build(CASES[0])
    model._tp_plan = model.tp_plan | {"model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp.up_proj is to be cut as 'diagonal'"):
        cut(model, axis_of(2))


def test_a_weight_between_cut_layers_that_the_plan_forgets_is_refused():
    model = build(CASES[3])
    model._tp_plan = {name: style for name, style in model.tp_plan.items() if "k_norm" not in name}
    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.k_norm has weights, but"):
        cut(model, axis_of(2))


def test_a_cut_head_does_not_pretend_to_have_logits():
    model = build(CASES[0])
    cut(model, axis_of(2))
    with pytest.raises(NotImplementedError, match="Stage.logprobs"):
        model.lm_head(torch.zeros(1, 64))


def test_an_axis_of_one_changes_nothing():
    model = build(CASES[3])
    before = dict(model.named_modules())
    shards = cut(model, axis_of(1))
    assert dict(model.named_modules()) == before
    assert set(shards.dims.values()) == {None} and shards.partial == ()
    weight = model.lm_head.weight
    assert torch.equal(whole(weight, None, axis_of(2)), weight) and torch.equal(whole(weight, 0, axis_of(1)), weight)
