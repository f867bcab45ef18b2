"""One generation server: takes groups from the trainer, answers each when its last reward is known.

    trainer --Generate--> K requests to the engine --each response--> reward process --all K--> GroupDone --> trainer

Everything runs on one asyncio loop. The engine samples max_num_seqs responses at once; the server says when slots become free, and the
trainer decides what it gets next (admission.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from pasync.config import Config
from pasync.errors import RolloutError
from pasync.messages import (
    Cancel,
    Cancelled,
    Failed,
    Freed,
    Generate,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Join,
    Joined,
    Ping,
    Probe,
    Probed,
    Response,
    Stop,
    Sync,
    Synced,
    Unsynced,
    float_bytes,
    int_bytes,
    ints,
)
from pasync.rewards.pool import RewardPool
from pasync.rollout.admission import Credit
from pasync.transport.channel import TrainerChannel

if TYPE_CHECKING:
    from pasync.rollout.engine import Engine  # loads vllm

log = logging.getLogger(__name__)


class RolloutServer:
    """Answers the trainer's messages until it says Stop.

    Args:
        index: of this server.
        tokenizer: decodes responses for the rewards.
    """

    def __init__(self, config: Config, index: int, engine: Engine, rewards: RewardPool, tokenizer: Any, channel: TrainerChannel) -> None:
        self.config, self.index, self.engine, self.channel = config, index, engine, channel
        self.rewards, self.tokenizer = rewards, tokenizer
        self.version: int | None = -1  # None: of no version as a whole
        self._credit = Credit()
        self._evaluation: set[asyncio.Task[None]] = set()  # held-out groups

    async def run(self) -> None:
        """Serve until Stop. Any failure is told to the trainer and raised; one is a trainer that is gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = self.channel.watch(self.config.rollout.start_s, self.config.rollout.silence_s)
                beside = [tasks.create_task(work) for work in (self._heartbeat(), watch)]
                await self._serve(tasks)
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            await self.channel.send(Failed(error=type(error).__name__, message=str(error)))
            raise error from group

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        await self.channel.send(Hello(server=self.index, pid=os.getpid(), credits=self.config.rollout.max_num_seqs))
        while not isinstance(message := await self.channel.receive(), Stop):
            if isinstance(message, Ping):
                continue
            task = tasks.create_task(self._answer(message))
            if isinstance(message, Generate) and message.held_out:
                self._evaluation.add(task)
                task.add_done_callback(self._evaluation.discard)

    def _answer(self, message: Generate | Cancel | Join | Sync | Probe) -> Coroutine[Any, Any, None]:
        match message:
            case Generate():
                return self._generate(message)
            case Cancel():
                return self._cancel()
            case Join():
                return self._join(message)
            case Sync():
                return self._sync(message)
            case Probe():
                return self._probe(message)

    async def _heartbeat(self) -> None:
        while True:
            self.engine.require_alive()
            await self.channel.send(Heartbeat(self.channel.reader.dropped))
            await asyncio.sleep(self.config.rollout.heartbeat_s)

    async def _generate(self, task: Generate) -> None:
        if task.version != self.version:
            raise RolloutError(f"asked to sample with version {task.version}, this server holds {self.version}")
        started = time.time()
        responses = await asyncio.gather(*(self._respond(task, k) for k in range(task.sampling.num_responses)))
        if task.version != self.version:
            raise RolloutError(f"weights changed from version {task.version} to {self.version} while group {task.group_id} was sampled")
        group = Group(task.version, task.group_id, task.prompt_ids, list(responses), started, time.time(), self.index, task.held_out)
        await self.channel.send(GroupDone(group, self._credit.take()))

    async def _cancel(self) -> None:
        """Give up all held-out groups. Nothing else is under way then: a server gets either kind of group at a time."""
        given_up = list(self._evaluation)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)  # each has taken its requests out of the engine
        self._credit.take()
        await self.channel.send(Cancelled())

    async def _respond(self, task: Generate, k: int) -> Response:
        ids, logprobs, ended = await self.engine.sample(
            ints(task.prompt_ids).tolist(),
            temperature=task.sampling.temperature,
            max_tokens=task.sampling.max_tokens,
            request=f"{task.version}-{task.group_id}-{k}-{time.monotonic_ns()}",
        )
        if freed := self._credit.free(task.sampling.num_responses):
            await self.channel.send(Freed(freed))
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        reward, error = 0.0, ""
        if ended or not self.config.rewards.truncated_is_wrong:
            reward, error = await self.rewards.score(task.prompt, text, ids, task.sample)
        return Response(int_bytes(ids), float_bytes(logprobs), text, ended, reward, error)

    async def _join(self, message: Join) -> None:
        try:
            await self.engine.join(msgspec.to_builtins(message))
        except Exception as error:
            return await self._unsynced(error)
        await self.channel.send(Joined())

    async def _sync(self, message: Sync) -> None:
        began, self.version = time.monotonic(), None
        try:
            total = await self.engine.receive_weights(with_sum=message.with_sum)
        except Exception as error:
            return await self._unsynced(error)
        self.version = message.version
        await self.channel.send(Synced(message.version, time.monotonic() - began, total))

    async def _unsynced(self, error: Exception) -> None:
        """Another one may be to blame, so stay for the next transfer; with a dead engine the heartbeat ends this server."""
        log.warning("the weight transfer failed: %s", error)
        await self.channel.send(Unsynced(f"server-{self.index}: {type(error).__name__}: {error}"))

    async def _probe(self, message: Probe) -> None:
        logprobs = await self.engine.score(ints(message.ids).tolist(), f"probe-{message.version}")
        await self.channel.send(Probed(message.version, float_bytes(logprobs)))
