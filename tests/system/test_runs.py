"""Whole runs through launch.sh with the real vLLM server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, RUN_S, TINY, completed, finish, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pasync.configfile import load
from pasync.rollout.recording import read_recording

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SMALL = ("algorithm.batch_groups=8", "algorithm.group_responses=4", "eval.every=0", "data.eval=null")
WARM = ("rollout.temperature=0.8",)  # not 1, so that a forgotten temperature shows in the log-prob gap
GREEDY = ("eval.every=2", "eval.temperature=0", "data.eval.sort.size=60")
EVALUATED = (*SMALL[:2], "eval.every=3", "data.eval.sort.size=12", "data.eval.sort.responses=2")
UNSAVED = ("checkpoint.every=0",)  # 1.6 GB


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def distance(a: Path, b: Path) -> float:
    """Largest relative distance of any weight tensor of two runs' final models."""
    ours, theirs = weights_of(a), weights_of(b)
    assert ours.keys() == theirs.keys()
    return max(((ours[k] - theirs[k]).norm() / theirs[k].norm()).item() for k in ours)


def replay(recorded: Path, run: Path, *overrides: str) -> Path:
    completed(TINY, run, *SMALL, *WARM, f"rollout.source=replay:{recorded}", *overrides)
    return run


def test_one_step_off_is_labelled_and_learns_from_the_batch_before(tmp_path):
    run = tmp_path / "run"
    *lines, final = completed(TINY, run, *EVALUATED, "schedule=one_step_off", "iterations=4", "rollout.source=record")
    assert [line["policy/lag"] for line in lines] == [0, 1, 1, 1]
    assert [line["eval/problems"] for line in (lines[0], lines[3], final)] == [12, 12, 12]
    assert [read_recording(run, t).groups[0].version for t in range(4)] == [0, 0, 1, 2]
    assert (run.with_suffix(".console").read_text()).count("OFF-POLICY by 1") == 3


def test_refill_trains_adapters_on_whole_batches_of_useful_groups_with_several_updates(tmp_path):
    more = ("algorithm.filter_zero_variance=refill", "algorithm.updates_per_batch=2", "lora.rank=8")
    *lines, final = completed(TINY, tmp_path / "run", *EVALUATED, *more, "iterations=6", "rollout.source=record")
    assert [line["eval/problems"] for line in (lines[0], lines[3], final)] == [12, 12, 12]  # pushed aside by each further prompt
    assert all(line["policy/trained_groups"] == 8 for line in lines) and sum(line["reward/refilled_groups"] for line in lines) > 0
    for t, line in enumerate(lines):
        ids = sorted(g.group_id for g in read_recording(tmp_path / "run", t).groups)
        assert ids == list(range(8 + line["reward/refilled_groups"]))
    replay(tmp_path / "run", tmp_path / "again", *more, "iterations=6", "rollout.temperature=1", "rollout.replay_order=random")
    assert distance(tmp_path / "again", tmp_path / "run") < 1e-5
    assert max(line["policy/probe_gap"] for line in lines) < 1e-5  # servers hold the merged weights
    assert load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors").keys()


def test_a_run_that_only_samples_keeps_its_groups_and_its_weights(tmp_path):
    run = tmp_path / "run"
    lines = completed(TINY, run, *SMALL, "rollout.source=only", "iterations=3")
    assert all(line["time/train_s"] == 0 and line["tokens/response"] > 0 for line in lines)
    assert len(read_recording(run, 2).groups) == 8
    start = load_file(Path(load(run / "config.yaml").model.path) / "model.safetensors")
    assert all(torch.equal(weight, start[k]) for k, weight in weights_of(run).items())


def test_the_final_model_loads_in_transformers_and_scores_as_it_did_in_the_run(tmp_path):
    run = tmp_path / "run"
    lines = completed(TINY, run, "iterations=2", *GREEDY)
    config = load(run / "config.yaml")
    assert config.data.eval is not None
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    rows = [json.loads(line) for line in Path(config.data.eval["sort"].source).read_text().splitlines()[:60]]
    right = 0
    for row in rows:
        ids = tokenizer(config.data.template.format(**row), return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=config.rollout.max_tokens, do_sample=False)[0, ids.shape[1] :]
        ended = out[-1].item() == tokenizer.eos_token_id
        right += ended and tokenizer.decode(out[:-1]).strip() == str(row["answer"])
    assert lines[-1]["iteration"] == 2 and abs(right / 60 - lines[-1]["eval/accuracy_frac"]) <= 0.03
    # vLLM loads it too, without any sync: float32 and greedy, so it answers as it did when the run ended
    done = subprocess.run([sys.executable, "-m", "pasync.evaluate", str(run)], capture_output=True, text=True, timeout=RUN_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {key: value for key, value in lines[-1].items() if key.startswith("eval/")}


def test_a_server_of_two_tensor_parallel_workers_gets_the_weights(tmp_path):
    lines = completed(TINY, tmp_path / "run", *SMALL, "rollout.tensor_parallel=2", "iterations=2")
    assert max(line["policy/probe_gap"] for line in lines) < 1e-3
    assert all((line["policy/engine_logprob_gap"] or 0.0) < 1e-3 for line in lines)


def test_the_demo_starts_and_takes_two_steps(tmp_path):
    lines = completed(ROOT / "configs" / "demo_cpu.yaml", tmp_path / "demo", "iterations=2", "eval.every=0", "data.eval=null", *UNSAVED)
    assert len(lines) == 2 and all(line["time/of_ideal_frac"] > 0 for line in lines)
    assert max(line["policy/probe_gap"] for line in lines) < 1e-3


def test_a_mistake_in_the_configuration_ends_at_once_with_all_problems(tmp_path):
    run = tmp_path / "wrong"
    code, text = finish(start(TINY, run, "optimizer.learning_rate=1", "rollout.servers=0"), run, 30)
    assert code == 2 and "optimizer.learning_rate" in text and "rollout.servers=0" in text and not run.exists()


def test_a_reward_that_cannot_be_found_ends_the_run_by_name(tmp_path):
    run = tmp_path / "wrong"
    code, text = finish(start(TINY, run, *SMALL, "rewards.function=no_such_module:reward"), run)
    assert code != 0 and "ConfigError" in text and "no_such_module" in text.strip().splitlines()[-2] + text.strip().splitlines()[-1]


def test_the_eight_device_config_dry_runs_without_devices():
    command = ["bash", str(ROOT / "launch.sh"), str(ROOT / "configs" / "qwen25_7b.yaml"), "--dry-run", "device.kind=npu", "device.count=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PASYNC_PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"server-3.*7", done.stdout) and re.search(r"rank-0.*0", done.stdout)
