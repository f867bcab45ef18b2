"""How the cost of the host grows: `python -m benchmarks.growth [--png PICTURE]`. One JSON line per quantity, with its log-log slope.

    K, Lr (tokens of a response), B, servers:  CPU of the trainer's process per group, and time from a finished group to its micro-batch;
                                               stub servers answer at once, so that nothing but the host works
    parameters, receivers:                     seconds of a weight sync over loopback, float32

Slope 1 grows in proportion, 0 does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.transport import free_port
from benchmarks.weight_sync import configuration
from pasync.batch import Batch
from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.messages import (
    Generate,
    Group,
    GroupDone,
    Hello,
    Join,
    Joined,
    Message,
    Ping,
    Response,
    Sampling,
    Stop,
    Sync,
    Synced,
    float_bytes,
    int_bytes,
)
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.rollout.producer import RolloutProducer
from pasync.stream import stream_micro_batches
from pasync.transport.channel import TrainerChannel, server_name
from pasync.transport.weights import WeightReceiver, WeightSender, checksum

Line = dict[str, Any]


class Sizes(NamedTuple):
    """Of a batch, and how many servers answer."""

    K: int = 8
    Lr: int = 256
    B: int = 64
    servers: int = 1


VALUES = {"K": (2, 4, 8, 16, 32, 64), "Lr": (32, 128, 512, 2048), "B": (8, 32, 128, 512), "servers": (1, 2, 4, 8)}
PARAMETERS, RECEIVERS = (1 << 20, 1 << 22, 1 << 24, 1 << 26), (1, 2, 4, 8)
PROMPT_TOKENS, ROUNDS = 128, 5


async def answer(address: str, server: int) -> None:
    """One stub server: a finished group for every request, until Stop."""
    channel = TrainerChannel(address, server_name(server, os.getpid()))
    await channel.send(Hello(server=server, pid=os.getpid(), credits=1 << 20))
    while not isinstance(message := await channel.receive(), Stop):
        if isinstance(message, Ping):
            continue
        assert isinstance(message, Generate)
        sampling = message.sampling
        responses, now = made(sampling.num_responses, sampling.max_tokens), time.time()
        group = Group(message.version, message.group_id, message.prompt_ids, responses, now, now, server)
        await channel.send(GroupDone(group, sampling.num_responses))
    channel.close()


@lru_cache
def made(responses: int, tokens: int) -> list[Response]:
    """Responses of unequal rewards."""
    rng = np.random.default_rng(0)
    ids, logprobs = int_bytes(rng.integers(0, 50_000, tokens)), float_bytes(-rng.random(tokens))
    return [Response(ids, logprobs, "x" * 4 * tokens, True, float(k % 2)) for k in range(responses)]


def host(every: set[Sizes], ranks: Ranks, rounds: int) -> dict[Sizes, tuple[float, float]]:
    """Of each: (CPU seconds of this process per group, mean seconds from a finished group to its micro-batch)."""
    found = {}
    for servers, of_servers in groupby(sorted(every, key=lambda s: s.servers), key=lambda s: s.servers):
        address, versions = f"tcp://127.0.0.1:{free_port()}", count()
        command = [sys.executable, "-m", "benchmarks.growth", "--serve", address, str(servers)]
        quiet = contextlib.redirect_stdout(sys.stderr)
        with subprocess.Popen(command), quiet, RolloutProducer(trainer_configuration(servers), address) as producer:
            producer.muster()
            for sizes in of_servers:
                costs = [iterate(producer, sizes, next(versions), ranks) for _ in range(1 + rounds)][1:]
                found[sizes] = statistics.median(cpu for cpu, _ in costs), statistics.median(wait for _, wait in costs)
    return found


def iterate(producer: RolloutProducer, sizes: Sizes, version: int, ranks: Ranks) -> tuple[float, float]:
    """The same of one iteration."""
    prompts = [Prompt(i, tuple(range(PROMPT_TOKENS)), "p" * 4 * PROMPT_TOKENS, {"answer": "1"}) for i in range(sizes.B)]
    began = time.process_time()
    producer.admit(version)
    producer.submit(prompts, version, Sampling(sizes.K, 1.0, sizes.Lr))
    stream = stream_micro_batches(Batch(producer, version, iter(()), refills=False), producer.config, ranks)
    wait_s = statistics.fmean(time.time() - group.finished for groups in stream for group in groups)
    return (time.process_time() - began) / len(prompts), wait_s


def trainer_configuration(servers: int) -> Config:
    """The parts that producer and stream read."""
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder), "float32")
    rollout = config.rollout.model_copy(update={"servers": servers, "max_num_seqs": 1 << 20, "admission": "fifo", "max_tokens": 1 << 20})
    return config.model_copy(update={"rollout": rollout})


class Receivers:
    """The rollout side as WeightSender sees it: processes, told through pipes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = {f"server-{i}": pipe for i, pipe in enumerate(pipes)}
        self.names = list(self._pipes)
        self._version = 0

    def require_idle(self) -> None:
        """They never sample."""

    def tell(self, server: str, message: Message) -> None:
        """Join, or Sync."""
        self._version = message.version if isinstance(message, Sync) else self._version
        self._pipes[server].send(msgspec.to_builtins(message) if isinstance(message, Join) else getattr(message, "with_sum", False))

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        """Joined, or Synced with the sum."""
        answers = {name: pipe.recv() for name, pipe in self._pipes.items() if pipe.poll(deadline_s)}
        return {name: Joined() if kind is Joined else Synced(self._version, 0.0, total) for name, total in answers.items()}

    def failure(self, *, wait_s: float) -> Exception | None:
        """They say nothing about their end."""
        return None


def receive(pipe: Connection) -> None:
    """A receiver: Join as often as asked, and after each one version for every word that comes; ends with the pipe."""
    torch.set_num_threads(1)
    receiver: WeightReceiver | None = None
    pipe.send(None)  # it is there: importing may take long
    with contextlib.suppress(EOFError):
        while True:
            if isinstance(message := pipe.recv(), dict):
                receiver = WeightReceiver("cpu", message, 0, torch.device("cpu"), torch.float32)
                pipe.send(None)
                continue
            assert receiver
            pipe.send(received(receiver, with_sum=message))


def received(receiver: WeightReceiver, *, with_sum: bool) -> int | None:
    """Take one version and keep nothing of it; the sum of what came, if asked for."""
    sums: list[int] = []
    receiver.receive(lambda weights: sums.extend(checksum([tensor]) if with_sum else 0 for _, tensor in weights), held=[])
    return sum(sums) % (1 << 32) if with_sum else None


def sync(parameters: int, pipes: list[Connection], config: Config, rounds: int) -> float:
    """Median seconds of a transfer to all receivers."""
    shapes = [(f"layer.{i}", [1024, 1024]) for i in range(parameters >> 20)]
    weight = torch.randn(1024, 1024)
    sender, times = WeightSender(config, Receivers(pipes), shapes, "cpu"), []  # type: ignore[arg-type]
    for version in (0, 1, *range(3, 2 * rounds + 3, 2)):  # even versions are checked, as the first two are in any case
        began = time.perf_counter()
        sender.publish(((name, weight) for name, _ in shapes), version)
        times.append(time.perf_counter() - began)
    sender.close()
    return statistics.median(times[2:])


def slope(values: tuple[int, ...], results: list[float]) -> float:
    """Of the line through the points in a log-log plot."""
    return float(np.polyfit(np.log(values), np.log(results), 1)[0])


def lines(rounds: int) -> Iterator[Line]:
    """A line for each quantity measured and each that it may depend on."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with join_ranks("cpu", deadline_s=60) as ranks:
        cases = {variable: [Sizes(**{variable: value}) for value in values] for variable, values in VALUES.items()}
        found = host({sizes for of_variable in cases.values() for sizes in of_variable}, ranks, rounds)
        for variable, values in VALUES.items():
            results = [found[sizes] for sizes in cases[variable]]
            for what, of_all in zip(("cpu_s_per_group", "queue_s"), zip(*results, strict=True), strict=True):
                yield {"of": variable, "values": values, "what": what, "results": of_all, "slope": slope(values, list(of_all))}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pasync.transport.weights"])
    pairs = [context.Pipe() for _ in range(max(RECEIVERS))]
    processes = [context.Process(target=receive, args=(theirs,), daemon=True) for _, theirs in pairs]
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder), "float32")
    for process in processes:
        process.start()
    try:
        pipes = [ours for ours, _ in pairs]
        assert all(pipe.poll(300) and pipe.recv() is None for pipe in pipes), "a receiver did not start within 300 s"
        for variable, values in (("parameters", PARAMETERS), ("receivers", RECEIVERS)):
            sizes = [(n, 1) if variable == "parameters" else (1 << 24, n) for n in values]
            times = [sync(parameters, pipes[:receivers], config, rounds) for parameters, receivers in sizes]
            yield {"of": variable, "values": values, "what": "sync_s", "results": times, "slope": slope(values, times)}
    finally:
        for process in processes:
            process.kill()


def draw(out: Path, measured: list[Line]) -> None:
    """Write the log-log plots, one for each quantity."""
    from matplotlib import pyplot

    kinds = {"cpu_s_per_group": "trainer's CPU per group, s", "queue_s": "finished group to micro-batch, s", "sync_s": "weight sync, s"}
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(13, 4), layout="constrained")
    for ax, (what, title) in zip(axes, kinds.items(), strict=True):
        for line in (line for line in measured if line["what"] == what):
            ax.loglog(line["values"], line["results"], "o-", label=f"{line['of']}: slope {line['slope']:.2f}")
        ax.set(title=title, xlabel="value")
        ax.legend(fontsize=8)
    figure.savefig(out, dpi=110)


async def serve(address: str, servers: int) -> None:
    """All stub servers, in one process."""
    await asyncio.gather(*(answer(address, i) for i in range(servers)))


def main() -> None:
    """Entry of the command, and of the stub servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--png", type=Path, help="draw the plots")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve[0], int(options.serve[1])))
        return
    measured = []
    for line in lines(options.rounds):
        measured.append(line)
        print(json.dumps(line), flush=True)
    if options.png:
        draw(options.png, measured)


if __name__ == "__main__":
    main()
