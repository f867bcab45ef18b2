"""Draw what runs learned and where their time went: `python -m pasync.observe.plot OUT.png RUN [RUN ...]`.

    <run>/metrics.jsonl, one run per seed --> left: held-out accuracy and mean reward; right: times of the first run's iterations
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

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
    plot(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
