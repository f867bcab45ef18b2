import msgspec
import numpy as np
import pytest
import torch
from groups import GRPO, make_batch, make_group
from hypothesis import given
from hypothesis import strategies as st

from pasync.algorithm.advantages import group_advantages
from pasync.data.packing import has_gradient, pack, rows

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 6), min_size=2, max_size=5)), min_size=1, max_size=5)


def packed(groups, budget: int, shared: bool = True):
    """All micro-batches."""
    return [pack(row, shared_prompt=shared) for row in rows(groups, GRPO, budget=budget, shared_prompt=shared)]


def whole_sequences(groups):
    """(tokens of prompt and response, prompt's length) of every response."""
    for group in groups:
        prompt = np.frombuffer(group.prompt_ids, "<i4").tolist()
        for response in group.responses:
            yield prompt + response.token_ids.tolist(), len(prompt)


@pytest.mark.parametrize("shared", [True, False])
@given(shapes=SHAPES)
def test_every_response_token_is_predicted_by_the_row_before_it_in_its_own_sequence(shared, shapes):
    groups = [make_group(np.random.default_rng(0), p, r) for p, r in shapes]
    batch = make_batch(groups, shared_prompt=shared)
    at = 0
    for index, (sequence, prompt) in enumerate(whole_sequences(groups)):
        for position in range(prompt - 1, len(sequence) - 1):
            row = batch.layout.rows[at]
            assert batch.input_ids[row] == sequence[position] and batch.layout.positions[row] == position
            assert batch.targets[at] == sequence[position + 1] and batch.layout.owner[at] == index
            at += 1
    assert at == len(batch.targets) == batch.lengths.sum()


@given(SHAPES)
def test_a_prompt_is_packed_once_or_once_per_response_and_nothing_is_padded(shapes):
    groups = [make_group(np.random.default_rng(0), p, r) for p, r in shapes]
    nothing = not any(sum(r) for _, r in shapes)  # to predict: then the prompts are the row
    assert make_batch(groups).num_tokens == sum(p + sum(r) for p, r in shapes if sum(r) or nothing)
    alone = sum(p + n for p, r in shapes for n in r if n)
    assert make_batch(groups, shared_prompt=False).num_tokens == (sum(p for p, _ in shapes) if nothing else alone)


@pytest.mark.parametrize("shared", [True, False])
@given(shapes=SHAPES, budget=st.integers(1, 60))
def test_rows_keep_to_the_budget_and_hold_every_response_once_with_its_own_advantage(shared, shapes, budget):
    groups = [make_group(np.random.default_rng(i), p, r) for i, (p, r) in enumerate(shapes)]
    batches = packed(groups, budget, shared)
    for batch in batches:
        assert batch.num_tokens <= budget or (batch.lengths > 0).sum() <= 1  # alone: nothing to cut
    lengths, advantages, targets, logprobs = (
        torch.cat([getattr(b, name) for b in batches]) for name in ("lengths", "credit", "targets", "engine_logprobs")
    )
    responses = [r for g in groups for r in g.responses]
    assert lengths.tolist() == [len(r.token_ids) for r in responses]
    assert targets.tolist() == [t for r in responses for t in r.token_ids]
    assert logprobs.tolist() == [x for r in responses for x in r.token_logprobs]
    assert torch.equal(advantages, torch.cat([group_advantages(torch.tensor(g.rewards), torch.ones(1), "grpo") for g in groups]))


def test_a_group_that_fits_is_never_cut():
    groups = [make_group(np.random.default_rng(0), 4, [3, 3]) for _ in range(3)]
    batches = packed(groups, 15)
    assert [b.lengths.tolist() for b in batches] == [[3, 3]] * 3


def test_owners_lengths_and_engine_logprobs_follow_the_responses():
    group = make_group(np.random.default_rng(0), 4, [2, 0, 3])
    batch = make_batch([group, group])
    assert batch.lengths.tolist() == [2, 0, 3, 2, 0, 3]
    assert batch.layout.owner.tolist() == [0, 0, 2, 2, 2, 3, 3, 5, 5, 5]
    assert torch.equal(batch.engine_logprobs[:2], torch.tensor(group.responses[0].token_logprobs))


def test_no_groups_make_no_micro_batch():
    assert packed([], 9) == []


@pytest.mark.parametrize("regularizer", [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_only_groups_with_unequal_rewards_or_a_regularizer_have_a_gradient(regularizer):
    rng = np.random.default_rng(0)
    equal, mixed = make_group(rng, 3, [2, 2], rewards=[1, 1]), make_group(rng, 3, [2, 2], rewards=[1, 0])
    empty = make_group(rng, 3, [0, 0], rewards=[1, 0])
    algorithm = GRPO.model_copy(update=regularizer)
    assert [has_gradient(g, algorithm) for g in (equal, mixed, empty)] == [bool(regularizer), True, False]


def cut_short(group, *places):
    """The group with these responses cut at max_tokens."""
    made = [msgspec.structs.replace(r, ended=k not in places) for k, r in enumerate(group.responses)]
    return msgspec.structs.replace(group, responses=made)


def test_masked_responses_count_in_the_baseline_only():
    group = cut_short(make_group(np.random.default_rng(0), 3, [2, 4, 1], rewards=[1, 0, 0]), 1)
    masking = GRPO.model_copy(update={"mask_truncated": True, "advantage": "dr_grpo"})
    [[part]] = rows([group], masking, budget=99, shared_prompt=True)
    assert part.lengths == [2, 1] and part.credit == pytest.approx([2 / 3, -1 / 3])
    assert not has_gradient(cut_short(group, 0, 1, 2), masking) and has_gradient(cut_short(group, 0, 1, 2), GRPO)
