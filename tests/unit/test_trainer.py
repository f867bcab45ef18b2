"""The trainer's gradient against the textbook: the whole batch at once, one padded-free sequence per response, plain autograd."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_group
from transformers import AutoModelForCausalLM
from workers import free_port

from pasync.config import Config, load
from pasync.messages import Group
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.trainer import Trainer

TEMPERATURE, MAX_TOKENS = 0.7, 8
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with join_ranks("cpu", deadline_s=30) as joined:
        yield joined


def config(folder: Path, model: Path, **algorithm: object) -> Config:
    (folder / "c.yaml").write_text(
        f"{{name: t, iterations: 9, model: {{path: {model}, dtype: float32}}, data: {{train: {{source: x}}}}, "
        f"rollout: {{max_tokens: {MAX_TOKENS}, temperature: {TEMPERATURE}}}, "
        "algorithm: {batch_groups: 4, group_responses: 3}, optimizer: {lr: 1e-3}}"
    )
    return load(folder / "c.yaml", [f"algorithm.{k}={v}" for k, v in algorithm.items()])


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Moves the policy away from the reference, so that the KL term has a gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return model


def logprobs(model: torch.nn.Module, group: Group, k: int) -> torch.Tensor:
    prompt, response = np.frombuffer(group.prompt_ids, "<i4"), group.responses[k].token_ids
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def textbook_gradient(model_folder: Path, normalizer: str, kl_coef: float) -> list[torch.Tensor]:
    policy = perturbed(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))
    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    losses, lengths = [], []
    for group in GROUPS:
        rewards = np.array(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for k, advantage in enumerate(advantages):
            logp = logprobs(policy, group, k)
            with torch.no_grad():
                d = logprobs(reference, group, k)
            loss = -torch.exp(logp - logp.detach()) * advantage + kl_coef * (torch.exp(d - logp) - (d - logp) - 1)
            losses.append(loss)
            lengths.append(len(logp))
    if normalizer == "sequence":
        total = torch.stack([loss.mean() if n else loss.sum() for loss, n in zip(losses, lengths, strict=True)]).mean()
    else:
        total = torch.cat(losses).sum() / (sum(lengths) if normalizer == "token" else len(losses) * MAX_TOKENS)
    total.backward()
    return [p.grad for p in policy.parameters()]


def streamed_gradient(trainer: Trainer, rounds: list[list[int]]) -> list[torch.Tensor]:
    """The accumulated gradient after the given micro-batches, divided as `optimizer_step` would."""
    for round_ in rounds:
        trainer.forward_backward([GROUPS[i] for i in round_])
    divisors = {"sequence": 12, "token": sum(g.num_response_tokens for g in GROUPS), "constant": 12 * MAX_TOKENS}
    flat = trainer.optimizer.gradient / divisors[trainer.config.algorithm.normalizer]
    return [part.clone() for part in flat.split([p.numel() for p in trainer.model.parameters()])]


@pytest.mark.parametrize("rounds", [[[0, 1, 2, 3]], [[3], [2], [0], [1]], [[1, 3], [], [2, 0]]])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("normalizer", ["sequence", "token", "constant"])
def test_streamed_gradients_equal_the_textbook_in_any_order_and_packing(tmp_path, model, ranks, normalizer, kl_coef, rounds):
    trainer = Trainer(config(tmp_path, model, normalizer=normalizer, kl_coef=kl_coef), model, ranks)
    perturbed(trainer.model)
    ours, oracle = streamed_gradient(trainer, rounds), textbook_gradient(model, normalizer, kl_coef)
    scale = torch.cat([g.flatten() for g in oracle]).norm()
    difference = torch.cat([a - b.flatten() for a, b in zip(ours, oracle, strict=True)]).norm()
    assert scale > 0 and difference / scale < 2e-6  # float32


def test_a_batch_of_equal_rewards_changes_nothing(tmp_path, model, ranks):
    trainer = Trainer(config(tmp_path, model), model, ranks)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.forward_backward([GROUPS[2]] * 4)
    metrics = trainer.optimizer_step(0)
    assert metrics["optimizer/gradient_norm"] == 0 and np.isnan(metrics["policy/engine_logprob_gap"])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_statistics_are_means_over_the_trained_tokens(tmp_path, model, ranks):
    trainer = Trainer(config(tmp_path, model, kl_coef=0.1), model, ranks)
    trainer.forward_backward(GROUPS[:2])
    metrics = trainer.optimizer_step(0)
    gaps = []
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for group in GROUPS[:2]:
        for k, response in enumerate(group.responses):
            gaps.append((logprobs(oracle, group, k).detach() - torch.tensor(response.token_logprobs)).abs())
    assert metrics["policy/engine_logprob_gap"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-5)
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the reference
    assert metrics["policy/trained_groups"] == 2


def test_sequence_logprobs_are_those_of_the_model_at_temperature_1(tmp_path, model, ranks):
    trainer = Trainer(config(tmp_path, model), model, ranks)
    ids = [20, 30, 40, 50, 60]
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.sequence_logprobs(ids), expected, atol=1e-5)
