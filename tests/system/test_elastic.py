"""Servers die and come back while a real run goes on: nothing is lost, nothing is trained twice (and see test_faults.py).

PASYNC_KILLS=10 kills a server in each of 10 consecutive iterations instead of 3.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from harness import STUB, TINY, completed, finish, gone_within, metrics, processes_of, start, wait_for_line
from safetensors.torch import load_file

from pasync.configfile import load
from pasync.data.prompts import PromptStream
from pasync.messages import ints
from pasync.model.causal_lm import load_tokenizer
from pasync.rollout.recording import read_recording

KILLS = int(os.environ.get("PASYNC_KILLS", "3"))
pytestmark = [pytest.mark.system, pytest.mark.timeout(300 + 90 * KILLS)]
RUN_S = 240 + 60 * KILLS
GROUPS = 16
SMALL = (f"algorithm.batch_groups={GROUPS}", "algorithm.group_responses=4", "eval.every=0", "data.eval=null")
EXACT = "parallel.accumulate=exact"


def at_iteration(run: Path, process: subprocess.Popen[str], t: int, phase: str = "generate") -> dict[int, int]:
    """Wait until the phase begins; (index: pid) of the servers that hold the weights then."""
    ranks = run / "logs" / "ranks.log"
    wait_for_line(ranks, f"iteration {t}: {phase}", process, RUN_S)
    told = [line for line in ranks.read_text().split(f"iteration {t}: {phase}")[0].splitlines() if "weights go to" in line][-1]
    return {int(index): int(pid) for index, pid in re.findall(r"server-(\d+) \(pid (\d+)\)", told)}


def require_whole(run: Path, iterations: int) -> None:
    """Every iteration was trained on exactly its groups: each prompt once, all responses, the right version."""
    config = load(run / "config.yaml")
    prompts = PromptStream(config, load_tokenizer(Path(config.model.path)))
    for t in range(iterations):
        groups = sorted(read_recording(run, t).groups, key=lambda g: g.group_id)
        assert [(g.group_id, g.version, len(g.responses)) for g in groups] == [(i, t, 4) for i in range(GROUPS)]
        assert [tuple(ints(g.prompt_ids).tolist()) for g in groups] == [p.ids for p in prompts.batch(t)]


def ended(process: subprocess.Popen[str], run: Path) -> tuple[int, str]:
    code, text = finish(process, run, RUN_S)
    assert gone_within(run, 15), [p.cmdline() for p in processes_of(run)]
    return code, text


def test_a_server_killed_in_each_of_several_iterations_changes_no_bit_of_the_weights(tmp_path):
    run, iterations = tmp_path / "run", KILLS + 2
    process = start(TINY, run, *SMALL, EXACT, "rollout.servers=2", f"rollout.max_restarts={KILLS}", "rollout.source=record",
                    f"iterations={iterations}")  # fmt: skip
    for t in range(1, KILLS + 1):
        servers = at_iteration(run, process, t)
        os.kill(servers.get(t % 2, servers.get(1 - t % 2)), signal.SIGKILL)
    code, text = ended(process, run)
    assert code == 0, text
    assert text.count("is started again") == KILLS
    lines = metrics(run)
    print([(line["rollout/requeued_groups"], line["time/step_s"]) for line in lines])
    assert lines[-1]["rollout/requeued_groups"] >= KILLS  # each had groups
    require_whole(run, iterations)
    undisturbed = tmp_path / "undisturbed"
    completed(TINY, undisturbed, *SMALL, EXACT, f"rollout.source=replay:{run}", f"iterations={iterations}")
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, undisturbed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_only_server_loses_its_engine_and_is_restarted_within_the_iteration(tmp_path):
    run = tmp_path / "run"
    process = start(TINY, run, *SMALL, "rollout.source=record", "iterations=3")
    server = psutil.Process(at_iteration(run, process, 1)[0])
    engine = next(p for p in server.children(recursive=True) if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline()))
    engine.kill()
    code, text = ended(process, run)
    assert code == 0 and text.count("is started again") == 1, text
    assert engine.pid not in psutil.pids()
    require_whole(run, 3)


@pytest.mark.parametrize("cut", [("parallel.pipeline=2", "parallel.tensor=2"), ("parallel.data=fsdp",)], ids=["stages and shards", "fsdp"])
def test_a_cut_model_gives_its_weights_to_a_restarted_server_in_mid_iteration(tmp_path, cut):
    """Each sync is checked: sum over all weights, and log-probs of a probe; and the log-probs of what was sampled."""
    run, ranks = tmp_path / "run", 2 * len(cut)
    warm = "rollout.temperature=0.8"  # not 1, so that a forgotten temperature shows in the log-prob gap
    more = ("rollout.source=record", "iterations=3", "algorithm.kl_coef=0.01", f"parallel.ranks={ranks}", warm, *cut)
    process = start(TINY, run, *SMALL, *more)
    os.kill(at_iteration(run, process, 1)[0], signal.SIGKILL)
    code, text = ended(process, run)
    assert code == 0 and text.count("is started again") == 1, text
    require_whole(run, 3)
    lines = metrics(run)
    assert max(line["policy/probe_gap"] for line in lines) < 1e-5
    assert max(line["policy/engine_logprob_gap"] or 0.0 for line in lines) < 1e-5
    began = load_file(Path(load(run / "config.yaml").model.path) / "model.safetensors")
    trained = load_file(run / "model" / "model.safetensors")
    assert trained.keys() == began.keys() and not torch.equal(trained["model.norm.weight"], began["model.norm.weight"])


def test_used_up_restarts_end_the_run_by_name(tmp_path):
    run = tmp_path / "run"
    process = start(TINY, run, *SMALL, *STUB, "rollout.servers=2", "rollout.max_restarts=1", "iterations=2000", stub=True)
    first = at_iteration(run, process, 0)[0]
    os.kill(first, signal.SIGKILL)
    ranks = run / "logs" / "ranks.log"
    successor = rf"weights go to server-0 \(pid (?!{first}\))(\d+)\)"
    wait_for_line(run.with_suffix(".console"), "server-0 is started again, 0 restarts are left", process)
    os.kill(int(wait_for_line(ranks, successor, process)[1]), signal.SIGKILL)
    code, text = ended(process, run)
    last = text.strip().splitlines()[-2]
    assert code == 1 and "ProcessDied: server-0" in last and "SIGKILL" in last
