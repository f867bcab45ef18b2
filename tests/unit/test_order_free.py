"""DESIGN invariant 2: the gradient of a batch does not depend on arrival order, packing or number of ranks."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_group
from textbook import divisor, flat_gradient, perturbed, small_config, textbook_gradient
from workers import run_ranks

from pasync.batch import Batch
from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.messages import Group, Sampling
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks
from pasync.rollout.recording import Recording, ReplayProducer, record
from pasync.stream import stream_micro_batches
from pasync.trainer import Trainer

ORDERS = 50
PACKED, ALONE = 64, 1


def batch_of_groups() -> list[Group]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, (8, 3)).tolist()
    groups = [make_group(rng, 2 + i, ns, rewards=[1, 0, 0.5], group_id=i) for i, ns in enumerate(lengths)]
    groups[5] = make_group(rng, 4, [3, 2, 5], rewards=[1, 1, 1], group_id=5)  # no gradient, but counted
    return groups


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    random_model(folder, "qwen2", tied=True, seed=1)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    record(folder, 0, Recording(batch_of_groups(), [0.0] * 8))
    return folder


def replayed(config: Config, ranks: Ranks, run: Path, count: int) -> Iterator[list[Group]]:
    """One iteration of so many groups replayed through the stream: this rank's."""
    batch = None
    if ranks.is_first:
        source = ReplayProducer(config, run)
        source.submit([Prompt(i, (1,), "", {}) for i in range(count)], 0, Sampling(3, 1.0, 8))
        batch = Batch(source, 0, iter(()), refills=False)
    return stream_micro_batches(batch, config, ranks)


def replayed_gradient(trainer: Trainer, config: Config, run: Path) -> torch.Tensor:
    """[parameters] of all ranks: one iteration replayed through the stream, added up, divided."""
    for groups in replayed(config, trainer.ranks, run, count=8):
        trainer.forward_backward([groups])
    gradient = flat_gradient(trainer, divisor(batch_of_groups(), config.algorithm.normalizer))
    trainer.optimizer.gradient.clear()
    return gradient


def in_orders(config: Config, seeds: range, budget: int) -> list[Config]:
    """The same configuration with other orders of arrival."""
    parallel = config.parallel.model_copy(update={"micro_batch_tokens": budget})
    return [config.model_copy(update={"seed": seed, "parallel": parallel}) for seed in seeds]


def largest_distance(ranks: Ranks, model: Path, run: Path, configs: list[Config], oracles: list[torch.Tensor], orders: int) -> float:
    distances = []
    for config, oracle in zip(configs, oracles, strict=True):
        trainer = Trainer(config, model, ranks)
        perturbed(trainer.models.policy)
        for budget in (PACKED, ALONE):
            for ordered in in_orders(config, range(orders), budget):
                ours = replayed_gradient(trainer, ordered, run)
                distances.append(((ours - oracle).norm() / oracle.norm()).item())
    assert len(distances) == len(configs) * 2 * orders >= ORDERS
    return max(distances)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("size", "orders"), [(1, ORDERS), (2, 9), (4, 9)])
def test_fifty_orders_with_every_normalizer_and_packing_equal_the_one_big_batch(tmp_path, model, run, size, orders):
    """On one rank fifty of each, on more ranks fifty in all."""
    normalizers = ("sequence", "token", "constant")
    replay = (f"rollout.source=replay:{run}", "rollout.replay_order=random")
    configs = [small_config(tmp_path, model, *replay, normalizer=n) for n in normalizers]
    oracles = [textbook_gradient(model, batch_of_groups(), n) for n in normalizers]
    assert max(run_ranks(largest_distance, size, model, run, configs, oracles, orders)) < 2e-6


def digests(ranks: Ranks, model: Path, run: Path, config: Config) -> set[str]:
    """Of the gradient's bits in every order, and of the weights after the step (clipped by the norm over all ranks)."""
    trainer = Trainer(config, model, ranks)
    perturbed(trainer.models.policy)
    found = set()
    for ordered in in_orders(config, range(ORDERS), PACKED):
        gradient = replayed_gradient(trainer, ordered, run)
        found.add(hashlib.sha256(gradient.numpy().tobytes()).hexdigest())
    for groups in [batch_of_groups()[i :: ranks.size] for i in range(ranks.size)][ranks.rank :][:1]:
        trainer.forward_backward([groups])
    trainer.optimizer_step(0)
    weights = torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])
    return found | {"weights " + hashlib.sha256(weights.numpy().tobytes()).hexdigest()}


@pytest.mark.timeout(240)
def test_exact_sums_have_the_same_bits_in_every_order_on_1_2_and_4_ranks(tmp_path, model, run):
    replay = (f"rollout.source=replay:{run}", "rollout.replay_order=random", "parallel.accumulate=exact", "optimizer.clip_norm=0.1")
    config = small_config(tmp_path, model, *replay, advantage="reinforce++", kl_coef=0.1, kl_in="reward", kl_estimate="k1")
    found = [result for size in (1, 2, 4) for result in run_ranks(digests, size, model, run, config)]
    assert len(found) == 7 and all(len(result) == 2 for result in found)  # one gradient, one set of weights
    assert all(result == found[0] for result in found)


def test_exact_sums_are_the_textbook_gradient_too(tmp_path, model, run):
    config = small_config(tmp_path, model, f"rollout.source=replay:{run}", "parallel.accumulate=exact")
    oracle = textbook_gradient(model, batch_of_groups(), "token")
    assert run_ranks(exact_distance, 1, model, run, config, oracle)[0] < 2e-6


def exact_distance(ranks: Ranks, model: Path, run: Path, config: Config, oracle: torch.Tensor) -> float:
    trainer = Trainer(config, model, ranks)
    perturbed(trainer.models.policy)
    return ((replayed_gradient(trainer, config, run) - oracle).norm() / oracle.norm()).item()
