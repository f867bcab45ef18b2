"""A real run but for vLLM: launcher, torchrun, ranks, sockets, weight transfer and reward processes are those of pasync.

    python -m benchmarks.stub_run launch CONFIG [key=value ...]
    python -m benchmarks.stub_run serve RUN INDEX       a server that answers in STUB_S seconds what depends on the prompt only

For tests: with REAL=1 the servers are vLLM's after all; with FAR=NAME:HOST server 1 runs in the network namespace NAME, which reaches
this one at HOST only, over interfaces NAMEa (here) and NAMEb.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

SAMPLE_S = float(os.environ.get("STUB_S", "0.3"))


def reward(prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> float:
    """Differs between the responses of a group."""
    return sum((i + 1) * token for i, token in enumerate(response_ids)) % 7 / 7


class Engine:
    """In place of `pasync.rollout.engine.Engine`: equal prompts get equal responses, whatever weights it was given."""

    def __init__(self) -> None:
        import pasync.transport.weights  # noqa: F401  not only in the first sync

        self._receiver: Any = None

    async def sample(
        self, prompt_ids: list[int], *, temperature: float, max_tokens: int, request: str
    ) -> tuple[list[int], list[float], bool]:
        import numpy as np

        await asyncio.sleep(SAMPLE_S)
        rng = np.random.default_rng([*prompt_ids, int(request.split("-")[2])])
        ids = rng.integers(0, 12, rng.integers(2, max_tokens)).tolist()
        return ids, (-rng.random(len(ids))).tolist(), True

    async def score(self, ids: list[int], request: str) -> list[float]:
        return [0.0] * (len(ids) - 1)

    async def join(self, fields: dict[str, Any]) -> None:
        await asyncio.to_thread(self._join, fields)

    async def receive_weights(self, *, with_sum: bool) -> int:
        return await asyncio.to_thread(self._receive)

    def require_alive(self) -> None:
        pass

    def _join(self, fields: dict[str, Any]) -> None:
        import torch

        from pasync.transport.weights import WeightReceiver

        if self._receiver:
            self._receiver.group.close()
        self._receiver = WeightReceiver("cpu", fields, 0, torch.device("cpu"), torch.float32)

    def _receive(self) -> int:
        from pasync.transport.weights import SUM_MODULUS, checksum

        sums: list[int] = []
        self._receiver.receive(lambda weights: sums.extend(checksum([tensor]) for _, tensor in weights), held=[])
        return sum(sums) % SUM_MODULUS


class Tokenizer:
    """Text is of no use here."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


async def serve(run: Path, index: int) -> None:
    """As `pasync.serve` does."""
    from pasync.configfile import load
    from pasync.placement import Placement
    from pasync.rewards.pool import RewardPool
    from pasync.rollout.server import RolloutServer
    from pasync.transport.channel import Keys, TrainerChannel, server_name

    config, placement = load(run / "config.yaml"), Placement.load(run / "placement.json")
    channel = TrainerChannel(placement.address, server_name(index, os.getpid()), Keys.load(placement.keys))
    with RewardPool(config.rewards) as rewards:
        engine: Any = Engine()
        try:
            await RolloutServer(config, index, engine, rewards, Tokenizer(), channel).run()
        finally:
            channel.close()


def launch(argv: list[str]) -> int:
    """As `pasync.launch` does."""
    from pasync import launch
    from pasync.configfile import load
    from pasync.placement import Placement
    from pasync.supervisor import Command
    from pasync.transport.channel import Keys

    config = load(Path(argv[0]), argv[1:])
    placement = launch.placed(config, False)
    namespace, _, host = os.environ.get("FAR", "").partition(":")
    if namespace:
        keys = Path(str(config.run.dir)) / "keys.json"
        keys.parent.mkdir(parents=True, exist_ok=True)
        Keys.make(keys)
        placement = replace(placement, address=f"tcp://{host}:{placement.address.rpartition(':')[2]}", keys=str(keys))

    def commands(placement: Placement, run: Path) -> list[Command]:
        *servers, ranks = launch.run_commands(config, placement, run)
        for i, server in enumerate(servers):
            argv = server.argv if os.environ.get("REAL") else [sys.executable, "-m", "benchmarks.stub_run", "serve", str(run), str(i)]
            far = bool(namespace) and i == 1
            network = {"GLOO_SOCKET_IFNAME": f"{namespace}{'b' if far else 'a'}"} if namespace else {}
            servers[i] = replace(server, argv=[*["ip", "netns", "exec", namespace] * far, *argv], env=server.env | network)
        return [*servers, replace(ranks, env=ranks.env | ({"GLOO_SOCKET_IFNAME": f"{namespace}a"} if namespace else {}))]

    return launch.launch(config, placement, commands)


def main() -> None:
    """Entry of both."""
    from pasync.processes import die_with_parent, report_fatal

    if sys.argv[1] == "launch":
        raise SystemExit(launch(sys.argv[2:]))
    die_with_parent()
    run, index = Path(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s server-{index} %(name)s %(levelname)s %(message)s")
    with report_fatal(run, f"server-{index}"):
        asyncio.run(serve(run, index))


if __name__ == "__main__":
    main()
