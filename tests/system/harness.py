"""Start real runs through launch.sh and watch them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
RUN_S = 400
"""Longest time for any run of a test: ten times what it takes alone, for starting is a minute of work for one core."""
STUB = ("rewards.function=benchmarks.stub_run:reward", "sync.probe_tolerance=1e9")
"""What a run with stub servers needs."""


def start(config: Path, run: Path, *overrides: str, stub: bool = False) -> subprocess.Popen[str]:
    """`bash launch.sh config overrides`, or its like with stub servers, in a session of its own, console to <run>.console."""
    launcher = [sys.executable, "-m", "benchmarks.stub_run", "launch"] if stub else ["bash", str(ROOT / "launch.sh")]
    command = [*launcher, str(config), f"run.dir={run}", *overrides]
    console = run.with_suffix(".console").open("w")
    env = os.environ | {"PASYNC_PYTHON": sys.executable} | ({"PYTHONPATH": str(ROOT)} if stub else {})
    return subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True, cwd=run.parent)


def finish(process: subprocess.Popen[str], run: Path, timeout_s: float = RUN_S) -> tuple[int, str]:
    """Wait for the end; (exit code, console). A run that does not end in time is killed and fails the test."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        raise AssertionError(f"no end within {timeout_s} s:\n{console(run)}") from None
    return code, console(run)


def completed(config: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run to the end, which must be a success; the lines of metrics.jsonl."""
    code, text = finish(start(config, run, *overrides), run)
    assert code == 0, text
    return metrics(run)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def console(run: Path) -> str:
    return run.with_suffix(".console").read_text()


def wait_for_line(path: Path, pattern: str, process: subprocess.Popen[str], timeout_s: float = RUN_S) -> re.Match[str]:
    """What matches in a log file, once something does; fail if the run ends or the time is up before."""
    end = time.monotonic() + timeout_s
    while not (found := re.search(pattern, path.read_text(errors="replace") if path.exists() else "")):
        assert process.poll() is None, f"the run ended before {pattern!r}"
        assert time.monotonic() < end, f"{pattern!r} did not appear within {timeout_s} s"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    return found


def processes_of(run: Path) -> list[psutil.Process]:
    """Every live process that belongs to the run: its environment or command line names the run folder."""
    found = []
    for process in psutil.process_iter():
        try:
            marker = process.environ().get("PASYNC_RUN_ID", "")
            if process.status() != psutil.STATUS_ZOMBIE and (marker == run_id(run) or str(run) in " ".join(process.cmdline())):
                found.append(process)
        except psutil.Error:
            continue
    return [p for p in found if p.pid != os.getpid()]


def run_id(run: Path) -> str:
    """The marker that all processes of a run carry."""
    return str(run)


def gone_within(run: Path, seconds: float) -> bool:
    """Whether no process of the run is left before the time is up."""
    psutil.wait_procs(processes_of(run), timeout=seconds)
    return not processes_of(run)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
