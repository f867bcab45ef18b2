"""One training rank: the loop of periodic asynchrony. Started by torchrun with the run folder as its argument.

    publish weights t -> submit the whole batch -> train on groups as they finish -> one optimizer step -> t + 1

Nothing is in flight between iterations, so every token of iteration t was sampled from the weights of version t. (`one_step_off`, which
exists for comparison, is the exception.)
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pasync import device as devices
from pasync.checkpoint import Checkpoints
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import PromptStream
from pasync.errors import Preempted
from pasync.leader import Leader
from pasync.messages import Group
from pasync.model.causal_lm import load_tokenizer
from pasync.observe.trace import Trace
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.placement import Placement
from pasync.preemption import preemption
from pasync.processes import die_with_parent, report_fatal, report_stop
from pasync.stream import stream_micro_batches
from pasync.trainer import Trainer, require_in_bounds

log = logging.getLogger(__name__)


def train(config: Config, run: Path, placement: Placement, ranks: Ranks) -> None:
    """Train from the newest checkpoint, or from the start, to the end. Runs on every rank."""
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    prompts = PromptStream(config, tokenizer)
    trainer = Trainer(config, folder, ranks)
    checkpoints = Checkpoints(config, Path(config.run.dir or run), trainer)  # of several nodes all save into the run's one folder
    first = checkpoints.resume()
    trace = Trace(run, f"rank-{ranks.rank}", first)
    leader = Leader(config, run, placement, trainer, prompts, first, trace) if ranks.is_first else None
    if leader:
        leader.recall(checkpoints.history)
    with ExitStack() as stack:
        done = first
        try:
            lead(trainer, leader, Leader.start, stack)
            for t in range(first, config.iterations):
                iterate(t, config, leader, trainer, trace)
                done = t + 1
                if checkpoints.due(t):
                    with trace.span("checkpoint", t):
                        log.info("iteration %d: checkpoint", t)
                        checkpoints.save(done, leader.history if leader else b"")
            lead(trainer, leader, Leader.end, tokenizer)
            checkpoints.finish()
        except Preempted:  # on all ranks, and never after an optimizer step has begun
            stop(checkpoints, done, leader, run)


def stop(checkpoints: Checkpoints, done: int, leader: Leader | None, run: Path) -> None:
    """Save what is not saved yet, and tell the launcher that the run can be continued. Runs on every rank."""
    if checkpoints.newest < done:
        log.info("SIGTERM: checkpoint, to continue with iteration %d", done)
        checkpoints.save(done, leader.history if leader else b"")
    checkpoints.finish()
    report_stop(run, done)


def iterate(t: int, config: Config, leader: Leader | None, trainer: Trainer, trace: Trace) -> None:
    """One iteration: sync, generate and train side by side, step. Runs on every rank."""
    ranks, metrics = trainer.ranks, dict[str, float]()
    lead(trainer, leader, Leader.begin, t)
    train_on_batch(t, config, leader, trainer, trace)
    while ranks.from_first(lambda: b"more" if leader and leader.batch.left else b""):  # all servers were lost
        lead(trainer, leader, Leader.resume, t)
        train_on_batch(t, config, leader, trainer, trace)
    if config.trains:
        with trace.span("optimizer", t):
            log.info("iteration %d: optimizer step", t)
            metrics = trainer.optimizer_step(t)
    lead(trainer, leader, Leader.finish, t, metrics)
    if config.trains:
        require_in_bounds(config, t, metrics)


def train_on_batch(t: int, config: Config, leader: Leader | None, trainer: Trainer, trace: Trace) -> None:
    """Forward and backward on groups as they come, until there are none left or no server is. Runs on every rank."""
    ranks = trainer.ranks
    rounds = stream_micro_batches(leader.batch if leader else None, config, ranks) if ranks.mesh.pipeline.is_first else None
    if config.trains:
        trainer.forward_backward(traced(rounds, t, trace) if rounds else None)
    elif rounds:
        deque(rounds, maxlen=0)


def traced(rounds: Iterator[list[Group]], t: int, trace: Trace) -> Iterator[list[Group]]:
    """The same, and a span in the trace for the time in which each was worked on."""
    for groups in rounds:
        if not groups:
            yield groups  # replicas in lock-step do every round together
            continue
        log.info("iteration %d: train on %d groups", t, len(groups))
        with trace.span("micro-batch", t, groups=len(groups), tokens=sum(g.num_tokens for g in groups)):
            yield groups


def lead(trainer: Trainer, leader: Leader | None, act: Callable[..., None], *args: Any) -> None:
    """Rank 0 does it, the others wait and take part in what it calls for; what fails there is raised on all."""
    trainer.ranks.on_first(lambda: act(leader, *args), trainer.calls)


def main() -> None:
    """Entry of one rank: `torchrun -m pasync.train RUN`."""
    die_with_parent()
    run = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank-{rank} %(name)s %(levelname)s %(message)s")
    with report_fatal(run, f"rank-{rank}"):
        config, placement = load(run / "config.yaml"), Placement.load(run / "placement.json")
        if config.checkpoint.every:
            preemption.listen()
        if placement.kind == "cpu":
            devices.pin(placement.ranks[rank])
        layout = {"pipeline": config.parallel.pipeline, "tensor": config.parallel.tensor}
        with join_ranks(placement.kind, deadline_s=config.parallel.deadline_s, **layout) as ranks:
            train(config, run, placement, ranks)


if __name__ == "__main__":
    main()
