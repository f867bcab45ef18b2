"""What ran when, in the whole of a run: `python -m pasync.observe.timeline RUN [RUN ...]`. `pasync.report` draws one iteration.

    <run>/trace/*.jsonl --> <run>/timeline.json   Chrome trace, opens in https://ui.perfetto.dev
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pasync.observe.trace import whole_lines

Span = dict[str, Any]


def read_spans(run: Path) -> list[Span]:
    """Every span of a run with the process it belongs to (`row`), by time. Raises FileNotFoundError if it has none."""
    files = sorted((run / "trace").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run} has no trace: {run / 'trace'} holds no .jsonl file")
    spans = []
    for path in files:
        for line in whole_lines(path):
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


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description="Write the Chrome trace of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for run in parser.parse_args().runs:
        (run / "timeline.json").write_text(json.dumps(chrome_trace(read_spans(run))))
        print(run / "timeline.json")


if __name__ == "__main__":
    main()
