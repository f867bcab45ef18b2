from pathlib import Path

import msgspec
import numpy as np
import pytest
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st
from workers import run_ranks

from pasync.batch import Batch
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt
from pasync.errors import RewardError
from pasync.messages import Sampling
from pasync.parallel.ranks import Ranks
from pasync.rollout.recording import Recording, ReplayProducer, record
from pasync.stream import share, stream_micro_batches


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 4), st.integers(1, 100))
def test_shares_lose_nothing_repeat_nothing_and_keep_to_the_budget(sizes, ranks, budget):
    groups = [make_group(np.random.default_rng(i), n, [0, 0], group_id=i) for i, n in enumerate(sizes)]
    shares, rest = share(groups, [0] * ranks, budget, lambda g: g.num_tokens)
    assert sorted(g.group_id for part in [*shares, rest] for g in part) == list(range(len(sizes)))
    assert all(sum(g.num_tokens for g in part) <= budget or len(part) == 1 for part in shares)
    assert not groups or any(shares)


def test_the_next_largest_group_goes_to_the_least_loaded_rank():
    groups = [make_group(np.random.default_rng(0), n, [0, 0], group_id=n) for n in (3, 9, 5, 4)]
    shares, rest = share(groups, [0, 0], 100, lambda g: g.num_tokens)
    assert [[g.group_id for g in part] for part in shares] == [[9, 3], [5, 4]] and rest == []


def test_a_single_group_goes_to_the_rank_that_had_the_least_so_far():
    group = make_group(np.random.default_rng(0), 3, [1, 1])
    assert share([group], [50, 20, 30], 100, lambda g: g.num_tokens) == ([[], [group], []], [])


def rounds(ranks: Ranks, run: Path, config: Config) -> list[list[int]]:
    batch = None
    if ranks.is_first:
        source = ReplayProducer(config, run)
        source.submit([Prompt(i, (1,), "", {}) for i in range(6)], 0, Sampling(2, 1.0, 4))
        batch = Batch(source, 0, iter(()), refills=False)
    return [[g.group_id for g in groups] for groups in stream_micro_batches(batch, config, ranks)]


def fails(ranks: Ranks, run: Path, config: Config) -> str:
    batch = None
    if ranks.is_first:
        source = ReplayProducer(config, run)
        source.submit([Prompt(i, (1,), "", {}) for i in range(2)], 0, Sampling(2, 1.0, 4))
        batch = Batch(source, 0, iter(()), refills=False, on_error="raise")
    try:
        list(stream_micro_batches(batch, config, ranks))
    except RewardError as error:
        return str(error)
    return "no error"


def test_a_reward_that_fails_is_raised_on_all_ranks_with_its_cause(tmp_path):
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 3, [1, 2], rewards=[0, 1], group_id=i) for i in range(2)]
    failed = msgspec.structs.replace(groups[1].responses[1], reward_error="ZeroDivisionError: division by zero")
    groups[1] = msgspec.structs.replace(groups[1], responses=[groups[1].responses[0], failed])
    record(tmp_path, 0, Recording(groups, [0.0] * 2))
    errors = run_ranks(fails, 2, tmp_path, small_config(tmp_path, "periodic"))
    assert errors == ["the reward function failed on group 1 of version 0, response 1: ZeroDivisionError: division by zero"] * 2


def small_config(folder: Path, schedule: str) -> Config:
    (folder / f"{schedule}.yaml").write_text(
        f"{{name: t, iterations: 1, schedule: {schedule}, model: {{path: m}}, data: {{train: {{source: x}}}}, rollout: {{max_tokens: 4}}, "
        "algorithm: {batch_groups: 6, group_responses: 2}, optimizer: {lr: 1e-3}, parallel: {ranks: 2, micro_batch_tokens: 12}}"
    )
    return load(folder / f"{schedule}.yaml")


@pytest.mark.parametrize("schedule", ["periodic", "sync"])
def test_ranks_run_the_same_number_of_micro_batches_and_share_every_group_once(tmp_path, schedule):
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 3, [1 + i, 2], rewards=[0, 1] if i % 3 else [1, 1], group_id=i) for i in range(6)]
    record(tmp_path, 0, Recording(groups, [0.0] * 6))
    first, second = run_ranks(rounds, 2, tmp_path, small_config(tmp_path, schedule))
    assert len(first) == len(second) > 1
    assert sorted(i for part in (*first, *second) for i in part) == list(range(6))
