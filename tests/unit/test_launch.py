"""The launcher with real processes: small scripts in place of servers and ranks, and a real torchrun where its words matter."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from workers import free_port

from pasync.cause import Exit, find_cause, rank_exits
from pasync.configfile import load
from pasync.launch import placed, run_commands
from pasync.placement import place
from pasync.processes import all_in_run, kill_run

pytestmark = pytest.mark.timeout(180)  # real processes, and busy cores
ROOT = Path(__file__).parents[2]
UP = "from pasync.observe.console import say; say('up'); "
FOREVER = UP + "import signal; signal.pause()"
RAISE = "from pathlib import Path\nfrom pasync.errors import WeightSyncError\nfrom pasync.processes import report_fatal\nwith report_fatal"
STARTER = """
import os, sys
from pasync import launch
from pasync.supervisor import Command
def commands(placement, run):
    argv, restarts = [sys.executable, "-c", sys.argv[2]], int(os.environ.get("RESTARTS", "0"))
    servers = [Command(f"server-{i}", argv, restarts=restarts) for i in range(int(os.environ.get("SERVERS", "1")))]
    return [*servers, Command("ranks", [sys.executable, *sys.argv[3:]])]
config = launch.load(sys.argv[1])
sys.exit(launch.launch(config, launch.placed(config, False), commands))
"""


@pytest.fixture
def config_file(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 1024}')
    (model / "model.safetensors").touch()
    (tmp_path / "t.jsonl").write_text("")
    temporary = tempfile.mkdtemp(dir="/tmp")  # short, or the run's folder of sockets would lie elsewhere
    (tmp_path / "temporary").symlink_to(temporary)
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
name: tiny
iterations: 1
model: {{path: model}}
data: {{train: {{source: t.jsonl}}}}
rollout: {{max_tokens: 8, kv_cache_bytes: 16777216}}
algorithm: {{batch_groups: 4, group_responses: 2}}
optimizer: {{lr: 1e-6}}
device: {{kind: cpu}}
run: {{dir: {tmp_path}/run}}
"""
    )
    yield path
    kill_run(str(tmp_path / "run"))
    shutil.rmtree(temporary, ignore_errors=True)


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.2", port)) != 0


def python(config_file: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "7", "TMPDIR": str((config_file.parent / "temporary").resolve())}
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, cwd=config_file.parent)


def start(config_file: Path, server: str, *ranks: str) -> subprocess.Popen[str]:
    return python(config_file, "-c", STARTER, str(config_file), server, *ranks)


def launch(config_file: Path, *arguments: str) -> subprocess.Popen[str]:
    return python(config_file, "-m", "pasync.launch", str(config_file), *arguments)


def ended(launcher: subprocess.Popen[str], config_file: Path) -> tuple[int, list[str]]:
    """(exit code, console lines) of a launcher that left no process and no temporary file."""
    lines = launcher.communicate(timeout=90)[0].splitlines()
    assert all_in_run(str(config_file.parent / "run")) == [] and list((config_file.parent / "temporary").iterdir()) == []
    return launcher.returncode, lines


def until(launcher: subprocess.Popen[str], text: str) -> None:
    assert launcher.stdout
    while text not in (line := launcher.stdout.readline()):
        assert line, f"ended without {text!r}"


def test_a_dry_run_shows_configuration_and_devices_and_creates_nothing(config_file: Path) -> None:
    before = sorted(config_file.parent.rglob("*"))
    code, lines = ended(launch(config_file, "--dry-run", "device.kind=npu", "device.count=8"), config_file)
    assert code == 0 and "name: tiny" in lines
    assert "  rank-0     npu 0" in lines and "  server-0   npu 1" in lines and "    ASCEND_RT_VISIBLE_DEVICES=1" in lines
    assert sorted(config_file.parent.rglob("*")) == before


def test_a_configuration_that_cannot_work_ends_with_2_and_all_problems(config_file: Path) -> None:
    code, lines = ended(launch(config_file, "rollout.sevrers=2", "optimizer.lr=-1"), config_file)
    assert code == 2 and "Traceback" not in "".join(lines)
    assert any("rollout.sevrers" in line for line in lines) and any("optimizer.lr" in line for line in lines)


def test_devices_that_are_not_there_end_a_real_run_with_2(config_file: Path) -> None:
    code, lines = ended(launch(config_file, "device.kind=npu", "device.count=8"), config_file)
    assert code == 2 and any("device.count=8: this machine has 0 npu devices" in line for line in lines)


def test_a_finished_run_without_a_checkpoint_is_not_begun_anew(config_file: Path) -> None:
    model = config_file.parent / "run" / "model"
    model.mkdir(parents=True)
    code, lines = ended(launch(config_file, "iterations=9"), config_file)
    assert code == 2 and any("has no checkpoint to go on from" in line for line in lines) and model.exists()


def test_a_model_that_is_nowhere_ends_with_2(config_file: Path) -> None:
    code, lines = ended(launch(config_file, "model.path=nowhere"), config_file)
    assert code == 2 and any("model.path=nowhere" in line for line in lines)


NODES = ["device.nodes=2", "device.count=1", "rollout.max_restarts=0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node-rank", "0"], "device.nodes=1: --node-rank and --address are for several"),
        (["--address", "localhost:1234"], "device.nodes=1: --node-rank and --address are for several"),
        (NODES, "device.nodes=2: each is started with --node-rank, 0 to 1, and --address HOST:PORT of node 0"),
        ([*NODES, "--node-rank", "2", "--address", "localhost:1234"], "each is started with --node-rank, 0 to 1"),
        ([*NODES, "--node-rank", "0", "--address", "localhost"], "--address localhost: "),
        ([*NODES, "run.dir=null"], "run.dir=null: must be given with device.nodes=2, the same on every node"),
        (["device.nodes=2"], "device.count=null: must be given with device.nodes=2, the same on every node"),
    ],
)
def test_several_nodes_need_to_know_which_is_which_and_where(config_file: Path, arguments: list[str], words: str) -> None:
    code, lines = ended(launch(config_file, *arguments), config_file)
    assert code == 2 and any(words in line for line in lines), lines


def test_a_dry_run_shows_all_nodes(config_file: Path) -> None:
    wide = ["parallel.ranks=3", "algorithm.batch_groups=3", "rollout.servers=2", "rollout.tensor_parallel=2"]
    nodes = ["device.kind=npu", "device.nodes=4", "device.count=2", "rollout.max_restarts=0"]
    code, lines = ended(launch(config_file, "--dry-run", *nodes, *wide), config_file)
    assert code == 0
    assert [" ".join(line.split()) for line in lines if line.startswith(("  rank-", "  server-"))] == [
        "rank-0 node 0, npu 0", "rank-1 node 0, npu 1", "rank-2 node 1, npu 0", "server-0 node 2, npu 0, 1", "server-1 node 3, npu 0, 1",
    ]  # fmt: skip
    visible = [line.strip() for line in lines if "ASCEND_RT_VISIBLE_DEVICES" in line]
    assert visible == [f"ASCEND_RT_VISIBLE_DEVICES={ids}" for ids in ("0,1", "0,1", "0", "0,1", "0,1")]


def test_every_node_starts_its_own_part(config_file: Path) -> None:
    wide = ["parallel.ranks=3", "algorithm.batch_groups=3", "rollout.servers=2", "device.nodes=3", "device.count=2", "device.kind=npu"]
    config = load(config_file, [*wide, "rollout.max_restarts=0"])
    commands = {
        node: run_commands(config, place(config, "npu", [4, 5], "tcp://10.0.0.1:29500", node), Path("/run")) for node in range(3)
    }
    assert {node: [c.name for c in each] for node, each in commands.items()} == {0: ["ranks"], 1: ["server-0", "ranks"], 2: ["server-1"]}
    meet = ["--rdzv-backend=static", "--rdzv-endpoint=10.0.0.1:29501"]
    assert commands[0][-1].argv[3:] == ["--nnodes=2", "--node-rank=0", *meet, "--nproc-per-node=2", "-m", "pasync.train", "/run"]
    assert commands[1][-1].argv[3:] == ["--nnodes=2", "--node-rank=1", *meet, "--nproc-per-node=1", "-m", "pasync.train", "/run"]
    visible = {(n, c.name): c.env["ASCEND_RT_VISIBLE_DEVICES"] for n, each in commands.items() for c in each}
    assert visible == {(0, "ranks"): "4,5", (1, "ranks"): "4", (1, "server-0"): "5", (2, "server-1"): "4"}


def test_the_ranks_of_two_nodes_meet_and_are_numbered_by_node(config_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(
        "import os, sys\nfrom pasync.parallel.ranks import join_ranks\n"
        "with join_ranks('cpu', deadline_s=40) as ranks:\n"
        "    total = ranks.sum({'count': 1.0})['count']\n"
        "    print(f'node {sys.argv[1]} local {os.environ[\"LOCAL_RANK\"]} rank {ranks.rank} of {total:.0f}', flush=True)\n"
    )
    wide = ["parallel.ranks=3", "algorithm.batch_groups=3", "rollout.servers=1", "device.nodes=2", "device.count=2"]
    config = load(config_file, [*wide, "rollout.max_restarts=0"])
    port = next(p for p in (free_port() for _ in range(99)) if free(p + 1))
    running = []
    for node in (1, 0):
        placement = place(config, "cpu", [0, 1], f"tcp://127.0.0.2:{port}", node)
        argv = run_commands(config, placement, tmp_path)[-1].argv
        command = [*argv[1 : argv.index("pasync.train") - 1], str(script), str(node)]
        running.append(python(config_file, *command))
    lines = sorted(line for process in running for line in process.communicate(timeout=50)[0].splitlines() if line.startswith("node"))
    assert lines == ["node 0 local 0 rank 0 of 3", "node 0 local 1 rank 1 of 3", "node 1 local 0 rank 2 of 3"]


def test_a_node_whose_node_0_is_elsewhere_says_so(config_file: Path) -> None:
    meet = ["--node-rank", "1", "--address", "localhost:29500"]
    code, lines = ended(launch(config_file, *NODES, *meet, "rollout.start_s=0.5"), config_file)
    assert code == 2 and lines[-1].endswith("node 0 must run in this very folder")
    assert all_in_run(f"{config_file.parent}/run/node-1") == []


def test_the_port_of_a_run_is_the_trainers_from_before_it_listens(config_file: Path) -> None:
    address = placed(load(config_file), dry_run=False).address
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as trainer:
        trainer.bind(address)


def test_a_run_that_ends_well_shows_said_lines_and_leaves_a_loadable_configuration(config_file: Path) -> None:
    rank = UP + "import os; say(f'rank {os.environ.get(\"RANK\")}')"
    code, lines = ended(start(config_file, rank, "-c", rank), config_file)
    run = config_file.parent / "run"
    assert code == 0 and lines[-1] == f"done: {run}"
    assert "server-0 | up" in lines
    assert "server-0 | rank None" in lines and "rank None" in lines, "an outer torchrun's variables must not leak in"
    assert load(run / "config.yaml").run.dir == str(run)
    assert (config_file.parent / "runs" / "latest").resolve() == run


def test_a_server_that_dies_ends_the_run_and_is_named(config_file: Path) -> None:
    launcher = start(config_file, "import os; os.kill(os.getpid(), 9)", "-c", FOREVER)
    code, lines = ended(launcher, config_file)
    assert code == 1 and lines[-2].startswith("ProcessDied: server-0 (pid ") and lines[-2].endswith("was killed by SIGKILL")
    assert lines[-1].endswith("logs/server-0.log (server-0)")


def restarting(config_file: Path, monkeypatch: pytest.MonkeyPatch, times: int, server: str, ranks: str) -> tuple[int, list[str]]:
    """A server that may be started again so often, and that appends its pid to the file `pids`."""
    monkeypatch.setenv("RESTARTS", str(times))
    note = "import os, signal, sys, time; from pathlib import Path; pids = Path('pids'); pids.open('a').write(f'{os.getpid()}\\n'); "
    count = "started = len(pids.read_text().split())\n"
    return ended(start(config_file, note + count + server, "-c", ranks), config_file)


UNTIL = "import time; from pathlib import Path; p = Path('pids'); p.touch()\nwhile len(p.read_text().split()) < {}: time.sleep(0.05)"


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "1 / 0"])
def test_a_server_that_dies_is_started_again_and_the_run_goes_on(config_file: Path, monkeypatch, death: str) -> None:
    server = f"if started < 3: {death}\nsignal.pause()"
    code, lines = restarting(config_file, monkeypatch, 2, server, UNTIL.format(3))
    assert code == 0 and [line for line in lines if "is started again" in line and "server-0" in line][1].startswith(
        "server-0 is started again, 0 restarts are left: exit code "
    )


def test_servers_that_die_while_others_are_started_again_are_started_again_too(config_file: Path, monkeypatch) -> None:
    monkeypatch.setenv("SERVERS", "8")
    server = "while len(pids.read_text().split()) < 8: time.sleep(0.01)\n"
    server += "if started <= 8: time.sleep(0.02 * (9 - started)); os.kill(os.getpid(), 9)\nsignal.pause()"
    code, lines = restarting(config_file, monkeypatch, 2, server, UNTIL.format(16))
    assert code == 0 and {line.split()[0] for line in lines if "is started again" in line} == {f"server-{i}" for i in range(8)}


def test_what_is_left_of_a_dead_server_is_ended_before_it_is_started_again(config_file: Path, monkeypatch) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    server = f"import subprocess\nif started == 1:\n  p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    server += "  Path('engine').write_text(str(p.pid)); os.kill(os.getpid(), 9)\n"
    server += "stat = Path('/proc') / Path('engine').read_text() / 'stat'\n"
    server += "sys.exit(3 if not stat.exists() or stat.read_text().split()[2] == 'Z' else 4)"
    code, lines = restarting(config_file, monkeypatch, 1, server, FOREVER)
    assert code == 1 and any("ended with exit code 3" in line for line in lines)


def test_used_up_restarts_end_the_run_by_name(config_file: Path, monkeypatch) -> None:
    code, lines = restarting(config_file, monkeypatch, 2, "os.kill(os.getpid(), 9)", FOREVER)
    assert code == 1 and sum("is started again" in line for line in lines) == 2
    assert lines[-2].startswith("ProcessDied: server-0 (pid ") and lines[-2].endswith("was killed by SIGKILL")


def test_a_server_that_the_trainer_gives_up_is_killed_and_started_again_but_not_its_successor(config_file: Path, monkeypatch) -> None:
    server = "if started == 1: signal.signal(15, signal.SIG_IGN)\nsignal.pause()"
    ranks = UNTIL.format(1) + "\nfrom pasync.errors import RolloutError; from pasync.processes import report_lost\n"
    ranks += "first = int(Path('pids').read_text())\nreport_lost('server-0', first, RolloutError('server-0 is silent'))\n"
    ranks += UNTIL.format(2) + "\nreport_lost('server-0', first, RolloutError('late word'))\ntime.sleep(1)"
    code, lines = restarting(config_file, monkeypatch, 3, server, ranks)
    assert code == 0 and [line for line in lines if "is started again" in line] == [
        "server-0 is started again, 2 restarts are left: server-0 is silent"
    ]


def test_a_users_mistake_is_not_tried_again(config_file: Path, monkeypatch) -> None:
    server = "from pasync.errors import ConfigError; from pasync.processes import report_fatal\n"
    server += f"with report_fatal(Path({str(config_file.parent / 'run')!r}), 'server-0'): raise ConfigError('no such reward')"
    code, lines = restarting(config_file, monkeypatch, 3, server, FOREVER)
    assert code == 2 and lines[-2] == "ConfigError: no such reward" and not any("started again" in line for line in lines)


def test_a_server_that_exits_with_an_error_shows_the_end_of_its_log(config_file: Path) -> None:
    code, lines = ended(start(config_file, "import nothing_like_this", "-c", FOREVER), config_file)
    assert code == 1 and any("ended with exit code 1" in line for line in lines)
    assert "  ModuleNotFoundError: No module named 'nothing_like_this'" in lines


def test_a_reported_error_is_shown_last_even_if_the_process_lingers(config_file: Path) -> None:
    body = RAISE + f"(Path({str(config_file.parent / 'run')!r}), 'rank-0'):\n  raise WeightSyncError('version 3 is missing')"
    lingering = f"import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\n{body}"
    code, lines = ended(start(config_file, FOREVER, "-c", lingering), config_file)
    assert code == 1 and lines[-2:] == ["WeightSyncError: version 3 is missing", f"log: {config_file.parent}/run/logs/ranks.log (rank-0)"]


def test_a_killed_rank_is_named_from_the_report_of_torchrun(config_file: Path) -> None:
    script = config_file.with_suffix(".py")
    script.write_text("import os, signal\nos.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\nsignal.pause()\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    code, lines = ended(start(config_file, FOREVER, *torchrun), config_file)
    assert code == 1 and lines[-2].startswith("ProcessDied: rank-1 (pid ") and lines[-2].endswith("was killed by SIGKILL")


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Terminated")])
def test_a_signal_ends_everything_in_seconds(config_file: Path, number: int, code: int, word: str) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOREVER
    launcher = start(config_file, stubborn, "-c", FOREVER)
    until(launcher, "server-0 | up")
    asked = time.monotonic()
    launcher.send_signal(number)
    result, lines = ended(launcher, config_file)
    assert result == code and lines[-1].startswith(f"{word}: ") and time.monotonic() - asked < 5


def with_checkpoints(config_file: Path, max_restarts: int = 0) -> None:
    text = config_file.read_text().replace("/run}", f"/run, max_restarts: {max_restarts}}}")
    config_file.write_text(text + "checkpoint: {every: 1, grace_s: 4}\n")


def torchrun(config_file: Path, body: str) -> list[str]:
    """Two ranks that do this."""
    script = config_file.with_suffix(".py")
    script.write_text(f"import os, signal, sys, time\nfrom pathlib import Path\nfrom pasync.observe.console import say\n{body}")
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]


SAVING = """
from pasync.processes import report_stop
def save(*_):
    time.sleep(0.5)
    report_stop(Path({run!r}), 7)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
say(f"rank {{os.environ['RANK']}} of {{os.getppid()}}")
signal.pause()
"""


@pytest.mark.parametrize("to_torchrun_too", [False, True])
def test_ranks_that_save_when_told_to_end_make_the_run_continuable(config_file: Path, to_torchrun_too: bool) -> None:
    with_checkpoints(config_file)
    launcher = start(config_file, FOREVER, *torchrun(config_file, SAVING.format(run=str(config_file.parent / "run"))))
    ready = [rank_line(launcher), rank_line(launcher)]
    launcher.send_signal(signal.SIGTERM)
    if to_torchrun_too:  # it ends with an error then, and the ranks are told twice
        os.kill(int(ready[0].split()[-1]), signal.SIGTERM)
    code, lines = ended(launcher, config_file)
    assert code == 75 and lines[-1] == f"Terminated: the same command with run.dir={config_file.parent}/run continues with iteration 7"


def rank_line(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout
    while not (line := launcher.stdout.readline()).startswith("rank "):
        assert line, "ended without a rank"
    return line


def test_ranks_that_do_not_save_in_time_are_ended(config_file: Path) -> None:
    with_checkpoints(config_file)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(f\"rank {os.environ['RANK']}\")\nwhile True: signal.pause()"
    launcher = start(config_file, FOREVER, *torchrun(config_file, stubborn))
    rank_line(launcher), rank_line(launcher)
    asked = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    code, lines = ended(launcher, config_file)
    assert code == 143 and lines[-1].startswith("Terminated: all processes") and 4 <= time.monotonic() - asked < 15


RAISES = "from pasync.errors import {error}\nfrom pasync.processes import report_fatal\nwith report_fatal(Path({run!r}), 'rank-0'):\n"


@pytest.mark.parametrize(("error", "code", "starts"), [("TrainingError", 1, 3), ("ConfigError", 2, 1)])
def test_a_failed_run_is_started_again_unless_the_configuration_is_to_blame(config_file: Path, error: str, code: int, starts: int) -> None:
    with_checkpoints(config_file, max_restarts=2)
    body = RAISES.format(error=error, run=str(config_file.parent / "run")) + f"  say('rank'); raise {error}('no good')"
    head = "import os, signal, sys, time\nfrom pathlib import Path\nfrom pasync.observe.console import say\n"
    result, lines = ended(start(config_file, FOREVER, "-c", head + body), config_file)
    assert result == code and lines.count("rank") == starts and lines[-2] == f"{error}: no good"
    assert sum("starting again" in line for line in lines) == starts - 1
    log = (config_file.parent / "run" / "logs" / "launcher.log").read_text()
    assert log.count(f"{error}: no good\nlog: ") == starts


def test_a_run_that_failed_once_is_started_again_and_ends_well(config_file: Path) -> None:
    with_checkpoints(config_file, max_restarts=1)
    once = config_file.parent / "once"
    body = f"from pathlib import Path; once = Path({str(once)!r}); fails = not once.exists(); once.touch(); assert not fails"
    code, lines = ended(start(config_file, FOREVER, "-c", body), config_file)
    assert code == 0 and lines[-1].startswith("done: ") and sum("starting again" in line for line in lines) == 1


def test_a_run_that_is_started_again_may_restart_its_servers_as_often_as_the_first(config_file: Path, monkeypatch) -> None:
    with_checkpoints(config_file, max_restarts=1)
    server = "if started < 4: os.kill(os.getpid(), 9)\nsignal.pause()"
    code, lines = restarting(config_file, monkeypatch, 1, server, UNTIL.format(4))
    assert code == 0 and sum("server-0 is started again, 0 restarts are left" in line for line in lines) == 2
    assert sum("starting again from the newest checkpoint" in line for line in lines) == 1


def test_the_traceback_of_a_failed_rank_comes_before_its_name(config_file: Path) -> None:
    body = RAISES.format(error="TrainingError", run=str(config_file.parent / "run")) + "  [][1]"
    code, lines = ended(start(config_file, FOREVER, "-c", f"from pathlib import Path\n{body}"), config_file)
    assert code == 1 and lines[-2] == "IndexError: list index out of range" and lines[-1].endswith("(rank-0)")
    assert "Traceback (most recent call last):" in lines


def test_a_second_run_in_a_folder_in_use_is_refused(config_file: Path) -> None:
    launcher = start(config_file, FOREVER, "-c", FOREVER)
    until(launcher, "server-0 | up")
    second = launch(config_file)
    assert "another run is still working there" in second.communicate(timeout=20)[0] and second.returncode == 2
    launcher.send_signal(signal.SIGINT)
    assert ended(launcher, config_file)[0] == 130


def test_a_kill_outranks_errors_of_the_same_moment_but_not_an_older_one(tmp_path: Path) -> None:
    report = '{"process": "rank-0", "error": "RolloutError", "message": "server-0 is silent", "time": 100.0, "traceback": ""}'
    (tmp_path / "rank-0.error.json").write_text(report)
    assert find_cause(tmp_path, [Exit("server-0", 5, -9, 100.5)], "").error == "ProcessDied"
    assert find_cause(tmp_path, [Exit("server-0", 5, -9, 190.0)], "").error == "RolloutError"


def test_of_several_errors_the_earliest_counts(tmp_path: Path) -> None:
    for name, moment in (("rank-0", 3), ("server-0", 2), ("rank-1", 4)):
        report = {"process": name, "error": "RolloutError", "message": "lost", "time": moment, "traceback": ""}
        (tmp_path / f"{name}.error.json").write_text(json.dumps(report))
    assert find_cause(tmp_path, [], "").process == "server-0"


def test_a_rank_that_only_lost_another_one_is_no_cause_if_there_is_another(tmp_path: Path) -> None:
    for name, error, moment in (("rank-0", "RankLost", 2), ("rank-1", "TrainingError", 3)):
        report = {"process": name, "error": error, "message": "", "time": moment, "traceback": ""}
        (tmp_path / f"{name}.error.json").write_text(json.dumps(report))
    assert find_cause(tmp_path, [], "").process == "rank-1"


LOSES = """
from pasync.errors import RankLost
from pasync.processes import report_fatal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
signal.signal(signal.SIGTERM, lambda *_: None)
try:
    with report_fatal(Path({run!r}), "rank-0"):
        raise RankLost("rank-1 is gone")
finally:
    time.sleep(4)
"""


def test_a_killed_rank_is_named_though_another_says_first_that_it_lost_it_and_ends_slowly(config_file: Path) -> None:
    ranks = torchrun(config_file, LOSES.format(run=str(config_file.parent / "run")))
    code, lines = ended(start(config_file, FOREVER, *ranks), config_file)
    assert code == 1 and lines[-2].startswith("ProcessDied: rank-1 (pid ") and lines[-2].endswith("was killed by SIGKILL")


@pytest.mark.parametrize("who", ["ranks", "server-0", "sleep of server-0", "guard"])
def test_a_process_that_stays_stopped_is_ended_and_named(config_file: Path, who: str) -> None:
    config_file.write_text(config_file.read_text().replace("run: {", "run: {silence_s: 1, "))
    server = UP + "import subprocess; subprocess.run(['sleep', '60'], check=True)"
    launcher = start(config_file, server, "-c", FOREVER)
    until(launcher, "up"), until(launcher, "up")
    victim = next(p for name, p in by_name(config_file, launcher) if name == who)
    victim.suspend()
    code, lines = ended(launcher, config_file)
    told = f"{who} (pid {victim.pid}) was stopped (SIGSTOP) for run.silence_s=1.0 and is killed"
    assert code == 1 and told in lines
    assert lines[-2] == f"ProcessDied: {told}" or who == "sleep of server-0"  # whose parent fails then


def by_name(config_file: Path, launcher: subprocess.Popen[str]) -> Iterator[tuple[str, psutil.Process]]:
    yield "guard", next(p for p in psutil.Process(launcher.pid).children() if "pasync.guard" in p.cmdline())
    for process in all_in_run(str(config_file.parent / "run")):
        name = "ranks" if process.cmdline()[-1] == FOREVER else "server-0"
        yield name if process.ppid() == launcher.pid else "sleep of server-0", process


def test_ranks_that_torchrun_ended_itself_are_no_cause() -> None:
    report = "  time      : 2026-11-29_15:48:44\n  host      : h\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 6)  (X)\n"
    assert [e.code for e in rank_exits(report.format(-15) + report.format(-9))] == [-9]


def test_what_the_machine_and_the_files_lack_is_reported_together(config_file: Path) -> None:
    wrong = ["device.count=999", "data.train.source=gone.jsonl", "data.max_prompt_tokens=2000", "data.eval.h.source=gsm8k", "eval.every=1"]
    launcher = launch(config_file, *wrong)
    text = launcher.communicate(timeout=20)[0]
    assert launcher.returncode == 2 and "4 problems" in text
    assert "gsm8k_test.jsonl: there is no such file or folder; python -m pasync.data.prepare gsm8k makes it" in text
    assert "device.count=999" in text and "gone.jsonl: there is no such file" in text and "beyond the model's length, at most 1024" in text
    assert not (config_file.parent / "run").exists()
