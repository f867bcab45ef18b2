"""Every product of stages, shards and replicas trains as one process does."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_group
from textbook import small_config
from workers import run_ranks

from pasync.messages import Group
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks
from pasync.trainer import Trainer

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""(stages, shards, replicas)."""
SHARDED = [(1, 1, 3), (2, 1, 2), (1, 2, 2)]
"""Of these with `parallel.data=fsdp`."""
MODELS = [("qwen2", True), ("qwen3", False), ("llama", True)]
WAYS = [(True, 1), (False, 2), (True, 2)]
"""(tri_model=always, updates_per_batch)."""
Case = tuple[int, bool, int]
EVERY: list[Case] = [(model, *way) for model in range(len(MODELS)) for way in WAYS]

COMPARED = ("policy/loss", "policy/kl", "policy/entropy", "policy/clipped_frac", "policy/trained_groups", "optimizer/gradient_norm")


def batch(seed: int) -> list[Group]:
    """Five to nine groups of ragged lengths, one without gradient but for the KL term."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 10))
    lengths = rng.integers(0, 8, (count, 3)) + (np.arange(3) == 0)
    groups = [make_group(rng, int(rng.integers(1, 12)), n.tolist(), rewards=[1, 0, 0.5], group_id=i) for i, n in enumerate(lengths)]
    groups[2] = make_group(rng, 4, [3, 2, 5], rewards=[1, 1, 1], group_id=2)
    return groups


def overrides(ranks: Ranks, data: str, always: bool, updates: int) -> list[str]:
    mesh = ranks.mesh
    return [
        f"parallel.data={data}", "algorithm.batch_groups=12",
        f"parallel.ranks={ranks.size}", f"parallel.pipeline={mesh.pipeline.size}", f"parallel.tensor={mesh.tensor.size}",
        f"algorithm.tri_model={'always' if always else 'needed'}", f"algorithm.updates_per_batch={updates}", "algorithm.kl_coef=0.1",
        "algorithm.clip_high=0.02", "optimizer.clip_norm=0.05", "optimizer.eps=1e-3", "optimizer.lr=0.01", "algorithm.normalizer=sequence",
        f"algorithm.kl_in={'loss' if always else 'reward'}", "parallel.micro_batch_tokens=16",  # cuts most groups
    ]  # fmt: skip


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the policy, on rank 0."""
    found: dict[str, torch.Tensor] = {}
    trainer.ranks.on_first(lambda: found.update((n, w.clone()) for n, w in trainer.models.weights()), trainer.calls)
    return found


def probe(trainer: Trainer) -> list[float]:
    """Log-probs of a sequence, on rank 0."""
    found: list[float] = []
    trainer.ranks.on_first(lambda: found.extend(trainer.sequence_logprobs([5, 7, 9, 11]).tolist()), trainer.calls)
    return found


def three_batches(ranks: Ranks, folder: Path, models: list[Path], data: str, cases: list[Case]) -> list[tuple[dict, dict, list[float]]]:
    """Metrics of the last step, weights and log-probs after three batches, of every case."""
    results, mesh = [], ranks.mesh
    for model, always, updates in cases:
        place = folder / f"{ranks.rank}"
        place.mkdir(exist_ok=True)
        trainer = Trainer(small_config(place, models[model], *overrides(ranks, data, always, updates)), models[model], ranks)
        for t in range(3):
            groups = batch(t)
            dealt = [groups[at : at + mesh.data.size] for at in range(0, len(groups), mesh.data.size)]  # a replica may get nothing
            rounds = [among[mesh.data.index : mesh.data.index + 1] for among in dealt]
            trainer.forward_backward(rounds if mesh.pipeline.is_first else None)
            metrics = trainer.optimizer_step(t)
        results.append((metrics, whole_weights(trainer), probe(trainer)))
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("model") / family for family, _ in MODELS]
    for folder, (family, tied) in zip(folders, MODELS, strict=True):
        random_model(folder, family, tied=tied, seed=1, heads=4)
    return folders


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory) -> dict[Case, tuple]:
    [results] = run_ranks(three_batches, 1, tmp_path_factory.mktemp("alone"), models, "zero1", EVERY)
    return dict(zip(EVERY, results, strict=True))


def cut() -> Iterator[Any]:
    """Each layout with every model and every way once, so that each model goes each way on three of them; the rest is slow."""
    layouts = [(x, "zero1") for x in LAYOUTS] + [(x, "fsdp") for x in SHARDED]
    for i, (layout, data) in enumerate(layouts):
        few = [((i + k) % len(MODELS), *way) for k, way in enumerate(WAYS)]
        name = f"{data}-{'x'.join(map(str, layout))}"
        yield pytest.param(layout, data, few, id=name)
        yield pytest.param(layout, data, [case for case in EVERY if case not in few], id=f"{name}-rest", marks=pytest.mark.slow)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layout", "data", "cases"), list(cut()))
def test_three_batches_on_any_layout_equal_one_process(tmp_path, models, alone, layout, data, cases):
    pipeline, tensor, _ = layout
    ranks = run_ranks(three_batches, math.prod(layout), tmp_path, models, data, cases, pipeline=pipeline, tensor=tensor)
    for case, (metrics, weights, logprobs) in zip(cases, ranks[0], strict=True):
        expected = alone[case]
        assert weights.keys() == expected[1].keys()
        for name, weight in weights.items():
            off = (weight - expected[1][name]).norm() / expected[1][name].norm()
            assert off < 1e-5, (case, name, off)
        assert logprobs == pytest.approx(expected[2], abs=2e-5), case
        for key in COMPARED:
            assert metrics[key] == pytest.approx(expected[0][key], rel=2e-5, abs=1e-7), (case, key)
    assert all(other[0][0] == ranks[0][0][0] for other in ranks)  # metrics are the same everywhere
