"""One picture of what ran when: `python -m pasync.observe.timeline RUN [RUN2] [--iteration N] [--out PICTURE.png]`.

    <run>/trace/*.jsonl --> <run>/timeline.json   Chrome trace of the whole run, opens in https://ui.perfetto.dev
                        --> PICTURE.png           one iteration; of two runs one above the other on one scale
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Span = dict[str, Any]
COLORS = {"group": "C0", "micro-batch": "C1", "optimizer": "C3", "sync": "C2", "checkpoint": "C4", "evaluate": "C7"}


def read_spans(run: Path) -> list[Span]:
    """Every span of a run with the process it belongs to (`row`), by time. Raises FileNotFoundError if it has none."""
    files = sorted((run / "trace").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run} has no trace: {run / 'trace'} holds no .jsonl file")
    spans = []
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            span = json.loads(line)
            spans.append(span | {"row": f"server-{span['server']}" if span["name"] == "group" else path.stem})
    return sorted(spans, key=lambda s: s["begin"])


def chrome_trace(spans: list[Span]) -> dict[str, Any]:
    """Spans as Chrome trace events: one process per row, overlapping groups of a server on lanes, queue depth as a counter.

    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, times in microseconds.
    """
    start = min(s["begin"] for s in spans)
    rows = sorted({s["row"] for s in spans}, reverse=True)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": row}} for i, row in enumerate(rows)
    ]
    for span, lane in zip(spans, lanes(spans), strict=True):
        facts = {k: v for k, v in span.items() if k not in ("name", "begin", "end", "row")}
        name = f"group {span['group']}" if span["name"] == "group" else span["name"]
        at, length = (span["begin"] - start) * 1e6, (span["end"] - span["begin"]) * 1e6
        events.append({"ph": "X", "name": name, "pid": rows.index(span["row"]), "tid": lane, "ts": at, "dur": length, "args": facts})
    for at, depth in queue_depth(spans):
        counter = {"ph": "C", "name": "groups ready", "pid": rows.index("rank-0"), "tid": 0, "ts": (at - start) * 1e6}
        events.append(counter | {"args": {"groups": depth}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(spans: list[Span]) -> list[int]:
    """A lane for each span within its row, so that none overlaps another there; spans are in order of time."""
    free_at: dict[str, list[float]] = {}
    chosen = []
    for span in spans:
        ends = free_at.setdefault(span["row"], [])
        lane = next((i for i, end in enumerate(ends) if end <= span["begin"]), len(ends))
        ends[lane : lane + 1] = [span["end"]]
        chosen.append(lane)
    return chosen


def queue_depth(spans: list[Span]) -> list[tuple[float, int]]:
    """(time, groups that have arrived and are not being trained on yet), at every change."""
    changes = [(s["arrived"], 1) for s in spans if s["name"] == "group"]
    changes += [(s["begin"], -s["groups"]) for s in spans if s["name"] == "micro-batch" and s["groups"]]
    depth, found = 0, []
    for at, change in sorted(changes, key=lambda c: (c[0], -c[1])):
        depth = max(0, depth + change)  # with refill, groups of no use arrive and are never trained on
        found.append((at, depth))
    return found


def draw(out: Path, runs: list[Path], iteration: int | None) -> None:
    """Write the picture of one iteration of each run, on one scale.

    Args:
        iteration: number; None takes the middle one of the first run.
    """
    per_run = [read_spans(run) for run in runs]
    if iteration is None:
        numbers = sorted({s["iteration"] for s in per_run[0] if s["name"] == "optimizer"})
        iteration = numbers[len(numbers) // 2]
    chosen = [[s for s in spans if s["iteration"] == iteration and s["name"] != "evaluate"] for spans in per_run]
    if not all(chosen):
        raise ValueError(f"iteration={iteration}: not in every run")
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(11, 0.6 + 2.2 * len(runs)), sharex=True, squeeze=False, layout="constrained")
    for ax, spans, run in zip(axes[:, 0], chosen, runs, strict=True):
        _draw_iteration(ax, spans, f"{run.name}, iteration {iteration}")
    axes[-1, 0].set_xlabel("seconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in COLORS if name != "evaluate"]
    figure.legend(handles, [name for name in COLORS if name != "evaluate"], loc="outside right upper", fontsize=8)
    figure.savefig(out, dpi=110)


def _draw_iteration(ax: Any, spans: list[Span], title: str) -> None:
    start, end = min(s["begin"] for s in spans), max(s["end"] for s in spans)
    rows = sorted({s["row"] for s in spans})  # rank-0, .., server-0, .. from below
    lane_of, tops = lanes(spans), {}
    for row in rows:
        tops[row] = 1 + max(lane for span, lane in zip(spans, lane_of, strict=True) if span["row"] == row)
    for span, lane in zip(spans, lane_of, strict=True):
        height = 0.8 / tops[span["row"]]
        y = rows.index(span["row"]) - 0.4 + lane * height
        ax.broken_barh([(span["begin"] - start, span["end"] - span["begin"])], (y, height), color=COLORS[span["name"]], ec="white", lw=0.3)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_title(f"{title}: {end - start:.2f} s", fontsize=10, loc="left")


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description="Chrome trace of a run, and a picture of one iteration of one or two runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--out", type=Path, help="default: RUN/timeline.png")
    options = parser.parse_args()
    for run in options.runs:
        (run / "timeline.json").write_text(json.dumps(chrome_trace(read_spans(run))))
        print(run / "timeline.json")
    out = options.out or options.runs[0] / "timeline.png"
    draw(out, options.runs, options.iteration)
    print(out)


if __name__ == "__main__":
    main()
