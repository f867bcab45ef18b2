"""Real processes: a fake launcher starts the guard and a child, which starts a grandchild in a session of its own."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from pasync.errors import WeightSyncError
from pasync.processes import all_in_run, kill_run, report_fatal

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, subprocess, sys
from pasync import guard
run_id, scratch = sys.argv[1:]
watch = guard.start(run_id, dict(os.environ), 1.0, scratch)
grand = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = f"import subprocess, sys, signal; subprocess.Popen([sys.executable, '-c', {grand!r}], start_new_session=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", child], env=os.environ | {"PASYNC_RUN_ID": run_id}, start_new_session=True)
if sys.stdin.readline() == "end well\\n":
    watch.communicate(guard.QUIET)
"""


@pytest.fixture
def run_id():
    name = f"test-{uuid.uuid4()}"
    yield name
    kill_run(name)


@pytest.fixture
def scratch(run_id: str, tmp_path: Path) -> Path:
    """With a file in it, as a run has."""
    folder = tmp_path / run_id
    folder.mkdir()
    (folder / "socket").touch()
    return folder


def fake_launcher(run_id: str, scratch: Path | str = "") -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", LAUNCHER, run_id, str(scratch)]
    launcher = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
    assert launcher.stdout and launcher.stdout.readline() == "up\n"
    return launcher


def test_kill_of_the_launcher_ends_children_and_grandchildren_and_is_reported(run_id: str, scratch: Path) -> None:
    launcher = fake_launcher(run_id, scratch)
    family = all_in_run(run_id)
    assert len(family) == 2 and list(scratch.iterdir())
    launcher.kill()
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert "the launcher" in launcher.communicate(timeout=5)[1]  # ends when the guard does
    assert not scratch.exists()


def test_a_launcher_that_stays_stopped_is_ended_with_all_it_started_and_named(run_id: str) -> None:
    launcher = fake_launcher(run_id)
    family = all_in_run(run_id)
    launcher.send_signal(signal.SIGSTOP)
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert "was stopped (SIGSTOP, Ctrl-Z) for run.silence_s=1.0" in launcher.communicate(timeout=5)[1]
    assert launcher.returncode == -signal.SIGKILL


def test_a_launcher_that_goes_on_in_time_is_left_alone(run_id: str) -> None:
    launcher = fake_launcher(run_id)
    for _ in range(2):
        launcher.send_signal(signal.SIGSTOP)
        assert psutil.wait_procs(all_in_run(run_id), timeout=0.7)[0] == []
        launcher.send_signal(signal.SIGCONT)
    assert launcher.communicate("end well\n", timeout=10)[1] == ""


def test_a_launcher_that_ends_well_has_nothing_reported_and_nothing_left(run_id: str) -> None:
    launcher = fake_launcher(run_id)
    assert launcher.communicate("end well\n", timeout=10)[1] == ""
    assert all_in_run(run_id) == []


def test_the_guard_cannot_be_talked_out_of_it(run_id: str) -> None:
    launcher = fake_launcher(run_id)
    guard = next(p for p in psutil.Process(launcher.pid).children() if "pasync.guard" in p.cmdline())
    for number in (signal.SIGINT, signal.SIGTERM):
        guard.send_signal(number)
    launcher.kill()
    launcher.communicate(timeout=5)
    assert all_in_run(run_id) == []


def test_processes_of_other_runs_are_left_alone(run_id: str) -> None:
    launcher = fake_launcher(run_id)
    assert kill_run("another") == 0 and len(all_in_run(run_id)) == 2
    launcher.kill()
    launcher.communicate(timeout=5)


def test_a_process_that_asked_for_it_dies_with_its_parent() -> None:
    child = "import signal; from pasync.processes import die_with_parent; die_with_parent(); print('up', flush=True); signal.pause()"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True).returncode)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout and process.stdout.readline() == "up\n"
    family = psutil.Process(process.pid).children()
    process.kill()
    assert len(family) == 1 and psutil.wait_procs(family, timeout=5)[1] == []
    process.communicate()


@pytest.mark.parametrize(("end", "failed"), [("1 / 0", True), ("sys.exit(3)", True), ("sys.exit(0)", False), ("pass", False)])
def test_only_a_failure_is_written_down(tmp_path: Path, end: str, failed: bool) -> None:
    text = "import sys; from pathlib import Path; from pasync.processes import report_fatal\n"
    text += f"with report_fatal(Path(sys.argv[1]), 'rank-0'):\n  {end}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", text, str(tmp_path)], capture_output=True, text=True, env=env)
    assert result.returncode == int(failed) and (tmp_path / "logs" / "rank-0.error.json").exists() == failed
    assert ("Traceback" in result.stderr) == failed


def test_a_named_error_is_not_hidden_by_one_that_closing_raised(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), report_fatal(tmp_path, "rank-0"):
        try:
            raise WeightSyncError("server-0 is stale")
        finally:
            os.close(-1)
    report = json.loads((tmp_path / "logs" / "rank-0.error.json").read_text())
    assert (report["error"], report["message"]) == ("WeightSyncError", "server-0 is stale")
