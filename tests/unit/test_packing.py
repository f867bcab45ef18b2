import numpy as np
import torch
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from pasync.data.packing import has_gradient, pack

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 6), min_size=2, max_size=5)), min_size=1, max_size=5)


@given(SHAPES)
def test_every_response_token_is_predicted_by_the_row_before_it_in_its_own_sequence(shapes):
    rng = np.random.default_rng(0)
    groups = [make_group(rng, p, r) for p, r in shapes]
    batch = pack(groups, normalize_std=True)
    at = 0
    for group, segment in zip(groups, batch.segments, strict=True):
        prompt = np.frombuffer(group.prompt_ids, "<i4").tolist()
        for response in group.responses:
            sequence = prompt + response.token_ids.tolist()
            for j in range(len(response.token_ids)):
                row, position = batch.rows[at].item(), len(prompt) + j - 1
                assert segment.start <= row < segment.end
                assert batch.input_ids[row] == sequence[position]
                assert batch.position_ids[row] == position
                assert batch.targets[at] == sequence[position + 1]
                at += 1
    assert at == len(batch.rows) == batch.lengths.sum()


@given(SHAPES)
def test_a_prompt_is_packed_once_and_nothing_is_padded(shapes):
    batch = pack([make_group(np.random.default_rng(0), p, r) for p, r in shapes], normalize_std=True)
    assert batch.num_tokens == sum(p + sum(r) for p, r in shapes)
    assert batch.segments[-1].end == batch.num_tokens


def test_owners_lengths_and_engine_logprobs_follow_the_responses():
    group = make_group(np.random.default_rng(0), 4, [2, 0, 3])
    batch = pack([group, group], normalize_std=True)
    assert batch.lengths.tolist() == [2, 0, 3, 2, 0, 3]
    assert batch.owner.tolist() == [0, 0, 2, 2, 2, 3, 3, 5, 5, 5]
    assert torch.equal(batch.engine_logprobs[:2], torch.tensor(group.responses[0].token_logprobs))


def test_no_groups_make_an_empty_micro_batch():
    batch = pack([], normalize_std=True)
    assert batch.num_tokens == 0 and batch.rows.numel() == 0 and batch.segments == ()


def test_only_groups_with_unequal_rewards_or_a_kl_term_have_a_gradient():
    rng = np.random.default_rng(0)
    equal, mixed = make_group(rng, 3, [2, 2], rewards=[1, 1]), make_group(rng, 3, [2, 2], rewards=[1, 0])
    empty = make_group(rng, 3, [0, 0], rewards=[1, 0])
    assert [has_gradient(g, kl_coef=0.0) for g in (equal, mixed, empty)] == [False, True, False]
    assert [has_gradient(g, kl_coef=0.1) for g in (equal, mixed, empty)] == [True, True, False]
