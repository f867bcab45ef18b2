"""What a run did against what was estimated for it, and the work that it had.

    <run>/config.yaml, metrics.jsonl, trace/, rollouts/ --calibrate--> Calibration --scaled--> Rates of any layout on such devices

The shape of the estimate is kept (what a step costs against a response in it), its size is the run's. So a run of one server and one
rank says what other numbers of them would do.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load
from pasync.errors import ConfigError
from pasync.estimate import Machine
from pasync.geometry import read_geometry
from pasync.observe.metrics import read_metrics
from pasync.observe.timeline import Span, read_spans
from pasync.placement import Placement
from pasync.rates import estimate
from pasync.rollout.recording import read_recording
from pasync.simulate import GroupWork, Rates, generate, training_time

Line = dict[str, Any]


@dataclass(frozen=True)
class Calibration:
    """Measured over estimated, and what has no estimate."""

    serve: float
    train: float
    optimizer: float
    sync: float
    micro_batch_s: float
    iterations: int
    """It was measured on; the first of a run is left out."""
    exact_lengths: bool
    """Whether each response's length is known, or only its group's mean."""

    def scaled(self, rates: Rates) -> Rates:
        """The estimate, as fast as the run was."""
        return replace(
            rates,
            step_s=self.serve * rates.step_s,
            sequence_s=self.serve * rates.sequence_s,
            context_s=self.serve * rates.context_s,
            prompt_s=self.serve * rates.prompt_s,
            micro_batch_s=self.micro_batch_s,
            token_s=self.train * rates.token_s,
            pair_s=self.train * rates.pair_s,
            optimizer_s=self.optimizer * rates.optimizer_s,
            sync_s=self.sync * rates.sync_s,
        )


def calibrate(run: Path, *, chosen: range | None = None) -> tuple[Calibration, list[list[GroupWork]]]:
    """What a run tells.

    Args:
        run: its folder.
        chosen: iterations to look at; all but the first if not given.

    Returns:
        (the factors, the groups of each iteration looked at).

    Raises:
        ConfigError: the run has no iteration to look at.
    """
    if missing := [name for name in ("config.yaml", "placement.json", "metrics.jsonl", "trace") if not (run / name).exists()]:
        raise ConfigError(f"--measure {run}: is no folder of a run, it lacks {', '.join(missing)}")
    config, placement, spans = load(run / "config.yaml"), Placement.load(run / "placement.json"), read_spans(run)
    lines: dict[int, Line] = {line["iteration"]: line for line in read_metrics(run) if "time/step_s" in line}  # type: ignore[misc]
    numbers = [t for t in (range(1, 1 + max(lines, default=0)) if chosen is None else chosen) if t in lines]
    if not numbers or config.replayed_run:
        raise ConfigError(f"--measure {run}: has no iteration after the first that servers sampled, {len(lines)} in all")
    geometry = read_geometry(Path(config.model.path))
    rates = estimate(config, geometry, Machine(placement.kind, 1, devices.memory_bytes(placement.kind)))
    works = [_work(config, run, lines[t], [s for s in spans if s["iteration"] == t and s["name"] == "group"]) for t in numbers]
    serve = [lines[t]["time/generate_s"] / generate(config, work, rates).arrivals[-1][0] for t, work in zip(numbers, works, strict=True)]
    trained = [[s for s in spans if s["iteration"] == t and s["name"] == "micro-batch"] for t in numbers]
    fixed_s, train = _training(config, trained, works, rates)
    optimizer_s = statistics.median(_length(s) for s in spans if s["iteration"] in numbers and s["name"] == "optimizer")
    sync_s = statistics.median(lines[t]["time/sync_s"] for t in numbers)
    return Calibration(
        serve=statistics.median(serve),
        train=train,
        optimizer=optimizer_s / rates.optimizer_s,
        sync=sync_s / rates.sync_s,
        micro_batch_s=fixed_s,
        iterations=len(numbers),
        exact_lengths=(run / "rollouts").is_dir(),
    ), works


def _work(config: Config, run: Path, line: Line, spans: list[Span]) -> list[GroupWork]:
    """The groups of one iteration: as recorded, else with responses of their group's mean length and the batch's mean prompt."""
    count = config.algorithm.group_responses
    if (run / "rollouts").is_dir():
        groups = sorted(read_recording(run, int(line["iteration"])).groups, key=lambda g: g.group_id)
        lengths = [tuple(max(1, len(r.ids) // 4) for r in g.responses) for g in groups]
        prompts = [len(g.prompt_ids) // 4 for g in groups]
    else:
        spans = sorted(spans, key=lambda s: s["group"])
        lengths = [(max(1, round(s["tokens"] / count)),) * count for s in spans]
        prompts = [round(line["tokens/prompt"] / count / len(spans))] * len(spans)
    return [GroupWork(prompt, of_group, max(of_group)) for prompt, of_group in zip(prompts, lengths, strict=True)]


def _training(config: Config, trained: list[list[Span]], works: list[list[GroupWork]], rates: Rates) -> tuple[float, float]:
    """(seconds of a micro-batch whatever is in it, measured over estimated of the rest), of the spans and the groups of each iteration.

    Least squares of seconds over tokens; where all are of one size nothing is told apart, and all counts as rest.
    """
    every = [(s["tokens"], _length(s)) for spans in trained for s in spans]
    tokens, seconds = np.array(every).T
    slope, fixed_s = np.polyfit(tokens, seconds, 1) if tokens.std() > 0.1 * tokens.mean() else (0.0, 0.0)
    fixed_s = float(fixed_s) if slope > 0 and fixed_s > 0 else 0.0
    ratios = []
    for spans, work in zip(trained, works, strict=True):
        measured_s = sum(_length(s) - fixed_s for s in spans) / config.parallel.tensor  # all shards of a replica tell of the same
        ratios.append(measured_s / sum(training_time(config, [group], rates)[0] for group in work))
    return fixed_s, statistics.median(ratios)


def _length(span: Span) -> float:
    return float(span["end"] - span["begin"])
