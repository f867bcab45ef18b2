"""What happened when: each process appends spans to a file of its own; `pasync.observe.timeline` draws them.

    <run>/trace/rank-0.jsonl   {"name": "micro-batch", "iteration": 3, "begin": 1764440000.1, "end": 1764440000.9, "tokens": 4096}

Times are unix seconds: one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pasync.messages import Group


class Trace:
    """Writes the spans of one process. Belongs to its main thread.

    Args:
        first: iteration that the run begins with; spans from it on are removed, they are done again.
    """

    def __init__(self, run: Path, process: str, first: int) -> None:
        path = run / "trace" / f"{process}.jsonl"
        path.parent.mkdir(exist_ok=True)
        drop_lines(path, first)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def add(self, name: str, iteration: int, begin: float, end: float, **facts: Any) -> None:
        """Write one span, unix times."""
        self._file.write(json.dumps({"name": name, "iteration": iteration, "begin": begin, "end": end, **facts}) + "\n")

    @contextmanager
    def span(self, name: str, iteration: int, **facts: Any) -> Iterator[None]:
        """Write the time of the block, if it ends well."""
        began = time.time()
        yield
        self.add(name, iteration, began, time.time(), **facts)

    def group(self, iteration: int, group: Group, arrived: float) -> None:
        """Write a group's time on its server, and when it came to the trainer."""
        facts = {"server": group.server, "group": group.group_id, "tokens": group.num_response_tokens, "arrived": arrived}
        self.add("group", iteration, group.started, group.finished, **facts)


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that grows, without one that is not finished."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def drop_lines(path: Path, first: int) -> None:
    """Remove lines of iterations from `first` on, and one that a crash left unfinished."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [text for text in lines if text.endswith("\n") and json.loads(text)["iteration"] < first]
        path.write_text("".join(kept), encoding="utf-8")
