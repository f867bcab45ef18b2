"""From groups to new weights: forward and backward as groups arrive, one optimizer step when the batch is complete."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasync import device as devices
from pasync.algorithm.losses import clipped, denominator, kl_k3, policy_loss, token_weights
from pasync.config import Config
from pasync.data.packing import MicroBatch, Part, has_gradient, micro_batches, pack
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.model.causal_lm import load_model, response_logprobs
from pasync.parallel.ranks import Ranks
from pasync.parallel.zero import ShardedAdamW, learning_rate

STATISTICS = ("responses", "tokens", "trained_tokens", "trained_groups", "loss", "kl", "entropy", "gap", "clipped")


class Trainer:
    """Policy, reference and optimizer of one rank. Methods run on the main thread of every rank."""

    def __init__(self, config: Config, model_folder: Path, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.exact = config.parallel.accumulate == "exact"
        if self.exact:
            devices.make_deterministic()
        self.model: PreTrainedModel = load_model(config.model, model_folder, ranks.device)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.algorithm.kl_coef else None
        self.optimizer = ShardedAdamW(self.model.named_parameters(), config.optimizer, ranks, exact=self.exact)
        self._start_batch()

    def forward_backward(self, groups: list[Group]) -> None:
        """Add the unnormalised gradient of these groups to the batch's sum.

        Groups without a gradient (equal rewards and no KL term) are counted in the denominator but not computed. No collective.
        """
        began = time.perf_counter()
        self._totals["responses"] += sum(len(g.responses) for g in groups)
        self._totals["tokens"] += sum(g.num_response_tokens for g in groups)
        useful = [g for g in groups if has_gradient(g, kl_coef=self.config.algorithm.kl_coef)]
        self._totals["trained_groups"] += len(useful)
        for batch in self._packed(useful):
            old = self._backward(batch, None)
            if self.config.algorithm.updates_per_batch > 1:
                self._kept.append((batch, old.cpu()))
        self._train_s += time.perf_counter() - began

    def optimizer_step(self, iteration: int) -> dict[str, float]:
        """Step with the gradient of the whole batch; then go over the batch and step again, M times in all. A collective.

        Returns:
            metrics of the last step, the same on all ranks.

        Raises:
            TrainingError: on all ranks, if the gradient is not finite.
        """
        began = time.perf_counter()
        metrics = self._step(iteration)
        gap = metrics["policy/engine_logprob_gap"]  # before any step: later it would be the policy's own change
        for _ in range(1, self.config.algorithm.updates_per_batch):
            for batch, old in self._kept:
                self._backward(batch, old)
            metrics = self._step(iteration)
        mine = {"s": self._train_s + time.perf_counter() - began}
        slowest, mean = self.ranks.max(mine)["s"], self.ranks.sum(mine)["s"] / self.ranks.size
        self._start_batch()
        return metrics | {"policy/engine_logprob_gap": gap, "time/train_s": slowest, "time/mean_train_s": mean}

    def _step(self, iteration: int) -> dict[str, float]:
        """Divide the gradient by the whole batch's denominator and step."""
        sums = self._totals | {name: value.item() for name, value in self._sums.items()} | {"trained_tokens": self._trained_tokens}
        total = self.ranks.sum({name: sums[name] for name in STATISTICS})
        algorithm = self.config.algorithm
        divisor = denominator(
            algorithm.normalizer,
            responses=int(total["responses"]),
            tokens=int(total["tokens"]),
            max_tokens=self.config.rollout.max_tokens,
        )
        lr = learning_rate(self.config.optimizer, iteration, self.config.iterations)
        norm = self.optimizer.step(lr=lr, divisor=divisor)
        self._start_sums()
        trained = total["trained_tokens"] or math.nan  # no token trained, no mean
        return {
            "policy/loss": total["loss"] / divisor,
            "policy/kl": total["kl"] / trained,
            "policy/entropy": total["entropy"] / trained,
            "policy/engine_logprob_gap": total["gap"] / trained,
            "policy/clipped_frac": total["clipped"] / trained,
            "policy/trained_groups": total["trained_groups"],
            "optimizer/lr": lr,
            "optimizer/gradient_norm": norm,
        }

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face checkpoint, tensor) of every weight; a tied head is not listed twice."""
        return ((name, p.detach()) for name, p in self.model.named_parameters())

    @torch.no_grad()
    def sequence_logprobs(self, ids: list[int]) -> Tensor:
        """[P - 1] log-probs of tokens 1 .. P-1 of a sequence at temperature 1."""
        rest = Response(int_bytes(ids[1:]), float_bytes([0.0] * (len(ids) - 1)), "", True, 0.0)
        batch = pack([Part(np.array(ids[:1]), [rest], torch.zeros(1))], shared_prompt=True).to(self.ranks.device)
        return response_logprobs(self.model, batch, temperature=1.0)[0].cpu()

    def _packed(self, groups: list[Group]) -> Iterator[MicroBatch]:
        """Micro-batches of at most `parallel.micro_batch_tokens`; with exact sums no two groups share one."""
        for together in [[g] for g in groups] if self.exact else [groups]:
            yield from micro_batches(
                together,
                budget=self.config.parallel.micro_batch_tokens,
                normalize_std=self.config.algorithm.normalize_std,
                shared_prompt=self.config.model.shared_prompt,
            )

    def _backward(self, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """Add the gradient of the summed, weighted token losses, and the statistics (without moving them off the device).

        Args:
            old: [N] log-probs under the weights that the iteration began with; None in the first pass, when they are the policy's own.

        Returns:
            `old`, [N].
        """
        batch, algorithm, temperature = batch.to(self.ranks.device), self.config.algorithm, self.config.rollout.temperature
        logp, entropy = response_logprobs(self.model, batch, temperature=temperature)  # [N], [N]
        if old is None:
            old = batch.engine_logprobs if self.config.schedule == "one_step_off" else logp.detach()
        owner = batch.layout.owner  # [N]
        old, advantages = old.to(self.ranks.device), batch.advantages[owner]  # [N], [N]
        clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
        loss = policy_loss(logp, old, advantages, **clip)
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = response_logprobs(self.reference, batch, temperature=temperature)
            kl = kl_k3(logp, reference)
            loss = loss + algorithm.kl_coef * kl
            self._sums["kl"] += kl.detach().sum()
        weighted = (loss * token_weights(batch.lengths, owner, algorithm.normalizer)).sum()
        weighted.backward()
        self._sums["loss"] += weighted.detach()
        self._sums["entropy"] += entropy.sum()
        self._sums["gap"] += (logp.detach() - batch.engine_logprobs).abs().sum()
        self._sums["clipped"] += clipped(logp.detach(), old, advantages, **clip).sum()
        self._trained_tokens += len(old)
        return old

    def _start_batch(self) -> None:
        self._totals = {"responses": 0.0, "tokens": 0.0, "trained_groups": 0.0}
        self._kept: list[tuple[MicroBatch, Tensor]] = []  # for further passes: micro-batches and their old log-probs
        self._train_s = 0.0
        self._start_sums()

    def _start_sums(self) -> None:
        self._trained_tokens = 0
        self._sums = {name: torch.zeros((), device=self.ranks.device) for name in ("loss", "kl", "entropy", "gap", "clipped")}
