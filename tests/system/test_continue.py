"""Runs that are interrupted end in the weights of one that was not: replayed groups, real launcher, torchrun and ranks, no server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import ROOT, TINY, completed, console, finish, gone_within, metrics, processes_of, start, wait_for_line
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.rollout.recording import Recording, record

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
ITERATIONS, GROUPS, SLOW = 4, 8, 2
"""One group of iteration SLOW arrives late, so that there is time to interrupt it."""
EXACT = ("parallel.accumulate=exact",)
SAVES = ("checkpoint.every=1",)
LATE = ("rollout.replay_delay=recorded",)


def made_up(run: Path, late_s: float) -> Path:
    """A recording of groups that nobody sampled."""
    rng = np.random.default_rng(0)
    for t in range(ITERATIONS):
        groups = []
        for i in range(GROUPS):
            responses = [
                Response(int_bytes(rng.integers(0, 12, n)), float_bytes(-rng.random(n)), "", True, float(k % 2))
                for k, n in enumerate(rng.integers(2, 9, 4))
            ]
            groups.append(Group(t, i, int_bytes(rng.integers(0, 12, 5)), responses, 0.0, 1.0))
        (run / "rollouts").mkdir(parents=True, exist_ok=True)
        record(run, t, Recording(groups, [0.0] * (GROUPS - 1) + [late_s if t == SLOW else 0.0]))
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return made_up(tmp_path_factory.mktemp("recorded") / "run", 300)


@pytest.fixture(scope="module")
def whole(recorded) -> dict[str, np.ndarray]:
    """Weights of the run that nothing interrupts."""
    run = recorded.parent / "whole"
    completed(TINY, run, *of(recorded), *EXACT)
    return weights_of(run)


def of(recorded: Path) -> list[str]:
    small = ["algorithm.batch_groups=8", "algorithm.group_responses=4", "eval.every=0", "data.eval=null"]
    return [*small, f"rollout.source=replay:{recorded}", f"iterations={ITERATIONS}"]


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return {name: weight.numpy() for name, weight in load_file(run / "model" / "model.safetensors").items()}


def distance(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.linalg.norm(ours[k] - theirs[k]) / np.linalg.norm(theirs[k])) for k in ours)


def in_slow_iteration(run: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run that waits for the late group of iteration SLOW; its first groups are being trained on."""
    process = start(TINY, run, *overrides)
    wait_for_line(run / "logs" / "ranks.log", f"iteration {SLOW}: train on", process)
    return process


LAYOUTS = {
    "one": ((), EXACT, 0.0),
    "stages": (("parallel.ranks=2", "parallel.pipeline=2"), (), 1e-5),
    "fsdp": (("parallel.ranks=2", "parallel.data=fsdp"), (), 1e-5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sigterm_saves_in_the_middle_of_an_iteration_and_the_same_command_continues(tmp_path, recorded, whole, layout):
    cut, sums, tolerance = LAYOUTS[layout]
    run, command = tmp_path / "run", [*of(recorded), *cut, *sums, "checkpoint.every=100"]
    process = in_slow_iteration(run, *command, *LATE)
    os.kill(process.pid, signal.SIGTERM)
    code, text = finish(process, run, 90)
    assert code == 75 and f"continues with iteration {SLOW}" in text.strip().splitlines()[-1], text
    assert gone_within(run, 15) and [p.name for p in (run / "checkpoints").iterdir()] == [f"iteration-{SLOW:05d}"]
    completed(TINY, run, *command)
    assert [line["iteration"] for line in metrics(run)] == list(range(ITERATIONS))
    assert distance(weights_of(run), whole) <= tolerance


def test_a_scheduler_may_send_sigterm_to_every_process(tmp_path, recorded, whole):
    run, command = tmp_path / "run", [*of(recorded), *EXACT, "parallel.ranks=2", "checkpoint.every=100"]
    process = in_slow_iteration(run, *command, *LATE)
    for each in processes_of(run):
        each.terminate()
    code, text = finish(process, run, 90)
    assert code == 75 and f"continues with iteration {SLOW}" in text.strip().splitlines()[-1], text
    completed(TINY, run, *command)
    assert distance(weights_of(run), whole) == 0.0


def test_ctrl_c_does_not_wait_for_a_checkpoint(tmp_path, recorded):
    run = tmp_path / "run"
    process = in_slow_iteration(run, *of(recorded), *LATE, *SAVES)
    os.kill(process.pid, signal.SIGINT)
    code, text = finish(process, run, 20)
    assert code == 130 and "Interrupted: all processes" in text and gone_within(run, 15)


def test_without_checkpoints_sigterm_ends_everything_at_once(tmp_path, recorded):
    run = tmp_path / "run"
    process = in_slow_iteration(run, *of(recorded), *LATE)
    os.kill(process.pid, signal.SIGTERM)
    code, text = finish(process, run, 20)
    assert code == 143 and "Terminated: all processes" in text and gone_within(run, 15)


def test_a_killed_rank_brings_the_run_back_by_itself_as_often_as_allowed(tmp_path, whole):
    recorded, run = made_up(tmp_path / "recorded", 15), tmp_path / "run"
    process = in_slow_iteration(run, *of(recorded), *EXACT, *LATE, *SAVES, "parallel.ranks=2", "run.max_restarts=1")
    next(p for p in processes_of(run) if p.environ().get("RANK") == "1").kill()
    code, text = finish(process, run)
    assert code == 0 and "starting again from the newest checkpoint, 0 of run.max_restarts=1 left" in text
    assert "ProcessDied: rank-1" in text and "ProcessDied: rank-1" in (run / "logs" / "launcher.log").read_text()
    assert [line["iteration"] for line in metrics(run)] == list(range(ITERATIONS))
    assert distance(weights_of(run), whole) == 0.0


def test_a_damaged_checkpoint_costs_one_iteration_and_nothing_else(tmp_path, recorded, whole):
    run, command = tmp_path / "run", [*of(recorded), *EXACT, *SAVES]
    process = in_slow_iteration(run, *command, *LATE)
    wait_for_line(run / "logs" / "ranks.log", f"checkpoint iteration-{SLOW:05d} is complete", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    assert gone_within(run, 15)
    data = run / "checkpoints" / f"iteration-{SLOW:05d}" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    completed(TINY, run, *command)
    assert f"checkpoint iteration-{SLOW:05d} is damaged and not used" in console(run) and "__0_0.distcp" in console(run)
    assert [line["iteration"] for line in metrics(run)] == list(range(ITERATIONS))
    assert distance(weights_of(run), whole) == 0.0


def exported(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pasync.export", str(run), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)


def test_a_model_of_any_checkpoint_can_be_had(recorded, tmp_path):
    run, cut = tmp_path / "run", ("parallel.ranks=2", "parallel.tensor=2")
    small = ("algorithm.batch_groups=8", "algorithm.group_responses=4", "eval.every=0", "data.eval=null")
    completed(TINY, run, "iterations=2", *SAVES, f"rollout.source=replay:{recorded}", *small, *cut)
    assert exported(run, "--iteration", "1").returncode == exported(run).returncode == 0
    absent = exported(run, "--iteration", "7")
    assert absent.returncode == 1 and "has no checkpoint of it, there are 1, 2" in absent.stderr
    last, of_run, first = (load_file(run / name / "model.safetensors") for name in ("model-2", "model", "model-1"))
    assert last.keys() == of_run.keys() and all(torch.equal(last[name], of_run[name]) for name in last)
    assert not all(torch.equal(first[name], of_run[name]) for name in first)
    assert AutoModelForCausalLM.from_pretrained(run / "model-1").dtype == torch.float32
    next((run / "checkpoints" / "iteration-00002").glob("*.distcp")).write_bytes(b"")
    damaged = exported(run)
    assert damaged.returncode == 1 and "is damaged" in damaged.stderr
