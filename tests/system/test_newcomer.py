"""The path of a newcomer, word by word from README, in a checkout of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pasync.rollout.samples import read_samples

pytestmark = [pytest.mark.system, pytest.mark.timeout(500)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of this one, and the environment that its set-up made."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def block() -> list[str]:
    """The commands under "Run it"."""
    text = (ROOT / "README.md").read_text().split("\n## Run it\n\n")[1].split("\n\n")[0]
    return [re.split(r"\s+#", line)[0].strip() for line in text.splitlines()]


def follow(checkout: Path, commands: list[str], timeout_s: float) -> str:
    """Type the commands into one shell."""
    script = "\n".join(["set -e", *commands])
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PASYNC_PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", script], cwd=checkout, capture_output=True, text=True, timeout=timeout_s, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_of_the_readme_train_report_continue_and_export(checkout: Path) -> None:
    small = "configs/tiny_cpu.yaml iterations=2 checkpoint.every=1 eval.every=2 run.trackers=[tensorboard]"
    lines = [line.replace("configs/demo_cpu.yaml", small).replace("=60", "=4").replace("40", "2") for line in block()]
    assert len(lines) == 5 and lines[0] == f"bash launch.sh {small}"
    again = "bash launch.sh runs/latest/config.yaml run.dir=null --dry-run"
    follow(checkout, ["bash setup.sh", *lines, again], 480)
    (run,) = (path for path in (checkout / "runs").iterdir() if not path.is_symlink())
    assert (checkout / "runs" / "latest").resolve() == run
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3, 4] and "reward/mean" not in metrics[4]
    assert "Held-out accuracy" in (run / "report.html").read_text() and (run / "model-2" / "model.safetensors").exists()
    assert {sample["iteration"] for sample in read_samples(run) if sample["kind"] == "held-out"} == {0, 2, 4}
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1, 2, 3]
    assert [event.step for event in events.Scalars("eval/accuracy_frac")] == [0, 2, 4]
    assert events.Scalars("policy/loss")[3].value == pytest.approx(metrics[3]["policy/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_itself(checkout: Path) -> None:
    follow(checkout, block(), 1700)
    metrics = [json.loads(line) for line in (checkout / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    learned = {line["iteration"]: line["eval/accuracy_frac"] for line in metrics if "eval/accuracy_frac" in line}
    assert learned[0] < 0.4 and learned[60] > 0.75 and [line["iteration"] for line in metrics] == list(range(61))
