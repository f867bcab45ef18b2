"""The pipeline on real processes against whole models on one process.

All runs on several processes happen in one start of four, because starting them takes longer than everything they compute.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from groups import make_batch, make_group, response_logprobs
from torch import Tensor
from transformers import PreTrainedModel
from workers import run_ranks

from pasync.algorithm.kl import kl_estimate
from pasync.data.packing import MicroBatch
from pasync.errors import ConfigError, RolloutError
from pasync.messages import Group
from pasync.model import shared_prompt
from pasync.model.stage import Stage, split_layers
from pasync.model.tiny import new_model
from pasync.parallel.mesh import Axis, make_mesh
from pasync.parallel.pipeline import Pipeline
from pasync.parallel.ranks import Ranks

pytestmark = pytest.mark.timeout(120)
TEMPERATURE, DEADLINE_S = 0.7, 20
_groups = msgspec.msgpack.Decoder(list[Group])


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    models: int
    batches: int
    checkpointing: bool = False
    delays: bool = False
    """Micro-batches arrive, and every stage reads them, after random waits."""
    fails_after: int | None = None
    """The source raises after so many micro-batches; then a whole batch follows."""
    backward: bool = True

    def __str__(self) -> str:
        flags = {f.name: getattr(self, f.name) for f in fields(self)[4:] if getattr(self, f.name) != f.default}
        head = "tied" if self.tied else "untied"
        return "-".join([self.family, head, f"{self.models}models", f"{self.batches}batches", *(f"{k}={v}" for k, v in flags.items())])


CASES = {
    4: [
        Case("qwen2", tied=True, models=3, batches=9),
        Case("qwen2", tied=True, models=3, batches=9, delays=True),
        Case("qwen3", tied=False, models=1, batches=6, checkpointing=True),
        Case("llama", tied=True, models=1, batches=0),
        Case("llama", tied=True, models=1, batches=1),
        Case("llama", tied=False, models=3, batches=5, checkpointing=True, delays=True),
        Case("qwen2", tied=True, models=1, batches=6, fails_after=2),
        Case("qwen3", tied=True, models=3, batches=12, backward=False),
    ],
    2: [
        Case("qwen2", tied=False, models=3, batches=5),
        Case("qwen3", tied=True, models=3, batches=6, checkpointing=True, delays=True),
        Case("llama", tied=True, models=1, batches=8),
        Case("llama", tied=False, models=1, batches=1),
    ],
    1: [
        Case("qwen2", tied=True, models=3, batches=5),
        Case("qwen3", tied=False, models=1, batches=5, checkpointing=True),
        Case("llama", tied=True, models=1, batches=0),
        Case("llama", tied=False, models=3, batches=1),
        Case("qwen2", tied=True, models=1, batches=5, fails_after=2),
        Case("qwen3", tied=True, models=3, batches=3, backward=False),
    ],
}
"""By number of stages."""


@dataclass
class Seen:
    """What one process saw of one case."""

    logps: list[list[Tensor]]
    """Of every micro-batch, of every model, [N]."""
    entropies: list[Tensor]
    gradients: dict[str, Tensor]
    held: list[int]
    """Micro-batches between forward and backward, after each of either."""
    tied: str | None
    """Name of the tied weight."""
    error: str = ""


def make_models(case: Case) -> list[PreTrainedModel]:
    """Policy, and frozen ones that differ a little."""
    torch.manual_seed(0)
    policy = new_model(case.family, hidden=64, layers=4, heads=4, intermediate=96, positions=128, tied=case.tied)
    policy.set_attn_implementation(shared_prompt.implementation("merged"))
    if case.checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    models = [policy.train(), *(copy.deepcopy(policy).requires_grad_(False) for _ in range(case.models - 1))]
    for model in models:
        with torch.no_grad():
            for weight in model.parameters():  # biases and norms, too, so that a forgotten one shows
                weight.add_(torch.randn_like(weight), alpha=0.02)
    return models


def make_groups(case: Case, replica: int) -> list[list[Group]]:
    """Micro-batches of one or two groups of very different lengths."""
    rng = np.random.default_rng(replica)
    return [
        [make_group(rng, int(rng.integers(1, 40)), rng.integers(1, 30, 3).tolist(), rewards=[0.0, 1.0, 0.5]) for _ in range(1 + i % 2)]
        for i in range(case.batches)
    ]


def decode(body: bytes) -> MicroBatch:
    return make_batch(_groups.decode(body))


def loss_of(batch: MicroBatch, logps: list[Tensor], entropy: Tensor) -> Tensor:
    """Not linear, and of all models."""
    policy, (old, *others) = logps[0], (logps[1:] or [logps[0].detach()])
    loss = (policy - old).exp() * batch.credit[batch.layout.owner]  # [N]
    return loss.sum() + sum((0.1 * kl_estimate(policy, reference, "k3").sum() for reference in others), torch.zeros(()))


def source_of(groups: list[list[Group]], case: Case, fails_after: int | None) -> Iterator[bytes]:
    draw = random.Random(1)
    for i, micro_batch in enumerate(groups):
        if i == fails_after:
            raise RolloutError("server-1 is gone")
        if case.delays:
            time.sleep(draw.random() * 0.03)
        yield msgspec.msgpack.encode(micro_batch)


def run_case(case: Case, axis: Axis, replica: int) -> Seen:
    """Runs on every stage."""
    stages = [Stage(model, axis.index, axis.size) for model in make_models(case)]
    held = watch(stages[0])
    draw = random.Random(axis.index)

    def slow_decode(body: bytes) -> MicroBatch:
        if case.delays:
            time.sleep(draw.random() * 0.03)
        return decode(body)

    names = {id(p): name for name, p in stages[0].named_parameters()}
    seen = Seen([], [], {}, held, names.get(id(stages[0].tied_weight)))

    def loss(batch: MicroBatch, logps: list[Tensor], entropy: Tensor) -> Tensor:
        seen.logps.append([logp.detach() for logp in logps])
        seen.entropies.append(entropy.detach())
        return loss_of(batch, logps, entropy)

    pipeline = Pipeline(stages, axis, torch.device("cpu"), slow_decode, deadline_s=DEADLINE_S)
    run: Callable[..., Any] = pipeline.run if case.backward else torch.no_grad()(pipeline.run)
    groups = make_groups(case, replica)
    if case.fails_after is not None:
        try:
            run(source_of(groups, case, case.fails_after) if axis.is_first else None, loss, temperature=TEMPERATURE)
        except RolloutError as error:
            seen.error = f"{type(error).__name__}: {error}"
    run(source_of(groups, case, None) if axis.is_first else None, loss, temperature=TEMPERATURE)
    seen.gradients = {name: p.grad for name, p in stages[0].named_parameters() if p.grad is not None}
    return seen


def watch(policy: Stage) -> list[int]:
    """Forward and backward passes seen from outside: the last of the stage's weights to get its gradient ends a backward."""
    held, count = [0], len(list(policy.parameters()))
    arrived = [0]

    def began(*_: object) -> None:
        held.append(held[-1] + 1)

    def added(_: Tensor) -> None:
        arrived[0] += 1
        if arrived[0] % count == 0:
            held.append(held[-1] - 1)

    policy.model.rotary_emb.register_forward_hook(began)  # once in every pass, not again where layers are computed again
    for weight in policy.parameters():
        weight.register_post_accumulate_grad_hook(added)
    return held


def run_all(ranks: Ranks) -> list[tuple[int, Case, int, Seen]]:
    """(number of stages, case, replica, what was seen) of all cases on several stages."""
    seen = []
    for stages in (4, 2):
        mesh = make_mesh(pipeline=stages, tensor=1, deadline_s=20)
        for case in CASES[stages]:
            seen.append((stages, case, mesh.data.index, run_case(case, mesh.pipeline, mesh.data.index)))
    return seen


@cache
def run_on_processes() -> dict[tuple[int, Case, int], list[Seen]]:
    """By (stages, case, replica) what the stages saw, in order."""
    everything = run_ranks(run_all, 4)
    found: dict[tuple[int, Case, int], list[Seen]] = {}
    for rank in everything:  # in the order of stages
        for stages, case, replica, seen in rank:
            found.setdefault((stages, case, replica), []).append(seen)
    return found


@cache
def stages_of(stages: int, case: Case, replica: int = 0) -> list[Seen]:
    if stages == 1:
        return [run_case(case, Axis(0, (0,), None), replica)]  # type: ignore[arg-type]  # no group: nothing is sent
    return run_on_processes()[stages, case, replica]


def whole(case: Case, replica: int) -> Seen:
    """Oracle: the models on one process, without stages."""
    models = make_models(case)
    seen = Seen([], [], {}, [], None)
    groups = make_groups(case, replica)
    for micro_batch in [*groups[: case.fails_after or 0], *groups]:
        batch = make_batch(micro_batch)
        results = [response_logprobs(model, batch, temperature=TEMPERATURE) for model in models]
        logps = [logp for logp, _ in results]
        if case.backward:
            loss_of(batch, logps, results[0][1]).backward()
        seen.logps.append([logp.detach() for logp in logps])
        seen.entropies.append(results[0][1])
    seen.gradients = {name: p.grad for name, p in models[0].named_parameters() if p.grad is not None}
    return seen


ALL = [(stages, case, replica) for stages, cases in CASES.items() for case in cases for replica in range(2 if stages == 2 else 1)]


@pytest.mark.parametrize(("stages", "case", "replica"), ALL, ids=str)
def test_a_pipeline_computes_what_the_whole_models_do(stages: int, case: Case, replica: int):
    seen, expected = stages_of(stages, case, replica), whole(case, replica)
    last = seen[-1]
    assert len(last.logps) == len(expected.logps) and all(not s.logps for s in seen[:-1])
    for ours, oracle in zip(last.logps, expected.logps, strict=True):
        assert len(ours) == len(oracle) == case.models
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, oracle, strict=True))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(last.entropies, expected.entropies, strict=True))
    gradients: dict[str, Tensor] = {}
    for stage in seen:
        for name, gradient in stage.gradients.items():
            if name == stage.tied:
                name = "model.embed_tokens.weight"
            gradients[name] = gradients.get(name, 0) + gradient
    assert gradients.keys() == expected.gradients.keys()
    for name, oracle in expected.gradients.items():
        # a bias of keys shifts all scores of a row alike: its gradient is zero but for rounding
        size = 1.0 if name.endswith("k_proj.bias") else oracle.norm()
        assert (gradients[name] - oracle).norm() < 2e-6 * size, name


@pytest.mark.parametrize(("stages", "case", "replica"), ALL, ids=str)
def test_a_stage_holds_as_many_micro_batches_as_stages_follow_and_no_more(stages: int, case: Case, replica: int):
    for index, seen in enumerate(stages_of(stages, case, replica)):
        if case.backward:
            assert max(seen.held) == min(stages - index, case.batches) and seen.held[-1] == 0
        else:
            assert not seen.gradients


def test_first_and_last_of_several_stages_say_that_they_copy_the_embedding():
    for stages, case, replica in ALL:
        names = [s.tied for s in stages_of(stages, case, replica)]
        if case.tied and stages > 1:
            assert names == ["model.embed_tokens.weight", *[None] * (stages - 2), "lm_head.weight"]
        else:
            assert names == [None] * stages


def test_random_delays_do_not_change_a_bit():
    prompt, late = (stages_of(4, case) for case in CASES[4][:2])
    assert CASES[4][1] == replace(CASES[4][0], delays=True)
    for a, b in zip(prompt, late, strict=True):
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)
        assert all(torch.equal(x, y) for x, y in zip(sum(a.logps, []), sum(b.logps, []), strict=True))


def test_what_fails_in_the_source_is_raised_by_every_stage_and_the_next_run_works():
    for stages, case in ((4, CASES[4][6]), (1, CASES[1][4])):
        assert [s.error for s in stages_of(stages, case)] == ["RolloutError: server-1 is gone"] * stages


def test_layers_are_split_by_work_and_every_stage_has_one():
    assert split_layers(28, 4, head=2.3) == [range(0, 8), range(8, 15), range(15, 23), range(23, 28)]
    assert split_layers(4, 1, head=5.0) == [range(0, 4)]
    for layers in range(1, 12):
        for count in range(1, layers + 1):
            for head in (0.0, 0.5, 3.0, 40.0):
                split = split_layers(layers, count, head=head)
                assert [i for part in split for i in part] == list(range(layers)) and all(split) and len(split) == count
    with pytest.raises(ConfigError, match="5 pipeline stages"):
        split_layers(4, 5, head=0.0)
