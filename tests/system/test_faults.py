"""The table of faults: each kind of process is killed (SIGKILL), stopped (SIGSTOP) or cut off the network at each phase of a run.

    row         what runs                                     what a fault leads to
    mortal      launcher, 1 or 2 ranks, a stub server         the run ends by name, nothing is left, the same command continues
    survivors   the same with 2 stub servers                  the run goes on; who was lost is replaced and takes part again
    real        the same with 2 real vLLM servers             the same

Cells of a row are faults of one run, one after the other; its last cell compares the final weights, bit for bit, with those of a run
that trains on the same groups undisturbed. Servers are killed at every phase; all else comes at every second or third one, so that every
phase of a row has several, and on real servers a few. PASYNC_FAULTS=all is the whole table.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from harness import ROOT, STUB, TINY, console, finish, gone_within, processes_of, start
from safetensors.torch import load_file

from pasync.rollout.recording import read_recording

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
GROUPS = 4
SILENCE_S = 2.0
SMALL = (f"algorithm.batch_groups={GROUPS}", "algorithm.group_responses=2", "eval.every=0", "data.eval=null", "parallel.accumulate=exact")
QUICK = (f"run.silence_s={SILENCE_S}", "rollout.silence_s=4", "rollout.heartbeat_s=0.5", "rollout.start_s=240", "sync.deadline_s=5")
KEPT = ("checkpoint.every=1", "rollout.source=record", "rollout.max_restarts=100")
PHASES = ("start", "sync", "generate", "train", "optimizer", "checkpoint")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MORTAL = ("rank-0", "rank-1", "launcher")


ALL = os.environ.get("PASYNC_FAULTS") == "all"


CHOSEN = {
    ("rank-0", "kill"): PHASES[::2], ("rank-0", "stop"): PHASES[1::3],
    ("rank-1", "kill"): PHASES[2::3], ("rank-1", "stop"): PHASES[3:4],
    ("launcher", "kill"): PHASES[1::2], ("launcher", "stop"): PHASES[::3],
    ("worker", "kill"): PHASES[::2], ("worker", "stop"): PHASES[1::3],
    ("server", "kill"): PHASES, ("server", "stop"): PHASES[::2], ("server", "cut"): PHASES[1::2],
}  # fmt: skip
"""(victim, fault): phases, if not ALL."""


def phases(victim: str, fault: str) -> tuple[str, ...]:
    return PHASES if ALL else CHOSEN[victim, fault]


def cells() -> Iterator[tuple[str, str, str, str]]:
    """(row, victim, fault, phase)."""
    yield from (("mortal", victim, fault, phase) for victim in MORTAL for fault in SIGNALS for phase in phases(victim, fault))
    yield "mortal", "nobody", "", "end"
    yield from (("survivors", "worker", fault, phase) for fault in SIGNALS for phase in phases("worker", fault))
    yield from (("survivors", "server", fault, phase) for fault in (*SIGNALS, "cut") for phase in phases("server", fault))
    yield "survivors", "nobody", "", "end"
    few = [("server", "kill", "sync"), ("server", "stop", "generate"), ("server", "cut", "train")]
    few += [("engine", "kill", "optimizer"), ("engine", "stop", "checkpoint")]
    every = [(victim, fault, phase) for victim in ("server", "engine") for fault in SIGNALS for phase in PHASES]
    every += [("server", "cut", phase) for phase in PHASES]
    yield from (("real", *cell) for cell in (every if ALL else few))
    yield "real", "nobody", "", "end"


class Network:
    """A host of its own for server 1: a network namespace, and a cable that can be cut."""

    def __init__(self) -> None:
        self.name = f"pa{os.getpid()}"
        self.host, far = (f"10.213.{os.getpid() % 256}.{os.getpid() // 256 % 64 * 4 + i}" for i in (1, 2))
        self.is_cut = False
        ip("netns", "add", self.name)
        ip("link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b", "netns", self.name)
        ip("address", "add", f"{self.host}/30", "dev", f"{self.name}a")
        ip("link", "set", f"{self.name}a", "up")
        ip("-n", self.name, "address", "add", f"{far}/30", "dev", f"{self.name}b")
        ip("-n", self.name, "link", "set", "lo", "up")
        self.mend()

    def cut(self) -> None:
        """No packet passes from now on, and nobody is told."""
        ip("-n", self.name, "link", "set", f"{self.name}b", "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", f"{self.name}b", "up")

    def close(self) -> None:
        ip("netns", "delete", self.name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


def make_network() -> Network | None:
    """None where this process may not, or there is no `ip`."""
    try:
        return Network()
    except (OSError, subprocess.CalledProcessError):
        return None


class Row:
    """One run, started again by the same command whenever a fault has ended it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.run = name, folder / name
        self.process: subprocess.Popen[str] | None = None
        self.patience_s = 240 if name == "real" else 90
        several = not name.startswith("mortal")
        self.network = make_network() if several else None
        self.overrides = [*SMALL, *QUICK, *KEPT, *([] if name == "real" else STUB), *["rollout.servers=2"] * several]

    def up(self, ranks: int = 1, iterations: int = 100_000) -> None:
        """Start it unless it runs already as it should."""
        if self.process and self.process.poll() is None:
            return
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        env |= {"REAL": "1"} if self.name == "real" else {"STUB_S": "0.8"} if self.name == "survivors" else {}  # few iterations in all
        env |= {"FAR": f"{self.network.name}:{self.network.host}"} if self.network else {}
        extra = [f"run.dir={self.run}", f"parallel.ranks={ranks}", f"iterations={iterations}"]
        command = [sys.executable, "-m", "benchmarks.stub_run", "launch", str(TINY), *self.overrides, *extra]
        text = self.run.with_suffix(".console").open("w")
        self.process = subprocess.Popen(
            command, stdout=text, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True, cwd=self.run.parent
        )

    def log(self) -> str:
        path = self.run / "logs" / "ranks.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, there: Callable[[], object], what: str, timeout_s: float | None = None) -> None:
        """Return when it is there; fail if the run ends or the time is up before."""
        assert self.process
        timeout_s = timeout_s or self.patience_s
        end = time.monotonic() + timeout_s
        while not there():
            assert self.process.poll() is None, f"the run ended before {what}:\n{console(self.run)}"
            assert time.monotonic() < end, f"{what} did not come within {timeout_s} s:\n{console(self.run)}\n{self.log()[-3000:]}"
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue

    def until_phase(self, phase: str) -> None:
        """The next time that the ranks say so."""
        since = len(self.log())
        pattern = re.compile(rf"iteration \d+: {phase}")
        self.until(lambda: pattern.search(self.log()[since:]), phase)

    def find(self, victim: str) -> psutil.Process | None:
        """The process now, None if there is none; of server 1, where a server is meant."""
        assert self.process
        if victim == "launcher":
            launcher = psutil.Process(self.process.pid)
            return launcher if len(launcher.children()) > 1 else None  # the guard and one more
        for process in processes_of(self.run):
            try:
                words, parent = " ".join(process.cmdline()), " ".join(process.parent().cmdline() if process.parent() else [])
                is_server = re.search(rf"serve {self.run} 1$", words)
                of_server = re.search(rf"serve {self.run} 1$", parent)
                if victim.startswith("rank-") and process.environ().get("RANK") == victim[-1]:
                    return process
                if victim == "server" and is_server:
                    return process
                if victim == "worker" and of_server and "spawn_main" in words and "resource_tracker" not in words:
                    return process
                if victim == "engine" and of_server and "EngineCore" in f"{process.name()} {words}":
                    return process
            except psutil.Error:
                continue
        return None

    def await_victim(self, victim: str) -> psutil.Process:
        found: list[psutil.Process] = []
        self.until(lambda: (p := self.find(victim)) and (found.append(p), True)[1], f"a {victim}")
        return found[0]

    def takes_part(self) -> int | None:
        """Pid of server 1 if it was given the weights last."""
        told = re.findall(r"weights go to (.*)", self.log().rpartition("run folder")[2])
        found = re.search(r"server-1 \(pid (\d+)\)", told[-1]) if told else None
        return int(found[1]) if found else None

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.network:
            self.network.close()
        assert gone_within(self.run, 15)


@pytest.fixture(scope="module")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Row]]:
    folder, rows = tmp_path_factory.mktemp("faults"), dict[str, Row]()

    def get(name: str) -> Row:
        if name not in rows:
            for old in rows.values():
                old.close()
            rows.clear()
            rows[name] = Row(name, folder)
        return rows[name]

    yield get
    for row in rows.values():
        row.close()


@pytest.mark.parametrize(("row", "victim", "fault", "phase"), list(cells()))
def test_fault(row_of: Callable[[str], Row], row: str, victim: str, fault: str, phase: str) -> None:
    run = row_of(row)
    if fault == "cut" and not run.network:
        pytest.skip("no rights to make a network namespace")
    if phase == "end":
        require_undisturbed_weights(run)
    elif victim in MORTAL:
        require_named_end(run, victim, fault, phase)
    elif victim == "worker":
        require_replaced_worker(run, fault, phase)
    else:
        require_replaced_server(run, victim, fault, phase)


@pytest.mark.parametrize("cut", ["pipeline", "tensor"])
def test_a_killed_rank_of_a_cut_model_is_named(row_of: Callable[[str], Row], cut: str) -> None:
    row = row_of(f"mortal-{cut}")
    row.overrides.append(f"parallel.{cut}=2")
    require_named_end(row, "rank-1", "kill", "train")


def require_named_end(row: Row, victim: str, fault: str, phase: str) -> None:
    """One that nobody can do without: everything ends, and the last words name it."""
    row.up(ranks=2 if victim == "rank-1" else 1)
    if phase != "start":
        row.until_phase(phase)
    process = row.await_victim(victim)
    process.send_signal(SIGNALS[fault])
    assert row.process
    code, _ = finish(row.process, row.run, 40)
    assert gone_within(row.run, 15), [p.cmdline() for p in processes_of(row.run)]
    text = console(row.run)  # the guard's words, too
    why = "was killed" if fault == "kill" else f"was stopped (SIGSTOP{', Ctrl-Z' * (victim == 'launcher')}) for run.silence_s={SILENCE_S}"
    assert f"ProcessDied: {'the ' * (victim == 'launcher')}{victim} (pid {process.pid}) {why}" in text, text
    assert code == (-signal.SIGKILL if victim == "launcher" else 1)
    if victim != "launcher":
        assert text.strip().splitlines()[-1] == f"log: {row.run}/logs/ranks.log ({victim})"


def require_replaced_worker(row: Row, fault: str, phase: str) -> None:
    """A reward worker: at most its own answer is lost."""
    row.up()
    if phase == "start":
        old = restarted(row)
        row.until(lambda: (p := row.find("worker")) and p.parent() != old, "a worker of the next server")
    else:
        row.until(lambda: row.find("worker"), "a worker")
        row.until_phase(phase)
    process = row.await_victim("worker")
    process.send_signal(SIGNALS[fault])
    row.until(lambda: not process.is_running(), "its end", 15)
    row.until(lambda: row.find("worker"), "another worker")
    server = row.await_victim("server")  # of phase "start": the new one, which must not lose a second worker before it is there
    row.until(lambda: row.takes_part() == server.pid, "its server")
    row.until_phase("optimizer")


def require_replaced_server(row: Row, victim: str, fault: str, phase: str) -> None:
    """Server 1, or the engine in it: the other one goes on, and a new one takes part."""
    row.up()
    if phase == "start":
        restarted(row)
    else:
        row.until(lambda: row.takes_part() and row.find(victim), f"a {victim} that takes part")
        row.until_phase(phase)
    server, process = row.await_victim("server"), row.await_victim(victim)
    restarts = console(row.run).count("server-1 is started again")
    if fault == "cut":
        assert row.network
        row.network.cut()
    else:
        process.send_signal(SIGNALS[fault])
    if fault == "cut" and phase == "start":
        row.until_phase("optimizer")  # nobody waits for it
        row.network.mend()
        row.until(lambda: row.takes_part() == server.pid, "the server itself")
        return
    row.until(lambda: not server.is_running() and not process.is_running(), "their end", 30)
    row.until(lambda: console(row.run).count("server-1 is started again") > restarts, "a restart", 15)
    if row.network:
        row.network.mend()
    row.until(lambda: row.takes_part() not in (None, server.pid), "the server in its place")


def restarted(row: Row) -> psutil.Process:
    """End server 1; returns when the next one has just begun."""
    row.until(row.takes_part, "a server that takes part")
    old = row.await_victim("server")
    old.kill()
    row.until(lambda: (p := row.find("server")) and p.pid != old.pid, "the next server")
    return old


def require_undisturbed_weights(row: Row) -> None:
    """The same command continues to the end, and nothing of all that can be seen in the weights."""
    if row.process and row.process.poll() is None:
        row.process.terminate()
        assert finish(row.process, row.run, 60)[0] == 75
    assert gone_within(row.run, 15)
    complete = [p.name.removeprefix("iteration-") for p in (row.run / "checkpoints").glob("*")]  # and maybe a draft of one cut short
    done = max((int(number) for number in complete if number.isdigit()), default=0)
    row.up(iterations=done + 2)
    assert row.process
    code, text = finish(row.process, row.run, row.patience_s + 60)
    assert code == 0, text
    for t in range(done + 2):
        assert sorted((g.group_id, g.version) for g in read_recording(row.run, t).groups) == [(i, t) for i in range(GROUPS)]
    undisturbed = row.run.with_name(f"{row.name}-undisturbed")
    code, text = finish(start(TINY, undisturbed, *SMALL, f"rollout.source=replay:{row.run}", f"iterations={done + 2}"), undisturbed, 400)
    assert code == 0, text
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (row.run, undisturbed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
