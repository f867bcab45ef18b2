"""Every combination of the algorithm section that is allowed: the papers' gradient, in any order, packing, cut and number of ranks."""

import itertools
import random
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np
import pytest
import torch
from formulas import Sample, algorithm_loss
from groups import make_group
from test_order_free import replayed
from textbook import flat_gradient, logprobs, logprobs_and_entropies, perturbed, small_config
from transformers import AutoModelForCausalLM
from workers import run_ranks

from pasync.algorithm.objective import Tokens, objective
from pasync.config import Config
from pasync.conflicts import conflicts
from pasync.messages import Group, float_bytes
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks
from pasync.rollout.recording import Recording, record
from pasync.sections import AlgorithmConfig
from pasync.trainer import Trainer

NO_FORMULA = {"filter_zero_variance", "on_nonfinite", "tri_model"}
SWITCHES = {"kl_coef": (0.0, 0.1), "entropy_coef": (0.0, 0.05), "overlong_tokens": (0, 3), "mask_truncated": (False, True)}
FIXED = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.1}
OTHERS = {"batch_groups", "group_responses", "updates_per_batch", "refill_limit", "max_logprob_gap", "max_kl"}
TYPES = {key: field.annotation for key, field in AlgorithmConfig.model_fields.items() if key not in NO_FORMULA}
CHOICES: dict[str, tuple] = {key: get_args(kind) for key, kind in TYPES.items() if get_origin(kind) is Literal} | SWITCHES
BEFORE = {"advantage", "overlong_tokens", "mask_truncated"}
"""What is done when the objective begins."""
TOLERANCE = 5e-6
"""Of float32 against float64, relative."""


def test_every_key_of_the_section_is_in_the_matrix_or_known_to_be_no_formula():
    assert AlgorithmConfig.model_fields.keys() == CHOICES.keys() | FIXED.keys() | NO_FORMULA | OTHERS


def allowed(config: Config) -> list[dict[str, Any]]:
    """The whole product of the choices, without what `conflicts` refuses."""
    every = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    return [x for x in every if not conflicts(config.model_copy(update={"algorithm": config.algorithm.model_copy(update=x)}))]


def pairs(combination: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(combination.items(), 2))


def covering(combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of them, with every two choices together that are together in any."""
    combinations = random.Random(0).sample(combinations, len(combinations))
    left = set().union(*map(pairs, combinations))
    chosen = []
    for enough in (40, 30, 20, 12, 6, 3, 1):
        for combination in combinations:
            new = pairs(combination) & left
            if len(new) >= enough:
                chosen.append(combination)
                left -= new
    assert not left
    return chosen


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return small_config(tmp_path_factory.mktemp("config"), "none", **FIXED)


@pytest.fixture(scope="module")
def combinations(config) -> list[dict[str, Any]]:
    return allowed(config)


def test_the_objective_of_every_combination_gives_each_token_the_same_gradient_in_any_micro_batch(config, combinations):
    """Pure tensors; what groups and batch add to it is below."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 5, 2, 4, 0])
    owner = torch.arange(6).repeat_interleave(lengths)
    logp, entropy, *others = (0.5 * torch.randn(15, dtype=torch.float64) for _ in range(5))
    advantages = torch.randn(6, dtype=torch.float64)
    seen = {tuple((k, v) for k, v in x.items() if k not in BEFORE): x for x in combinations if x["kl_in"] == "loss"}
    for combination in seen.values():
        algorithm = config.algorithm.model_copy(update=combination)
        whole, *parts = (
            gradient(algorithm, take(responses, lengths, owner, [logp, entropy, *others], advantages))
            for responses in ([0, 1, 2, 3, 4, 5], [4, 1, 5], [3, 2, 0])
        )
        assert len(whole) == 15 and whole.abs().sum() > 0
        again = torch.cat(parts)
        places = torch.cat([torch.nonzero(owner == k)[:, 0] for k in (4, 1, 5, 3, 2, 0)])
        assert torch.allclose(again, whole[places], rtol=1e-12), combination
    assert len(seen) > 250


def take(responses: list[int], lengths: torch.Tensor, owner: torch.Tensor, tokens: list[torch.Tensor], advantages: torch.Tensor) -> Tokens:
    rows = torch.cat([torch.nonzero(owner == k)[:, 0] for k in responses])
    logp, entropy, old, reference, engine = (x[rows] for x in tokens)
    mine = torch.arange(len(responses)).repeat_interleave(lengths[responses])
    return Tokens(logp.requires_grad_(), entropy.requires_grad_(), old, reference, engine, advantages[responses], mine, lengths[responses])


def gradient(algorithm: AlgorithmConfig, tokens: Tokens) -> torch.Tensor:
    """[N, 2] of log-probs and entropies."""
    objective(algorithm, tokens)[0].backward()
    return torch.stack([x.grad if x.grad is not None else torch.zeros_like(x) for x in (tokens.logp, tokens.entropy)], 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    random_model(folder, "qwen2", tied=True, seed=1)
    return folder


OLD_SEED = 5


@pytest.fixture(scope="module")
def samples(model) -> tuple[list[Group], list[list[Sample]], list[torch.nn.Parameter]]:
    """Groups on the wire; the same for the formulas, with a graph to the policy's parameters; these."""
    rng = np.random.default_rng(0)
    policy, old, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(3))
    policy, old, reference = perturbed(policy).double(), perturbed(old, OLD_SEED).double(), reference.double()
    groups = [make_group(rng, 3 + i, rng.integers(1, 9, 3).tolist(), rewards=[1, 0, 0.5], group_id=i) for i in range(4)]
    groups.append(make_group(rng, 4, [3, 2, 8], rewards=[1, 1, 1], group_id=4))
    wire, textbook = [], []
    for group in groups:
        responses, made = [], []
        for k, response in enumerate(group.responses):
            with torch.no_grad():
                before, start = logprobs(old, group, k), logprobs(reference, group, k)
            engine = (before + 0.2 * torch.from_numpy(rng.standard_normal(len(before)))).float()
            ended = bool(rng.random() < 0.7)
            responses.append(msgspec.structs.replace(response, logprobs=float_bytes(engine.numpy()), ended=ended))
            made.append(Sample(*logprobs_and_entropies(policy, group, k), before, start, engine.double(), response.reward, ended))
        wire.append(msgspec.structs.replace(group, responses=responses))
        textbook.append(made)
    return wire, textbook, list(policy.parameters())


def divided_gradient(trainer: Trainer) -> torch.Tensor:
    """What the optimizer would step with, instead of the step."""
    found: list[torch.Tensor] = []

    def step(*, lr: float, divisor: float) -> float:
        found.append(flat_gradient(trainer, divisor))
        trainer.optimizer.clear()
        return 0.0

    trainer.optimizer.step = step  # type: ignore[method-assign]
    trainer.models.refresh_old = lambda: None  # type: ignore[method-assign]
    trainer.optimizer_step(0)
    return found[0]


def distances(ranks: Ranks, folder: Path, model: Path, run: Path, combinations: list[dict[str, Any]], oracles: list[torch.Tensor]) -> list:
    """Largest relative distance of each combination, over orders and packings."""
    results = []
    for combination, oracle in zip(combinations, oracles, strict=True):
        place = folder / str(ranks.rank)
        place.mkdir(exist_ok=True)
        replay = (f"rollout.source=replay:{run}", "rollout.replay_order=random", f"parallel.ranks={ranks.size}", "algorithm.batch_groups=6")
        config = small_config(place, model, *replay, tri_model="always", **FIXED, **combination)
        trainer = Trainer(config, model, ranks)
        perturbed(trainer.models.policy)
        perturbed(trainer.models.old, OLD_SEED)
        worst = 0.0
        for seed, budget in enumerate((1 << 10, 14)):  # some in one row; most cut into pieces
            parallel = config.parallel.model_copy(update={"micro_batch_tokens": budget})
            trainer.config = config.model_copy(update={"seed": seed, "parallel": parallel})
            for groups in replayed(trainer.config, ranks, run, count=5):
                trainer.forward_backward([groups])
            worst = max(worst, ((divided_gradient(trainer) - oracle).norm() / oracle.norm()).item())
        results.append(worst)
    return results


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [1, 2])
def test_every_two_choices_give_the_papers_gradient_in_any_order_and_packing(tmp_path, config, model, samples, combinations, size):
    groups, textbook, parameters = samples
    record(tmp_path, 0, Recording(groups, [0.0] * len(groups)))
    combinations = covering(combinations)
    oracles = []
    for combination in combinations:
        loss = algorithm_loss(config.model_copy(update={"algorithm": config.algorithm.model_copy(update=combination)}), textbook)
        oracles.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]))
    found = run_ranks(distances, size, tmp_path, model, tmp_path, combinations, oracles)
    wrong = {str(x): distance for x, distance in zip(combinations, found[0], strict=True) if not distance < TOLERANCE}
    assert not wrong and len(combinations) >= 20
