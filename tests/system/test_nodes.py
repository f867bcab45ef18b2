"""Two launchers on one machine as on two hosts: node 0 trains, the server that node 1 starts generates for it."""

import stat
import subprocess
from pathlib import Path

import pytest
from harness import RUN_S, TINY, console, finish, free_port, gone_within, metrics, start, wait_for_line

from pasync.placement import Placement

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def both(run: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """Both launchers; the second one's console is beside <run>/../second."""
    nodes = ["device.nodes=2", "device.count=1", "rollout.max_restarts=0"]
    common = [*nodes, "algorithm.batch_groups=8", "data.eval=null", "eval.every=0", *overrides]
    address = ["--address", f"127.0.0.2:{free_port()}"]
    names = (run, run.with_name("second"))
    return [start(TINY, name, *common, f"run.dir={run}", "--node-rank", str(node), *address) for node, name in enumerate(names)]


def test_the_server_of_another_node_generates_for_the_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = both(run, "iterations=2")
    code, text = finish(first, run)
    assert code == 0, text
    code, text = finish(second, tmp_path / "second", 30)
    assert code == 0, text
    lines = metrics(run)
    assert [line["iteration"] for line in lines if "time/step_s" in line] == [0, 1] and lines[0]["tokens/response"] > 0
    assert stat.S_IMODE((run / "keys.json").stat().st_mode) == 0o600
    assert not (run / "logs" / "server-0.log").exists() and (run / "node-1" / "logs" / "server-0.log").exists()
    placement = Placement.load(run / "node-1" / "placement.json")
    assert placement.host == "127.0.0.2" and placement.servers_on(1) == [0] and placement.ranks_on(0) == [0]


def test_a_node_ends_when_the_trainers_node_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = both(run, "iterations=1000", "rollout.silence_s=3")
    wait_for_line(run / "logs" / "ranks.log", "iteration 1: optimizer step", first, RUN_S)
    first.kill()
    code, text = finish(second, tmp_path / "second", 60)
    assert code == 1 and "RolloutError: the trainer at tcp://127.0.0.2:" in text and "was lost for rollout.silence_s=3.0" in text, text
    assert gone_within(run, 20) and "done" not in console(run)
