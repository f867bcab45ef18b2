"""Runs whose servers and ranks sleep instead of computing, for as long as given rates say; everything between them is real.

    ranks 0 .. n: RolloutProducer, Batch, stream_micro_batches over gloo  <--tcp-->  servers 0 .. m: RolloutServer, an engine that sleeps

So more processes than cores do not disturb one another, and a split of 2 + 1 can be compared with 1 + 2 on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.transport import free_port
from pasync.batch import Batch
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt
from pasync.messages import Group, Sampling, Sync, Synced
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.rollout.producer import RolloutProducer
from pasync.rollout.server import RolloutServer
from pasync.simulate import GroupWork, Rates, training_time
from pasync.stream import stream_micro_batches
from pasync.transport.channel import TrainerChannel, server_name

RATES = Rates(
    step_s=8e-3, sequence_s=5e-4, context_s=1e-6, prompt_s=2e-4, micro_batch_s=10e-3, token_s=6e-4, pair_s=0.0, optimizer_s=0.1, sync_s=0.1
)
GROUPS, RESPONSES, SLOTS, BUDGET = 16, 4, 8, 400


class Case(NamedTuple):
    """Lengths that set the ratio of generation to training."""

    prompt: int
    median: int
    """Of the responses, in tokens."""
    spread: float
    """Standard deviation of the logarithm."""


CASES = {
    "long_responses": Case(prompt=16, median=40, spread=0.0),
    "long_prompts": Case(prompt=300, median=12, spread=0.0),
    "long_tailed": Case(prompt=32, median=24, spread=0.7),
}


def work(name: str) -> list[GroupWork]:
    """The groups of a case, whose longest responses the trainer has seen before."""
    case = CASES[name]
    drawn = case.median * np.exp(np.random.default_rng(0).normal(0, case.spread, (GROUPS, RESPONSES))) if case.spread else case.median
    lengths = np.broadcast_to(drawn, (GROUPS, RESPONSES)).round().astype(int).tolist()
    return [GroupWork(case.prompt, tuple(row), max(row)) for row in lengths]


def configuration(servers: int, ranks: int) -> Config:
    """The parts of a configuration that the scheduler reads."""
    tree = {
        "name": "emulate",
        "iterations": 1,
        "model": {"path": "none"},
        "data": {"train": {"source": "none"}},
        "rollout": {"max_tokens": 1000, "max_num_seqs": SLOTS, "servers": servers},
        "algorithm": {"batch_groups": GROUPS, "group_responses": RESPONSES},
        "optimizer": {"lr": 1e-6},
        "parallel": {"ranks": ranks, "micro_batch_tokens": BUDGET},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulate.yaml"
        path.write_text(json.dumps(tree))
        return load(path)


class SleepingEngine:
    """Samples SLOTS responses side by side, first come first served; response k has as many tokens as the prompt's k-th id says."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, int, asyncio.Future[None]]] = deque()  # (R, P, P to compute, done)
        self._came = asyncio.Event()
        self._steps = asyncio.create_task(self._run())

    async def sample(self, prompt_ids: list[int], *, request: str, **_: Any) -> tuple[list[int], list[float], bool]:
        """As `Engine.sample`."""
        k, done = int(request.split("-")[2]), asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids[k], len(prompt_ids), 0 if k else len(prompt_ids), done))
        self._came.set()
        await done
        return [0] * prompt_ids[k], [0.0] * prompt_ids[k], True

    async def receive_weights(self, *, with_sum: bool) -> None:
        """As `Engine.receive_weights`."""
        await asyncio.sleep(RATES.sync_s)

    def require_alive(self) -> None:
        """It always is."""

    async def _run(self) -> None:
        running: list[list[Any]] = []  # [tokens left, context, done]
        at = time.monotonic()
        while True:
            prompts = 0
            while self._waiting and len(running) < SLOTS:
                length, prompt, to_compute, done = self._waiting.popleft()
                running.append([length, prompt, done])
                prompts += to_compute
            if not running:
                self._came.clear()
                await self._came.wait()
                at = time.monotonic()
                continue
            at += RATES.step_s + prompts * RATES.prompt_s
            at += len(running) * RATES.sequence_s + sum(context for _, context, _ in running) * RATES.context_s
            await asyncio.sleep(at - time.monotonic())
            for sequence in running:
                sequence[0] -= 1
                sequence[1] += 1
                if not sequence[0]:
                    sequence[2].set_result(None)
            running = [sequence for sequence in running if sequence[0]]
            await asyncio.sleep(0)  # the server may answer, and the next group may be there


class AnyReward:
    """Rewards that differ, so that every group has a gradient; and a tokenizer."""

    async def score(self, *_: Any) -> tuple[float, str]:
        """As `RewardPool.score`."""
        return random.random(), ""

    def decode(self, *_: Any, **__: Any) -> str:
        """As a tokenizer's."""
        return ""


async def serve(config: Config, address: str, index: int) -> None:
    """One server."""
    channel = TrainerChannel(address, server_name(index, os.getpid()))
    engine: Any = SleepingEngine()
    rewards: Any = AnyReward()
    await RolloutServer(config, index, engine, rewards, rewards, channel).run()
    channel.close()


def iterate(config: Config, name: str, version: int, producer: RolloutProducer | None, ranks: Ranks) -> dict[str, float]:
    """One iteration, on every rank; what it took, on rank 0."""
    began, batch = time.time(), None
    if producer:
        producer.muster()
        for server in producer.names:
            producer.tell(server, Sync(version, with_sum=False))
        producer.replies(Synced, deadline_s=30)
        producer.admit(version)
        prompts = [Prompt(i, (*g.lengths, *[i] * (g.prompt - RESPONSES)), "", {}) for i, g in enumerate(work(name))]
        producer.submit(prompts, version, Sampling(RESPONSES, 1.0, 1000))
        batch = Batch(producer, version, iter(()), refills=False)
    for groups in stream_micro_batches(batch, config, ranks):
        time.sleep(training_time(config, [_as_work(group) for group in groups], RATES)[0])
    time.sleep(RATES.optimizer_s)
    ranks.max({"done": 1.0})
    if not batch:
        return {}
    arrivals = [at for _, at in batch.arrived()]
    return {"step_s": time.time() - began, "generate_s": max(arrivals) - batch.submitted, "first_wait_s": min(arrivals) - batch.submitted}


def train(address: str, servers: int, names: list[str], rounds: int) -> None:
    """Every case with both schedules in turns, on one rank; rank 0 prints a JSON line for each, with medians after a round of warm-up."""
    with join_ranks("cpu", deadline_s=120) as ranks, contextlib.ExitStack() as stack:
        config, version = configuration(servers, ranks.size), 0
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        producer = stack.enter_context(RolloutProducer(config, address)) if ranks.is_first else None
        for name in names:
            seen: dict[str, list[dict[str, float]]] = {"sync": [], "periodic": []}
            for _ in range(1 + rounds):
                for schedule, of_schedule in seen.items():
                    scheduled = config.model_copy(update={"schedule": schedule})
                    of_schedule.append(iterate(scheduled, name, version, producer, ranks))
                    version += 1
            for schedule, of_schedule in seen.items() if ranks.is_first else ():
                medians = {key: statistics.median(line[key] for line in of_schedule[1:]) for key in of_schedule[0]}
                print(json.dumps({"case": name, "schedule": schedule, **medians}), file=sys.__stdout__, flush=True)


def measured(servers: int, ranks: int, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A line for each case and schedule, of new processes."""
    address, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    command = [sys.executable, "-m", "benchmarks.emulate", address, str(servers), "--rounds", str(rounds), "--cases", *names]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([*command, "--server", str(i)]) for i in range(servers)]
    environments = [os.environ | meeting | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    try:
        started += [subprocess.Popen(command, env=env) for env in environments[1:]]
        done = subprocess.run(command, env=environments[0], stdout=subprocess.PIPE, text=True, check=True, timeout=900)
        for process in started:
            process.wait(30)
    finally:
        for process in started:
            process.kill()
    return [json.loads(line) for line in done.stdout.splitlines()]


def _as_work(group: Group) -> GroupWork:
    return GroupWork(len(group.prompt_ids) // 4, tuple(len(r.ids) // 4 for r in group.responses), 0.0)


def main() -> None:
    """Entry of one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("servers", type=int)
    parser.add_argument("--server", type=int)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    options = parser.parse_args()
    if options.server is None:
        train(options.address, options.servers, options.cases, options.rounds)
    else:
        asyncio.run(serve(configuration(options.servers, 1), options.address, options.server))


if __name__ == "__main__":
    main()
