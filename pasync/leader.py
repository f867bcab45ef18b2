"""What rank 0 does besides training: weights to the servers, prompts, evaluation, the log.

    begin(t):  weights t --> servers --> probe --> [evaluate] --> submit the batch, return at once
    finish(t): one line of metrics, [the groups of the iteration on disk]
    end():     weights of the last step --> [evaluate] --> exported model
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pasync import checkpoint
from pasync.config import Config
from pasync.data.prompts import PromptStream
from pasync.messages import Sampling
from pasync.observe.console import progress, say
from pasync.observe.metrics import RunLog, batch_metrics, step_times
from pasync.placement import Placement
from pasync.rollout.producer import RolloutProducer
from pasync.rollout.recording import ReplayProducer, record
from pasync.trainer import Trainer
from pasync.transport.weights import WeightSender

PROBE_TOKENS = 64
log = logging.getLogger(__name__)


class Leader:
    """Runs on rank 0's main thread; an exception of any method is raised on all ranks by `Ranks.on_first`.

    Args:
        first: iteration that the run begins with.
    """

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
        progress("training", t, self.config.iterations)
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
