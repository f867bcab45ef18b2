"""Batches over recorded groups: refill and holding."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from groups import make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import small_config

from pasync.batch import Batch
from pasync.data.prompts import Prompt
from pasync.errors import RewardError, RolloutError
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


def failing(groups: list[Group], failures: dict[int, str]) -> list[Group]:
    """The same, the second response of some without a reward."""
    for i, why in failures.items():
        failed = msgspec.structs.replace(groups[i].responses[1], reward=0.0, reward_error=why)
        groups[i] = msgspec.structs.replace(groups[i], responses=[groups[i].responses[0], failed])
    return groups


def taken(batch: Batch) -> list[int]:
    ids = []
    while batch.left:
        group = batch.take(wait=True)
        ids += [group.group_id] if group is not None else []
    return ids


@pytest.mark.parametrize(("on_error", "expected"), [("zero", [0, 1, 2, 3]), ("drop", [0, 3])])
def test_a_group_whose_reward_failed_scores_zero_or_is_left_out_but_has_arrived(tmp_path, on_error, expected, caplog):
    groups = failing(useful_or_not([True] * 4), {0: "timeout", 1: "ValueError: x", 2: "not a number"})
    batch = Batch(replayed(tmp_path, groups, size=4), 0, iter(()), refills=False, on_error=on_error)
    assert taken(batch) == expected and len(batch.arrived()) == 4
    assert batch.dropped == 4 - len(expected) and batch.refilled == 0
    if on_error == "drop":
        assert "left out group 1 of version 0, its reward failed: response 1: ValueError: x" in caplog.text


@pytest.mark.parametrize("hold", [False, True])
def test_with_refill_another_prompt_takes_the_place_of_a_dropped_group(tmp_path, hold):
    groups = failing(useful_or_not([True, True, False, True, True, True]), {0: "KeyError: 'a'", 3: "not a number"})
    batch = Batch(replayed(tmp_path, groups, size=3), 0, iter(prompts(3)), refills=True, on_error="drop")
    if hold:
        batch.hold()
    assert taken(batch) == [1, 4, 5]
    assert batch.dropped == 2 and batch.refilled == 3


def test_raise_gives_the_cause_and_so_do_rewards_that_fail_on_all_groups(tmp_path):
    groups = failing(useful_or_not([True] * 2), {1: "ValueError: x"})
    batch = Batch(replayed(tmp_path, groups, size=2), 0, iter(()), refills=False, on_error="raise")
    with pytest.raises(RewardError, match="failed on group 1 of version 0, response 1: ValueError: x"):
        taken(batch)
    both = failing(useful_or_not([True] * 2), {0: "ValueError: x", 1: "ValueError: x"})
    with pytest.raises(RewardError, match="failed on all 2 groups of version 0"):
        Batch(replayed(tmp_path, both, size=2), 0, iter(()), refills=False, on_error="drop").hold()
