"""The model of an iteration against hand-computed times, and properties that any schedule has."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasync.config import Config
from pasync.configfile import load
from pasync.simulate import GroupWork, Rates, generate, simulate, train

ROOT = Path(__file__).parents[2]
TINY = load(ROOT / "configs/tiny_cpu.yaml")
STEP = Rates(step_s=1.0, sequence_s=0, context_s=0, prompt_s=0, micro_batch_s=0, token_s=1.0, pair_s=0, optimizer_s=0, sync_s=0)
"""A second per decode step, a second per row."""


def configured(
    schedule: str = "periodic", *, servers: int = 1, ranks: int = 1, slots: int = 2, budget: int = 1, **rollout: object
) -> Config:
    changed = {
        "rollout": TINY.rollout.model_copy(update={"servers": servers, "max_num_seqs": slots, **rollout}),
        "parallel": TINY.parallel.model_copy(update={"ranks": ranks, "micro_batch_tokens": budget}),
    }
    return TINY.model_copy(update={"schedule": schedule, **changed})


def group(*lengths: int, prompt: int = 0, expected: float = 1) -> GroupWork:
    return GroupWork(prompt, lengths, expected)


works = st.lists(
    st.builds(GroupWork, st.integers(0, 20), st.lists(st.integers(1, 40), min_size=3, max_size=3).map(tuple), st.floats(1, 40)),
    min_size=1, max_size=12,
)  # fmt: skip
rates = st.builds(Rates, *[st.floats(1e-3, 1.0)] * 2, *[st.floats(0, 1e-2)] * 2, *[st.floats(1e-3, 1.0)] * 2, *[st.floats(0, 1)] * 3)
layouts = st.builds(
    configured, servers=st.integers(1, 4), ranks=st.integers(1, 4), slots=st.integers(3, 9), budget=st.integers(1, 200),
    admission=st.sampled_from(["fifo", "group_first", "longest_first"]),
)  # fmt: skip


def test_groups_that_follow_each_other_on_one_server_arrive_when_computed_by_hand():
    arrivals = generate(configured(), [group(3, 5), group(2, 2), group(4, 1)], STEP).arrivals
    # slots: [3 | 2 | 4] and [5 | 2 | 1]: ends 3, 5; the second group runs 3-5 and 5-7; the third 5-9 and 7-8
    assert arrivals == [(5.0, 0), (7.0, 1), (9.0, 2)]


def test_a_step_costs_what_is_in_it_and_prompts_are_computed_once_per_group():
    priced = Rates(1.0, 0.5, 0.1, 2.0, 0, 0, 0, 0, 0)
    # 3 tokens of prompt at 2 s, then 4 steps of 1 + 2 (0.5 + 0.1 (3 + 2))
    assert generate(configured(), [group(4, 4, prompt=3)], priced).arrivals == [(pytest.approx(6 + 4 * 3), 0)]


def test_a_full_cache_keeps_responses_waiting():
    small = Rates(1.0, 0, 0, 0, 0, 0, 0, 0, 0, cache_tokens=5)  # each holds 1 + 4 / 2
    assert generate(configured(), [group(4, 4, prompt=1)], small).arrivals == [(8.0, 0)]


def test_two_servers_share_the_groups():
    arrivals = generate(configured(servers=2), [group(3, 3), group(4, 4)], STEP).arrivals
    assert arrivals == [(3.0, 0), (4.0, 1)]


@pytest.mark.parametrize(
    ("schedule", "step_s", "tail_s"),
    [("sync", 1 + 30 + 36 + 2, 38), ("periodic", 1 + 10 + 36 + 2, 18), ("one_step_off", 1 + 36 + 2, 8)],
)  # fmt: skip
def test_equal_groups_take_the_time_computed_by_hand(schedule, step_s, tail_s):
    costs = Rates(1.0, 0, 0, 0, micro_batch_s=2, token_s=0.5, pair_s=0, optimizer_s=2, sync_s=1)
    iteration = simulate(configured(schedule, budget=20), [group(10, 10)] * 3, costs)  # each: 10 s on the server, 2 + 20 / 2 on the rank
    assert (iteration.step_s, iteration.tail_s) == (pytest.approx(step_s), pytest.approx(tail_s))
    assert (iteration.generate_s, iteration.train_s, iteration.first_wait_s) == (30, 38, 10)
    assert iteration.server_idle_frac == pytest.approx(1 - 30 / step_s) and iteration.rank_idle_frac == pytest.approx(1 - 38 / step_s)


def test_further_updates_go_over_the_whole_batch_again():
    config = configured(budget=20)
    twice = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"updates_per_batch": 2})})
    first, both = (simulate(c, [group(10, 10)] * 2, STEP) for c in (config, twice))
    assert both.step_s == first.step_s + 40


def test_ranks_wait_for_rank_0_before_they_get_more():
    # rank 0 gets the larger group of the first round; the third group is dealt out when it is done, to the rank that had less
    trained = train(configured(ranks=2, budget=6), [group(6), group(4), group(3)], [(0.0, i) for i in range(3)], STEP)
    assert trained.busy_s == [6, 7] and trained.end_s == 9


def test_a_group_larger_than_a_micro_batch_computes_its_prompt_again():
    costs = Rates(1, 0, 0, 0, micro_batch_s=100, token_s=1, pair_s=0, optimizer_s=0, sync_s=0)
    [busy] = train(configured(budget=10), [group(7, 7, 7, prompt=3)], [(0.0, 0)], costs).busy_s
    assert busy == 3 * 100 + 21 + 3 * 3


@settings(deadline=None)
@given(works, layouts, rates)
def test_every_group_arrives_once_not_before_its_longest_response_and_not_after_all_in_a_row(groups, config, rates):
    generated = generate(config, groups, rates)
    assert sorted(i for _, i in generated.arrivals) == list(range(len(groups)))
    assert [at for at, _ in generated.arrivals] == sorted(at for at, _ in generated.arrivals)
    for at, i in generated.arrivals:
        assert at >= max(groups[i].lengths) * (rates.step_s + rates.sequence_s) * (1 - 1e-9)
    alone = sum(n * (rates.step_s + rates.sequence_s + rates.context_s * (g.prompt + n)) for g in groups for n in g.lengths)
    assert generated.arrivals[-1][0] <= (alone + sum(g.prompt for g in groups) * rates.prompt_s) * (1 + 1e-9)
    assert generated.busy_s <= config.rollout.servers * generated.arrivals[-1][0] * (1 + 1e-9)


@settings(deadline=None)
@given(works, layouts, rates)
def test_periodic_lies_between_the_ideal_and_sync(groups, config, rates):
    one = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": 1})})
    smooth = replace(rates, micro_batch_s=0.0)  # else sync, which packs all at once, may need fewer micro-batches
    sync, periodic = (simulate(one.model_copy(update={"schedule": s}), groups, smooth) for s in ("sync", "periodic"))
    assert periodic.step_s <= sync.step_s * (1 + 1e-9)
    assert sync.step_s == pytest.approx(sync.generate_s + sync.train_s + sync.sync_s)
    periodic = simulate(config, groups, rates)
    assert periodic.step_s >= (max(periodic.generate_s, periodic.train_s) + periodic.sync_s) * (1 - 1e-9)
    assert 0 <= periodic.first_wait_s <= periodic.generate_s and periodic.of_ideal_frac <= 1 + 1e-9


@settings(deadline=None)
@given(works, layouts, rates, st.integers(-7, 7))
def test_everything_scales_with_the_rates(groups, config, rates, exponent):
    factor = 2.0**exponent  # without rounding, which would let events that come together change places
    slower = Rates(*(factor * getattr(rates, name) for name in list(vars(rates))[:-1]))
    assert simulate(config, groups, slower).step_s == pytest.approx(factor * simulate(config, groups, rates).step_s, rel=1e-6)
