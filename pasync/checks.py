"""What the doctor looks at: one function per check, which yields what it found and what to do about it.

    machine  python, packages, companions, accelerators, loopback, shared_memory, broadcast
    run      configuration, weights, memory, disk, prompts, reward, server

Each has a process to itself (doctor.py), so it may load torch and hold a device. `broadcast` and `server` start the processes of a
small run, as the launcher would; what works in them is `python -m pasync.checks broadcast|ask RUN`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

from pasync import advice, estimate
from pasync import device as devices
from pasync import disk as room
from pasync.config import Config
from pasync.configfile import load, save
from pasync.errors import ConfigError
from pasync.geometry import Geometry, read_geometry
from pasync.launch import machine_problems, placed, run_commands
from pasync.model import prepare
from pasync.observe.console import Screen
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal
from pasync.sections import RunConfig
from pasync.supervisor import Command, Supervisor

PYTHONS = ((3, 11), (3, 12))
"""As in setup.sh."""
SHARED_BYTES = (128 << 20, 1 << 30)
"""Less than the first holds no queue of vLLM's workers, less than the second perhaps not all. Containers begin with 64 MiB."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
BROADCAST_S, ANSWER_TOKENS = 60, 32


class Finding(NamedTuple):
    """A line of the doctor's."""

    level: Literal["ok", "warn", "fail"]
    text: str


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


# The machine


def python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = f"{sys.version.split()[0]} in {sys.executable}"
    yield ok(version) if sys.version_info[:2] in PYTHONS else fail(f"{version}; make the environment with Python 3.11 or 3.12")


def packages(pins: Path) -> Iterator[Finding]:
    """Installed versions against a file of pins, one `name==version` a line."""
    if not pins.is_file():
        yield warn(f"there is no pinned set {pins} for this kind of machine; docs/runs.md says what is needed")
        return
    lines = (line.split("#")[0].strip() for line in pins.read_text().splitlines())
    required = [Requirement(line) for line in lines if line and not line.startswith("-")]
    differ = [text for requirement in required if (text := _difference(requirement))]
    some = ", ".join(differ[:5]) + ", .." * (len(differ) > 5)
    advice = "see docs/ascend.md" if pins.stem == "npu" else f"pip install --no-deps -r {pins}"  # no single pip run finds the NPU set
    yield fail(f"{len(differ)} of {len(required)} differ from {pins}: {some}; {advice}") if differ else ok(f"{len(required)} as in {pins}")


def companions() -> Iterator[Finding]:
    """torchvision and torchaudio made for another torch break the imports of transformers and vLLM; those that are there are tried."""
    there = [name for name in ("torchvision", "torchaudio") if importlib.util.find_spec(name)]
    for name in there:
        try:
            importlib.import_module(name)
            yield ok(f"{name} fits this torch")
        except Exception as error:
            yield fail(f"{name} does not fit this torch ({error}); pip uninstall -y {name}")
    if not there:
        yield ok("neither torchvision nor torchaudio is in the way")


def accelerators(kind: str, count: int | None) -> Iterator[Finding]:
    """Visible devices (cores on cpu), at most `count`, their memory, and on npu their health."""
    ids, size = devices.device_ids(kind)[:count], devices.memory_bytes(kind)
    if not ids:
        yield fail(f"no {kind} is visible; look at {devices.VISIBLE[kind]} and at the driver")
    elif size is None:
        yield fail(f"torch reaches no {kind}; on npu source CANN's set_env.sh, and look at the driver")
    else:
        yield ok(f"{kind} {', '.join(map(str, ids))}; {estimate.size_text(size).strip()}" + " each" * (kind != "cpu"))
    yield from map(warn, devices.left_out(kind))
    yield from map(fail, devices.device_problems(kind))


def loopback(address: str) -> Iterator[Finding]:
    """Whether `tcp://host:port` can be listened on (port 0: any) and reached, and whether this machine's name has an address."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    try:
        with socket.create_server((host, int(port))) as listener, socket.create_connection(listener.getsockname(), timeout=5):
            yield ok(f"{host} listens and answers")
    except OSError as error:
        yield fail(f"{address}: {error}; end what holds it (ss -ltnp), or choose another")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        yield warn(f"{socket.gethostname()}: {error}; gloo looks up this machine's own name, add it to /etc/hosts")


def shared_memory(folder: str = "/dev/shm") -> Iterator[Finding]:
    """Room for queues and collectives between processes."""
    free, (least, enough) = shutil.disk_usage(folder).free, SHARED_BYTES
    judge = ok if free >= enough else warn if free >= least else fail
    yield judge(f"{estimate.size_text(free).strip()} free in {folder}" + "; give the container more, --shm-size=16g" * (free < enough))


def broadcast(kind: str, run: Path) -> Iterator[Finding]:
    """Two ranks under torchrun, each on a device of its own, on the real backend."""
    ids = devices.device_ids(kind)
    if kind != "cpu" and len(ids) < 2:
        yield warn(f"not tried: two ranks need two devices, visible is {kind} {', '.join(map(str, ids)) or 'none'}")
        return
    Placement(kind, "", [], [[i] for i in ids[:2]]).save(run / "placement.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = devices.process_environment(kind, ids[:1] if kind == "cpu" else ids[:2], "rank")
    _supervised(run, [Command("ranks", [*torchrun, "-m", "pasync.checks", "broadcast", str(run)], env)])
    yield ok(f"two ranks, {devices.collective_backend(kind)}")


# A run


def configuration(config: Config) -> Iterator[Finding]:
    """What the launcher would refuse."""
    problems = machine_problems(config, dry_run=False)
    yield from map(fail, problems) if problems else [ok(f"{config.name} fits this machine")]


def weights(config: Config) -> Iterator[Finding]:
    """The model's safetensors files against their index, and its tokenizer. A model that this repository makes is made."""
    folder = prepare.prepare(config.model.path)
    shards = _shards(folder)
    damaged = [text for shard, names in shards.items() if (text := _damage(folder / shard, names))]
    yield from (fail(f"{text}; copy it into {folder} again") for text in damaged)
    if not any((folder / name).exists() for name in TOKENIZERS):  # transformers would make an empty one
        yield fail(f"no tokenizer; copy tokenizer.json and tokenizer_config.json into {folder}")
    elif not damaged:
        files = f"{len(shards)} whole safetensors file{'s' * (len(shards) > 1)}"
        yield ok(f"{folder}: {files}, a tokenizer of {len(_tokenizer(config))} tokens")


def memory(config: Config, kind: str) -> Iterator[Finding]:
    """The estimate for every process against the devices."""
    geometry, size = _geometry(config), devices.memory_bytes(kind) or 0
    machine = estimate.Machine(kind, config.device.count or len(devices.device_ids(kind)), size)
    short = advice.warnings(config, geometry, machine)
    pools = estimate.pools(config, geometry, machine)
    needed = ", ".join(f"{estimate.size_text(total).strip()} for the {name}" for name, total in pools.items())
    yield from map(warn, short) if short else [ok(f"at most {needed}, of {estimate.size_text(size).strip()}")]


def disk(config: Config) -> Iterator[Finding]:
    """Room for checkpoints and the exported model where the run folder will be."""
    short = room.problems(config, _geometry(config), Path(config.run.dir or "runs").resolve())
    yield from (fail(f"{text}; lower checkpoint.keep or put run.dir on a larger disk") for text in short)
    if not short:
        yield ok("room for the checkpoints that are kept, one more, and the exported model")


def prompts(config: Config) -> Iterator[Finding]:
    """The data sets as the ranks read them: columns, template, lengths."""
    from pasync.data.prompts import PromptStream

    stream, size = PromptStream(config, _tokenizer(config)), config.algorithm.batch_groups
    epoch = [p for t in range(-(-len(stream) // size)) for p in stream.batch(t)]
    held_out = [p for prompts in stream.held_out.values() for p in prompts]
    longest, limit = max(len(p.ids) for p in (*epoch, *held_out)), config.data.max_prompt_tokens
    yield ok(f"{len(stream)} to learn from, {len(held_out)} held out; the longest has {longest} of {limit} tokens")


def reward(config: Config) -> Iterator[Finding]:
    """The reward function in its real process, on the reference answer of the first row."""
    from pasync.rewards.pool import RewardPool

    prompt, tokenizer = _first_prompt(config), _tokenizer(config)
    answer = str(prompt.sample["answer"])
    try:
        with RewardPool(config.rewards) as pool:
            score, problem = asyncio.run(pool.score(prompt.text, answer, tokenizer(answer)["input_ids"], prompt.sample))
    except ConfigError as error:
        yield fail(f"{error}; it is looked for from the working directory, {Path.cwd()}")
        return
    said = f"{config.rewards.function} scores the reference answer '{answer[-40:]}'"
    if problem:
        yield fail(f"{said}: {problem}; every response would score 0, mend the function")
    elif ":" not in config.rewards.function and score != 1:
        yield warn(f"{said} with {score:g}; is data.train.answer_column={config.data.train.answer_column} the right one?")
    else:
        yield ok(f"{said} with {score:g}")


def server(config: Config, run: Path) -> Iterator[Finding]:
    """One prompt through a real server, on the devices of the first, with the weights on disk."""
    placement = placed(config, False)
    if not placement.servers:
        yield ok("a replayed run has none")
        return
    rollout = config.rollout.model_copy(update={"servers": 1})
    model = config.model.model_copy(update={"path": str(prepare.folder(config.model.path).resolve())})
    save(config.model_copy(update={"rollout": rollout, "model": model}), run / "config.yaml")
    placement.save(run / "placement.json")
    _supervised(run, [run_commands(config, placement, run)[0], Command("ranks", [sys.executable, "-m", "pasync.checks", "ask", str(run)])])
    yield ok((run / "answer").read_text())


def _difference(requirement: Requirement) -> str:
    """How an installed package differs from its pin; "" if it does not, or is not for this machine."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    foreign = requirement.marker and not requirement.marker.evaluate()
    fits = version and requirement.specifier.contains(version, prereleases=True)  # 2.13.0+cpu is 2.13.0
    return "" if foreign or fits else f"{requirement} is {version or 'missing'}"


def _shards(folder: Path) -> dict[str, set[str]]:
    """Names of the weights that each file of a checkpoint should hold; of a single file none are known."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {"model.safetensors": set()}
    where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return {file: {name for name in where if where[name] == file} for file in sorted(set(where.values()))}


def _damage(shard: Path, names: set[str]) -> str:
    """What is wrong with a safetensors file that should hold these weights; "" if nothing is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, "numpy") as file:  # compares its header with the file's size, reads no weight
            missing = names - set(file.keys())
    except (OSError, SafetensorError) as error:
        return f"{shard.name}: {error}"
    return f"{shard.name} lacks {len(missing)} of {len(names)} weights, {min(missing)} for one" if missing else ""


def _geometry(config: Config) -> Geometry:
    return read_geometry(prepare.folder(config.model.path))


def _tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare.folder(config.model.path))


def _first_prompt(config: Config) -> Any:
    from pasync.data.prompts import PromptStream

    data = config.data.model_copy(update={"train": config.data.train.model_copy(update={"size": 1}), "eval": None})
    return PromptStream(config.model_copy(update={"data": data}), _tokenizer(config)).batch(0)[0]


def _supervised(run: Path, commands: list[Command]) -> None:
    """Start processes and wait for the last one; none is left afterwards. Raises RunFailed with the cause."""
    with Supervisor(run, Screen(), RunConfig().silence_s) as processes:
        processes.wait_for([processes.start(command) for command in commands][-1])
        processes.let_finish()


# In the processes that a check starts


def broadcast_rank(run: Path) -> None:
    """One of two ranks: what the other one sends has to arrive."""
    import torch
    import torch.distributed as dist

    from pasync.parallel.ranks import join_ranks

    with join_ranks(Placement.load(run / "placement.json").kind, deadline_s=BROADCAST_S) as ranks:
        sent = torch.arange(1 << 20, dtype=torch.float32, device=ranks.device)
        held = sent.clone() if ranks.is_first else torch.zeros_like(sent)
        dist.broadcast(held, 0)
        if not torch.equal(held, sent):
            raise RuntimeError(f"rank {ranks.rank} holds other numbers than were sent to it")


def ask(run: Path) -> None:
    """The trainer's side of one prompt."""
    from pasync.messages import ON_DISK, Sampling
    from pasync.rollout.producer import RolloutProducer

    config, began = load(run / "config.yaml"), time.monotonic()
    prompt = _first_prompt(config)
    with RolloutProducer(config, Placement.load(run / "placement.json").address) as producer:
        ready = time.monotonic()
        producer.muster()
        producer.admit(ON_DISK)
        producer.submit([prompt], ON_DISK, Sampling(1, config.rollout.temperature, min(ANSWER_TOKENS, config.rollout.max_tokens)))
        group = producer.next_group(ON_DISK)
    assert group is not None
    answer, took = group.responses[0], time.monotonic() - ready
    tokens = f"{len(prompt.ids)} tokens with {len(answer.token_ids)}"
    (run / "answer").write_text(f"ready in {ready - began:.0f} s, answers {tokens} in {took:.1f} s: '{answer.text[:40]}'")


def main() -> None:
    """Entry of such a process."""
    die_with_parent()
    run = Path(sys.argv[2])
    with report_fatal(run, f"rank-{os.environ.get('RANK', 0)}"):
        {"broadcast": broadcast_rank, "ask": ask}[sys.argv[1]](run)


if __name__ == "__main__":
    main()
