"""Keep the processes of one run: all work, or all end.

    launcher (this, one thread) --Popen--> guard, servers, torchrun -> ranks      each in a session of its own
        ^-- signals (queue)     <--Tail--- logs/<name>.log                        stdout and stderr

The launcher wakes for a signal, and ten times a second for new log lines and ended processes.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

import pasync
from pasync import guard
from pasync.cause import Exit, Failure, find_cause
from pasync.errors import ConfigError, RankLost
from pasync.observe.console import WATCHED, Screen, Tail, parse
from pasync.processes import LAUNCHER_PID, RUN_ID, STOPPED, all_in_run, kill_run
from pasync.suspended import SuspensionWatch

TICK_S = 0.1
SETTLE_S = 2.0
"""Wait for the others' evidence after the first sign of a failure."""
STOP_S = 2.0
"""Time between SIGTERM and SIGKILL."""
CLEAN_EXIT_S = 10.0
"""Servers and ranks may end that much apart."""
LONGEST_TMPDIR = 54
"""Characters: a socket's path has at most 107 (unix(7)), of which a folder of the run's own takes 16 and vLLM's name for it 37."""
TORCHRUN_VARIABLES = re.compile(r"(TORCHELASTIC_.*|(LOCAL_|GROUP_|ROLE_|)(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT))$")


@dataclass(frozen=True)
class Command:
    """A process to start."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """On top of the launcher's own environment."""
    cores: list[int] = field(default_factory=list)
    """Cores it is bound to; empty: any."""
    restarts: int = 0
    """How often it is started again after it failed."""


class RunFailed(Exception):
    """Something ended the run; `failure` says what."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Stopped(Exception):
    """A signal asks to end the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Child:
    """A started process, its log, and when its end was seen.

    Args:
        command: that starts it again; None if it is not to be.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], tail: Tail | None, command: Command | None = None) -> None:
        self.name, self.process, self.tail, self.command = name, process, tail, command
        self.exit: Exit | None = None

    def poll(self) -> Exit | None:
        """How it ended, None while it runs."""
        code = self.process.poll()
        if self.exit is None and code is not None:
            self.exit = Exit(self.name, self.process.pid, code, time.time())
        return self.exit


class Supervisor:
    """The processes of the run in `run_dir`; leaving the `with` block ends every one of them, whatever happened.

    Sockets that vLLM leaves behind, and folders that torchrun does, are in a folder that goes with the run.

    The run's marker is its folder, so a folder holds one live run.

    Args:
        silence_s: a process that is stopped for so long is killed.
    """

    def __init__(self, run_dir: Path, screen: Screen, silence_s: float) -> None:
        self.run_dir, self.logs, self.screen = run_dir, run_dir / "logs", screen
        self.run_id = str(run_dir)
        self.children: list[Child] = []
        self._suspended = SuspensionWatch(silence_s, self._processes)
        self._killed_for: dict[int, str] = {}
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put is safe in a signal handler, Event.set is not
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Supervisor:
        if left := all_in_run(self.run_id):
            raise ConfigError(f"run.dir={self.run_dir}: another run is still working there, pids {[p.pid for p in left]}")
        self.logs.mkdir(parents=True, exist_ok=True)
        for old in (*self.logs.glob("*.error.json"), self.logs / STOPPED):
            old.unlink(missing_ok=True)  # of the run that this one continues
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)
        folder = tempfile.gettempdir()
        self._scratch = tempfile.mkdtemp(prefix="pasync-", dir=folder if len(folder) <= LONGEST_TMPDIR else "/tmp")
        self._guard = Child("guard", guard.start(self.run_id, _base_environment(), self._suspended.limit_s, self._scratch), None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end_all()
            self._forward_logs()
        finally:
            self.screen.close()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, command: Command) -> Child:
        """Start a process in its own session, with the run's marker, its output appended to logs/<name>.log."""
        log = self.logs / f"{command.name}.log"
        tail = Tail(log)
        env = _base_environment() | command.env | {RUN_ID: self.run_id, LAUNCHER_PID: str(os.getpid())}
        env |= {"VLLM_RPC_BASE_PATH": self._scratch, "PET_LOG_DIR": self._scratch}
        env |= {WATCHED: "1"} if self.screen.is_watched else {}
        pin = partial(os.sched_setaffinity, 0, command.cores) if command.cores else None
        with log.open("ab") as output:
            process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
                start_new_session=True, preexec_fn=pin,  # no threads here, so preexec_fn is safe
            )  # fmt: skip
        self.children.append(Child(command.name, process, tail, command if command.restarts else None))
        return self.children[-1]

    def wait_for(self, main: Child, grace_s: float = 0.0) -> None:
        """Return when `main` has ended with code 0, the others still at work.

        Waits without a deadline, because the processes have their own. Woken by a signal, else every TICK_S.

        Args:
            grace_s: after SIGTERM, `main` is torchrun and its ranks have so long to save; 0: they have nothing to save.

        Raises:
            RunFailed: another process ended before, `main` ended with another code, or somebody reported an error.
            Stopped: by a signal; after SIGTERM only if `main` did not end with code 0 in time.
        """
        while not (exit := main.poll()) or exit.code != 0:
            try:
                self._tick()
            except Stopped as stopped:
                if stopped.number != signal.SIGTERM or not self._let_save(main, grace_s):
                    raise
                continue
            if self._failed() and not self._revive():
                raise RunFailed(self._cause(main))
        self._forward_logs()
        self.children.remove(main)

    def wait_until(self, there: Callable[[], bool], timeout_s: float) -> bool:
        """Whether something that no process of ours does comes true in time; looked at every TICK_S. Raises Stopped."""
        deadline = time.monotonic() + timeout_s
        while not there():
            if time.monotonic() > deadline:
                return False
            self._tick()
        return True

    def let_finish(self, timeout_s: float = CLEAN_EXIT_S) -> None:
        """Give the processes that are left some time to end by themselves. Raises Stopped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(child.poll() is None for child in self.children):
            self._tick()

    def _cause(self, main: Child) -> Failure:
        """Of the failure. A rank that only lost another one is none, so wait for torchrun's word on the other; Stopped by a signal."""
        self.let_finish(SETTLE_S)
        deadline = time.monotonic() + CLEAN_EXIT_S
        while True:
            ended = main.poll()  # before its log is read
            ranks = main.tail.gained() if main.tail and main.name == "ranks" else ""
            cause = find_cause(self.logs, self._exits(), ranks, self._killed_for)
            if cause.error != RankLost.__name__ or ended or time.monotonic() > deadline:
                return cause
            self._tick()

    def _let_save(self, main: Child, grace_s: float) -> bool:
        """Ask the ranks themselves, not torchrun, which would kill them after 30 s; whether it all ended well in time.

        What happens to the other processes is of no interest: whoever sent SIGTERM may have sent it to them, too.
        """
        if not grace_s:
            return False
        self.screen.say(f"SIGTERM: the ranks save where they are, for at most checkpoint.grace_s={grace_s} s")
        with suppress(psutil.NoSuchProcess):
            for rank in psutil.Process(main.process.pid).children():
                rank.terminate()
        deadline = time.monotonic() + grace_s
        while main.poll() is None and time.monotonic() < deadline:
            try:
                self._tick()
            except Stopped as again:
                if again.number != signal.SIGTERM:  # which often comes twice
                    raise
        return main.exit is not None and main.exit.code == 0

    def _failed(self) -> bool:
        """Whether a process ended badly or too early. A server may end well a little before the ranks do."""
        return any(map(_is_failure, self._exits())) or bool(self._reports())

    def _revive(self) -> bool:
        """Start again whatever failed and may be; all that is left of it ends first. A user's mistake would only be met again.

        Returns:
            Whether there was any.
        """
        reports, revived = self._reports(), []
        for child in list(self.children):
            report, exit = reports.get(child.name, {}), child.poll()
            if child.command and (report or (exit and _is_failure(exit))) and report.get("error") != ConfigError.__name__:
                child.process.kill()
                kill_run(self.run_id, session=child.process.pid)
                (self.logs / f"{child.name}.error.json").unlink(missing_ok=True)
                self._forward_logs()
                self.children.remove(child)
                left, code = child.command.restarts - 1, child.process.wait()
                self.screen.say(f"{child.name} is started again, {left} restarts are left: {report.get('message') or f'exit code {code}'}")
                revived.append(self.start(replace(child.command, restarts=left)))
        return bool(revived)

    def _reports(self) -> dict[str, dict[str, Any]]:
        """Error reports by process; those on a server that is gone already, or that others have started, are removed."""
        found, pids = {}, {child.name: child.process.pid for child in self.children}
        for path in self.logs.glob("*.error.json"):
            report = json.loads(path.read_text())
            if report["process"].startswith("server-") and pids.get(report["process"]) != report["pid"]:
                path.unlink()
            else:
                found[report["process"]] = report
        return found

    def _exits(self) -> list[Exit]:
        return [e for child in (*self.children, self._guard) if (e := child.poll())]

    def _tick(self) -> None:
        """Wait TICK_S, or raise Stopped at once; then show what is new."""
        with suppress(queue.Empty):
            raise Stopped(self._signals.get(timeout=TICK_S))
        self._forward_logs()
        self._end_suspended()
        self.screen.tick()

    def _forward_logs(self) -> None:
        for child in self.children:
            for line in child.tail.lines() if child.tail else []:
                if event := parse(line):
                    self.screen.show(event, child.name if child.name.startswith("server-") else "")

    def _end_suspended(self) -> None:
        """Kill whoever is stopped for too long; what follows is as if it had died by itself."""
        for process in self._suspended.overdue():
            with suppress(psutil.Error, ProcessLookupError):  # gone meanwhile
                why = f"was stopped (SIGSTOP) for run.silence_s={self._suspended.limit_s} and is killed"
                self.screen.say(f"{self._name(process)} (pid {process.pid}) {why}")
                self._killed_for[process.pid] = why
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        """All that are to work: those of the run, and the guard, unless it is gone."""
        found = all_in_run(self.run_id)
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(self._guard.process.pid))
        return found

    def _name(self, process: psutil.Process) -> str:
        names = {child.process.pid: child.name for child in (*self.children, self._guard)}
        if rank := process.environ().get("RANK"):
            return f"rank-{rank}"
        return names.get(process.pid) or f"{process.name()} of {names.get(os.getsid(process.pid), 'the run')}"

    def _end_all(self) -> None:
        """SIGTERM, up to STOP_S for clean ends (another signal cuts it short), then SIGKILL for all that carry the marker."""
        for child in self.children:
            if child.poll() is None:
                child.process.terminate()
        with suppress(Stopped):
            self.let_finish(STOP_S)
        kill_run(self.run_id)
        with suppress(subprocess.TimeoutExpired):  # what SIGKILL cannot end is stuck in the kernel
            for child in self.children:
                child.process.wait(STOP_S)
            self._guard.process.communicate(guard.QUIET, STOP_S)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)


def _is_failure(exit: Exit) -> bool:
    return exit.code != 0 or time.time() - exit.time > CLEAN_EXIT_S


def _base_environment() -> dict[str, str]:
    """The launcher's environment without what an outer torchrun left, and with this checkout on the path."""
    env = {key: value for key, value in os.environ.items() if not TORCHRUN_VARIABLES.match(key)}
    paths = [str(Path(pasync.__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    unbuffered = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return env | unbuffered | {"SPT_NOENV": "1"}  # or setproctitle, which vLLM uses, wipes the marker out of /proc
