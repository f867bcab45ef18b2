"""Start a run and stay with it: `python -m pasync.launch CONFIG [key.sub=value ...] [--dry-run]`.

    config, devices --place--> run folder --> [model made once] --> guard, N x pasync.serve, torchrun -m pasync.train

Of several nodes each runs its own launcher with `--node-rank N --address HOST:PORT`, and starts what is placed on it. Node 0 makes the
keys that the others' servers need; their own logs are in <run folder>/node-N.

Exit codes: 0 trained to the end, 1 something failed, 2 the configuration cannot work, 75 SIGTERM and the same command continues where
it came, 130 Ctrl-C, 143 SIGTERM and nothing was saved for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from pasync import advice, disk, estimate
from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load, save
from pasync.errors import ConfigError
from pasync.geometry import PUBLISHED, Geometry, read_geometry
from pasync.model import prepare
from pasync.observe import trackers
from pasync.observe.console import Progress, Screen
from pasync.placement import Placement, misfits, place
from pasync.processes import stop_report
from pasync.sections import PREPARED
from pasync.supervisor import Command, RunFailed, Stopped, Supervisor
from pasync.transport.channel import Keys

FAILED, CANNOT_WORK, CAN_CONTINUE = 1, 2, os.EX_TEMPFAIL
_held: list[socket.socket] = []
STOP_WORDS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


def main(argv: list[str] | None = None) -> int:
    """Run to the end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.sh", description="Train a language model as a configuration says.")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replaces a value of the file")
    parser.add_argument("--dry-run", action="store_true", help="show the configuration and who runs where, start nothing")
    parser.add_argument("--node-rank", type=int, metavar="N", help="which of device.nodes this is, from 0")
    parser.add_argument("--address", metavar="HOST:PORT", help="of node 0, where the others meet it; PORT + 1 must be free too")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load(args.config, args.overrides, partial(machine_problems, dry_run=args.dry_run))
        placement = placed(config, args.dry_run, args.node_rank, args.address)
        for text in devices.left_out(placement.kind):
            print(text, file=sys.stderr)
        if args.dry_run:
            print(description(config, placement))
            print(memory(config, placement.kind))
            return 0
        return launch(config, placement, partial(run_commands, config))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return CANNOT_WORK
    except KeyboardInterrupt:  # before there is a supervisor, which takes signals itself
        print("Interrupted: nothing was started", file=sys.stderr)
        return 130


def machine_problems(config: Config, dry_run: bool) -> list[str]:
    """What this machine lacks for the configuration. A dry run may assume devices, data and a model that are not there."""
    kind, ids = _devices(config, dry_run)
    found = misfits(config, kind, ids)
    found += devices.left_out(kind) if found else []
    found += devices.environment_problems(kind, exact=_exact(config))
    if not dry_run or kind == devices.detect():
        found += devices.device_problems(kind)
    if dry_run:
        return found
    found += prepare.problems(config) + _missing_data(config) + trackers.problems(config) + _finished_for_good(config)
    geometry, _ = _geometry(config)
    if not geometry:
        return found
    found += disk.problems(config, geometry, Path(config.run.dir or "runs").resolve())
    return found + advice.problems(config, geometry, _machine(config, kind)) if kind == "cpu" else found


def placed(config: Config, dry_run: bool, node: int | None = None, meeting: str | None = None) -> Placement:
    """Who runs on which devices, and the trainer's address.

    Args:
        dry_run: whether devices may be assumed, and an address.
        node: which of several nodes this is.
        meeting: HOST:PORT of node 0; on one node a port of loopback that is free now.

    Raises:
        ConfigError: it does not fit, or not both or neither of `node` and `meeting` are given as `device.nodes` needs.
    """
    nodes = config.device.nodes
    if nodes == 1 and (node is not None or meeting):
        raise ConfigError("device.nodes=1: --node-rank and --address are for several")
    if nodes == 1 or (dry_run and not meeting):
        return place(config, *_devices(config, dry_run), f"tcp://127.0.0.1:{_free_port()}", node or 0)
    if node is None or node not in range(nodes) or not meeting:
        raise ConfigError(f"device.nodes={nodes}: each is started with --node-rank, 0 to {nodes - 1}, and --address HOST:PORT of node 0")
    return place(config, *_devices(config, dry_run), f"tcp://{_resolved(meeting)}", node)


def description(config: Config, placement: Placement) -> str:
    """The resolved configuration and, process by process, devices and environment."""
    lines = [yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), f"devices ({placement.kind})"]
    for node in range(config.device.nodes):
        ranks, servers = placement.ranks_on(node), placement.servers_on(node)
        rows = [(f"rank-{i}", placement.ranks[i], _rank_environment(config, placement, node)) for i in ranks]
        rows += [(f"server-{i}", placement.servers[i], _server_environment(config, placement, i)) for i in servers]
        for name, ids, env in rows:
            where = f"node {node}, " * (config.device.nodes > 1)
            lines.append(f"  {name:<10} {where}{placement.kind} {', '.join(map(str, ids))}")
            lines += [f"    {key}={value}" for key, value in env.items()]
    return "\n".join(lines)


def memory(config: Config, kind: str) -> str:
    """The estimate for every process, and what to change if it does not fit; or why there is none."""
    geometry, note = _geometry(config)
    return "\n".join([note] * bool(note) + ([advice.report(config, geometry, _machine(config, kind))] if geometry else []))


def launch(config: Config, placement: Placement, commands: Callable[[Placement, Path], list[Command]]) -> int:
    """Start everything, wait for the end, say how it went; after a failure again, if `run.max_restarts` allows. Returns the exit code.

    No process is left.

    Args:
        config: the whole tree.
        placement: where its processes run.
        commands: what to start; the last one is the work, and the run ends with it.
    """
    whole, restarts = new_run_folder(config), config.run.max_restarts
    run = whole / f"node-{placement.node}" if placement.node else whole
    while (code := _launch_once(config, placement, commands, whole, run)) == FAILED and restarts:
        restarts -= 1
        _say(run, f"starting again from the newest checkpoint, {restarts} of run.max_restarts={config.run.max_restarts} left")
    return code


def _launch_once(
    config: Config, placement: Placement, commands: Callable[[Placement, Path], list[Command]], whole: Path, run: Path
) -> int:
    screen = Screen()
    try:
        with Supervisor(run, screen, config.run.silence_s) as processes:
            screen.say(f"run folder: {run}")
            config = _with_model(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(whole)})}), processes)
            if config.device.nodes > 1:
                placement = replace(placement, keys=str(_keys(config, placement.node, whole, processes)))
            save(config, run / "config.yaml")
            placement.save(run / "placement.json")
            work = [processes.start(command) for command in commands(placement, run)][-1]
            if placement.servers and not placement.node:  # rank 0 says how this goes on
                screen.show(Progress("starting servers", 0, len(placement.servers)))
            processes.wait_for(work, config.checkpoint.grace_s if config.checkpoint.every else 0.0)
            processes.let_finish()  # the trainer has told the servers to stop
    except RunFailed as failed:
        failure = failed.failure
        _say(run, f"{failure.traceback}{failure.error}: {failure.message}\nlog: {failure.log} ({failure.process})")
        return CANNOT_WORK if failure.error == ConfigError.__name__ else FAILED
    except Stopped as stopped:
        if stopped.number != signal.SIGTERM or not stop_report(run):
            print(f"{STOP_WORDS[signal.Signals(stopped.number)]}: all processes of {run} have ended", file=sys.stderr)
            return 128 + stopped.number
    if iteration := stop_report(run):
        print(f"Terminated: the same command with run.dir={run} continues with iteration {iteration}", file=sys.stderr)
        return CAN_CONTINUE
    print(f"done: {run}", flush=True)
    return 0


def run_commands(config: Config, placement: Placement, run: Path) -> list[Command]:
    """What this node starts: one server process each, and torchrun for all ranks; on cpu bound to their cores."""
    on_cpu, commands, node = placement.kind == "cpu", [], placement.node
    for i in placement.servers_on(node):
        argv, cores = [sys.executable, "-m", "pasync.serve", str(run), str(i)], placement.servers[i] if on_cpu else []
        commands.append(Command(f"server-{i}", argv, _server_environment(config, placement, i), cores, config.rollout.max_restarts))
    ranks = [placement.ranks[i] for i in placement.ranks_on(node)]
    if not ranks:
        return commands
    meet, nodes = ["--standalone"], len(set(placement.rank_nodes))
    if nodes > 1:
        meet = [f"--nnodes={nodes}", f"--node-rank={node}", "--rdzv-backend=static", f"--rdzv-endpoint={placement.rendezvous}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={len(ranks)}", "-m", "pasync.train", str(run)]
    cores = sorted({i for ids in ranks for i in ids}) if on_cpu else []
    return [*commands, Command("ranks", torchrun, _rank_environment(config, placement, node), cores)]


def new_run_folder(config: Config) -> Path:
    """Make the run folder and let `runs/latest` point at it."""
    parent = Path("runs").resolve()
    run = Path(config.run.dir).resolve() if config.run.dir else parent / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.mkdir(parents=True, exist_ok=config.run.dir is not None)
    parent.mkdir(exist_ok=True)
    draft = parent / f".latest-{os.getpid()}"
    draft.symlink_to(os.path.relpath(run, parent) if run.is_relative_to(parent) else run)
    draft.replace(parent / "latest")
    return run


def _keys(config: Config, node: int, whole: Path, processes: Supervisor) -> Path:
    """The run's file of keys, which node 0 makes and the others wait for, at most `rollout.start_s`."""
    path = whole / "keys.json"
    if node == 0:
        Keys.make(path)
    elif not processes.wait_until(path.exists, config.rollout.start_s):
        raise ConfigError(f"{path}: not there after rollout.start_s={config.rollout.start_s}: node 0 must run in this very folder")
    return path


def _say(run: Path, text: str) -> None:
    """Tell the user, and keep it: the next start removes the reports of this one."""
    print(text, file=sys.stderr)
    with (run / "logs" / "launcher.log").open("a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _missing_data(config: Config) -> list[str]:
    found = []
    for key, data in config.data.sets.items():
        if ":" not in data.source and not Path(data.source).exists():
            name = Path(data.source).stem.split("_")[0]
            hint = f"; python -m pasync.data.prepare {name} makes it" * (name in PREPARED)
            found.append(f"{key}.source={data.source}: there is no such file or folder{hint}")
    return found


def _finished_for_good(config: Config) -> list[str]:
    run = Path(config.run.dir or "")
    if not config.run.dir or not (run / "model").is_dir() or any((run / "checkpoints").glob("iteration-*")):
        return []
    return [f"run.dir={run}: this run is finished and has no checkpoint to go on from (checkpoint.every=0), choose another folder"]


def _devices(config: Config, dry_run: bool) -> tuple[str, list[int]]:
    """(kind, ids) of the devices that are there, or for a dry run would be."""
    kind = devices.detect() if config.device.kind == "auto" else config.device.kind
    ids = devices.device_ids(kind)
    return kind, list(range(config.device.count or 0)) if dry_run and not ids else ids


def _geometry(config: Config) -> tuple[Geometry | None, str]:
    """(sizes of the model, "") or, if there is no such folder, (sizes as published if it is a known one, why)."""
    try:
        return read_geometry(prepare.folder(config.model.path)), ""
    except ConfigError as error:
        published = PUBLISHED.get(Path(config.model.path).name)
        return published, f"memory: {error}" + "; sizes below are ASSUMED to be those of the published model" * bool(published)


def _machine(config: Config, kind: str) -> estimate.Machine:
    there = devices.memory_bytes(kind)
    count = config.device.nodes * (config.device.count or len(devices.device_ids(kind)))
    return estimate.Machine(kind, count, there or devices.NOMINAL_BYTES[kind], assumed=there is None)


def _with_model(config: Config, processes: Supervisor) -> Config:
    """The configuration with the folder of its model, which is made first if this repository makes it."""
    name = config.model.path
    if name in prepare.KNOWN and not prepare.cached(name):
        processes.wait_for(processes.start(Command("prepare", [sys.executable, "-m", "pasync.model.prepare", name])))
    if found := prepare.problems(config):
        raise ConfigError("\n".join(found))  # a model made just now may be too short for the prompts
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(prepare.folder(name).resolve())})})


def _server_environment(config: Config, placement: Placement, index: int) -> dict[str, str]:
    return _environment(config, placement, placement.servers[index], "server")


def _rank_environment(config: Config, placement: Placement, node: int) -> dict[str, str]:
    """Of a node's torchrun and so of its ranks: all their devices, of which a rank takes its own; or the cores of the smallest."""
    ranks = [placement.ranks[i] for i in placement.ranks_on(node)]
    ids = min(ranks, key=len) if placement.kind == "cpu" else [i for rank in ranks for i in rank]
    return _environment(config, placement, ids, "rank")


def _environment(config: Config, placement: Placement, ids: list[int], role: devices.Role) -> dict[str, str]:
    return devices.process_environment(placement.kind, ids, role, exact=_exact(config), deadline_s=config.parallel.deadline_s)


def _exact(config: Config) -> bool:
    return config.parallel.accumulate == "exact"


def _resolved(meeting: str) -> str:
    """The same HOST:PORT with the host's number, which a socket can bind to."""
    host, _, port = meeting.rpartition(":")
    try:
        return f"{socket.gethostbyname(host)}:{int(port)}"
    except (OSError, ValueError) as error:
        raise ConfigError(f"--address {meeting}: {error}, must be HOST:PORT") from None


def _free_port() -> int:
    """Of loopback. It stays bound as long as this process lives: nobody else is given it before the trainer listens, or ever."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whoever asks for this very port, and sets this too, may have it
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
