"""Each formula against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from pasync.algorithm.advantages import batch_scale, group_advantages
from pasync.algorithm.importance import engine_ratios
from pasync.algorithm.kl import kl_estimate
from pasync.algorithm.losses import denominator, policy_loss, token_weights
from pasync.algorithm.overlong import overlong_penalty, shaped
from pasync.algorithm.responses import response_sums

LENGTHS = torch.tensor([3, 5, 2])
OWNER = torch.tensor([0] * 3 + [1] * 5 + [2] * 2)
REWARDS = torch.tensor([1.0, 0.0, 0.0])
# By hand: mean 1/3, unbiased standard deviation sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = 0.57735; (2/3) / 0.57735 = 1.154700
ADVANTAGES = {
    "grpo": [1.1547, -0.57735, -0.57735],
    "dr_grpo": [2 / 3, -1 / 3, -1 / 3],
    "rloo": [1.0, -0.5, -0.5],  # the others' means: 0, 1/2, 1/2
    "opo": [0.7, -0.3, -0.3],  # baseline 3 / (3 + 5 + 2)
    "reinforce++": [2 / 3, -1 / 3, -1 / 3],
}
KINDS = st.sampled_from(sorted(ADVANTAGES))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_those_worked_out_by_hand(kind):
    assert group_advantages(REWARDS, LENGTHS, kind).tolist() == pytest.approx(ADVANTAGES[kind], abs=2e-6)


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 16), KINDS)
def test_equal_rewards_give_exactly_zero_advantages(reward, count, kind):
    assert group_advantages(torch.full((count,), reward), torch.arange(count), kind).tolist() == [0.0] * count


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.tensor([1.0]), torch.tensor([1]), "grpo")


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16), KINDS)
def test_advantages_are_finite_and_centered_with_their_baselines_weights(rewards, kind):
    lengths = torch.arange(len(rewards)) + 1.0
    advantages = group_advantages(torch.tensor(rewards), lengths, kind)
    weights = lengths if kind == "opo" else torch.ones(len(rewards))
    assert torch.isfinite(advantages).all() and abs((weights * advantages).sum() / weights.sum()) < 1e-4


def test_reinforce_plus_plus_divides_by_the_deviation_over_the_batch():
    # two groups: [2/3, -1/3, -1/3] and three equal rewards; mean square (4 + 1 + 1) / 9 / 6 = 1/9
    assert batch_scale("reinforce++", 6 / 9, 6) == pytest.approx(1 / 3 + 1e-6)
    assert batch_scale("grpo", 6 / 9, 6) == 1


def gradient_of(kind: str, logp: list[float], old: list[float], advantages: list[float], lengths: list[int]) -> tuple[list[float], list]:
    """d(sum of losses) / d(logp), and which tokens are reported as clipped."""
    variable, count = torch.tensor(logp, requires_grad=True), torch.tensor(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(count)
    loss, clipped = policy_loss(kind, variable, torch.tensor(old), torch.tensor(advantages), owner, count, clip_low=0.2, clip_high=0.3)
    loss.sum().backward()
    assert variable.grad is not None
    return variable.grad.tolist(), clipped.tolist()


RATIOS = [1.5, 1.5, 0.5, 0.5]
LOG_RATIOS = [math.log(r) for r in RATIOS]


def test_ppo_stops_the_gradient_only_on_the_side_that_would_go_further():
    gradient, clipped = gradient_of("ppo", LOG_RATIOS, [0.0] * 4, [1.0, -1.0, 1.0, -1.0], [4])
    assert gradient == pytest.approx([0, 1.5, -0.5, 0]) and clipped == [True, False, False, True]


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    gradient, clipped = gradient_of("cispo", LOG_RATIOS, [0.0] * 4, [1.0, -1.0, 1.0, -1.0], [4])
    assert gradient == pytest.approx([-1.3, 1.3, -0.8, 0.8]) and clipped == [True] * 4


def test_gspo_takes_the_geometric_mean_of_a_responses_ratios_and_clips_it_as_a_whole():
    # ratios sqrt(1.21 x 1) = 1.1, sqrt(2 x 2) = 2 and 0.9: gradient of each token -s A / length x length (both tokens bear s)
    logp = [math.log(r) for r in (1.21, 1.0, 2.0, 2.0, 0.9)]
    gradient, clipped = gradient_of("gspo", logp, [0.0] * 5, [1.0, 1.0, 1.0, 1.0, -1.0], [2, 2, 1])
    assert gradient == pytest.approx([-1.1, -1.1, 0, 0, 0.9], abs=1e-6) and clipped == [False, False, True, True, False]


def test_reinforce_knows_no_ratio():
    gradient, clipped = gradient_of("reinforce", LOG_RATIOS, [0.0] * 4, [1.0, -1.0, 2.0, 0.0], [4])
    assert gradient == [-1, 1, -2, 0] and not any(clipped)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_every_loss_is_linear_in_a_positive_factor_of_the_advantages(kind):
    advantages = [0.7, -1.2, 0.4, -0.1]
    one, ten = (gradient_of(kind, LOG_RATIOS, [0.1] * 4, [x * a for a in advantages], [1, 3])[0] for x in (1, 10))
    assert ten == pytest.approx([10 * g for g in one], rel=1e-6)


def gradient_weights(normalizer: str) -> list[float]:
    """d(total loss) / d(logp) of every token of the example group, as the trainer computes it."""
    logp = torch.full((10,), -1.0, requires_grad=True)
    advantages = group_advantages(REWARDS, LENGTHS, "grpo")[OWNER]
    loss, _ = policy_loss("ppo", logp, logp.detach(), advantages, OWNER, LENGTHS, clip_low=0.2, clip_high=0.2)
    total = (loss * token_weights(LENGTHS, OWNER, normalizer)).sum() / denominator(normalizer, responses=3, tokens=10, max_tokens=8)
    total.backward()
    assert logp.grad is not None
    return logp.grad.tolist()


@pytest.mark.parametrize(("normalizer", "divisors"), [("sequence", (9, 15, 6)), ("token", (10, 10, 10)), ("constant", (24, 24, 24))])
def test_each_normalizer_gives_the_textbook_token_weights(normalizer, divisors):
    a, b, c = (-x / n for x, n in zip(ADVANTAGES["grpo"], divisors, strict=True))
    assert gradient_weights(normalizer) == pytest.approx([a] * 3 + [b] * 5 + [c] * 2, abs=2e-6)


def test_denominators_count_the_whole_batch():
    totals = dict(responses=6, tokens=40, max_tokens=16)
    assert [denominator(n, **totals) for n in ("sequence", "token", "constant")] == [6, 40, 96]


ESTIMATES = {"k1": [0, -1, 2.5], "k2": [0, 0.5, 3.125], "k3": [0, math.e - 2, math.exp(-2.5) + 1.5]}


@pytest.mark.parametrize(("kind", "expected"), ESTIMATES.items())
def test_kl_estimates_are_their_formulas(kind, expected):
    logp, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.0, -3.0])
    assert kl_estimate(logp, reference, kind).tolist() == pytest.approx(expected, abs=1e-6)


def expected_gradients(of: str) -> torch.Tensor:
    """[V] gradient in the logits, in expectation over all V tokens: of an estimate in the loss or in the reward, or of a KL itself."""
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    logits.requires_grad_()
    logp = logits.log_softmax(-1)
    where, _, kind = of.partition(" ")
    if where == "loss":
        loss = (logp.detach().exp() * kl_estimate(logp, reference, kind)).sum()
    elif where == "reward":
        loss = (logp.detach().exp() * kl_estimate(logp, reference, kind).detach() * logp).sum()
    else:
        loss = (logp.exp() * (logp - reference)).sum() if kind == "reverse" else (reference.exp() * (reference - logp)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_gradients_of_kl_estimates_have_the_stated_expectation():
    reverse, forward = expected_gradients("kl reverse"), expected_gradients("kl forward")
    of = [f"{where} {kind}" for where in ("loss", "reward") for kind in ("k1", "k2", "k3")]
    assert [x for x in of if torch.allclose(expected_gradients(x), reverse)] == ["loss k2", "reward k1"]
    assert torch.allclose(expected_gradients("loss k3"), forward) and expected_gradients("loss k1").abs().max() < 1e-12


def test_k3_of_a_forgotten_token_has_a_finite_gradient():
    logp = torch.tensor([-500.0], requires_grad=True)
    kl_estimate(logp, torch.tensor([-0.1]), "k3").sum().backward()
    assert logp.grad is not None and torch.isfinite(logp.grad).all()


def test_engine_ratios_are_of_tokens_or_products_over_responses():
    old, engine = torch.tensor([2.0, 3.0, 0.5]).log(), torch.zeros(3)
    owner = torch.tensor([0, 0, 2])
    assert engine_ratios(old, engine, owner, 3, of_responses=False).tolist() == pytest.approx([2, 3, 0.5])
    assert engine_ratios(old, engine, owner, 3, of_responses=True).tolist() == pytest.approx([6, 6, 0.5])
    assert engine_ratios(old + 500, engine, owner, 3, of_responses=True).square().isfinite().all()


def test_sums_of_responses_leave_empty_ones_at_zero():
    assert response_sums(torch.tensor([1.0, 2, 4]), torch.tensor([0, 2, 2]), 4).tolist() == [1, 0, 6, 0]


def test_an_overlong_response_loses_reward_in_proportion_up_to_one():
    assert [overlong_penalty(n, 10, 4) for n in (0, 6, 7, 9, 10)] == [0, 0, -0.25, -0.75, -1]
    group = make_group(np.random.default_rng(0), 2, [6, 9], rewards=[1, 1])
    assert shaped(group, 10, 4).rewards == [1, 0.25] and shaped(group, 10, 0) is group
