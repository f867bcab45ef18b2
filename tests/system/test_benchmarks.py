"""The benchmarks run and print what they promise; what they measure is not asserted."""

import json
import subprocess
import sys

import pytest
from harness import ROOT

from benchmarks import emulate
from benchmarks.page import COMMANDS
from pasync.simulate import simulate

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
OVERLAP = {
    "case", "groups", "sync_step_s", "periodic_step_s", "ideal_step_s", "speedup", "of_ideal", "first_wait_s", "tail_s", "runs",
}  # fmt: skip


def lines_of(*command: str, timeout: int = 280) -> list[dict[str, object]]:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def line_of(*command: str) -> dict[str, object]:
    (line,) = lines_of(*command)
    return line


def test_transport_prints_its_line():
    line = line_of("benchmarks.transport", "--iterations", "100")
    assert {"groups_per_s", "rss_growth_frac"} <= line.keys() and line["groups_per_s"] > 0


def test_overlap_prints_its_line():
    line = line_of("benchmarks.overlap", "--case", "generate_bound", "--pairs", "1")
    assert line.keys() >= OVERLAP and all(line[key] > 0 for key in OVERLAP - {"case"})


@pytest.mark.slow  # it measures as overlap does
def test_admission_prints_its_line():
    line = line_of("benchmarks.admission", "--lengths", "uniform", "--pairs", "1")
    assert line["fifo_step_s"] > 0 and line["longest_first_step_s"] > 0 and line["max_over_median"] == 1


def test_weight_sync_prints_a_line_for_every_type_and_way():
    lines = lines_of("benchmarks.weight_sync", "--model", "smollm2-135m", "--layers", "1", "--rounds", "1")
    assert len({line["case"] for line in lines}) == 16
    assert all(line[key] > 0 for line in lines for key in ("seconds", "gb_per_s", "raw_gb_per_s", "of_limit"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "command",
    [
        ("shared_prompt", "--case", "64,256,8", "--dtype", "float32"),
        ("logprob", "--dtype", "bfloat16"),
        ("tri_model",),
        ("algorithms", "--seeds", "0"),
        ("ablation", "--rounds", "1", "--groups", "4"),
    ],
)
def test_a_slow_one_prints_its_lines(command):
    assert lines_of(f"benchmarks.{command[0]}", *command[1:])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case", [("short", "--kl-coef", "0.04"), ("long",), ("curve", "--seeds", "2")], ids=lambda c: c[0]
)
def test_against_trl_prints_its_line(case):
    (line,) = lines_of("benchmarks.against_trl", "--case", *case, timeout=1700)  # set-up of TRL included
    if case[0] != "curve":
        assert line["tokens_a_step"] == line["trl_tokens_a_step"], "not the same work"
        assert line["faster"] > 0 and line["less_memory"] > 0
    else:
        assert len(line["reward"]) == len(line["trl_reward"]) == 10


@pytest.mark.slow
def test_all_measures_one_again_keeps_the_others_and_writes_the_page(tmp_path):
    old = {"name": "ablation", "command": COMMANDS["ablation"].args, "machine": "m", "versions": "v", "busy": 0.0, "seconds": 1.0}
    (tmp_path / "benchmarks.jsonl").write_text(json.dumps(old | {"lines": []}) + "\n")
    assert lines_of("benchmarks.all", "--only", "overlap", "--out", str(tmp_path)) == []
    kept = [json.loads(text)["name"] for text in (tmp_path / "benchmarks.jsonl").read_text().splitlines()]
    assert kept == ["ablation", "overlap"]
    assert "| balanced |" in (tmp_path / "benchmarks.md").read_text()


def test_runs_of_the_real_scheduler_that_sleep_by_known_rates_are_not_faster_than_planned():
    for line in emulate.measured(2, 1, ["long_tailed"], rounds=1):
        config = emulate.configuration(2, 1).model_copy(update={"schedule": line["schedule"]})
        predicted = simulate(config, emulate.work(line["case"]), emulate.RATES)
        assert line["step_s"] > 0.9 * predicted.step_s, line  # not more: a busy machine sleeps too long


@pytest.mark.slow
def test_growth_prints_a_line_for_all_that_costs_depend_on():
    lines = lines_of("benchmarks.growth", "--rounds", "1")
    assert {(line["what"], line["of"]) for line in lines} == {
        *((what, of) for what in ("cpu_s_per_group", "queue_s") for of in ("K", "Lr", "B", "servers")),
        ("sync_s", "parameters"), ("sync_s", "receivers"),
    }  # fmt: skip
    assert all(result > 0 for line in lines for result in line["results"])


def test_a_few_hundred_iterations_leave_memory_files_threads_and_sockets_of_every_process_as_they_were():
    line = line_of("benchmarks.soak", "--stub", "--iterations", "600")
    kinds = {name.split(" ")[0] for name in line["growth_per_100"]}
    assert {"launcher", "guard", "torchrun", "rank-0", "server", "reward"} <= kinds
    assert line["flat"], line["over"]
