"""Whether this machine can run a configuration: `python -m pasync.doctor [CONFIG] [key.sub=value ...]`.

    doctor --fork--> a process per check, its output in a scratch folder --[Finding, ..]--> ok | warn | fail, what was found, what to do

Without a configuration only the machine is looked at. Exit codes: 0 nothing failed, 1 something did, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from pasync import checks
from pasync import device as devices
from pasync.checks import Finding, fail, warn
from pasync.config import Config
from pasync.configfile import load
from pasync.errors import ConfigError
from pasync.launch import placed
from pasync.model.prepare import LOCK_S
from pasync.processes import die_with_parent
from pasync.supervisor import RunFailed

END_S = 15.0
"""For a check past its deadline to end the processes that it started."""
_FORK = multiprocessing.get_context("fork")  # this process has no threads and loads no torch


class Check(NamedTuple):
    """A row of the table."""

    name: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float = 60
    after: tuple[str, ...] = ()
    """Where one of these failed, this one would only say the same again."""


def table(config: Config | None, work: Path) -> list[Check]:
    """All checks, in order; without a configuration those of the machine.

    Args:
        work: has a folder for every check that starts processes.
    """
    kind = devices.detect() if config is None or config.device.kind == "auto" else config.device.kind
    count = config.device.count if config else None
    pins = Path(os.path.relpath(Path(__file__).parents[1] / "requirements" / f"{kind}.txt"))
    machine = [
        Check("python", checks.python),
        Check("packages", partial(checks.packages, pins)),
        Check("companions", checks.companions, 120),
        Check("devices", partial(checks.accelerators, kind, count), 120),
        Check("ports", lambda: checks.loopback(placed(config, False).address if config else "tcp://127.0.0.1:0"), 60, ("configuration",)),
        Check("shared-memory", checks.shared_memory),
        Check("broadcast", partial(checks.broadcast, kind, work / "broadcast"), 180, ("devices",)),
    ]
    if config is None:
        return machine
    answer_s, needed = config.rollout.start_s + config.rollout.deadline_s + 60, ("configuration", "devices", "model", "prompts", "reward")
    return [
        Check("configuration", partial(checks.configuration, config)),
        *machine,
        Check("model", partial(checks.weights, config), LOCK_S + 60),
        Check("memory", partial(checks.memory, config, kind), 120, ("devices", "model")),
        Check("disk", partial(checks.disk, config), 60, ("model",)),
        Check("prompts", partial(checks.prompts, config), 600, ("model",)),
        Check("reward", partial(checks.reward, config), 180, ("prompts",)),
        Check("server", partial(checks.server, config, work / "server"), answer_s, needed),
    ]


def findings(rows: list[Check], work: Path) -> Iterator[tuple[str, Finding]]:
    """Every finding of the table with its check's name, as they come."""
    failed: set[str] = set()
    for check in rows:
        causes = [name for name in check.after if name in failed]
        found = [warn(f"not tried, because of {', '.join(causes)}")] if causes else examine(check, work)
        yield from ((check.name, finding) for finding in found)
        if causes or any(finding.level == "fail" for finding in found):
            failed.add(check.name)


def examine(check: Check, work: Path) -> list[Finding]:
    """Run one check in a process of its own; whatever becomes of it is a finding. Waits for it, at most its deadline."""
    (work / check.name).mkdir()
    log = work / f"{check.name}.log"
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_look, args=(check, sender, log))
    process.start()
    sender.close()
    try:
        if receiver.poll(check.deadline_s):
            return receiver.recv()  # type: ignore[no-any-return]
        return [fail(f"not done within {check.deadline_s:.0f} s; see {log}")]
    except EOFError:
        process.join(END_S)
        return [fail(f"its process ended with code {process.exitcode}; see {log}")]
    finally:
        process.terminate()
        process.join(END_S)
        process.kill()


def _look(check: Check, sender: Connection, log: Path) -> None:
    """In the check's process: what is printed goes to the log, and nothing is raised."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the doctor, who then ends this process
    output, found = log.open("w", buffering=1), list[Finding]()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        for finding in check.look():
            found.append(finding)
    except ConfigError as error:
        found.append(fail(str(error)))
    except RunFailed as failed:
        found.append(fail(f"{failed.failure.error}: {failed.failure.message}; see {failed.failure.log}"))
    except BaseException as error:
        traceback.print_exc(file=output)
        found.append(fail(f"{type(error).__name__}: {error}; see {log}"))
    sender.send(found)


def main(argv: list[str] | None = None) -> int:
    """Look at everything; returns the exit code. The scratch folder stays if something failed."""
    parser = argparse.ArgumentParser(prog="python -m pasync.doctor", description="Check this machine, and whether a configuration can run.")
    parser.add_argument("config", type=Path, nargs="?", help="YAML file; without it only the machine is checked")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replaces a value of the file")
    args = parser.parse_intermixed_args(argv)
    work, code = Path(tempfile.mkdtemp(prefix="pasync-doctor-")), 0
    config, broken = None, list[tuple[str, Finding]]()
    try:
        config = load(args.config, args.overrides) if args.config else None
    except ConfigError as error:
        broken = [("configuration", fail(line)) for line in str(error).splitlines() if not line.endswith("in the configuration:")]
    try:
        for name, finding in chain(broken, findings(table(config, work), work)):
            print(f"{finding.level:<5} {name:<14} {' '.join(finding.text.split())}", flush=True)
            code = max(code, int(finding.level == "fail"))
    except KeyboardInterrupt:
        print("Interrupted: all processes have ended", file=sys.stderr)
        code = 130
    if code != 1:
        shutil.rmtree(work, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
