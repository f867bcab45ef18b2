"""What a user sees of a run: sender and receiver side by side.

    any process: say(), progress(), status() --marked lines--> its log file --Tail--> launcher: Screen --> terminal

Said lines scroll by; under them a live line tells what goes on, how far it is and how long it will take, and the dashboard the newest
facts. Without a terminal the line is printed now and then and there are no facts. Outside a launched run `say` and `progress` just print.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich import progress as bars
from rich.console import Console, Group
from rich.live import Live

from pasync.observe.dashboard import dashboard

SAY, PROGRESS, STATUS = "::say:: ", "::progress:: ", "::status:: "
WATCHED = "PASYNC_WATCHED"
"""Set in the environment of a run's processes if its console is a terminal."""
PLAIN_EVERY_S = 5.0
READ_BYTES = 1 << 20


class Said(NamedTuple):
    """A line for the user."""

    text: str


class Progress(NamedTuple):
    """How far the thing that goes on is."""

    label: str
    done: int
    total: int


class Status(NamedTuple):
    """Facts that the dashboard shows from now on."""

    facts: dict[str, Any]


def say(text: str) -> None:
    """Show the user a line (or several)."""
    mark = SAY if "PASYNC_RUN_ID" in os.environ else ""
    _emit("".join(f"{mark}{line}\n" for line in text.splitlines() or [""]))


def progress(label: str, done: int, total: int) -> None:
    """Show the user how far something is; the newest call of any process is the one that shows."""
    if "PASYNC_RUN_ID" in os.environ:
        _emit(f"{PROGRESS}{json.dumps(Progress(label, done, total)._asdict())}\n")
    else:
        _emit(f"{label} {done}/{total}\n")


def status(**facts: Any) -> None:
    """Give the dashboard newer facts, if anybody watches."""
    if WATCHED in os.environ:
        _emit(f"{STATUS}{json.dumps(facts)}\n")


def parse(line: str) -> Said | Progress | Status | None:
    """Read a line of a log file; None if it is not for the user."""
    if line.startswith(SAY):
        return Said(line[len(SAY) :])
    try:
        if line.startswith(PROGRESS):
            return Progress(**json.loads(line[len(PROGRESS) :]))
        if line.startswith(STATUS):
            return Status(dict(json.loads(line[len(STATUS) :])))
    except (ValueError, TypeError):
        pass  # somebody else's line that happens to begin alike
    return None


class Tail:
    """The lines that a file gains from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self._position = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Complete lines since the last call, at most about READ_BYTES of them; does not wait."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read(READ_BYTES)
        self._position += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def gained(self) -> str:
        """Everything since the start, again."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")


class Screen:
    """The launcher's terminal. Not thread-safe, starts no thread: call `tick` about ten times a second."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or Console(soft_wrap=True, highlight=False, markup=False, emoji=False), clock
        columns = (
            bars.SpinnerColumn(), bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(),
        )  # fmt: skip
        self._facts: dict[str, Any] = {}
        self._bars = bars.Progress(*columns, console=self._console, auto_refresh=False, get_time=clock)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self._view)
        self._task: bars.TaskID | None = None
        self._now, self._printed = Progress("", 0, 0), Progress("", 0, 0)
        self._since, self._done_before, self._printed_at = clock(), 0, float("-inf")

    @property
    def is_watched(self) -> bool:
        """Whether there is a terminal, and so a dashboard."""
        return self._console.is_terminal

    def show(self, event: Said | Progress | Status, source: str = "") -> None:
        """Show what a process sent; `source` goes before a said line."""
        if isinstance(event, Progress):
            self._advance(event)
        elif isinstance(event, Status):
            self._facts |= event.facts
        else:
            self.say(f"{source} | {event.text}" if source else event.text)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Redraw the live line, or print the plain one if it is due."""
        if self._task is not None and self.is_watched:
            self._live.refresh()
        elif self._now != self._printed and self._clock() - self._printed_at >= PLAIN_EVERY_S:
            self.say(f"{self._now.label} {self._now.done}/{self._now.total} ({self._time()})")
            self._printed, self._printed_at = self._now, self._clock()

    def _time(self) -> str:
        """Seconds so far, and what is left at the pace since the live line last changed its subject."""
        elapsed, (_, done, total) = self._clock() - self._since, self._now
        made = done - self._done_before
        left = f", about {elapsed / made * (total - done):.0f} s left" if made > 0 and done < total else ""
        return f"{elapsed:.0f} s{left}"

    def close(self) -> None:
        """Remove the live line."""
        if self._task is not None:
            self._live.stop()

    def _advance(self, event: Progress) -> None:
        if event.label != self._now.label:
            self._since, self._done_before = self._clock(), event.done
            self._restart(event)
        elif self._task is not None:
            self._bars.update(self._task, completed=event.done, total=event.total)
        self._now = event

    def _restart(self, event: Progress) -> None:
        if not self.is_watched:
            return
        if self._task is None:
            self._live.start()
        else:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(event.label, total=event.total, completed=event.done)

    def _view(self) -> Group:
        return Group(self._bars, dashboard(self._facts))


def _emit(text: str) -> None:
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be written
    sys.stdout.write(text)  # one write: ranks share a log file, and print() makes two of an unbuffered line
    sys.stdout.flush()
