"""Planted faults, each of which gives its line and what to do; and whatever a check does to itself is a line too."""

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pasync import checks
from pasync.checks import fail, ok, warn
from pasync.config import Config
from pasync.configfile import load
from pasync.doctor import Check, examine, findings
from pasync.model import tiny
from pasync.processes import all_in_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with a random model, which this machine can do."""
    tiny.random_model(tmp_path / "model", "qwen2", tied=True)
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 40 + 2?", "answer": "so\\n#### 42"}\n')
    (tmp_path / "run.yaml").write_text(
        "{name: tiny, iterations: 1, model: {path: model, dtype: float32}, "
        "data: {train: {source: rows.jsonl}, chat: false, max_prompt_tokens: 64}, rollout: {max_tokens: 24, kv_cache_bytes: 67108864}, "
        "algorithm: {batch_groups: 1, group_responses: 2}, optimizer: {lr: 1e-3}, checkpoint: {every: 1}, device: {kind: cpu}}"
    )
    return load(tmp_path / "run.yaml")


def changed(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def found(tmp_path: Path, look, deadline_s: float = 120) -> list[tuple[str, str]]:
    """What the doctor makes of a check, in a process of its own."""
    return [tuple(finding) for finding in examine(Check(f"look-{len(list(tmp_path.iterdir()))}", look, deadline_s), tmp_path)]


def test_nothing_is_said_against_a_run_that_can_be_done(tmp_path, config):
    looks = [
        checks.python, checks.companions, checks.shared_memory,
        partial(checks.accelerators, "cpu", 1), partial(checks.loopback, "tcp://127.0.0.1:0"),
        *(partial(look, config) for look in (checks.configuration, checks.weights, checks.disk, checks.prompts, checks.reward)),
        partial(checks.memory, config, "cpu"),
    ]  # fmt: skip
    said = {getattr(look, "func", look).__name__: found(tmp_path, look) for look in looks}
    assert {name: [level for level, _ in lines] for name, lines in said.items()} == {name: ["ok"] for name in said}
    assert said["prompts"] == [("ok", "1 to learn from, 0 held out; the longest has 15 of 64 tokens")]
    assert said["reward"] == [("ok", "math scores the reference answer 'so\n#### 42' with 1")]


@pytest.mark.timeout(150)
def test_ranks_that_do_not_reach_each_other_are_told_with_their_log(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    ((level, text),) = found(tmp_path, partial(checks.broadcast, "cpu", tmp_path / "run"))
    assert level == "fail" and "nowhere0" in text and "nowhere0" in Path(text.split("; see ")[1]).read_text()


def test_one_accelerator_is_not_enough_for_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    assert list(checks.broadcast("npu", tmp_path)) == [warn("not tried: two ranks need two devices, visible is npu 3")]


def test_packages_are_held_against_the_pins(tmp_path):
    pins = tmp_path / "cpu.txt"
    pins.write_text(f"# what else\n--extra-index-url elsewhere\npytest=={importlib.metadata.version('pytest')}  # tests\n\n")
    assert list(checks.packages(pins)) == [ok(f"1 as in {pins}")]
    pins.write_text(pins.read_text() + "Rich==1.0\nno-such-package==2\nrich==1.0; sys_platform == 'elsewhere'\n")
    (line,) = checks.packages(pins)
    mine = importlib.metadata.version("rich")
    wrong = f"2 of 4 differ from {pins}: Rich==1.0 is {mine}, no-such-package==2 is missing"
    assert line == fail(f"{wrong}; pip install --no-deps -r {pins}")
    assert next(checks.packages(tmp_path / "none.txt")).level == "warn"


def test_a_torchvision_of_another_torch_is_named(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    ((level, text),) = checks.companions()
    assert level == "fail" and "torchvision::nms does not exist" in text and "pip uninstall -y torchvision" in text


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        level, text = next(checks.loopback(address))
    assert level == "fail" and text.startswith(f"{address}: ") and "in use" in text and "choose another" in text


def test_a_container_with_little_shared_memory_is_told(monkeypatch):
    for bounds, level in (((0, 1 << 60), "warn"), ((1 << 59, 1 << 60), "fail")):
        monkeypatch.setattr(checks, "SHARED_BYTES", bounds)
        (line,) = checks.shared_memory()
        assert line.level == level and "--shm-size" in line.text


def test_devices_that_are_left_out_or_cannot_be_used_are_told(monkeypatch):
    monkeypatch.setattr(checks.devices, "left_out", lambda kind: [f"left out {kind} 3: health Alarm"])
    monkeypatch.setattr(checks.devices, "device_problems", lambda kind: ["ASCEND_RT_VISIBLE_DEVICES=9: npu 9 is not there"])
    lines = list(checks.accelerators("npu", None))
    assert warn("left out npu 3: health Alarm") in lines and fail("ASCEND_RT_VISIBLE_DEVICES=9: npu 9 is not there") in lines


def test_a_configuration_that_the_launcher_would_refuse_fails(tmp_path, config):
    wanting = changed(config, "rollout", kv_cache_bytes=None)
    assert found(tmp_path, partial(checks.configuration, wanting)) == [
        ("fail", "rollout.kv_cache_bytes=null: must be given on cpu, for instance 268435456")
    ]


def test_files_that_a_checkpoint_lacks_are_named(tmp_path, config):
    folder = Path(config.model.path)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink()
    first, second, *others = sorted(folder.glob("model-*.safetensors"))
    assert found(tmp_path, partial(checks.weights, config))[0][0] == "ok"
    second.unlink()
    held = load_file(first)
    gone = held.popitem()[0]
    save_file(held, first)
    others[0].write_bytes(others[0].read_bytes()[:-4])
    texts = [text for level, text in found(tmp_path, partial(checks.weights, config)) if level == "fail"]
    assert len(texts) == 3 and all(text.endswith(f"copy it into {folder} again") for text in texts)
    assert texts[0].startswith(f"{first.name} lacks 1 of {len(held) + 1} weights, {gone} for one")
    assert texts[1].startswith(f"{second.name}: No such file") and texts[2].startswith(f"{others[0].name}: ")


def test_a_checkpoint_without_tokenizer_is_told(tmp_path, config):
    for file in Path(config.model.path).glob("*token*"):
        file.unlink()
    ((level, text),) = found(tmp_path, partial(checks.weights, config))
    assert level == "fail" and "copy tokenizer.json and tokenizer_config.json into" in text


def test_a_full_disk_is_told(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    (line,) = checks.disk(config)
    assert line.level == "fail" and "has 0.00 GB left" in line.text and "lower checkpoint.keep" in line.text


def test_a_run_that_may_not_fit_is_warned_of_with_values_that_would(config):
    large = changed(changed(config, "parallel", micro_batch_tokens=1 << 30), "algorithm", batch_groups=1 << 22)
    (line,) = checks.memory(large, "cpu")
    assert line.level == "warn" and "parallel.micro_batch_tokens=" in line.text


@pytest.mark.parametrize(
    ("look", "section", "values", "told"),
    [
        (checks.prompts, "data", {"max_prompt_tokens": 5}, "the longest has 15 tokens, the first is row 0; raise it"),
        (checks.prompts, "data", {"template": "{quesiton}"}, "no column quesiton, there are question, answer. Did you mean question?"),
        (checks.reward, "rewards", {"function": "nowhere:f"}, "ModuleNotFoundError: No module named 'nowhere'; it is looked for from"),
        (checks.reward, "rewards", {"function": "math:factorial"}, "takes exactly one argument (4 given); every response would"),
    ],
)
def test_data_and_rewards_that_cannot_be_used_fail(tmp_path, config, look, section, values, told):
    ((level, text),) = found(tmp_path, partial(look, changed(config, section, **values)))
    assert level == "fail" and told in text


def test_a_missing_column_is_named(tmp_path, config):
    wrong = changed(config, "data", train=config.data.train.model_copy(update={"answer_column": "anwser"}))
    ((level, text),) = found(tmp_path, partial(checks.prompts, wrong))
    assert level == "fail" and "answer_column=anwser: no such column, there are question, answer. Did you mean answer?" in text


def test_a_reference_answer_that_its_reward_refuses_is_pointed_out(tmp_path, config):
    Path(config.data.train.source).write_text('{"question": "q", "answer": "$1$ or so $2$"}\n')
    ((level, text),) = found(tmp_path, partial(checks.reward, config))
    assert level == "warn" and "with 0" in text and "data.train.answer_column=answer" in text


def test_a_check_that_hangs_crashes_or_raises_is_a_line(tmp_path):
    began = time.monotonic()
    assert found(tmp_path, signal.pause, 0.2)[0][1].startswith("not done within 0 s; see ")
    assert time.monotonic() - began < 10
    assert found(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))[0][1].startswith("its process ended with code -9; see ")
    ((level, text),) = found(tmp_path, lambda: [1 // 0])
    assert level == "fail" and text.startswith("ZeroDivisionError: integer division or modulo by zero; see ")
    assert "Traceback" in Path(text.split("see ")[1]).read_text()


def test_what_would_fail_for_the_same_reason_is_not_tried(tmp_path):
    table = [
        Check("a", lambda: [fail("broken")]),
        Check("b", lambda: [ok("fine")]),
        Check("c", lambda: [ok("never said")], 60, ("a", "b")),
        Check("d", lambda: [ok("never said")], 60, ("c",)),
    ]
    assert [(name, level) for name, (level, _) in findings(table, tmp_path)] == [("a", "fail"), ("b", "ok"), ("c", "warn"), ("d", "warn")]


@pytest.mark.timeout(150)
def test_a_broken_configuration_fails_and_the_machine_is_looked_at_all_the_same(tmp_path):
    (tmp_path / "broken.yaml").write_text("{name: x, iterrations: 1}")
    command = [sys.executable, "-m", "pasync.doctor", str(tmp_path / "broken.yaml")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, env=env, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert any(line.startswith("fail  configuration  iterrations=1: unknown key") and "Did you mean iterations?" in line for line in lines)
    levels = {line.split()[1]: line.split()[0] for line in lines}
    del levels["configuration"], levels["packages"]  # the tests run with other sets too
    assert levels == {name: "ok" for name in ("python", "companions", "devices", "ports", "shared-memory", "broadcast")}


@pytest.mark.timeout(150)
def test_a_killed_doctor_leaves_no_process(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    doctor = subprocess.Popen([sys.executable, "-m", "pasync.doctor"], stdout=subprocess.DEVNULL, env=env, cwd=tmp_path)

    def started() -> list[psutil.Process]:
        return [process for run in tmp_path.glob("*/broadcast") for process in all_in_run(str(run))]

    end = time.monotonic() + 120
    while len(started()) < 3:  # torchrun and two ranks
        assert doctor.poll() is None and time.monotonic() < end
        with suppress(subprocess.TimeoutExpired):
            doctor.wait(0.05)
    doctor.kill()
    doctor.wait(10)
    psutil.wait_procs(started(), timeout=10)
    assert not started()
