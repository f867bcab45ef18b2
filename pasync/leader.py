"""What rank 0 does besides training: weights to the servers, prompts, evaluation, the log.

    begin(t):  weights t --> servers --> probe --> submit the batch [and held-out prompts, which it does not wait for], return at once
    resume(t): the same weights again, to servers that came back after all were lost
    finish(t): [end of the evaluation] --> one line of metrics, [the groups of the iteration on disk]
    end():     weights of the last step --> [evaluate] --> exported model
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pasync import checkpoint
from pasync.batch import Batch
from pasync.config import Config
from pasync.data.prompts import PromptStream
from pasync.errors import Preempted, RolloutError, WeightSyncError
from pasync.evaluation import Evaluation
from pasync.messages import Sampling
from pasync.observe.console import progress, say
from pasync.observe.metrics import RunLog, Times, batch_metrics, idle_share, step_times
from pasync.observe.trace import Trace
from pasync.observe.trackers import Trackers
from pasync.placement import Placement
from pasync.preemption import preemption
from pasync.rollout.producer import RolloutProducer
from pasync.rollout.recording import Recording, ReplayProducer, record
from pasync.rollout.samples import Samples
from pasync.trainer import Trainer
from pasync.transport.channel import Keys
from pasync.transport.weights import WeightSender

PROBE_TOKENS = 64
log = logging.getLogger(__name__)


class Publisher:
    """Gives weights to the servers that are there. Runs on rank 0's main thread, inside `Ranks.on_first` with the trainer's calls.

    Args:
        probe_ids: tokens of the sequence that servers and trainer must agree on.
    """

    def __init__(self, config: Config, servers: RolloutProducer, trainer: Trainer, placement: Placement, probe_ids: list[int]) -> None:
        self.config, self.servers, self.trainer, self.placement, self.probe_ids = config, servers, trainer, placement, probe_ids
        self._sender: WeightSender | None = None

    def publish(self, t: int) -> float | None:
        """Give version t to every server that is there, check what they hold, and let them sample with it.

        Makes a new transfer group if the servers are others than the last time. If one is lost meanwhile, all of it again with those
        that are left.

        Returns:
            Largest mean log-prob difference of the probe, if one was due.

        Raises:
            RolloutError: no server is left, or one gave no answer that can be used.
            WeightSyncError: a server does not hold what was sent.
        """
        while True:
            with preemption.ends_wait():
                changed = self.servers.muster()
            try:
                gap = self._try(t, changed)
            except (RolloutError, WeightSyncError) as error:
                if not self.servers.lost_any():
                    raise
                log.warning("sync %d again without the servers that were lost: %s", t, error)
                continue
            self.servers.admit(t)
            return gap

    def _try(self, t: int, changed: bool) -> float | None:
        if changed or self._sender is None:
            log.info("weights go to %s", ", ".join(self.servers.names))
            if self._sender:
                self._sender.close()
            kind, host = self.placement.kind, self.placement.host
            self._sender = WeightSender(self.config, self.servers, self.trainer.models.shapes, kind, host)
        ours = self._sender.publish(self.trainer.models.weights(), t, partial(self._logprobs, self._sender, t))
        return None if ours is None else self._sender.probe(self.probe_ids, ours, t)

    def _logprobs(self, sender: WeightSender, t: int) -> Tensor | None:
        """The trainer's of the probe sequence, if a probe is due."""
        return self.trainer.sequence_logprobs(self.probe_ids) if sender.due(t) else None


class Leader:
    """Runs on rank 0's main thread; an exception of any method is raised on all ranks by `Ranks.on_first`.

    Args:
        first: iteration that the run begins with.
    """

    def __init__(
        self, config: Config, run: Path, placement: Placement, trainer: Trainer, prompts: PromptStream, first: int, trace: Trace
    ) -> None:
        self.config, self.run, self.trainer, self.prompts, self.trace = config, run, trainer, prompts, trace
        self.first = first
        self.trackers = Trackers(config, run, first)
        self.log = RunLog(run, config.iterations, sum(map(len, placement.servers + placement.ranks)), first, self.trackers)
        self.samples = Samples(run, first)
        replayed = config.replayed_run
        self.source: RolloutProducer | ReplayProducer = (
            ReplayProducer(config, replayed) if replayed else RolloutProducer(config, placement.address, Keys.load(placement.keys))
        )
        self.batch: Batch
        self.next_batch: Batch  # only in one_step_off
        self.sampling = Sampling(config.algorithm.group_responses, config.rollout.temperature, config.rollout.max_tokens)
        ids = list(prompts.batch(0)[0].ids)
        ids = (ids * PROBE_TOKENS)[: max(2, min(PROBE_TOKENS, config.max_model_tokens))]
        source = self.source
        self.publisher = Publisher(config, source, trainer, placement, ids) if isinstance(source, RolloutProducer) else None
        self.evaluation = Evaluation(config, source, prompts.held_out) if isinstance(source, RolloutProducer) and prompts.held_out else None

    def start(self, stack: ExitStack) -> None:
        """Wait for the servers."""
        with preemption.ends_wait():
            stack.enter_context(self.source)

    @property
    def history(self) -> bytes:
        """What a continued run should know besides the weights: the lengths of earlier responses."""
        return self.source.lengths.state() if isinstance(self.source, RolloutProducer) else b""

    def recall(self, history: bytes) -> None:
        """Know what `history` of an earlier run tells; empty tells nothing."""
        if history and isinstance(self.source, RolloutProducer):
            self.source.lengths.restore(history)

    def begin(self, t: int) -> None:
        """Give the servers version t, submit the batch, and held-out prompts if they are due; returns while it is being generated.

        `one_step_off` submits batch t + 1 here, and returns with batch t, which the weights of version t - 1 have sampled meanwhile.
        """
        preemption.check()
        self.began = time.time()
        ahead = self.config.schedule == "one_step_off"
        if ahead and t > self.first:
            self.batch = self.next_batch
            self._hold(self.batch)
        self._publish(t)
        log.info("iteration %d: generate", t)
        progress("training", t, self.config.iterations)
        if not ahead or t == self.first:
            self.batch = self._submit(t, version=t)
        if ahead and t + 1 < self.config.iterations:
            self._hold(self.batch)
            self.next_batch = self._submit(t + 1, version=t)
        if self.evaluation and t % self.config.eval.every == 0:
            self.evaluation.start(t)

    def resume(self, t: int) -> None:
        """All servers were lost: wait for one and give it the weights of this iteration, so that it does the groups that are missing."""
        log.info("iteration %d: %d groups wait for a server", t, self.source.in_flight)
        self._publish(t)

    def finish(self, t: int, metrics: dict[str, float]) -> None:
        """End the evaluation, write the iteration's line, and its groups if they are recorded."""
        finished, arrived = time.time(), self.batch.arrived()
        if self.evaluation and self.evaluation.running:
            self._end_evaluation(t)
        groups = [group for group, _ in arrived]
        self.log.add(metrics | batch_metrics(groups))
        self.log.add({"policy/lag": t - self.batch.version, "reward/refilled_groups": self.batch.refilled})
        self.log.add({"reward/dropped_groups": self.batch.dropped})
        times = Times(self.began, self.batch.submitted, [at for _, at in arrived], finished, ended=time.time())
        self.log.add(
            step_times(
                times,
                sync_s=self.log.value("time/sync_s"),
                train_s=metrics.get("time/train_s", 0.0),
                mean_train_s=metrics.get("time/mean_train_s", 0.0),
                waits_s=self.batch.waits_s,
            )
        )
        if isinstance(self.source, RolloutProducer):  # replayed groups carry the times of another run
            self.log.add({"time/server_idle_frac": idle_share(groups, self.config.rollout.servers, self.log.value("time/step_s"))})
            self.log.add({"rollout/requeued_groups": self.source.requeued, "wire/dropped_frames": self.source.dropped_frames})
            for group, at in arrived:
                self.trace.group(t, group, at)
        self.log.write(t)
        self.samples.batch(t, groups, self.prompts.batch(t))
        if self.config.keeps_groups:
            record(self.run, t, Recording(groups, [at - self.batch.submitted for _, at in arrived]))

    def end(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Evaluate the final weights and export them."""
        t = self.config.iterations
        if self.evaluation:
            self._publish(t)
            began = time.time()
            self.evaluation.start(t)
            with self.trace.span("evaluate", t):
                # The other ranks wait for the whole evaluation, and no longer than parallel.deadline_s without a word.
                self.evaluation.wait(None, lambda: self._publish(t), lambda: self.trainer.ranks.call("wait", b""))
            self._finish_evaluation(t, began)
            self.log.write(t)
        self.trackers.close()
        checkpoint.export(self.trainer, tokenizer, self.run / "model")
        say(f"final model in {self.run / 'model'}")

    def _submit(self, t: int, *, version: int) -> Batch:
        """Hand batch t to the servers."""
        self.source.submit(self.prompts.batch(t), version, self.sampling)
        refill = islice(self.prompts.refill(t), self.config.refill_limit)
        refills = self.config.algorithm.filter_zero_variance == "refill"
        return Batch(self.source, version, refill, refills=refills, on_error=self.config.rewards.on_error)

    @staticmethod
    def _hold(batch: Batch) -> None:
        batch.hold()
        if batch.stranded:
            raise RolloutError("all servers were lost, and the weights that sampled this batch are gone (schedule=one_step_off)")

    def _publish(self, t: int) -> None:
        log.info("iteration %d: sync", t)
        with self.log.timed("time/sync_s"), self.trace.span("sync", t):
            gap = self.publisher.publish(t) if self.publisher else None
            if gap is not None:
                self.log.add({"policy/probe_gap": gap})

    def _end_evaluation(self, t: int) -> None:
        """Wait for what is left of it. In `one_step_off` the servers sample the next batch first, which is no delay."""
        assert self.evaluation
        began = time.time()
        with suppress(Preempted), self.trace.span("evaluate", t):  # the next iteration raises it again, before it changes anything
            if self.config.schedule == "one_step_off" and t + 1 < self.config.iterations:
                self._hold(self.next_batch)
                began = time.time()
            self.evaluation.wait(self.config.eval.max_delay_s)
        self._finish_evaluation(t, began)

    def _finish_evaluation(self, t: int, waited_since: float) -> None:
        assert self.evaluation
        self.log.add(self.evaluation.finish(waited_since))
        for name, groups in self.evaluation.groups.items():
            self.samples.held_out(t, name, groups, self.prompts.held_out[name])
