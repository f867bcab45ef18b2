"""The gradient of a batch as a textbook writes it: all at once, one unpadded sequence per response, plain autograd, float64."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pasync.config import Config
from pasync.configfile import load
from pasync.messages import Group
from pasync.trainer import Trainer

TEMPERATURE, MAX_TOKENS = 0.7, 8


def small_config(folder: Path, model: Path | str, *overrides: str, **algorithm: object) -> Config:
    """A configuration around the functions of this file; `folder` gets its file."""
    (folder / "c.yaml").write_text(
        f"{{name: t, iterations: 9, model: {{path: {model}, dtype: float32}}, data: {{train: {{source: x}}}}, "
        f"rollout: {{max_tokens: {MAX_TOKENS}, temperature: {TEMPERATURE}}}, "
        "algorithm: {batch_groups: 4, group_responses: 3}, optimizer: {lr: 1e-3}}"
    )
    return load(folder / "c.yaml", [*overrides, *(f"algorithm.{k}={v}" for k, v in algorithm.items())])


def perturbed(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Moves the policy away from the reference, so that the KL term has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return model


def logprobs(model: torch.nn.Module, group: Group, k: int) -> torch.Tensor:
    """[R] log-probs of one response, at TEMPERATURE."""
    return logprobs_and_entropies(model, group, k)[0]


def logprobs_and_entropies(model: torch.nn.Module, group: Group, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] log-probs of one response, [R] entropies, at TEMPERATURE."""
    prompt, response = np.frombuffer(group.prompt_ids, "<i4"), group.responses[k].token_ids
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    table = (model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return table.gather(-1, ids[0, len(prompt) :, None])[:, 0], -(table.exp() * table).sum(-1)


def textbook_loss(policy: torch.nn.Module, old: list[torch.Tensor], reference: torch.nn.Module, groups: list[Group], normalizer: str,
                  kl_coef: float, clip: float = 0.2) -> torch.Tensor:  # fmt: skip
    """The batch's loss; `old` holds the log-probs of each response under the weights that sampled."""
    losses = []
    for i, group in enumerate(groups):
        rewards = np.array(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for k, advantage in enumerate(advantages):
            logp = logprobs(policy, group, k)
            with torch.no_grad():
                d = logprobs(reference, group, k)
            ratio = torch.exp(logp - old[i * len(advantages) + k])
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            losses.append(-gain + kl_coef * (torch.exp(d - logp) - (d - logp) - 1))
    if normalizer == "sequence":
        return torch.stack([loss.mean() if len(loss) else loss.sum() for loss in losses]).mean()
    return torch.cat(losses).sum() / (sum(map(len, losses)) if normalizer == "token" else len(losses) * MAX_TOKENS)


def textbook_gradient(model: Path, groups: list[Group], normalizer: str, kl_coef: float = 0.0) -> torch.Tensor:
    """[parameters] float64: gradient at the perturbed weights."""
    policy = perturbed(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)).double()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        old = [logprobs(policy, group, k) for group in groups for k in range(len(group.responses))]
    textbook_loss(policy, old, reference, groups, normalizer, kl_coef).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def divisor(groups: list[Group], normalizer: str) -> int:
    """What the summed loss is divided by."""
    responses = sum(len(g.responses) for g in groups)
    return {"sequence": responses, "token": sum(g.num_response_tokens for g in groups), "constant": responses * MAX_TOKENS}[normalizer]


def flat_gradient(trainer: Trainer, divisor: float) -> torch.Tensor:
    """[parameters] the divided gradient that the trainer has summed. A collective."""
    optimizer = trainer.optimizer
    return torch.cat([whole.flatten() for whole in optimizer.whole(optimizer.summed(divisor)[0])])
