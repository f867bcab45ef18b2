"""One training rank: the loop of periodic asynchrony. Started by torchrun with the run folder as its argument.

    publish weights t -> submit the whole batch -> train on groups as they finish -> one optimizer step -> t + 1

Nothing is in flight between iterations, so every token of iteration t was sampled from the weights of version t.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pasync import checkpoint
from pasync import device as devices
from pasync.config import Config, load
from pasync.data.prompts import PromptStream
from pasync.messages import Sampling
from pasync.model.causal_lm import load_tokenizer
from pasync.observe.console import progress, say
from pasync.observe.metrics import RunLog, batch_metrics, step_times
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal
from pasync.rollout.producer import RolloutProducer
from pasync.rollout.recording import ReplayProducer, record
from pasync.stream import stream_micro_batches
from pasync.trainer import Trainer
from pasync.transport.weights import WeightSender

PROBE_TOKENS = 64
log = logging.getLogger(__name__)


def train(config: Config, run: Path, placement: Placement, ranks: Ranks) -> None:
    """Train from the newest checkpoint, or from the start, to the end. Runs on every rank."""
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    prompts = PromptStream(config, tokenizer)
    trainer = Trainer(config, folder, ranks)
    first = checkpoint.resume(trainer, run)
    leader = Leader(config, run, placement, trainer, prompts, first) if ranks.is_first else None

    def lead(act: Callable[..., None], *args: Any) -> None:
        """Rank 0 does it, the others wait; what fails there is raised on all."""
        ranks.on_first(lambda: act(leader, *args))

    with ExitStack() as stack:
        lead(Leader.start, stack)
        for t in range(first, config.iterations):
            lead(Leader.begin, t)
            for groups in stream_micro_batches(leader.source if leader else None, t, config, ranks):
                log.info("iteration %d: train on %d groups", t, len(groups))
                trainer.forward_backward(groups)
            log.info("iteration %d: optimizer step", t)
            metrics = trainer.optimizer_step(t)
            lead(Leader.finish, t, metrics)
            if checkpoint.due(config, t):
                log.info("iteration %d: checkpoint", t)
                checkpoint.save(trainer, run, t + 1, config.checkpoint)
        lead(Leader.end, tokenizer)


class Leader:
    """What rank 0 does besides training: weights to the servers, prompts, evaluation, the log."""

    def __init__(self, config: Config, run: Path, placement: Placement, trainer: Trainer, prompts: PromptStream, first: int) -> None:
        self.config, self.run, self.trainer, self.prompts = config, run, trainer, prompts
        self.kind = placement.kind
        self.log = RunLog(run, config.iterations, sum(map(len, placement.servers + placement.ranks)), first)
        replayed = config.replayed_run
        self.source: RolloutProducer | ReplayProducer = (
            ReplayProducer(replayed) if replayed else RolloutProducer(config, placement.address)
        )
        self.sender: WeightSender | None = None
        self.sampling = Sampling(config.algorithm.group_responses, config.rollout.temperature, config.rollout.max_tokens)
        ids = list(prompts.batch(0)[0].ids)
        self.probe_ids = (ids * PROBE_TOKENS)[: max(2, min(PROBE_TOKENS, config.max_model_tokens))]

    def start(self, stack: ExitStack) -> None:
        """Wait for the servers and join them for weight transfer."""
        stack.enter_context(self.source)
        if isinstance(self.source, RolloutProducer):
            shapes = [(name, list(w.shape)) for name, w in self.trainer.policy_weights()]
            self.sender = WeightSender(self.config, self.source, shapes, self.kind)

    def begin(self, t: int) -> None:
        """Give the servers version t, evaluate it if due, submit the batch; returns while it is being generated."""
        self._publish(t)
        if self.config.eval.every and t % self.config.eval.every == 0:
            self._evaluate(t)
        log.info("iteration %d: generate", t)
        self.submitted = time.time()
        self.source.submit(self.prompts.batch(t), t, self.sampling)

    def finish(self, t: int, metrics: dict[str, float]) -> None:
        """Write the iteration's line, and its groups if they are recorded."""
        finished = time.time()
        groups = [group for group, _ in self.source.taken]
        self.log.add(metrics | batch_metrics(groups))
        self.log.add(
            step_times(
                sync_s=self.log.value("time/sync_s"),
                train_s=metrics["time/train_s"],
                submitted=self.submitted,
                arrivals=[arrived for _, arrived in self.source.taken],
                finished=finished,
            )
        )
        self.log.write(t)
        if self.config.rollout.source == "record":
            record(self.run, t, groups)

    def end(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Evaluate the final weights and export them."""
        t = self.config.iterations
        if self.config.eval.every:
            self._publish(t)
            self._evaluate(t)
            self.log.write(t)
        checkpoint.export(self.trainer, tokenizer, self.run / "model")
        say(f"final model in {self.run / 'model'}")

    def _publish(self, t: int) -> None:
        log.info("iteration %d: sync", t)
        with self.log.timed("time/sync_s"):
            if self.sender:
                self.sender.publish(self.trainer.policy_weights(), t)
                if self.sender.due(t):
                    gap = self.sender.probe(self.probe_ids, self.trainer.sequence_logprobs(self.probe_ids), t)
                    self.log.add({"policy/probe_gap": gap})

    def _evaluate(self, t: int) -> None:
        evaluation = self.config.eval
        with self.log.timed("time/eval_s"):
            prompts = self.prompts.held_out
            sampling = Sampling(1, evaluation.temperature, evaluation.max_tokens or self.config.rollout.max_tokens)
            self.source.submit(prompts, t, sampling)
            rewards = []
            while self.source.in_flight:
                group = self.source.next_group(t)
                assert group is not None
                rewards += group.rewards
                progress("evaluating", len(rewards), len(prompts))
        self.log.add({"eval/accuracy_frac": sum(rewards) / len(rewards), "eval/problems": len(rewards)})


def main() -> None:
    """Entry of one rank: `torchrun -m pasync.train RUN`."""
    die_with_parent()
    run = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank-{rank} %(name)s %(levelname)s %(message)s")
    with report_fatal(run, f"rank-{rank}"):
        config, placement = load(run / "config.yaml"), Placement.load(run / "placement.json")
        if placement.kind == "cpu":
            devices.pin(placement.ranks[rank])
        with join_ranks(placement.kind, deadline_s=config.parallel.deadline_s) as ranks:
            train(config, run, placement, ranks)


if __name__ == "__main__":
    main()
