"""Groups of one live run are trained on again: whatever the schedule, the ranks and the interruptions, the weights are the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, TINY, completed, gone_within, metrics
from safetensors.torch import load_file
from test_runs import EVALUATED, WARM, distance, replay, weights_of

from pasync.configfile import load
from pasync.observe.metrics import METRICS, described
from pasync.rollout.recording import read_recording

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
EXACT = "parallel.accumulate=exact"
PROMISED = {
    "iteration", "reward/mean", "policy/version", "policy/engine_logprob_gap", "time/step_s", "time/generate_s", "time/train_s",
    "time/sync_s", "time/first_group_wait_s", "time/tail_s", "time/ideal_s", "throughput/tpspd", "tokens/prompt", "tokens/response",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Twenty iterations with two servers and two ranks, gradients added up exactly, groups kept; every third one evaluated."""
    run = tmp_path_factory.mktemp("runs") / "recorded"
    completed(TINY, run, *EVALUATED, *WARM, "rollout.servers=2", "parallel.ranks=2", "iterations=20", "rollout.source=record", EXACT)
    return run


def test_a_run_leaves_what_is_promised_and_nothing_alive(recorded):
    *lines, final = metrics(recorded)
    assert [line["iteration"] for line in lines] == [line["policy/version"] for line in lines] == list(range(20))
    assert all(line.keys() >= PROMISED and set(map(described, line)) <= METRICS.keys() for line in lines)
    evaluated = [line for line in (*lines, final) if "eval/sort/pass@2" in line]
    assert [line["iteration"] for line in evaluated] == [*range(0, 20, 3), 20]
    assert all(0 <= line["eval/sort/avg@2"] <= line["eval/sort/pass@2"] <= 1 and line["eval/problems"] == 12 for line in evaluated)
    gaps = [line["policy/engine_logprob_gap"] for line in lines if line["policy/engine_logprob_gap"] is not None]
    assert gaps and max(gaps) < 1e-3  # float32 on both sides
    assert max(line["policy/probe_gap"] for line in lines) < 1e-3
    assert load(recorded / "config.yaml").iterations == 20
    assert gone_within(recorded, 5)
    for version in range(20):
        groups = read_recording(recorded, version).groups
        assert sorted(g.group_id for g in groups) == list(range(8)) and {g.version for g in groups} == {version}
        assert all(len(g.responses) == 4 for g in groups)


def test_two_servers_and_two_ranks_equal_one_of_each_on_the_same_rollouts(recorded, tmp_path):
    two = replay(recorded, tmp_path / "two", "parallel.ranks=2", "iterations=1")
    one = replay(recorded, tmp_path / "one", "parallel.ranks=1", "iterations=1")
    assert distance(two, one) < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule=sync", "parallel.ranks=1"),
        ("schedule=periodic", "parallel.ranks=1", "rollout.replay_order=random", "rollout.replay_delay=recorded"),
        ("schedule=periodic", "parallel.ranks=4", "rollout.replay_order=sorted"),
    ],
    ids=lambda o: "-".join(part.split("=")[1] for part in o),
)
def test_exact_sums_give_the_bits_of_the_live_run_after_20_iterations_whatever_the_schedule(recorded, tmp_path, overrides):
    """The live run was evaluated and the replay is not, so evaluation changes no bit either."""
    again = replay(recorded, tmp_path / "again", EXACT, "iterations=20", *overrides)
    ours, theirs = weights_of(again), weights_of(recorded)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    start = load_file(Path(load(recorded / "config.yaml").model.path) / "model.safetensors")
    assert all(not torch.equal(ours[k], start[k]) for k in ours)  # it did learn


def test_sync_and_periodic_give_the_same_weights_after_20_iterations_up_to_rounding(recorded, tmp_path):
    sync, periodic = (
        replay(recorded, tmp_path / s, f"schedule={s}", "iterations=20", "rollout.replay_order=random") for s in ("sync", "periodic")
    )
    assert distance(sync, periodic) < 1e-5  # rounding that AdamW carries through 20 steps


def test_the_trace_of_a_run_has_every_kind_of_span(recorded):
    command = [sys.executable, "-m", "pasync.observe.timeline", str(recorded)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = {event["name"] for event in json.loads((recorded / "timeline.json").read_text())["traceEvents"]}
    assert {"sync", "micro-batch", "optimizer", "group 0", "groups ready"} <= names


def test_an_interrupted_run_continues_to_the_same_weights(recorded, tmp_path):
    whole = replay(recorded, tmp_path / "whole", "iterations=4")
    half = replay(recorded, tmp_path / "half", "iterations=2", "checkpoint.every=2")
    other = Path(shutil.copytree(half, tmp_path / "other"))
    replay(recorded, half, "iterations=4", "checkpoint.every=2")
    assert [line["iteration"] for line in metrics(half)] == [0, 1, 2, 3]
    assert distance(half, whole) == 0.0
    cut = ("parallel.ranks=4", "parallel.pipeline=2", "parallel.tensor=2")
    replay(recorded, other, "iterations=4", "checkpoint.every=2", *cut)
    assert distance(other, whole) < 1e-5  # other sums of the same terms, and AdamW amplifies the rounding of small gradients
