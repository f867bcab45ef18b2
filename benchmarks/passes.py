"""A trainer that changes between ways to train while it runs, for benchmarks that alternate between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pasync.config import Config
from pasync.data.packing import MicroBatch
from pasync.messages import Group
from pasync.model.stage import Stage
from pasync.parallel.pipeline import Pipeline
from pasync.parallel.ranks import Ranks
from pasync.parallel.tri_model import LogProbs
from pasync.trainer import Trainer


class Passes(Trainer):
    """Policy and reference in one pass, as the product trains; or apart, as with a job for each model: the reference goes over the batch as
    groups arrive and its log-probs are kept; the policy, which needs those of all, follows when the reference has done the whole batch.

    Apart only works on one stage.
    """

    def __init__(self, config: Config, model_folder: Path, ranks: Ranks) -> None:
        super().__init__(config, model_folder, ranks)
        self._apart = False

    def switch(self, config: Config, *, apart: bool) -> None:
        """From the next batch on."""
        self.config, self._apart = config, apart
        self.models.shared_prompt = config.model.shared_prompt

    def forward_backward(self, rounds: Iterable[list[Group]] | None) -> None:
        """See `Trainer`."""
        if not self._apart:
            super().forward_backward(rounds)
            return
        assert rounds is not None and isinstance(self.models.reference, Stage)
        bodies, kept = list[bytes](), deque[Tensor]()

        def remembered() -> Iterator[bytes]:
            for body in self._first_pass(rounds):
                bodies.append(body)
                yield body

        def keep(batch: MicroBatch, logps: list[Tensor], entropy: Tensor) -> Tensor:
            kept.append(logps[0])
            return logps[0]

        def loss(batch: MicroBatch, logps: list[Tensor], entropy: Tensor) -> Tensor:
            return self._loss(batch, LogProbs(logps[0], None, kept.popleft(), entropy))

        temperature = self.config.rollout.temperature
        with torch.no_grad():
            self._alone(self.models.reference).run(remembered(), keep, temperature=temperature)
        began = time.perf_counter()
        self._alone(self.models.policy).run(iter(bodies), loss, temperature=temperature)
        self._train_s += time.perf_counter() - began

    def _alone(self, stage: Stage) -> Pipeline:
        return Pipeline([stage], self.mesh.pipeline, self.ranks.device, self.models._decode, deadline_s=self.config.parallel.deadline_s)
