"""Variants of one run in one pair of processes, iteration by iteration: A B A B ... (each torchrun rank: RUN A B ..).

A variant is overrides of the configuration separated by spaces, such as "schedule=sync rollout.admission=fifo"; those of `model` have to be
ones that `Passes` can change in a trainer that is there. Its first word may be "apart" (see there).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.passes import Passes
from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import PromptStream
from pasync.launch import launch, placed, run_commands
from pasync.leader import Leader
from pasync.model.causal_lm import load_tokenizer
from pasync.observe.metrics import read_metrics
from pasync.observe.trace import Trace
from pasync.parallel.ranks import join_ranks
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal
from pasync.supervisor import Command
from pasync.train import iterate, lead

Line = dict[str, Any]
WARM_UP = 1
"""Iterations of each variant that are not counted."""


def alternated(folder: Path, tree: Line, *variants: str, rounds: int) -> list[list[Line]]:
    """Metrics of `rounds` iterations of each variant, after the warm-up.

    Servers have core 0, the rank has core 1.

    Args:
        folder: of the run.
        tree: the configuration, without iterations.
        variants: see above.
    """
    path = folder / "benchmark.yaml"
    path.write_text(json.dumps(tree | {"iterations": len(variants) * (rounds + WARM_UP)}))
    config = load(path, [f"run.dir={folder / 'run'}"])
    cores = devices.device_ids("cpu")
    servers = [[cores[0]]] * config.rollout.servers
    placement = replace(placed(config, False), servers=servers, ranks=[[cores[-1]]])

    def commands(placement: Placement, run: Path) -> list[Command]:
        *servers, ranks = run_commands(config, placement, run)
        argv = [*ranks.argv[: ranks.argv.index("-m", 2)], "-m", "benchmarks.alternate", str(run), *variants]
        return [*servers, replace(ranks, argv=argv)]

    with contextlib.redirect_stdout(sys.stderr):
        code = launch(config, placement, commands)
    if code:
        raise SystemExit(code)
    lines = [line for line in read_metrics(folder / "run") if "time/step_s" in line][len(variants) * WARM_UP :]
    return [lines[i :: len(variants)] for i in range(len(variants))]


def median(lines: list[Line], key: str) -> float:
    """Of one metric."""
    return statistics.median(line[key] for line in lines)


def main() -> None:
    """Entry of a rank."""
    die_with_parent()
    run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    with report_fatal(run, f"rank-{rank}"):
        placement = Placement.load(run / "placement.json")
        devices.pin(placement.ranks[rank])
        work(run, sys.argv[2:], placement, rank)


def read(run: Path, variant: str) -> tuple[Config, bool]:
    """Its configuration, and whether its models pass apart."""
    words = variant.split()
    apart = words[:1] == ["apart"]
    return load(run / "config.yaml", words[apart:]), apart


def work(run: Path, words: list[str], placement: Placement, rank: int) -> None:
    """The loop of `pasync.train`, with another variant each iteration."""
    variants = [read(run, variant) for variant in words]
    config = variants[0][0]
    folder = Path(config.model.path)
    with join_ranks("cpu", deadline_s=config.parallel.deadline_s) as ranks, ExitStack() as stack:
        trainer, trace = Passes(config, folder, ranks), Trace(run, f"rank-{rank}", 0)
        prompts = PromptStream(config, load_tokenizer(folder))
        leader = Leader(config, run, placement, trainer, prompts, 0, trace) if ranks.is_first else None
        lead(trainer, leader, Leader.start, stack)
        for t in range(config.iterations):
            variant, apart = variants[t % len(variants)]
            trainer.switch(variant, apart=apart)
            if leader:
                leader.config = leader.source.config = variant
            iterate(t, variant, leader, trainer, trace)


if __name__ == "__main__":
    main()
