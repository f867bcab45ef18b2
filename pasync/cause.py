"""Why a run failed: from what its processes left behind, the one failure that the others followed from.

    exit codes of direct children, torchrun's report in ranks.log, logs/*.error.json  --find_cause()-->  Failure

When one process is killed, the others fail a moment later with errors about their lost peer. So a signal outranks
error reports of about the same moment; among reports the earliest counts, but for those of ranks that only lost another one; the end
of a log is the last resort.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from pasync.errors import ConfigError, ProcessDied, RankLost

CONSEQUENCE_S = 5.0
"""An error report that is older than a kill by more than this did not follow from it."""
LOG_LINES = 15
_RANK_FAILURE = re.compile(
    r"time\s*: (?P<time>\S+)\s*\n\s*host\s*: .*\n\s*rank\s*: (?P<rank>\d+) .*\n\s*exitcode\s*: (?P<code>-?\d+) +\(pid: (?P<pid>\d+)\)"
)
_TORCHRUN_WORDS = re.compile(r"torch/distributed/elastic/multiprocessing/api.py:\d+\]")


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    name: str
    pid: int
    code: int
    """As in Popen.returncode: negative for a signal."""
    time: float
    """Unix time at which it was seen."""


@dataclass(frozen=True)
class Failure:
    """What the user is told."""

    error: str
    """Class name of the error."""
    message: str
    process: str
    """Name of the process that failed first."""
    log: Path
    traceback: str = ""
    """What led to it, if it is not the user's mistake; ends with an end of line."""


def find_cause(logs: Path, exits: list[Exit], ranks_text: str, killed_for: Mapping[int, str] = MappingProxyType({})) -> Failure:
    """Name the root cause of a failed run.

    Args:
        logs: folder of the log files and error reports.
        exits: direct children that have ended, at least one if there is no error report.
        ranks_text: what ranks.log gained in this run.
        killed_for: why the launcher itself killed a process, by pid.
    """
    killed = [e for e in exits + rank_exits(ranks_text) if e.code < 0]
    reports = [json.loads(path.read_text()) for path in logs.glob("*.error.json")]
    reports.sort(key=lambda report: (report["error"] == RankLost.__name__, report["time"]))
    first_kill = min(killed, key=lambda e: e.time, default=None)
    if first_kill and not (reports and reports[0]["time"] < first_kill.time - CONSEQUENCE_S):
        why = killed_for.get(first_kill.pid, f"was killed by {_signal_name(-first_kill.code)}")
        message = f"{first_kill.name} (pid {first_kill.pid}) {why}"
        return Failure(ProcessDied.__name__, message, first_kill.name, log_of(logs, first_kill.name))
    if reports:
        first_report = reports[0]
        error, name = first_report["error"], first_report["process"]
        trace = "" if error == ConfigError.__name__ else first_report["traceback"]
        return Failure(error, first_report["message"], name, log_of(logs, name), trace)
    first = min(exits, key=lambda e: (e.code == 0, e.time))
    log = log_of(logs, first.name)
    message = f"{first.name} (pid {first.pid}) ended with exit code {first.code}; the end of its log:\n{_last_lines(log)}"
    return Failure(ProcessDied.__name__, message, first.name, log)


def rank_exits(ranks_text: str) -> list[Exit]:
    """Failed ranks from torchrun's report, without those that torchrun ended itself."""
    found = []
    for match in _RANK_FAILURE.finditer(ranks_text):
        moment = datetime.strptime(match["time"], "%Y-%m-%d_%H:%M:%S").timestamp()
        found.append(Exit(f"rank-{match['rank']}", int(match["pid"]), int(match["code"]), moment))
    return [e for e in found if e.code != -signal.SIGTERM]


def log_of(logs: Path, name: str) -> Path:
    """The log file of a process; all ranks share one."""
    return logs / f"{'ranks' if name.startswith('rank-') else name}.log"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _last_lines(log: Path) -> str:
    """The end of a log, or what comes before torchrun's own words about failed ranks."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    end = next((i for i, line in enumerate(lines) if _TORCHRUN_WORDS.search(line)), None)
    return "\n".join(f"  {line}" for line in lines[:end][-LOG_LINES:])
