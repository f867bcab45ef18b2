"""The doctor on this machine: real processes, a real prompt through vLLM."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, TINY

from pasync.model import prepare
from pasync.processes import all_in_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(700)]
NAMES = (
    "configuration", "python", "packages", "companions", "devices", "ports", "shared-memory", "broadcast",
    "model", "memory", "disk", "prompts", "reward", "server",
)  # fmt: skip


def doctor(tmp_path, *overrides: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """(exit code, {check: (level, text)}); one line each, nothing else, and no process left. Its temporary files lie in `tmp_path`."""
    tmp_path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pasync.doctor", str(TINY), *overrides]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=650, env=env, cwd=tmp_path)
    assert done.stderr == "" and not [p for name in ("server", "broadcast") for w in tmp_path.glob("*") for p in all_in_run(str(w / name))]
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert tuple(name for _, name, _ in lines) == NAMES
    return done.returncode, {name: (level, text) for level, name, text in lines}


def test_a_machine_that_can_run_the_tiny_config_is_found_fit_with_one_prompt_through_its_server(tmp_path):
    folder = tmp_path / ("a-long-path" * 7)  # in which no socket can be made
    code, said = doctor(folder)
    pins = said.pop("packages")[0] != "ok"  # the tests run with other sets too
    assert {name: finding for name, finding in said.items() if finding[0] != "ok"} == {} and code == int(pins)
    assert "answers 5 tokens with" in said["server"][1]
    expected = ("pasync-doctor-", "torchinductor_")  # its own, if some check failed, and a cache
    assert [path for path in folder.iterdir() if not path.name.startswith(expected)] == []


def test_a_server_that_cannot_start_is_told_with_its_log(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(prepare.prepare("tiny-sort"), model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"intermediate_size": 2 * settings["intermediate_size"]}))
    code, said = doctor(tmp_path, f"model.path={model}")
    level, text = said["server"]
    assert (code, level) == (1, "fail") and "server-0" in text, said
    assert "Traceback" in Path(text.split("; see ")[1]).read_text()
