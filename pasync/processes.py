"""How the processes of a run die: with their parent, with a written reason, and never later than the run.

Everything the launcher starts carries `PASYNC_RUN_ID` in its environment and hands it on, so that whatever is left of
a run can be found and ended without knowing who started it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pasync.errors import ConfigError, PasyncError

RUN_ID = "PASYNC_RUN_ID"
LAUNCHER_PID = "PASYNC_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1
STOPPED = "stopped"
"""File in the folder of logs, see `report_stop`."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and end now if the parent is gone already.

    Linux only. The parent is the THREAD that started this process. Holds for this process, not for its children.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    orphan = os.getppid() != parent.pid if parent else os.getppid() == 1 and os.environ.get(LAUNCHER_PID, "1") != "1"
    if orphan:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def report_fatal(run_dir: Path, name: str) -> Iterator[None]:
    """Around a process's whole work: an exception is written down for the launcher, printed, and ends it with code 1.

    The report is `<run_dir>/logs/<name>.error.json`, there either whole or not at all. A clean exit passes through.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        traceback.print_exc()
        trace = "".join(traceback.format_exception(error)[:-1])  # without the error itself
        _write_report(run_dir, name, os.getpid(), named_error(error), trace)
        sys.exit(1)


def report_lost(name: str, pid: int, error: BaseException) -> None:
    """Write down, in place of a process that cannot, why it was given up: the launcher ends it. Does nothing outside a launched run."""
    if run := os.environ.get(RUN_ID):
        _write_report(Path(run), name, pid, error, "")


def report_stop(run_dir: Path, iteration: int) -> None:
    """Tell the launcher that the run was asked to end, did, and continues with `iteration`."""
    _write_whole(run_dir / "logs" / STOPPED, str(iteration))


def stop_report(run_dir: Path) -> str:
    """Iteration that the ranks stopped before because they were asked to; "" if they did not."""
    path = run_dir / "logs" / STOPPED
    return path.read_text() if path.exists() else ""


def all_in_run(run_id: str, session: int | None = None) -> list[psutil.Process]:
    """Every live process that carries the run's marker (of one session, if it is given), except the calling one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # gone meanwhile, a zombie, or another user's
            mine = process.pid != os.getpid() and process.environ().get(RUN_ID) == run_id
            if mine and (session is None or os.getsid(process.pid) == session):
                found.append(process)
    return found


def kill_run(run_id: str, timeout_s: float = 10.0, session: int | None = None) -> int:
    """Kill every process of the run (of one session, if it is given) until none is left; returns how many there were.

    Scans again after each round, because a process may have started another one while it was being killed.
    A process that the kernel cannot end within `timeout_s` is left to it.
    """
    deadline, killed = time.monotonic() + timeout_s, set()
    while (processes := all_in_run(run_id, session)) and time.monotonic() < deadline:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= {process.pid for process in processes}
        psutil.wait_procs(processes, timeout=0.5)
    return len(killed)


def _write_report(run_dir: Path, name: str, pid: int, error: BaseException, trace: str) -> None:
    report = {"process": name, "pid": pid, "error": type(error).__name__, "message": str(error), "time": time.time(), "traceback": trace}
    _write_whole(run_dir / "logs" / f"{name}.error.json", json.dumps(report))


def _write_whole(target: Path, text: str) -> None:
    """Write a file that is there either whole or not at all, also when several processes write it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(text)
    draft.replace(target)


def named_error(error: BaseException) -> BaseException:
    """The error of ours that led to `error`, if there is one: closing things after a failure may fail itself."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, (PasyncError, ConfigError)):
        link = link.__cause__ or link.__context__
    return link or error
