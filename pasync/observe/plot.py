"""Draw what runs learned and where their time went: `python -m pasync.observe.plot OUT.png RUN [RUN ...] [--by-schedule]`.

    <run>/metrics.jsonl, one run per seed --> left: held-out accuracy and mean reward; right: times of the first run's iterations
    --by-schedule --> rewards and accuracies of each schedule: mean over its runs, and the range between them
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from pasync.configfile import load
from pasync.observe.metrics import read_metrics


def plot(out: Path, runs: list[Path]) -> None:
    """Write the picture.

    Args:
        out: PNG file.
        runs: run folders of one configuration, for instance three seeds.
    """
    figure, (learning, times) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, run in enumerate(runs):
        _draw_learning(learning, read_metrics(run), f"C{i}", run.name)
    learning.set(title="Learning", xlabel="iteration", ylabel="accuracy, reward", ylim=(0, 1.02))
    learning.legend(loc="lower right", fontsize=8)
    _draw_times(times, read_metrics(runs[0]))
    times.margins(y=0.35)  # room for the legend
    times.set(title=f"Time of an iteration ({runs[0].name})", xlabel="iteration", ylabel="seconds")
    times.set_ylim(bottom=0)
    times.legend(loc="upper right", fontsize=8)
    figure.savefig(out, dpi=110)


def compare(out: Path, runs: list[Path]) -> None:
    """Write the picture of schedules side by side, and print each one's figures.

    Args:
        out: PNG file.
        runs: run folders, several seeds of each schedule, equally long.
    """
    by_schedule: dict[str, list[Path]] = {}
    for run in runs:
        by_schedule.setdefault(load(run / "config.yaml").schedule, []).append(run)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for ax, key in zip(axes, ("reward/mean", "eval/accuracy_frac"), strict=True):
        for i, (schedule, members) in enumerate(sorted(by_schedule.items())):
            lines = [[line for line in read_metrics(run) if key in line] for run in members]
            values = np.array([_column(of_run, key) for of_run in lines])  # [runs, iterations]
            steps = _column(lines[0], "iteration")
            ax.plot(steps, values.mean(0), color=f"C{i}", label=f"{schedule}, mean of {len(members)} seeds")
            ax.fill_between(steps, values.min(0), values.max(0), color=f"C{i}", alpha=0.2)
            last = values[:, -10:].mean(1) if key == "reward/mean" else values[:, -1]
            print(f"{key} {schedule}: " + ", ".join(f"{v:.3f}" for v in last))
        ax.set(title=key, xlabel="iteration", ylim=(0, 1.02))
        ax.legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=110)


def _draw_learning(axes: Any, lines: list[dict[str, Any]], color: str, name: str) -> None:
    evaluated = [line for line in lines if "eval/accuracy_frac" in line]
    trained = [line for line in lines if "reward/mean" in line]
    axes.plot(_column(trained, "iteration"), _column(trained, "reward/mean"), color=color, alpha=0.35, lw=1)
    accuracy = _column(evaluated, "eval/accuracy_frac")
    axes.plot(_column(evaluated, "iteration"), accuracy, "o-", color=color, label=f"{name}: held-out accuracy")


def _draw_times(axes: Any, lines: list[dict[str, Any]]) -> None:
    trained = [line for line in lines if "time/step_s" in line]
    for key, label in (
        ("time/step_s", "step"),
        ("time/ideal_s", "ideal: max(generate, train) + sync"),
        ("time/generate_s", "generate"),
        ("time/train_s", "train"),
        ("time/sync_s", "sync"),
    ):
        axes.plot(_column(trained, "iteration"), _column(trained, key), label=label, lw=1.2)


def _column(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--by-schedule", action="store_true")
    options = parser.parse_args()
    (compare if options.by_schedule else plot)(options.out, options.runs)
