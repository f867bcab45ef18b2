"""What the host costs: `python -m benchmarks.transport`. Groups a second from producer to a stub server and back through the stream,
and growth of memory over many iterations of a trainer that computes nothing.

    core 1: producer thread, Batch, stream_micro_batches  <--tcp-->  core 0: a server that answers at once with K x R tokens
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pasync import device as devices
from pasync.batch import Batch
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt
from pasync.messages import Generate, Group, GroupDone, Hello, Ping, Response, Sampling, Stop, float_bytes, int_bytes
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.rollout.producer import RolloutProducer
from pasync.stream import stream_micro_batches
from pasync.transport.channel import TrainerChannel, server_name

RESPONSES, TOKENS, PROMPT_TOKENS = 16, 512, 128
WARM_UP = 1000
"""Iterations after which memory is taken for the first time."""


async def answer(address: str) -> None:
    """The stub server: a finished group for every request, until Stop."""
    rng = np.random.default_rng(0)
    responses = [
        Response(int_bytes(rng.integers(0, 50_000, TOKENS)), float_bytes(-rng.random(TOKENS)), "x" * 2000, True, float(k % 2))
        for k in range(RESPONSES)
    ]
    channel = TrainerChannel(address, server_name(0, os.getpid()))
    await channel.send(Hello(server=0, pid=os.getpid(), credits=8 * RESPONSES))
    while not isinstance(message := await channel.receive(), Stop):
        if isinstance(message, Ping):
            continue
        assert isinstance(message, Generate)
        now = time.time()
        group = Group(message.version, message.group_id, message.prompt_ids, responses, now, now)
        await channel.send(GroupDone(group, RESPONSES))
    channel.close()


def iterate(producer: RolloutProducer, prompts: list[Prompt], version: int, config: Config, ranks: Ranks) -> int:
    """One iteration; returns the groups that came out of the stream."""
    producer.admit(version)
    producer.submit(prompts, version, Sampling(RESPONSES, 1.0, TOKENS))
    batch = Batch(producer, version, iter(()), refills=False)
    return sum(len(groups) for groups in stream_micro_batches(batch, config, ranks))


def measure(config: Config, producer: RolloutProducer, ranks: Ranks, iterations: int) -> dict[str, Any]:
    """The JSON line."""
    rng = np.random.default_rng(1)
    prompts = [Prompt(i, tuple(rng.integers(0, 50_000, PROMPT_TOKENS).tolist()), "p" * 500, {"answer": "1"}) for i in range(512)]
    rates = []
    for version in range(9):
        began = time.perf_counter()
        assert iterate(producer, prompts, version, config, ranks) == len(prompts)
        rates.append(len(prompts) / (time.perf_counter() - began))
    few, process, memory = prompts[:4], psutil.Process(), [0, 0]
    for i in range(WARM_UP + iterations):
        iterate(producer, few, 9 + i, config, ranks)
        if i == WARM_UP:
            memory[0] = process.memory_info().rss
    memory[1] = process.memory_info().rss
    return {
        "groups_per_s": statistics.median(rates[2:]),
        "rss_growth_frac": memory[1] / memory[0] - 1,
        "rss_bytes": memory[1],
        "responses": RESPONSES,
        "tokens": TOKENS,
        "iterations": iterations,
    }


def configuration(folder: Path) -> Config:
    """The parts of a configuration that producer and stream read."""
    tree = {
        "name": "transport",
        "iterations": 1,
        "model": {"path": "none"},
        "data": {"train": {"source": "none"}},
        "rollout": {"max_tokens": TOKENS, "max_num_seqs": 8 * RESPONSES},
        "algorithm": {"batch_groups": 1, "group_responses": RESPONSES},
        "optimizer": {"lr": 1e-6},
        "parallel": {"micro_batch_tokens": 4 * RESPONSES * TOKENS},
    }
    path = folder / "transport.yaml"
    path.write_text(json.dumps(tree))
    return load(path)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Entry of the command, and of the stub server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cores = devices.device_ids("cpu")
    if options.server:
        devices.pin(cores[:1])
        asyncio.run(answer(options.server))
        return
    address = f"tcp://127.0.0.1:{free_port()}"
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.transport", "--server", address])
    devices.pin(cores[-1:])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    try:
        with tempfile.TemporaryDirectory() as folder, join_ranks("cpu", deadline_s=60) as ranks:
            config = configuration(Path(folder))
            with contextlib.redirect_stdout(sys.stderr), RolloutProducer(config, address) as producer:
                producer.muster()
                line = measure(config, producer, ranks, options.iterations)
        server.wait(10)
        print(json.dumps(line))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
