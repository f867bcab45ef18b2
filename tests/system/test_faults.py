"""Whatever dies, whenever: the run ends with a named error, a non-zero code, and no process left behind."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from harness import TINY, finish, gone_within, processes_of, start, wait_for_line

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

BATCH = ("algorithm.batch_groups=8", "algorithm.group_responses=4", "eval.every=0", "data.eval=null")
SMALL = (*BATCH, "checkpoint.every=1", "iterations=2000", "rollout.max_restarts=0")
PHASES = {
    "start-up": ("server-0.log", "\n"),
    "sync": ("ranks.log", "iteration 1: sync"),
    "generation": ("ranks.log", "iteration 1: generate"),
    "training": ("ranks.log", "iteration 1: train on"),
    "checkpoint": ("ranks.log", "iteration 1: checkpoint"),
}


def at_phase(run: Path, phase: str, *overrides: str) -> subprocess.Popen[str]:
    process = start(TINY, run, *SMALL, *overrides)
    log, text = PHASES[phase]
    wait_for_line(run / "logs" / log, text, process)
    return process


def kill(run: Path, part: str) -> None:
    victims = [p for p in processes_of(run) if part in " ".join(p.cmdline())]
    assert victims, f"no process runs {part}"
    victims[-1].send_signal(signal.SIGKILL)


def ended(process: subprocess.Popen[str], run: Path) -> tuple[int, str]:
    code, text = finish(process, run, 60)
    assert gone_within(run, 15), [p.cmdline() for p in processes_of(run)]
    return code, text.strip().splitlines()[-2] + "\n" + text.strip().splitlines()[-1]


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_server_ends_the_run_and_is_named(tmp_path, phase):
    process = at_phase(tmp_path / "run", phase)
    kill(tmp_path / "run", "pasync.serve")
    code, last = ended(process, tmp_path / "run")
    assert code == 1 and "ProcessDied" in last and "server-0" in last and "SIGKILL" in last


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path, phase):
    process = at_phase(tmp_path / "run", phase)
    if phase == "start-up":
        wait_for_line(tmp_path / "run" / "logs" / "ranks.log", "\n", process)
    kill(tmp_path / "run", "-m pasync.train" if phase != "start-up" else "pasync.train")
    code, last = ended(process, tmp_path / "run")
    assert code == 1 and "ProcessDied" in last and "rank" in last and "SIGKILL" in last


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_launcher_leaves_no_process_behind(tmp_path, phase):
    process = at_phase(tmp_path / "run", phase)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert gone_within(tmp_path / "run", 15), [p.cmdline() for p in processes_of(tmp_path / "run")]


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_everything(tmp_path, phase):
    process = at_phase(tmp_path / "run", phase)
    os.kill(process.pid, signal.SIGINT)
    code, last = ended(process, tmp_path / "run")
    assert code == 130 and "Interrupted" in last


def test_sigterm_ends_everything(tmp_path):
    process = at_phase(tmp_path / "run", "generation")
    os.kill(process.pid, signal.SIGTERM)
    code, last = ended(process, tmp_path / "run")
    assert code == 75 and "Terminated" in last and "continues with iteration" in last


def test_a_killed_engine_inside_a_server_ends_the_run_by_name(tmp_path):
    run = tmp_path / "run"
    process = at_phase(run, "generation")
    server = next(p for p in processes_of(run) if "pasync.serve" in " ".join(p.cmdline()))
    engine = next(p for p in server.children(recursive=True) if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline()))
    engine.kill()
    code, last = ended(process, run)
    assert code == 1 and "server-0" in last


@pytest.mark.parametrize("cut", [(), ("parallel.pipeline=2",), ("parallel.tensor=2",)], ids=["replicas", "stages", "shards"])
def test_one_killed_rank_of_two_is_named(tmp_path, cut):
    run = tmp_path / "run"
    process = at_phase(run, "training", "parallel.ranks=2", *cut)
    ranks = {p.environ()["RANK"]: p for p in processes_of(run) if "RANK" in p.environ()}
    ranks["1"].kill()
    code, last = ended(process, run)
    assert code == 1 and "ProcessDied: rank-1" in last and "SIGKILL" in last


def test_a_server_that_is_killed_while_stages_train_is_named(tmp_path):
    run = tmp_path / "run"
    process = at_phase(run, "training", "parallel.ranks=2", "parallel.pipeline=2")
    kill(run, "pasync.serve")
    code, last = ended(process, run)
    assert code == 1 and "ProcessDied" in last and "server-0" in last and "SIGKILL" in last


def test_ports_are_free_again_after_the_end(tmp_path):
    run = tmp_path / "run"
    process = at_phase(run, "generation")
    listening = {c.laddr.port for p in processes_of(run) for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    os.kill(process.pid, signal.SIGINT)
    ended(process, run)
    assert listening and not listening & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
