import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pasync.algorithm.advantages import group_advantages
from pasync.algorithm.losses import denominator, kl_k3, policy_loss, token_weights

LENGTHS = torch.tensor([3, 5, 2])
OWNER = torch.tensor([0] * 3 + [1] * 5 + [2] * 2)
REWARDS = torch.tensor([1.0, 0.0, 0.0])
# By hand: mean 1/3, unbiased standard deviation sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = 0.57735; (2/3) / 0.57735 = 1.154700
ADVANTAGES = [1.1547, -0.57735, -0.57735]


def gradient_weights(normalizer: str) -> list[float]:
    """d(total loss) / d(logp) of every token of the example group, as the trainer computes it."""
    logp = torch.full((10,), -1.0, requires_grad=True)
    advantages = group_advantages(REWARDS, normalize_std=True)
    loss = policy_loss(logp, logp.detach(), advantages[OWNER], clip_low=0.2, clip_high=0.2)
    total = (loss * token_weights(LENGTHS, OWNER, normalizer)).sum() / denominator(normalizer, responses=3, tokens=10, max_tokens=8)
    total.backward()
    assert logp.grad is not None
    return logp.grad.tolist()


def test_sequence_mean_gives_the_textbook_token_weights():
    a, b, c = (-x / (3 * n) for x, n in zip(ADVANTAGES, (3, 5, 2), strict=True))
    assert gradient_weights("sequence") == pytest.approx([a] * 3 + [b] * 5 + [c] * 2, abs=2e-6)


def test_token_mean_gives_the_textbook_token_weights():
    a, b, c = (-x / 10 for x in ADVANTAGES)
    assert gradient_weights("token") == pytest.approx([a] * 3 + [b] * 5 + [c] * 2, abs=2e-6)


def test_constant_normalisation_gives_the_textbook_token_weights():
    a, b, c = (-x / (3 * 8) for x in ADVANTAGES)
    assert gradient_weights("constant") == pytest.approx([a] * 3 + [b] * 5 + [c] * 2, abs=2e-6)


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 16), st.booleans())
def test_equal_rewards_give_exactly_zero_advantages(reward, count, normalize):
    assert group_advantages(torch.full((count,), reward), normalize_std=normalize).tolist() == [0.0] * count


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.tensor([1.0]), normalize_std=True)


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16), st.booleans())
def test_advantages_are_finite_and_centered(rewards, normalize):
    advantages = group_advantages(torch.tensor(rewards), normalize_std=normalize)
    assert torch.isfinite(advantages).all()
    assert abs(advantages.mean().item()) < 1e-4


def test_clipping_stops_the_gradient_only_on_the_side_that_would_go_further():
    old = torch.zeros(4)
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    policy_loss(logp, old, advantages, clip_low=0.2, clip_high=0.2).sum().backward()
    assert logp.grad is not None
    assert [g == 0 for g in logp.grad.tolist()] == [True, False, False, True]


def test_k3_is_the_formula_and_never_negative():
    logp, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.0, -3.0])
    expected = [math.exp(d) - d - 1 for d in (0.0, 1.0, -2.5)]
    assert kl_k3(logp, reference).tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_of_a_forgotten_token_has_a_finite_gradient():
    logp = torch.tensor([-500.0], requires_grad=True)
    kl_k3(logp, torch.tensor([-0.1])).sum().backward()
    assert logp.grad is not None and torch.isfinite(logp.grad).all()


def test_denominators_count_the_whole_batch():
    totals = dict(responses=6, tokens=40, max_tokens=16)
    assert [denominator(n, **totals) for n in ("sequence", "token", "constant")] == [6, 40, 96]
