"""From groups to new weights: forward and backward as groups arrive, one optimizer step when the batch is complete."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasync.algorithm.losses import denominator, kl_k3, policy_loss, token_weights
from pasync.config import Config
from pasync.data.packing import MicroBatch, has_gradient, pack
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.model.causal_lm import load_model, response_logprobs
from pasync.parallel.ranks import Ranks
from pasync.parallel.zero import ShardedAdamW, learning_rate

STATISTICS = ("responses", "tokens", "trained_tokens", "trained_groups", "loss", "kl", "entropy", "gap")


class Trainer:
    """Policy, reference and optimizer of one rank. Methods run on the main thread of every rank."""

    def __init__(self, config: Config, model_folder: Path, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.model: PreTrainedModel = load_model(config.model, model_folder, ranks.device)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.algorithm.kl_coef else None
        self.optimizer = ShardedAdamW(self.model.parameters(), config.optimizer, ranks)
        self._start_batch()

    def forward_backward(self, groups: list[Group]) -> None:
        """Add the unnormalised gradient of these groups to the batch's sum.

        Groups without a gradient (equal rewards and no KL term) are counted in the denominator but not computed. No collective.
        """
        began = time.perf_counter()
        self._sums["responses"] += sum(len(g.responses) for g in groups)
        self._sums["tokens"] += sum(g.num_response_tokens for g in groups)
        useful = [g for g in groups if has_gradient(g, kl_coef=self.config.algorithm.kl_coef)]
        if useful:
            batch = pack(useful, normalize_std=self.config.algorithm.normalize_std).to(self.ranks.device)
            self._loss(batch).backward()
            self._sums["trained_groups"] += len(useful)
        self._train_s += time.perf_counter() - began

    def optimizer_step(self, iteration: int) -> dict[str, float]:
        """Divide the gradient by the whole batch's denominator and step. A collective.

        Returns:
            metrics of the batch, the same on all ranks.

        Raises:
            TrainingError: on all ranks, if the gradient is not finite.
        """
        began = time.perf_counter()
        for name, value in self._tensors.items():
            self._sums[name] += value.item()
        total = self.ranks.sum({name: self._sums[name] for name in STATISTICS})
        algorithm = self.config.algorithm
        divisor = denominator(
            algorithm.normalizer,
            responses=int(total["responses"]),
            tokens=int(total["tokens"]),
            max_tokens=self.config.rollout.max_tokens,
        )
        lr = learning_rate(self.config.optimizer, iteration, self.config.iterations)
        norm = self.optimizer.step(lr=lr, divisor=divisor)
        slowest = self.ranks.max({"train_s": self._train_s + time.perf_counter() - began})
        self._start_batch()
        trained = total["trained_tokens"] or math.nan  # no token trained, no mean
        return {
            "policy/loss": total["loss"] / divisor,
            "policy/kl": total["kl"] / trained,
            "policy/entropy": total["entropy"] / trained,
            "policy/engine_logprob_gap": total["gap"] / trained,
            "policy/trained_groups": total["trained_groups"],
            "optimizer/lr": lr,
            "optimizer/gradient_norm": norm,
            "time/train_s": slowest["train_s"],
        }

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face checkpoint, tensor) of every weight; a tied head is not listed twice."""
        return ((name, p.detach()) for name, p in self.model.named_parameters())

    @torch.no_grad()
    def sequence_logprobs(self, ids: list[int]) -> Tensor:
        """[P - 1] log-probs of tokens 1 .. P-1 of a sequence at temperature 1."""
        rest = Response(int_bytes(ids[1:]), float_bytes([0.0] * (len(ids) - 1)), "", True, 0.0)
        group = Group(0, 0, int_bytes(ids[:1]), [rest, rest], 0.0, 0.0)
        batch = pack([group], normalize_std=False).to(self.ranks.device)
        return response_logprobs(self.model, batch, temperature=1.0)[0][: len(ids) - 1].cpu()

    def _loss(self, batch: MicroBatch) -> Tensor:
        """The sum of weighted token losses; also adds up the statistics (without moving them off the device)."""
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature
        logp, entropy = response_logprobs(self.model, batch, temperature=temperature)  # [N], [N]
        old = logp.detach()  # one update per batch: the policy that sampled is the policy itself
        loss = policy_loss(logp, old, batch.advantages[batch.owner], clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = response_logprobs(self.reference, batch, temperature=temperature)
            kl = kl_k3(logp, reference)
            loss = loss + algorithm.kl_coef * kl
            self._tensors["kl"] += kl.detach().sum()
        weighted = (loss * token_weights(batch.lengths, batch.owner, algorithm.normalizer)).sum()
        self._tensors["loss"] += weighted.detach()
        self._tensors["entropy"] += entropy.sum()
        self._tensors["gap"] += (old - batch.engine_logprobs).abs().sum()
        self._sums["trained_tokens"] += len(old)
        return weighted

    def _start_batch(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._tensors = {name: torch.zeros((), device=self.ranks.device) for name in ("loss", "kl", "entropy", "gap")}
        self._train_s = 0.0
