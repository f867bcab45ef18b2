"""From groups to new weights: forward and backward as groups arrive, one optimizer step when the batch is complete."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices
from pasync.algorithm.advantages import batch_scale, group_advantages
from pasync.algorithm.kl import kl_estimate
from pasync.algorithm.losses import denominator
from pasync.algorithm.objective import STATISTICS, Tokens, objective
from pasync.algorithm.responses import response_sums
from pasync.config import Config
from pasync.data.packing import MicroBatch, Part, counts, has_gradient, rows
from pasync.errors import TrainingError
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.parallel.fsdp import FullyShardedAdamW
from pasync.parallel.optimizer import ShardedAdamW, learning_rate
from pasync.parallel.ranks import Ranks
from pasync.parallel.tri_model import EMPTY, LogProbs, TriModel, encode, group_ids
from pasync.parallel.zero import ZeroAdamW
from pasync.rollout.recording import Recording, record

TOTALS = ("responses", "tokens", "trained_groups")
"""Of a batch, known on the first stage."""
ENGINE = ("policy/engine_logprob_gap", "policy/engine_ratio", "policy/engine_sample_frac", "policy/engine_capped_frac")
"""Metrics taken before any step on a batch: later they would be the policy's own change."""

log = logging.getLogger(__name__)


class Trainer:
    """Models and optimizer of one rank. Methods run on the main thread of every rank."""

    def __init__(self, config: Config, model_folder: Path, ranks: Ranks) -> None:
        self.config, self.ranks, self.mesh = config, ranks, ranks.mesh
        self.exact = config.parallel.accumulate == "exact"
        if self.exact:
            devices.make_deterministic()
        self.models = TriModel(config, model_folder, ranks)
        parameters, copies = self.models.parameters, self.models.copies
        self.optimizer: ShardedAdamW = (
            FullyShardedAdamW(parameters, config.optimizer, ranks, copies)
            if config.parallel.data == "fsdp"
            else ZeroAdamW(parameters.items(), config.optimizer, ranks, copies, exact=self.exact)
        )
        self._start_batch()

    def forward_backward(self, rounds: Iterable[list[Group]] | None) -> None:
        """Add the unnormalised gradient of groups to the batch's sum, as they come.

        Groups without a gradient (equal rewards and no KL term) are counted in the denominator but not computed. A collective of the
        stages and shards of a replica; replicas may have different groups and numbers of them.

        Args:
            rounds: on the first stage, waits for the next ones; None elsewhere.
        """
        self._pass(None if rounds is None else self._first_pass(rounds))

    def optimizer_step(self, iteration: int) -> dict[str, float]:
        """Step with the gradient of the whole batch; then go over the batch and step again, M times in all. A collective.

        Returns:
            metrics of the last step, the same on all ranks.

        Raises:
            TrainingError: on all ranks, if log-probs, losses or the gradient are not finite, unless `algorithm.on_nonfinite=skip` helps. It
                names the groups whose micro-batches are not, and the files that keep them; weights are those before the failing step.
        """
        began = time.perf_counter()
        metrics = self._step(iteration)
        engine = {key: metrics[key] for key in ENGINE}
        for _ in range(1, self.config.algorithm.updates_per_batch):
            self._first = False
            self._pass(iter(self._kept) if self.mesh.pipeline.is_first else None)
            metrics = self._step(iteration)
        mine = {"s": self._train_s + time.perf_counter() - began if self.mesh.pipeline.is_first else 0.0}
        slowest, mean = self.ranks.max(mine)["s"], self.ranks.sum(mine)["s"] / self.mesh.stage.size
        self.models.rest()
        self.models.refresh_old()
        metrics["policy/skipped_micro_batches"] = self._skipped
        self._start_batch()
        return metrics | engine | {"time/train_s": slowest, "time/mean_train_s": mean}

    def _step(self, iteration: int) -> dict[str, float]:
        """As `_step_if_finite`; what is not finite is left out, or raised."""
        try:
            return self._step_if_finite(iteration)
        except TrainingError as error:  # on all ranks
            why = str(error)
        self._leave_out_nonfinite(iteration, why)
        return self._step_if_finite(iteration)

    def _step_if_finite(self, iteration: int) -> dict[str, float]:
        """Divide the gradient by the whole batch's denominator and step.

        The check costs the devices no wait: it looks at sums over the whole batch that are reduced anyway.

        Raises:
            TrainingError: on all ranks, something is not finite; nothing has changed then.
        """
        sums = self._totals | {name: value.item() for name, value in self._sums.items()} | {"trained_tokens": self._trained_tokens}
        # every shard computes the same numbers
        total = self.ranks.sum({name: value if self.mesh.tensor.is_first else 0.0 for name, value in sums.items()})
        if wrong := [name for name, value in total.items() if not math.isfinite(value)]:
            raise TrainingError(f"iteration {iteration}: sums over the batch are not finite: {', '.join(wrong)}")
        algorithm = self.config.algorithm
        divisor = denominator(
            algorithm.normalizer,
            responses=int(total["responses"]),
            tokens=int(total["tokens"]),
            max_tokens=self.config.rollout.max_tokens,
        ) * batch_scale(algorithm.advantage, total["squared_advantages"], int(total["responses"]))
        lr = learning_rate(self.config.optimizer, iteration, self.config.iterations)
        norm = self.optimizer.step(lr=lr, divisor=divisor)
        self._start_sums()
        trained = total["trained_tokens"] or math.nan  # no token trained, no mean
        return {
            "policy/loss": total["loss"] / divisor,
            "policy/kl": total["kl"] / trained,
            "policy/entropy": total["entropy"] / trained,
            "policy/engine_logprob_gap": total["gap"] / trained,
            "policy/engine_ratio": total["ratios"] / trained,
            "policy/engine_sample_frac": total["ratios"] ** 2 / (total["squared_ratios"] or math.nan) / trained,
            "policy/engine_capped_frac": total["capped"] / trained,
            "policy/clipped_frac": total["clipped"] / trained,
            "policy/trained_groups": total["trained_groups"],
            "optimizer/lr": lr,
            "optimizer/gradient_norm": norm,
        }

    def _leave_out_nonfinite(self, iteration: int, why: str) -> None:
        """Compute each micro-batch alone to find those that are not finite; then raise, or compute the batch without them. A collective."""
        if self._first:
            self._old.clear()  # each pass gives them again
        most = int(self.ranks.max({"kept": len(self._kept)})["kept"])
        bad = sum(not self._finite_alone(replica, i) for i in range(most) for replica in range(self.mesh.data.size))
        left = self.ranks.sum({"left": sum(body != EMPTY for body in self._kept)})["left"]
        found = f"{why}. Not finite: {self._keep_nonfinite(iteration) or 'no micro-batch alone'}"
        if not bad or not left or self.config.algorithm.on_nonfinite == "raise":
            raise TrainingError(found)
        log.warning("%s. Computing the batch without", found)
        self._skipped += bad
        self._start_sums()
        self.optimizer.clear()
        if self._first:
            self._old.clear()
        self._pass(iter(self._kept) if self.mesh.pipeline.is_first else None)

    def _finite_alone(self, replica: int, number: int) -> bool:
        """Whether one micro-batch of one replica has finite losses and gradients; if not, it becomes an empty one. A collective."""
        self._start_sums()
        self.optimizer.clear()
        mine = replica == self.mesh.data.index
        body = self._kept[number : number + 1] if mine else []
        self._pass(iter(self.models.in_step(body)) if self.mesh.pipeline.is_first else None)
        finite = self.optimizer.is_finite() and bool(torch.stack(list(self._sums.values())).isfinite().all())
        finite = not self.ranks.max({"bad": float(not finite)})["bad"]
        if mine and not finite:
            if self.mesh.pipeline.is_first:
                self._nonfinite += body
                self._kept[number] = EMPTY
            if self._old:
                self._old.pop()  # its own, because each pass puts the newest there
        return finite

    def _keep_nonfinite(self, iteration: int) -> str:
        """Write the groups to the run folder; which and where, of all ranks and the same on all. A collective."""
        mine, every = "", [""] * self.ranks.size
        if self._nonfinite and self.mesh.tensor.is_first:
            groups = [self._groups[i] for i in group_ids(self._nonfinite)]
            mine = f"groups {[group.group_id for group in groups]} on rank {self.ranks.rank}"
            try:
                assert self.config.run.dir is not None
                folder = Path(self.config.run.dir) / "nonfinite" / f"rank-{self.ranks.rank}"
                mine += f", kept in {record(folder, iteration, Recording(groups, [0.0] * len(groups)))}"
            except OSError as error:
                mine += f", which cannot be kept: {error}"
        dist.all_gather_object(every, mine)
        return "; ".join(filter(None, every))

    @property
    def calls(self) -> Mapping[str, Callable[[bytes], object]]:
        """What rank 0 may call for inside `Ranks.on_first`: work that the other ranks must take part in, and to go on waiting."""
        return {
            "weights": lambda chunk: self.models.gather(int(chunk)),
            "score": lambda ids: self._score(msgspec.msgpack.decode(ids)),
            "wait": lambda _: None,
        }

    def sequence_logprobs(self, ids: list[int]) -> Tensor:
        """[P - 1] log-probs of tokens 1 .. P-1 of a sequence at temperature 1. Runs on rank 0, inside `Ranks.on_first` with `calls`."""
        self.ranks.call("score", msgspec.msgpack.encode(ids))
        result = self._score(ids)
        assert result is not None
        return result

    @torch.no_grad()
    def _score(self, ids: list[int]) -> Tensor | None:
        """On all ranks; the result only on the first stage."""
        rest = Response(int_bytes(ids[1:]), float_bytes([0.0] * (len(ids) - 1)), "", True, 0.0)
        body = encode([Part(int_bytes(ids[:1]), [rest], [0.0])])
        found: list[Tensor] = []

        def show(batch: MicroBatch, logps: LogProbs) -> Tensor:
            found.append(logps.policy.cpu())
            return logps.policy

        self.models.run(iter([body]) if self.mesh.pipeline.is_first else None, show, temperature=1.0)
        return self.ranks.from_last_stage(found[0] if found else torch.empty(len(ids) - 1))

    def _first_pass(self, rounds: Iterable[list[Group]]) -> Iterator[bytes]:
        """Micro-batches of the groups that have a gradient."""
        algorithm = self.config.algorithm
        for groups in self._timed(rounds):
            lengths = [len(r.ids) // 4 for g in groups for r in g.responses if counts(r, algorithm)]
            useful = [g for g in groups if has_gradient(g, algorithm)]
            for name, more in zip(TOTALS, (len(lengths), sum(lengths), len(useful)), strict=True):
                self._totals[name] += more
            self._groups |= {g.group_id: g for g in useful}
            every = list(self._rows(useful))
            ahead, bodies = ([encode(row) for row in every if row[0].forward_only == wanted] for wanted in (True, False))
            yield from self.models.in_step(ahead, forward_only=True)
            for body in self.models.in_step(bodies):
                self._kept.append(body)
                yield body

    def _timed(self, rounds: Iterable[list[Group]]) -> Iterator[list[Group]]:
        """The same, and adds up the time in which they were worked on."""
        for groups in rounds:
            began = time.perf_counter()
            yield groups
            self._train_s += time.perf_counter() - began

    def _rows(self, groups: list[Group]) -> Iterator[list[Part]]:
        """At most `parallel.micro_batch_tokens` each; with exact sums no two groups share one."""
        for together in [[g] for g in groups] if self.exact else [groups]:
            yield from rows(
                together,
                self.config.algorithm,
                budget=self.config.parallel.micro_batch_tokens,
                shared_prompt=self.config.model.shared_prompt,
            )

    def _pass(self, bodies: Iterator[bytes] | None) -> None:
        self.models.run(bodies, self._loss, temperature=self.config.rollout.temperature)

    def _loss(self, batch: MicroBatch, logps: LogProbs) -> Tensor:
        """The objective of a micro-batch; adds to the statistics (without moving them off the device)."""
        old = self._old_logprobs(batch, logps)  # [N]
        advantages = self._advantages(batch, old, logps.reference)  # [S]
        if batch.forward_only:
            return logps.policy
        tokens = Tokens(
            logps.policy, logps.entropy, old, logps.reference, batch.engine_logprobs, advantages, batch.layout.owner, batch.lengths
        )
        loss, sums = objective(self.config.algorithm, tokens)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value
        self._trained_tokens += len(old)
        return loss

    def _advantages(self, batch: MicroBatch, old: Tensor, reference: Tensor | None) -> Tensor:
        """[S] of every response; with the KL in the reward of the group's rewards less what its responses, seen so far, cost in KL."""
        a, place = self.config.algorithm, 0
        if not a.kl_in_reward:
            return batch.credit
        assert reference is not None
        costs = response_sums(kl_estimate(old, reference, a.kl_estimate), batch.layout.owner, len(batch.lengths))  # [S]
        mine = torch.stack([batch.credit - a.kl_coef * costs, batch.lengths])  # [2, S] float32
        found = [mine[0, :0]]
        for part in batch.parts:
            count = len(part.responses)
            whole = self._returns.setdefault(part.group_id, mine.new_zeros(2, a.group_responses))  # [2, K]
            whole[:, part.first : part.first + count] = mine[:, place : place + count]
            found.append(group_advantages(whole[0], whole[1], a.advantage)[part.first : part.first + count])
            place += count
        return torch.cat(found)

    def _old_logprobs(self, batch: MicroBatch, logps: LogProbs) -> Tensor:
        """[N] under the weights that sampled: the old policy's if it is held, else those of the first pass over the batch."""
        if logps.old is not None:
            return logps.old
        if not len(logps.policy):
            return logps.policy.detach()  # an empty micro-batch may stand for one that is left out
        if self._first:
            old = batch.engine_logprobs if self.config.schedule == "one_step_off" else logps.policy.detach()
            if self.config.algorithm.updates_per_batch > 1 and not batch.forward_only:
                self._old.append(old.cpu())
            return old
        self._old.rotate(-1)  # micro-batches come in the same order again
        return self._old[-1].to(logps.policy.device)

    def _start_batch(self) -> None:
        self._totals = dict.fromkeys(TOTALS, 0.0)
        self._returns: dict[int, Tensor] = {}  # with the KL in the reward, of each group: rewards less KL, and lengths, [2, K]
        self._groups: dict[int, Group] = {}  # on the first stage, by number, those with a gradient
        self._nonfinite: list[bytes] = []  # micro-batches left out, on the first stage
        self._skipped = 0  # number of these on all ranks
        self._kept: list[bytes] = []  # for further passes: micro-batches on the first stage,
        self._old: deque[Tensor] = deque()  # and their old log-probs on the last
        self._first = True
        self._train_s = 0.0
        self._start_sums()

    def _start_sums(self) -> None:
        self._trained_tokens = 0
        self._sums = dict.fromkeys(STATISTICS, torch.zeros((), device=self.ranks.device))


def require_in_bounds(config: Config, iteration: int, metrics: Mapping[str, float]) -> None:
    """Raise TrainingError, with the figure, if an iteration's numbers exceed `algorithm.max_logprob_gap` or `algorithm.max_kl`."""
    limits = {"max_logprob_gap": "policy/engine_logprob_gap", "max_kl": "policy/kl"}
    for name, key in limits.items():
        limit = getattr(config.algorithm, name)
        if limit is not None and metrics[key] > limit:
            raise TrainingError(f"iteration {iteration}: {key}={metrics[key]:.3g} exceeds algorithm.{name}={limit}")
