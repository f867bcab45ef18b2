"""The process that makes orphans impossible: `python -m pasync.guard RUN_ID LAUNCHER_PID SILENCE_S SCRATCH`, started before all others.

    launcher --(pipe, write end)--> guard's stdin: end of file means that the launcher is gone, kill -9 included;
                                    one that is stopped for run.silence_s is killed
                                    guard --SIGKILL--> every process that carries the run's marker; then `scratch` goes

A launcher that ends by itself has ended the others already and says so with one byte; then there is nothing to report.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

from pasync.errors import ProcessDied
from pasync.processes import kill_run
from pasync.suspended import LOOK_S, SuspensionWatch

QUIET = b"."


def start(run_id: str, env: dict[str, str], silence_s: float, scratch: str) -> subprocess.Popen[bytes]:
    """Start the guard of this process's run; closing its stdin, dying, or being stopped for `silence_s` sets it off.

    Args:
        scratch: a folder to remove then.
    """
    argv = [sys.executable, "-m", "pasync.guard", run_id, str(os.getpid()), str(silence_s), scratch]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True,
        preexec_fn=_ignore_signals,  # before Python is up, so that it cannot be stopped while it starts
    )  # fmt: skip


def main() -> None:
    """Wait, without a deadline, until the pipe closes; then end the run. Woken by nothing else."""
    run_id, launcher, silence_s, scratch = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    why = "was killed"
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher)
        watch = SuspensionWatch(silence_s, lambda: [process])
        while not select.select([sys.stdin], [], [], LOOK_S)[0]:
            if watch.overdue():
                why = f"was stopped (SIGSTOP, Ctrl-Z) for run.silence_s={silence_s} and is killed"
                process.kill()
    said = sys.stdin.buffer.read()
    killed = kill_run(run_id)
    if said != QUIET:
        shutil.rmtree(scratch, ignore_errors=True)
        text = f"the launcher (pid {launcher}) {why}; ended the {killed} processes it had started"
        print(f"{ProcessDied.__name__}: {text}", file=sys.stderr)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
