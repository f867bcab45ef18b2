"""Does every choice learn? `python -m benchmarks.algorithms [--iterations N] [--seeds N]`: one JSON line per case and seed.

`configs/tiny_cpu.yaml` on a real vLLM server and a rank, one pair of processes for all: before each case the rank takes a new trainer
with the starting weights, which reach the server with the next sync. Accuracies are the exact chance that a response sampled at
temperature 1 is right, mean over the held-out rows: without any noise of sampling. On-policy all losses have one gradient, so those
with a ratio do two updates per batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from benchmarks.alternate import launch_pair
from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import PromptStream
from pasync.data.tasks import sorting
from pasync.leader import Leader
from pasync.model.causal_lm import load_tokenizer
from pasync.model.tiny import sampled_accuracy
from pasync.observe.metrics import read_metrics
from pasync.observe.trace import Trace
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal
from pasync.sections import Advantage, Normalizer, PolicyLoss
from pasync.train import iterate, lead
from pasync.trainer import Trainer

TINY = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"
CHEAPER = ("algorithm.batch_groups=32", "eval.every=0", "data.eval=null")
"""Half the batch: noisier, but 27 cases and three seeds take a while."""
RANGES = {"gspo": ("3e-4", "4e-4")}
"""Of the clipping, where 0.2 is not what the paper uses."""
Case = dict[str, str]


def cases() -> Iterator[Case]:
    """The overrides of each: every advantage with ppo, and every loss with grpo."""
    for normalizer in get_args(Normalizer):
        for advantage in get_args(Advantage):
            yield {"advantage": advantage, "loss": "ppo", "normalizer": normalizer, "updates_per_batch": "1"}
        for loss in get_args(PolicyLoss):
            low, high = RANGES.get(loss, ("0.2", "0.2"))
            updates = "1" if loss == "reinforce" else "2"
            case = {"advantage": "grpo", "loss": loss, "normalizer": normalizer, "updates_per_batch": updates}
            yield case | {"clip_low": low, "clip_high": high}


def measure(config: Config, case: Case, leader: Leader, ranks: Ranks) -> dict[str, object]:
    """Train from the starting weights and give the JSON line."""
    began, folder = time.perf_counter(), Path(config.model.path)
    trainer, prompts = Trainer(config, folder, ranks), PromptStream(config, load_tokenizer(folder))
    vars(leader).update(config=config, trainer=trainer, prompts=prompts)
    assert leader.publisher
    vars(leader.publisher).update(config=config, trainer=trainer)
    start = accuracy(trainer)
    for t in range(config.iterations):
        iterate(t, config, leader, trainer, leader.trace)
    clipped = [line["policy/clipped_frac"] for line in read_metrics(leader.run)[-config.iterations :]]
    return case | {
        "seed": config.seed,
        "iterations": config.iterations,
        "start": round(start, 4),
        "end": round(accuracy(trainer), 4),
        "clipped": sum(x or 0.0 for x in clipped) / len(clipped),
        "seconds": round(time.perf_counter() - began, 1),
    }


def accuracy(trainer: Trainer) -> float:
    """Exact sampled accuracy on the held-out rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trainer.config.model.path, dtype="float32")
    model.load_state_dict(dict(trainer.models.weights()), strict=False)  # a tied head is not listed
    return sampled_accuracy(model, sorting()[1])


def work(run: Path, seeds: int) -> None:
    """All cases, one after the other; lines go to the run folder, seed after seed."""
    config, placement = load(run / "config.yaml"), Placement.load(run / "placement.json")
    devices.pin(placement.ranks[0])
    folder = Path(config.model.path)
    with join_ranks("cpu", deadline_s=config.parallel.deadline_s) as ranks, ExitStack() as stack:
        trainer, prompts = Trainer(config, folder, ranks), PromptStream(config, load_tokenizer(folder))
        leader = Leader(config, run, placement, trainer, prompts, 0, Trace(run, "rank-0", 0))
        lead(trainer, leader, Leader.start, stack)
        for seed in range(seeds):
            for case in cases():
                overrides = [f"algorithm.{key}={value}" for key, value in case.items()]
                line = measure(load(run / "config.yaml", [f"seed={seed}", *overrides]), case, leader, ranks)
                with (run / "algorithms.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def main() -> None:
    """Entry of the command, and of the rank (RUN SEEDS)."""
    if "RANK" in os.environ:
        die_with_parent()
        run = Path(sys.argv[1])
        with report_fatal(run, "rank-0"):
            return work(run, int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--run", default=None, help="keep the run folder here; lines are in its algorithms.jsonl as they come")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(options.run or folder) / "run"
        config = load(TINY, [f"run.dir={run}", f"iterations={options.iterations}", *CHEAPER])
        launch_pair(config, "benchmarks.algorithms", str(options.seeds))
        print((run / "algorithms.jsonl").read_text(), end="")


if __name__ == "__main__":
    main()
