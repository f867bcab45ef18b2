"""Start a run and stay with it: `python -m pasync.launch CONFIG [key.sub=value ...] [--dry-run]`.

    config, devices --place--> run folder --> [model made once] --> guard, N x pasync.serve, torchrun -m pasync.train

Exit codes: 0 trained to the end, 1 something failed, 2 the configuration cannot work, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from pasync import device as devices
from pasync import estimate
from pasync.config import Config
from pasync.configfile import load, save
from pasync.errors import ConfigError
from pasync.geometry import Geometry, read_geometry
from pasync.model import prepare
from pasync.observe.console import Progress, Screen
from pasync.placement import Placement, misfits, place
from pasync.supervisor import Command, RunFailed, Stopped, Supervisor

STOP_WORDS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


def main(argv: list[str] | None = None) -> int:
    """Run to the end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.sh", description="Train a language model as a configuration says.")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replaces a value of the file")
    parser.add_argument("--dry-run", action="store_true", help="show the configuration and who runs where, start nothing")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load(args.config, args.overrides, partial(machine_problems, dry_run=args.dry_run))
        placement = placed(config, args.dry_run)
        if args.dry_run:
            print(description(config, placement))
            print(memory(config, placement.kind))
            return 0
        return launch(config, placement, partial(run_commands, config))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there is a supervisor, which takes signals itself
        print("Interrupted: nothing was started", file=sys.stderr)
        return 130


def machine_problems(config: Config, dry_run: bool) -> list[str]:
    """What this machine lacks for the configuration. A dry run may assume devices, data and a model that are not there."""
    kind, ids = _devices(config, dry_run)
    found = misfits(config, kind, ids)
    if dry_run:
        return found
    found += prepare.problems(config) + _missing_data(config)
    geometry = _geometry(config)
    return found if isinstance(geometry, str) or kind != "cpu" else found + estimate.problems(config, geometry, _machine(config, kind))


def placed(config: Config, dry_run: bool) -> Placement:
    """Who runs on which devices, and the trainer's address: a port that is free now. Raises ConfigError."""
    return place(config, *_devices(config, dry_run), f"tcp://127.0.0.1:{_free_port()}")


def description(config: Config, placement: Placement) -> str:
    """The resolved configuration and, process by process, devices and environment."""
    lines = [yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), f"devices ({placement.kind})"]
    rows = [(f"rank-{i}", ids, _rank_environment(placement)) for i, ids in enumerate(placement.ranks)]
    rows += [(f"server-{i}", ids, _server_environment(placement, i)) for i, ids in enumerate(placement.servers)]
    for name, ids, env in rows:
        lines.append(f"  {name:<10} {placement.kind} {', '.join(map(str, ids))}")
        lines += [f"    {key}={value}" for key, value in env.items()]
    return "\n".join(lines)


def memory(config: Config, kind: str) -> str:
    """The estimate for every process, and what to change if it does not fit; or why there is none."""
    geometry = _geometry(config)
    return f"memory: {geometry}" if isinstance(geometry, str) else estimate.report(config, geometry, _machine(config, kind))


def launch(config: Config, placement: Placement, commands: Callable[[Placement, Path], list[Command]]) -> int:
    """Start everything, wait for the end, say how it went. Returns the exit code; no process is left.

    Args:
        config: the whole tree.
        placement: where its processes run.
        commands: what to start; the last one is the work, and the run ends with it.
    """
    run = new_run_folder(config)
    screen = Screen()
    try:
        with Supervisor(run, screen) as processes:
            screen.say(f"run folder: {run}")
            config = _with_model(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})}), processes)
            save(config, run / "config.yaml")
            placement.save(run / "placement.json")
            ranks = [processes.start(command) for command in commands(placement, run)][-1]
            if placement.servers:
                screen.show(Progress("starting servers", 0, len(placement.servers)))
            processes.wait_for(ranks)
            processes.let_finish()  # the trainer has told the servers to stop
    except RunFailed as failed:
        print(f"{failed.failure.error}: {failed.failure.message}\nlog: {failed.failure.log} ({failed.failure.process})", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"{STOP_WORDS[signal.Signals(stopped.number)]}: all processes of {run} have ended", file=sys.stderr)
        return 128 + stopped.number
    print(f"done: {run}", flush=True)
    return 0


def run_commands(config: Config, placement: Placement, run: Path) -> list[Command]:
    """One server process each, and torchrun for all ranks; on cpu bound to their cores."""
    on_cpu, commands = placement.kind == "cpu", []
    for i, ids in enumerate(placement.servers):
        argv = [sys.executable, "-m", "pasync.serve", str(run), str(i)]
        commands.append(Command(f"server-{i}", argv, _server_environment(placement, i), ids if on_cpu else [], config.rollout.max_restarts))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(placement.ranks)}"]
    cores = sorted({i for ids in placement.ranks for i in ids}) if on_cpu else []
    return [*commands, Command("ranks", [*torchrun, "-m", "pasync.train", str(run)], _rank_environment(placement), cores)]


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


def _missing_data(config: Config) -> list[str]:
    named = {"train": config.data.train, "eval": config.data.eval}
    files = {key: data.source for key, data in named.items() if data and ":" not in data.source}
    return [f"data.{key}.source={path}: there is no such file or folder" for key, path in files.items() if not Path(path).exists()]


def _devices(config: Config, dry_run: bool) -> tuple[str, list[int]]:
    """(kind, ids) of the devices that are there, or for a dry run would be."""
    kind = devices.detect() if config.device.kind == "auto" else config.device.kind
    ids = devices.device_ids(kind)
    return kind, list(range(config.device.count or 0)) if dry_run and not ids else ids


def _geometry(config: Config) -> Geometry | str:
    """Sizes of the model, or why they are not known."""
    try:
        return read_geometry(prepare.folder(config.model.path))
    except ConfigError as error:
        return str(error)


def _machine(config: Config, kind: str) -> estimate.Machine:
    return estimate.Machine(kind, config.device.count or len(devices.device_ids(kind)), devices.memory_bytes(kind))


def _with_model(config: Config, processes: Supervisor) -> Config:
    """The configuration with the folder of its model, which is made first if this repository makes it."""
    name = config.model.path
    if name in prepare.KNOWN and not prepare.cached(name):
        processes.wait_for(processes.start(Command("prepare", [sys.executable, "-m", "pasync.model.prepare", name])))
    if found := prepare.problems(config):
        raise ConfigError("\n".join(found))  # a model made just now may be too short for the prompts
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(prepare.folder(name).resolve())})})


def _server_environment(placement: Placement, index: int) -> dict[str, str]:
    return devices.process_environment(placement.kind, placement.servers[index], "server")


def _rank_environment(placement: Placement) -> dict[str, str]:
    """Of torchrun and so of every rank: all their devices, of which a rank takes its own; or the cores of the smallest."""
    every = [i for ids in placement.ranks for i in ids]
    return devices.process_environment(placement.kind, min(placement.ranks, key=len) if placement.kind == "cpu" else every, "rank")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
