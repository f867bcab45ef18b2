"""What the launcher knows of devices without any: environments, and NPUs as a stand-in of npu-smi tells them."""

import os
import subprocess
import sys
from pathlib import Path

import fake_npus
import pytest

from pasync import device, npu_smi

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "configs" / "qwen25_7b.yaml"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    """Neither variables of this machine's user nor NPUs of an earlier test."""
    for name in list(os.environ):
        if name.startswith(("ASCEND", "HCCL", "VLLM", "CUDA", "PYTORCH", "RANK_TABLE", "TASK_QUEUE")):
            monkeypatch.delenv(name)
    npu_smi.npus.cache_clear()
    yield
    npu_smi.npus.cache_clear()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs an npu-smi in front of any other."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return lambda *args, **kwargs: fake_npus.install(folder, *args, **kwargs)


def dry_run(*overrides: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PASYNC_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "launch.sh"), str(QWEN), "--dry-run", "device.kind=npu", *overrides]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def processes(output: str) -> dict[str, dict[str, str]]:
    """{process: its environment and, under "devices", its devices} of a dry run."""
    found: dict[str, dict[str, str]] = {}
    for line in output.split("\ndevices (")[1].splitlines()[1:]:
        if line.startswith("    ") and "=" in line:
            key, _, value = line.strip().partition("=")
            found[list(found)[-1]][key] = value
        elif line.startswith("  ") and line.split()[0].startswith(("rank-", "server-")):
            name, _, *ids = line.split()
            found[name] = {"devices": " ".join(ids)}
        else:
            break
    return found


def test_a_dry_run_shows_eight_npus_without_one() -> None:
    answer = dry_run("device.count=8")
    assert answer.returncode == 0, answer.stderr
    shown = processes(answer.stdout)
    assert {name: env["devices"] for name, env in shown.items()} == {
        "rank-0": "0", "rank-1": "1", "rank-2": "2", "rank-3": "3", "server-0": "4", "server-1": "5", "server-2": "6", "server-3": "7",
    }  # fmt: skip
    for env in shown.values():
        assert env["HCCL_HOST_SOCKET_PORT_RANGE"] == env["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
        assert env["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True" and env["TASK_QUEUE_ENABLE"] == "1"
    assert shown["rank-3"]["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3" and shown["server-2"]["ASCEND_RT_VISIBLE_DEVICES"] == "6"
    assert shown["server-0"]["VLLM_ASCEND_ENABLE_NZ"] == "0" and shown["server-0"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert shown["rank-0"]["CPU_AFFINITY_CONF"] == "1" and "CPU_AFFINITY_CONF" not in shown["server-0"]
    memory = answer.stdout.split("\nmemory: ")[1]
    assert "ASSUMED to be those of the published model" in memory and "60.9 GiB  ASSUMED: no npu device can be asked here" in memory
    assert "  rank " in memory and "  server " in memory and "does not fit" not in memory


def test_waits_of_hccl_are_no_shorter_than_ours() -> None:
    env = device.process_environment("npu", [0], "rank", deadline_s=1800.0)
    assert (env["HCCL_CONNECT_TIMEOUT"], env["HCCL_EXEC_TIMEOUT"]) == ("1800", "3600")
    env = device.process_environment("npu", [0], "rank", deadline_s=20000.0)
    assert (env["HCCL_CONNECT_TIMEOUT"], env["HCCL_EXEC_TIMEOUT"]) == ("7200", "40000")
    env = device.process_environment("npu", [0], "rank", deadline_s=5.0)
    assert (env["HCCL_CONNECT_TIMEOUT"], env["HCCL_EXEC_TIMEOUT"]) == ("120", "1836")


def test_a_default_gives_way_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "61000-61050")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    env = device.process_environment("npu", [0], "server")
    assert env["TASK_QUEUE_ENABLE"] == "2" and env["HCCL_HOST_SOCKET_PORT_RANGE"] == "61000-61050"
    assert "PYTORCH_NPU_ALLOC_CONF" not in env, "torch_npu refuses both"
    assert device.environment_problems("npu", exact=False) == []


def test_devices_are_not_taken_from_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert device.process_environment("npu", [2], "server")["ASCEND_RT_VISIBLE_DEVICES"] == "2"
    assert device.process_environment("cpu", [2], "server")["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("name", "value", "exact", "words"),
    [
        ("VLLM_ASCEND_ENABLE_NZ", "1", False, "NZ format"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "fork", False, "allowed is spawn"),
        ("HCCL_DETERMINISTIC", "false", True, "allowed is true or strict"),
        ("RANK_TABLE_FILE", "ranks.json", False, "unset it"),
        ("HCCL_OP_EXPANSION_MODE", "AIV", False, "unset it"),
    ],
)
def test_what_would_break_a_run_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, exact: bool, words: str) -> None:
    monkeypatch.setenv(name, value)
    (problem,) = device.environment_problems("npu", exact=exact)
    assert problem.startswith(f"{name}={value}: ") and words in problem
    answer = dry_run("device.count=8", f"parallel.accumulate={'exact' if exact else 'float32'}")
    assert answer.returncode == 2 and problem in answer.stderr


def test_exact_sums_need_deterministic_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.process_environment("npu", [0], "rank", exact=True)["HCCL_DETERMINISTIC"] == "true"
    assert device.process_environment("cuda", [0], "rank", exact=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "HCCL_DETERMINISTIC" not in device.process_environment("npu", [0], "rank")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "strict")
    assert device.process_environment("npu", [0], "rank", exact=True)["HCCL_DETERMINISTIC"] == "strict"


@pytest.mark.parametrize("installed", ["0.23.0", "0.23.0+empty"])
def test_a_server_tells_vllm_ascend_a_version_it_can_compare(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"vllm": installed}.__getitem__)
    assert device.process_environment("npu", [0], "server")["VLLM_VERSION"] == "0.23.0"
    assert "VLLM_VERSION" not in device.process_environment("npu", [0], "rank")


def test_chips_have_logic_ids_and_controllers_have_none() -> None:
    assert npu_smi.chips(fake_npus.mapping([4, 5, 7])) == {(4, 0): 0, (5, 0): 1, (7, 0): 2}
    newer = "NPU ID  Chip ID  Chip Logic ID  Chip Phy-ID  Chip Name\n8  0  0  16  Ascend910\n8  1  1  17  Ascend910\n8  2  -  -  Mcu\n"
    assert npu_smi.chips(newer) == {(8, 0): 0, (8, 1): 1}
    assert npu_smi.chips("npu-smi: command failed") == {}


@pytest.mark.parametrize("state", ["OK", "Warning", "Alarm", "Critical", "UNKNOWN"])
def test_health_is_read(state: str) -> None:
    assert npu_smi.health(fake_npus.health(3, state)) == state


def test_no_answer_about_health_is_unknown_and_one_sick_chip_makes_a_card_sick() -> None:
    assert npu_smi.health("") == "UNKNOWN"
    assert npu_smi.health("\tHealth   : OK\n\tHealth   : Alarm\n\tHealth   : OK\n") == "Alarm"


def test_processes_are_read_with_and_without_a_name() -> None:
    text = fake_npus.overview([0, 1, 2], {1: [(3476, "python3.11", 62430), (3477, "", 132)]})
    assert npu_smi.users(text) == {(1, 0): ["pid 3476 (python3.11) with 62430 MB", "pid 3477 with 132 MB"]}


def test_npus_of_a_container_are_used_by_logic_id(smi) -> None:
    smi([8, 9, 10, 11, 12, 13, 14, 15], states={9: "Warning"})
    assert device.detect() == "npu" and device.device_ids("npu") == list(range(8)) and device.left_out("npu") == []


def test_a_sick_and_a_busy_npu_are_left_out_by_name(smi) -> None:
    smi([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], states={2: "Alarm"}, users={5: [(77, "python", 900)]})
    answer = dry_run()
    assert answer.returncode == 0, answer.stderr
    shown = processes(answer.stdout)
    assert [env["devices"] for env in shown.values()] == ["0", "1", "3", "4", "6", "7", "8", "9"]
    assert shown["rank-0"]["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,3,4"
    assert "left out npu 2: health Alarm\nleft out npu 5: in use by pid 77 (python) with 900 MB\n" in answer.stderr


def test_too_few_npus_are_reported_with_those_left_out(smi) -> None:
    smi([0, 1, 2, 3, 4, 5, 6, 7], states={2: "Critical"})
    answer = dry_run()
    assert answer.returncode == 2 and "need 8 devices" in answer.stderr and "left out npu 2: health Critical" in answer.stderr


def test_a_named_npu_that_is_sick_busy_or_absent_is_refused(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi([0, 1, 2, 3, 4, 5, 6, 7], states={2: "Alarm"}, users={5: [(77, "", 900)]})
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,2,5,9")
    given = "ASCEND_RT_VISIBLE_DEVICES=1,2,5,9: npu"
    wrong = [f"{given} 2 is health Alarm", f"{given} 5 is in use by pid 77 with 900 MB"]
    assert device.device_problems("npu") == [*wrong, f"{given} 9 is not there, there are 0, 1, 2, 3, 4, 5, 6, 7"]
    answer = dry_run("rollout.servers=2", "parallel.ranks=2", "parallel.tensor=2")
    assert answer.returncode == 2 and all(text in answer.stderr for text in wrong)


def test_named_npus_are_used_in_their_order(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi([0, 1, 2, 3, 4, 5, 6, 7], states={0: "Alarm"})
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7, 6,5")
    assert device.device_ids("npu") == [7, 6, 5] and device.device_problems("npu") == [] and device.left_out("npu") == []


@pytest.mark.parametrize("names", ["GPU-5f1c", "-1", "0,x"])
def test_named_devices_must_be_numbers(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert device.device_problems("cuda") == [f"CUDA_VISIBLE_DEVICES={names}: must be numbers of devices, separated by commas"]
    assert device.device_ids("cuda") == []


def test_an_npu_smi_that_fails_or_hangs_tells_of_no_npus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(npu_smi, "ANSWER_S", 0.2)
    for body in ("exit 1", "exec sleep 60"):
        (tmp_path / "npu-smi").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "npu-smi").chmod(0o755)
        npu_smi.npus.cache_clear()
        assert npu_smi.npus() == []


def test_the_launcher_sources_what_cann_needs(smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(list(range(8)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for part, line in (
        ("ascend-toolkit", "export HCCL_CONNECT_TIMEOUT=777"),
        ("nnal/atb", "export HF_HUB_OFFLINE=${1:-$(python3 -c 'import torch; print(7)')}"),
    ):
        file = tmp_path / "Ascend" / part / "set_env.sh"
        file.parent.mkdir(parents=True)
        file.write_text(f"echo $never_set\nfalse\n{line}\n")  # as the real ones: written for neither -u nor -e
    answer = dry_run("device.count=8")
    assert answer.returncode == 0, answer.stderr
    assert processes(answer.stdout)["rank-0"]["HCCL_CONNECT_TIMEOUT"] == "777"
    assert processes(answer.stdout)["server-0"]["HF_HUB_OFFLINE"] == "7", "by this run's own python, without the launcher's arguments"


def test_the_launcher_sources_nothing_that_is_set_up_and_says_what_it_cannot_find(smi, tmp_path: Path, monkeypatch) -> None:
    smi(list(range(8)))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", "/there")
    (tmp_path / "Ascend" / "ascend-toolkit").mkdir(parents=True)
    (tmp_path / "Ascend" / "ascend-toolkit" / "set_env.sh").write_text("export HCCL_CONNECT_TIMEOUT=777\n")
    answer = dry_run("device.count=8")
    assert answer.returncode == 0 and "=777" not in answer.stdout
    assert f"CANN's NNAL is not set up, and no set_env.sh was found in: {tmp_path}/Ascend/nnal/atb/set_env.sh" in answer.stderr
