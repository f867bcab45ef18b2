"""Batches over recorded groups: refill and holding."""

from pathlib import Path

import numpy as np
import pytest
from groups import make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import small_config

from pasync.batch import Batch
from pasync.data.prompts import Prompt
from pasync.errors import RolloutError
from pasync.messages import Group, Sampling
from pasync.rollout.recording import Recording, ReplayProducer, record

SAMPLING = Sampling(2, 1.0, 4)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, (1,), "", {}) for i in range(count)]


def useful_or_not(flags: list[bool]) -> list[Group]:
    rng = np.random.default_rng(0)
    return [make_group(rng, 2, [2, 3], rewards=[1, 0 if useful else 1], group_id=i) for i, useful in enumerate(flags)]


def replayed(folder: Path, groups: list[Group], *overrides: str, size: int) -> ReplayProducer:
    record(folder, 0, Recording(groups, [0.01 * i for i in range(len(groups))]))
    source = ReplayProducer(small_config(folder, "m", f"rollout.source=replay:{folder}", *overrides), folder)
    source.submit(prompts(size), 0, SAMPLING)
    return source


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=12), st.integers(0, 20), st.booleans())
def test_refill_trains_on_the_first_prompts_that_suffice_in_any_order(tmp_path_factory, flags, seed, hold):
    groups, wanted = useful_or_not(flags), 3
    needed = next((n for n in range(wanted, len(flags) + 1) if sum(flags[:n]) == wanted), len(flags))
    order = ("rollout.replay_order=random", f"seed={seed}")
    source = replayed(tmp_path_factory.mktemp("run"), groups, *order, size=wanted)
    batch = Batch(source, 0, iter(prompts(len(flags) - wanted)), refills=True)
    if hold:
        batch.hold()
    taken = []
    while batch.left:
        group = batch.take(wait=True)
        if group is not None:
            taken.append(group.group_id)
    assert sorted(taken) == [i for i in range(needed) if flags[i]]
    assert batch.refilled == needed - wanted and len(batch.arrived()) == needed


def test_without_refill_groups_of_equal_rewards_stay_in_the_batch(tmp_path):
    batch = Batch(replayed(tmp_path, useful_or_not([True, False, False]), size=3), 0, iter(()), refills=False)
    batch.hold()
    assert [batch.take(wait=True).group_id for _ in range(3)] == [0, 1, 2] and not batch.left and batch.take(wait=False) is None


def test_a_held_batch_leaves_the_source_to_the_next_one(tmp_path):
    source = replayed(tmp_path, useful_or_not([True, True]), size=2)
    first = Batch(source, 0, iter(()), refills=False)
    first.hold()
    source.submit(prompts(2), 0, SAMPLING)
    assert first.left and len(first.arrived()) == 2 and source.in_flight == 2 and source.taken == []


def test_recorded_delays_are_kept_and_waited_for(tmp_path):
    source = replayed(tmp_path, useful_or_not([True] * 6), "rollout.replay_delay=recorded", size=6)
    batch = Batch(source, 0, iter(()), refills=False)
    batch.hold()
    arrivals = [at for _, at in batch.arrived()]
    assert arrivals == sorted(arrivals) and 0.045 < arrivals[-1] - batch.submitted < 1.0
    assert len(batch.waits_s) == 6


def test_a_recorded_delay_beyond_the_deadline_ends_the_wait_as_a_live_one_would(tmp_path):
    source = replayed(tmp_path, useful_or_not([True] * 2), "rollout.replay_delay=recorded", "rollout.deadline_s=0.001", size=2)
    assert source.next_group(0) is not None
    with pytest.raises(RolloutError, match="deadline_s=0.001, 1 missing"):
        source.next_group(0)


@pytest.mark.parametrize(("order", "expected"), [("sorted", [0, 1, 2]), ("recorded", [2, 0, 1])])
def test_replay_orders(tmp_path, order, expected):
    groups = useful_or_not([True] * 3)
    source = replayed(tmp_path, [groups[i] for i in (2, 0, 1)], f"rollout.replay_order={order}", size=3)
    assert [source.next_group(0).group_id for _ in range(3)] == expected
