"""What README and docs say is what there is, and every command in them is run by a test that is named here."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.all import read_records
from benchmarks.page import COMMANDS, text_of
from pasync.reference import pages
from pasync.rewards.functions import resolve

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(bash|python[\d.]*|pip|docker|source|npu-smi|tensorboard|sha256sum|git|apt) \S")
RUN_BY = {
    "tests/system/test_newcomer.py::test_the_commands_of_the_readme_train_report_continue_and_export": (
        "bash launch.sh configs/demo_cpu.yaml",
        "source .venv/bin/activate",
        "python -m pasync.report runs/latest",
        "bash launch.sh configs/demo_cpu.yaml run.dir=runs/latest iterations=60",
        "python -m pasync.export runs/latest --iteration 40",
        "python -m pasync.report RUN",
        "python -m pasync.export RUN --iteration N",
        "python -m pasync.export RUN [--iteration N]",
        "bash launch.sh configs/tiny_cpu.yaml run.trackers=[tensorboard]",
        "tensorboard --logdir runs/latest/tensorboard",  # reads what the test reads
        "bash launch.sh runs/latest/config.yaml run.dir=null",
        "bash setup.sh",
    ),
    "tests/system/test_newcomer.py::test_the_demo_itself": ("bash launch.sh configs/demo_cpu.yaml",),
    "tests/unit/test_report.py::test_seeds_of_one_configuration_are_one_band_and_others_are_told_apart": (
        "python -m pasync.report RUN [RUN ...]",
        "python -m pasync.report runs/sync runs/periodic",
    ),
    "tests/system/test_replay.py::test_the_trace_of_a_run_has_every_kind_of_span": ("python -m pasync.observe.timeline RUN",),
    "tests/system/test_replay.py::test_a_run_leaves_what_is_promised_and_nothing_alive": (
        "bash launch.sh configs/tiny_cpu.yaml iterations=10 optimizer.lr=1e-4",
    ),
    "tests/system/test_runs.py::test_the_eight_device_config_dry_runs_without_devices": (
        "bash launch.sh CONFIG --dry-run",
        "bash launch.sh configs/qwen25_7b.yaml --dry-run",
        "bash launch.sh configs/qwen25_7b.yaml schedule=sync run.dir=runs/sync",  # eight devices: all but the start is tested
        "bash launch.sh configs/qwen25_7b.yaml schedule=periodic run.dir=runs/periodic",
    ),
    "tests/system/test_nodes.py::test_the_server_of_another_node_generates_for_the_trainer": (
        "bash launch.sh configs/r1_distill_qwen_32b.yaml --node-rank 0 --address 10.0.0.1:29500",
        "bash launch.sh configs/r1_distill_qwen_32b.yaml --node-rank 1 --address 10.0.0.1:29500",
    ),
    "tests/system/test_doctor.py::test_a_machine_that_can_run_the_tiny_config_is_found_fit_with_one_prompt_through_its_server": (
        "python -m pasync.doctor CONFIG",
        "python -m pasync.doctor [CONFIG] [key.sub=value ...]",
    ),
    "tests/unit/test_readme.py::test_the_reward_of_the_docs_works": (
        "python -m pasync.doctor configs/tiny_cpu.yaml rewards.function=my_rewards:brevity",
    ),
    "tests/unit/test_readme.py::test_the_reference_pages_are_those_of_the_code": ("python -m pasync.reference docs",),
    "tests/unit/test_readme.py::test_the_packages_to_install_are_those_that_set_up_looks_for": (
        "pip install accelerate pyzmq msgspec pydantic 'omegaconf>=2.4' pebble math-verify reasoning-gym datasets rich psutil peft",
    ),
    "tests/unit/test_prepare_data.py::test_published_files_become_prompts_whose_right_answers_score": (
        "python -m pasync.data.prepare",
        "python -m pasync.data.prepare NAME",
        "python -m pasync.data.prepare gsm8k|deepscaler|aime24|math500 [--from FOLDER_OR_FILE] [--to configs/data]",
    ),
    "tests/unit/test_checkpoint.py::test_checksums_are_those_of_sha256sum": ("sha256sum -c sha256sums",),
    "tests/unit/test_trackers.py::test_a_tracker_that_is_not_installed_is_named_with_what_to_do": ("pip install wandb",),
    "tests/system/test_benchmarks.py::test_runs_of_the_real_scheduler_that_sleep_by_known_rates_are_not_faster_than_planned": (
        "python -m benchmarks.plan",
    ),
    "tests/system/test_benchmarks.py::test_growth_prints_a_line_for_all_that_costs_depend_on": (
        "python -m benchmarks.growth",
        "python -m benchmarks.growth --rounds 2",
    ),
    "tests/system/test_benchmarks.py::test_overlap_prints_its_line": (
        "python -m benchmarks.overlap",
        "python -m benchmarks.overlap --pairs 2",
    ),
    "tests/system/test_benchmarks.py::test_all_measures_one_again_keeps_the_others_and_writes_the_page": (
        "python -m benchmarks.all",
        "python -m benchmarks.all --only overlap",
    ),
    "tests/system/test_benchmarks.py::test_against_trl_prints_its_line": (
        "python -m benchmarks.against_trl --case short",
        "python -m benchmarks.against_trl --case short --kl-coef 0.04",
        "python -m benchmarks.against_trl --case long",
        "python -m benchmarks.against_trl --case curve",
        "python -m benchmarks.against_trl --case curve --first-seed 3 --seeds 12",
    ),
    "tests/system/test_benchmarks.py::test_admission_prints_its_line": ("python -m benchmarks.admission",),
    "tests/system/test_benchmarks.py::test_transport_prints_its_line": ("python -m benchmarks.transport",),
    "tests/system/test_benchmarks.py::test_weight_sync_prints_a_line_for_every_type_and_way": (
        "python -m benchmarks.weight_sync",
        "python -m benchmarks.weight_sync --model smollm2-135m",
    ),
    "tests/system/test_benchmarks.py::test_a_slow_one_prints_its_lines": (
        "python -m benchmarks.shared_prompt",
        "python -m benchmarks.shared_prompt --case 64,256,8 1024,64,16 --dtype float32",
        "python -m benchmarks.ablation",
        "python -m benchmarks.ablation --help",
        "python -m benchmarks.logprob",
        "python -m benchmarks.tri_model",
        "python -m benchmarks.algorithms",
    ),
    "tests/system/test_runs.py::test_the_final_model_loads_in_transformers_and_scores_as_it_did_in_the_run": (
        "python -m pasync.evaluate RUN",
    ),
    "tests/unit/test_plan.py::test_the_command_compares_splits_and_says_what_it_rests_on": (
        "python -m pasync.plan CONFIG [key.sub=value ...] [--measure RUN] [--nodes N ...] [--mean-tokens N] [--png CURVE.png]",
    ),
    "tests/unit/test_plan.py::test_the_page_on_scale_is_in_step_with_the_planner": ("python -m benchmarks.scale > docs/scale.md",),
    "tests/run.sh::all of it": ("bash tests/run.sh", "bash tests/run.sh --set npu-versions", "python -m pytest tests/contract"),
}
ASCEND = "docs/ascend.md"
"""Its commands need the machine; tests/contract reads the packages that they install."""


def commands(text: str) -> set[str]:
    """Every command of a page, in blocks and between backticks, without its comment."""
    text = re.sub(r"\\\n\s+", "", text)
    lines = [line for line in text.splitlines() if line.startswith("    ")] + re.findall(r"`([^`\n]+)`", text)
    return {line for line in (re.split(r"\s+#", line)[0].strip() for line in lines) if COMMAND.match(line)}


def test_every_command_of_readme_and_docs_is_run_by_a_test() -> None:
    said = set().union(*(commands(text) for page, text in PAGES.items() if page != ASCEND))
    listed = set().union(*RUN_BY.values())
    assert said - listed == set(), "name the test that runs it"
    assert listed - said - commands(PAGES[ASCEND]) == set(), "no page says so any more"


@pytest.mark.parametrize("test", RUN_BY)
def test_the_tests_that_run_them_are_there(test: str) -> None:
    file, name = test.split("::")
    assert name == "all of it" or f"def {name}(" in (ROOT / file).read_text()


def test_a_command_in_a_page_is_noticed() -> None:
    assert commands("text `python -m x` and\n\n    bash a.sh \\\n        --b  # why\n    [p1 | p2]\n") == {"python -m x", "bash a.sh --b"}


def test_commands_name_files_that_exist() -> None:
    for text in PAGES.values():
        for name in re.findall(r"bash (?!runs/)([\w./]+\.sh)(?: (configs/[\w.]+))?", text):
            assert all((ROOT / part).exists() for part in name if part)


def test_links_between_pages_lead_somewhere() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!http|#)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            there = (ROOT / page).parent / name
            assert there.exists(), f"{page}: {target}"
            titles = re.findall(r"^#+ (.+)$", there.read_text(), re.M) if anchor else []
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, f"{page}: {target}"


def test_the_reference_pages_are_those_of_the_code() -> None:
    for name, text in pages().items():
        assert PAGES[f"docs/{name}"] == text, "python -m pasync.reference docs"


def test_the_page_of_benchmarks_is_that_of_its_lines() -> None:
    assert PAGES["docs/benchmarks.md"] == text_of(read_records(ROOT / "docs" / "benchmarks.jsonl")), "python -m benchmarks.all --only"


def test_all_benchmarks_took_less_than_half_an_hour() -> None:
    records = read_records(ROOT / "docs" / "benchmarks.jsonl")
    assert records.keys() == COMMANDS.keys()
    assert sum(record["seconds"] for record in records.values()) < 30 * 60


def test_the_code_page_lists_every_module_and_nothing_that_is_gone() -> None:
    command = ["git", "ls-files", "pasync", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    modules = {Path(name).name for name in tracked.stdout.split() if name.endswith(".py") and not name.endswith("__init__.py")}
    assert set(re.findall(r"(\w+\.py)\b", PAGES["docs/code.md"])) == modules


def test_the_reward_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = PAGES["docs/adding.md"].split("# my_rewards.py\n")[1].split("\n\n")[0]
    (tmp_path / "my_rewards.py").write_text("\n".join(line[4:] for line in block.splitlines()))
    monkeypatch.chdir(tmp_path)
    reward = resolve("my_rewards:brevity")
    assert reward("3+4=", "7", [9, 9], {"answer": "7"}) == pytest.approx(0.98) and reward("3+4=", "8", [9], {"answer": "7"}) < 0


def test_the_packages_to_install_are_those_that_set_up_looks_for() -> None:
    needed = set(re.search(r'needed="(.+)"', (ROOT / "setup.sh").read_text())[1].split())
    of_vllm, named_otherwise = {"torch", "transformers", "vllm", "safetensors", "yaml"}, {"zmq": "pyzmq"}
    said = re.search(r"`pip install (accelerate [^`]+)`", PAGES["docs/runs.md"])[1].replace("'omegaconf>=2.4'", "omegaconf").split()
    assert {named_otherwise.get(name, name).replace("_", "-") for name in needed - of_vllm} == set(said)
