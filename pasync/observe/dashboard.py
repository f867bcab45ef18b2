"""What stands under a run's lines on a terminal: the last step as bars, the course of the reward, and who has how much to do.

    facts, by name: STEP_FACTS and rewards, of the RunLog; ready, waiting and servers, of the RolloutProducer
"""

from __future__ import annotations

from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table

LEVELS = "▁▂▃▄▅▆▇█"
STEP_FACTS = ("generate_s", "train_s", "sync_s", "step_s", "of_ideal_frac")
SHOWN = 40
"""Iterations in the line of rewards."""
BAR_WIDTH = 28


def dashboard(facts: dict[str, Any]) -> Table:
    """Rows for those facts that are known."""
    rows = Table.grid(padding=(0, 1))
    if facts.get("step_s"):
        for name in ("generate_s", "train_s", "sync_s"):
            bar = ProgressBar(facts["step_s"], facts[name], BAR_WIDTH, complete_style="cyan", finished_style="cyan")
            rows.add_row(name[:-2], bar, f"{facts[name]:.2f} s")
        rows.add_row("step", f"{facts['step_s']:.2f} s", f"{facts['of_ideal_frac']:.2f} of the ideal")
    if rewards := facts.get("rewards"):
        rows.add_row("reward", sparkline(rewards), f"{rewards[-1]:.3f}")
    if "servers" in facts:
        busy = ", ".join(f"server-{i} " + ("is away" if n is None else f"has {n}") for i, n in enumerate(facts["servers"]))
        rows.add_row("groups", f"{facts['ready']} ready, {facts['waiting']} not begun", busy)
    return rows


def sparkline(values: list[float]) -> str:
    """The last values as a line of bars between their least and greatest."""
    shown = values[-SHOWN:]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(LEVELS[round((value - low) / span * (len(LEVELS) - 1))] for value in shown)
