"""The trainer's gradient against the textbook's."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from groups import make_group
from textbook import divisor, flat_gradient, logprobs, perturbed, small_config, textbook_gradient, textbook_loss
from transformers import AutoModelForCausalLM

from benchmarks.passes import Passes
from pasync.errors import TrainingError
from pasync.model.tiny import random_model
from pasync.trainer import Trainer

RNG = np.random.default_rng(3)
GROUPS = [
    make_group(RNG, 5, [3, 5, 2], rewards=[1, 0, 0], group_id=0),
    make_group(RNG, 2, [1, 8, 4], rewards=[1, 1, 0], group_id=1),
    make_group(RNG, 9, [4, 4, 4], rewards=[1, 1, 1], group_id=2),  # no advantage, but counted
    make_group(RNG, 4, [6, 0, 3], rewards=[0, 0.5, 1], group_id=3),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    random_model(folder, "qwen2", tied=True, seed=1)
    return folder


@pytest.mark.parametrize("rounds", [[[0, 1, 2, 3]], [[3], [2], [0], [1]], [[1, 3], [], [2, 0]]])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("normalizer", ["sequence", "token", "constant"])
def test_streamed_gradients_equal_the_textbook_in_any_order_and_packing(tmp_path, model, ranks, normalizer, kl_coef, rounds):
    trainer = Trainer(small_config(tmp_path, model, normalizer=normalizer, kl_coef=kl_coef), model, ranks)
    perturbed(trainer.models.policy)
    for round_ in rounds:
        trainer.forward_backward([[GROUPS[i] for i in round_]])
    ours = flat_gradient(trainer, divisor(GROUPS, normalizer))
    oracle = textbook_gradient(model, GROUPS, normalizer, kl_coef)
    assert oracle.norm() > 0 and (ours - oracle).norm() / oracle.norm() < 2e-6  # float32


@pytest.mark.parametrize("override", ["model.shared_prompt=off", "model.attention=concat", "parallel.micro_batch_tokens=12"])
def test_repeated_prompts_copied_keys_and_cut_groups_have_the_same_gradient(tmp_path, model, ranks, override):
    trainer = Trainer(small_config(tmp_path, model, override, kl_coef=0.1, normalizer="sequence"), model, ranks)
    perturbed(trainer.models.policy)
    trainer.forward_backward([GROUPS])
    ours = flat_gradient(trainer, divisor(GROUPS, "sequence"))
    oracle = textbook_gradient(model, GROUPS, "sequence", 0.1)
    assert (ours - oracle).norm() / oracle.norm() < 2e-6  # float32


def test_the_ways_that_the_ablation_alternates_between_have_the_same_gradient(tmp_path, model, ranks):
    config = small_config(tmp_path, model, kl_coef=0.1, normalizer="token")
    trainer = Passes(config, model, ranks)
    perturbed(trainer.models.policy)
    oracle = textbook_gradient(model, GROUPS, "token", 0.1)
    for shared, apart in ((False, True), (False, False), (True, True), (True, False)):
        way = config.model_copy(update={"model": config.model.model_copy(update={"shared_prompt": shared})})
        trainer.switch(way, apart=apart)
        trainer.forward_backward([[group] for group in GROUPS])
        ours = flat_gradient(trainer, divisor(GROUPS, "token"))
        assert (ours - oracle).norm() / oracle.norm() < 2e-6, (shared, apart)  # float32
        trainer.optimizer.clear()


def test_an_offloaded_reference_is_on_the_device_only_during_a_batch(tmp_path, model, ranks, monkeypatch):
    trainer = Trainer(small_config(tmp_path, model, "model.offload_reference=true", kl_coef=0.1), model, ranks)
    moves: list[str] = []
    monkeypatch.setattr(trainer.models.reference, "to", lambda device: moves.append(str(device)))
    monkeypatch.setattr(trainer.models, "ranks", SimpleNamespace(device="meta"))  # a name to tell apart; nothing is moved there
    trainer.forward_backward([GROUPS[:2]])
    assert moves == ["meta"]
    trainer.optimizer_step(0)
    assert moves == ["meta", "cpu"]


def textbook_steps(model: Path, old: list[torch.Tensor] | None, updates: int, lr: float) -> torch.Tensor:
    """[parameters] after several AdamW steps on the one batch; `old` as in `textbook_loss`, None for the starting weights' own."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    if old is None:
        with torch.no_grad():
            old = [logprobs(policy, group, k) for group in GROUPS for k in range(3)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    for _ in range(updates):
        optimizer.zero_grad()
        textbook_loss(policy, old, policy, GROUPS, "token", 0.0).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_further_updates_of_a_batch_are_ppo_steps_against_the_weights_it_began_with(tmp_path, model, ranks):
    config = small_config(tmp_path, model, "optimizer.lr=0.02", "optimizer.eps=1e-3", updates_per_batch=3)
    trainer = Trainer(config, model, ranks)
    trainer.forward_backward([GROUPS[:1]])
    trainer.forward_backward([GROUPS[1:]])
    metrics = trainer.optimizer_step(0)
    ours = torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])
    assert torch.allclose(ours.double(), textbook_steps(model, None, 3, 0.02), atol=2e-5)
    assert not torch.allclose(ours.double(), textbook_steps(model, None, 2, 0.02), atol=2e-3)
    assert metrics["policy/clipped_frac"] > 0  # so that the ratio mattered


def test_a_cut_group_with_the_kl_in_its_reward_takes_the_same_steps_as_a_whole_one(tmp_path, model, ranks):
    weights = []
    for budget in (1 << 10, 12):
        config = small_config(
            tmp_path, model, f"parallel.micro_batch_tokens={budget}", "optimizer.lr=0.02", "optimizer.eps=1e-3",
            updates_per_batch=3, kl_coef=0.3, kl_in="reward", kl_estimate="k1", advantage="opo",
        )  # fmt: skip
        trainer = Trainer(config, model, ranks)
        for _ in range(2):  # in the second batch the policy is not the reference any more
            trainer.forward_backward([GROUPS])
            metrics = trainer.optimizer_step(0)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()]))
    assert torch.allclose(*weights, atol=2e-5) and metrics["policy/kl"] > 1e-3


def test_one_step_off_corrects_by_the_log_probs_that_the_batch_was_sampled_with(tmp_path, model, ranks):
    config = small_config(tmp_path, model, "schedule=one_step_off", "optimizer.lr=0.02", "optimizer.eps=1e-3")
    trainer = Trainer(config, model, ranks)
    trainer.forward_backward([GROUPS])
    trainer.optimizer_step(0)
    ours = torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])
    sampled = [torch.tensor(r.token_logprobs, dtype=torch.float64) for g in GROUPS for r in g.responses]
    assert torch.allclose(ours.double(), textbook_steps(model, sampled, 1, 0.02), atol=2e-5)


def test_exact_sums_refuse_what_they_cannot_hold(tmp_path, model, ranks):
    trainer = Trainer(small_config(tmp_path, model, "parallel.accumulate=exact"), model, ranks)
    weight = next(trainer.models.policy.parameters())
    for value in (1e7, float("nan"), float("inf")):
        (weight.sum() * value).backward()
        with pytest.raises(TrainingError, match="do not fit parallel.accumulate=exact"):
            trainer.optimizer_step(0)
        trainer.optimizer.gradient.clear()


def test_a_batch_of_equal_rewards_changes_nothing(tmp_path, model, ranks):
    trainer = Trainer(small_config(tmp_path, model), model, ranks)
    before = [p.clone() for p in trainer.models.policy.parameters()]
    trainer.forward_backward([[GROUPS[2]] * 4])
    metrics = trainer.optimizer_step(0)
    assert metrics["optimizer/gradient_norm"] == 0 and np.isnan(metrics["policy/engine_logprob_gap"])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.models.policy.parameters(), strict=True))


def test_statistics_are_means_over_the_trained_tokens(tmp_path, model, ranks):
    trainer = Trainer(small_config(tmp_path, model, kl_coef=0.1), model, ranks)
    trainer.forward_backward([GROUPS[:2]])
    metrics = trainer.optimizer_step(0)
    gaps: list[torch.Tensor] = []
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for group in GROUPS[:2]:
        for k, response in enumerate(group.responses):
            gaps.append(logprobs(oracle, group, k).detach() - torch.tensor(response.token_logprobs))
    gap = torch.cat(gaps)
    assert metrics["policy/engine_logprob_gap"] == pytest.approx(gap.abs().mean().item(), rel=1e-5)
    assert metrics["policy/engine_ratio"] == pytest.approx(gap.exp().mean().item(), rel=1e-5)
    sample_frac = gap.exp().sum() ** 2 / (len(gap) * gap.exp().square().sum())
    assert metrics["policy/engine_sample_frac"] == pytest.approx(sample_frac.item(), rel=1e-5)
    assert metrics["policy/engine_capped_frac"] == 0  # nothing is corrected
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the reference
    assert metrics["policy/trained_groups"] == 2


def test_sequence_logprobs_are_those_of_the_model_at_temperature_1(tmp_path, model, ranks):
    trainer = Trainer(small_config(tmp_path, model), model, ranks)
    ids = [20, 30, 40, 50, 60]
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.sequence_logprobs(ids), expected, atol=1e-5)
