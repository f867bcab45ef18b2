import numpy as np
import pytest
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from pasync.data.prompts import Prompt
from pasync.rollout.admission import Credit, Lengths, Load, choose, order

POLICIES = ("fifo", "group_first", "longest_first")


@given(st.lists(st.floats(1, 1e4), max_size=30), st.sampled_from(POLICIES))
def test_every_group_is_handed_out_once(expected, policy):
    assert sorted(order(policy, expected)) == list(range(len(expected)))


def test_longest_first_sorts_by_expected_length_and_keeps_equals_in_place():
    assert order("longest_first", [3, 9, 3, 7]) == [1, 3, 0, 2]
    assert order("group_first", [3, 9, 3, 7]) == order("fifo", [3, 9, 3, 7]) == [0, 1, 2, 3]


def test_fifo_deals_the_whole_batch_out_evenly_whatever_is_free():
    assert choose("fifo", [Load(16, -50, 7, 0), Load(16, -40, 6, 900)], 8, 100) == 1


@pytest.mark.parametrize("policy", ["group_first", "longest_first"])
def test_a_server_gets_what_its_slots_hold_and_as_much_again_to_wait(policy):
    loads = [Load(slots=20, free=20, groups=0, expected_tokens=0)]
    given_out = 0
    while choose(policy, loads, 8, 100) is not None:
        given_out += 1
        loads = [Load(20, 20 - 8 * given_out, given_out, 10.0 * given_out)]
    assert given_out == 5  # 40 responses: 20 are sampled, 20 wait


def test_the_server_with_most_room_is_served_first():
    assert choose("group_first", [Load(16, 8, 1, 10), Load(16, 16, 0, 0)], 8, 100) == 1
    assert choose("group_first", [Load(16, -9, 4, 10), Load(16, -16, 4, 10)], 8, 100) is None


def test_in_the_tail_a_group_waits_for_slots_rather_than_at_a_busy_server():
    busy, free = Load(16, 4, 1, 500), Load(16, 8, 1, 900)
    assert choose("longest_first", [busy, busy, busy], 8, 7) == 0  # not the tail: some may wait at each
    assert choose("longest_first", [busy, busy, busy], 8, 6) is None
    assert choose("longest_first", [busy, free, Load(16, 16, 1, 700)], 8, 2) == 2  # of those with room the one with the least to do
    assert choose("longest_first", [busy], 8, 1) == 0  # a single server has no tail


def test_freed_slots_are_told_of_once_a_group_fits_and_none_is_lost():
    credit = Credit()
    assert [credit.free(3) for _ in range(4)] == [0, 0, 3, 0]
    assert credit.take() == 1 and credit.take() == 0


def test_expected_length_is_the_last_one_and_else_scales_with_the_prompt():
    lengths, rng = Lengths(), np.random.default_rng(0)
    short, long = Prompt(0, (1, 2), "", {}), Prompt(1, (1, 2, 3, 4), "", {})
    assert lengths.expect(short, 100) == 2 and lengths.expect(long, 100) == 4
    lengths.learn(short, make_group(rng, 2, [3, 12, 5]))
    assert lengths.expect(short, 100) == 12 and lengths.expect(long, 100) == 24
    lengths.learn(short, make_group(rng, 2, [3, 4, 5]))
    assert lengths.expect(short, 100) == 5
    assert lengths.expect(long, 10) == 10 and lengths.expect(Prompt(2, (1,) * 50, "", {}, 7), 100) == 7  # never beyond the limit


def test_what_was_learned_survives_a_checkpoint():
    before, after, rng = Lengths(), Lengths(), np.random.default_rng(0)
    seen, unseen = Prompt(0, (1, 2), "", {}), Prompt(1, (1, 2, 3, 4), "", {})
    before.learn(seen, make_group(rng, 2, [3, 12, 5]))
    after.restore(before.state())
    assert [after.expect(p, 100) for p in (seen, unseen)] == [before.expect(p, 100) for p in (seen, unseen)] == [12, 24]
