"""vllm-ascend's communicator in plain torch, and servers that receive through it in processes of their own.

Signature, attributes and silence when disabled: pyhccl.py of vllm-ascend 0.23.0. Like HCCL, and unlike gloo, it waits for ever.
"""

import ctypes
import multiprocessing
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from pasync import device as devices
from pasync.errors import RolloutError, WeightSyncError
from pasync.messages import Join, Joined, Message, Synced
from pasync.transport.weights import WeightReceiver, checksum

CPU = torch.device("cpu")


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 4108)]


class Library:
    """What is there of HCCL's own calls."""

    def __init__(self) -> None:
        self.destroyed = threading.Event()

    def hcclCommDestroy(self, comm: dist.ProcessGroupGloo) -> None:
        """Of this side only: whoever waits goes on waiting."""
        assert isinstance(comm, dist.ProcessGroupGloo)
        self.destroyed.set()


@dataclass
class StatelessProcessGroup:
    rank: int
    world_size: int
    store: dist.Store

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        raise AssertionError("the real one unpickles what it finds in the store")


class PyHcclCommunicator:
    def __init__(
        self, group: dist.ProcessGroup | StatelessProcessGroup, device: int | str | torch.device, library_path: str | None = None
    ) -> None:
        assert isinstance(group, StatelessProcessGroup) and isinstance(device, torch.device) and group.world_size > 1
        self.group, self.rank, self.world_size, self.device = group, group.rank, group.world_size, device
        self.available, self.disabled, self.calls, self.hccl = True, False, 0, Library()
        unique_id = UniqueId()
        if self.rank == 0:
            unique_id.internal[:] = [i % 100 for i in range(4108)]
        unique_id = group.broadcast_obj(unique_id, src=0)
        assert list(unique_id.internal) == [i % 100 for i in range(4108)]
        self.comm = dist.ProcessGroupGloo(dist.PrefixStore("hccl", group.store), self.rank, self.world_size, timedelta(hours=1))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        assert tensor.device == self.device and tensor.is_contiguous() and isinstance(stream, torch.cpu.Stream)
        self.calls += 1
        if not self.drops():
            options = dist.BroadcastOptions()
            options.rootRank = src
            self.comm.broadcast([tensor], options).wait()

    def drops(self) -> bool:
        return False


class Disabled(PyHcclCommunicator):
    """HCCL's library was not found."""

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        self.available, self.disabled = False, True


class DropsTheSecond(PyHcclCommunicator):
    """Does nothing once, on all sides and in silence."""

    def drops(self) -> bool:
        return self.calls == 2


class ServerDropsTheLast(PyHcclCommunicator):
    """The first version's third broadcast never begins on the server."""

    def drops(self) -> bool:
        return self.calls == 3 and self.rank > 0


class ServerNeverComes(PyHcclCommunicator):
    """The server hangs before it has entered."""

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        if group.rank > 0:
            group.store.wait(["never"], timedelta(hours=1))
        super().__init__(group, device, library_path)


@contextmanager
def ascend(communicator: type[PyHcclCommunicator]) -> Iterator[None]:
    """Inside, vllm_ascend can be imported and the first npu is the cpu."""
    names = ["vllm_ascend", "vllm_ascend.distributed", "vllm_ascend.distributed.device_communicators"]
    modules = {name: types.ModuleType(name) for name in [*names, f"{names[-1]}.pyhccl"]}
    modules[f"{names[-1]}.pyhccl"].__dict__.update(PyHcclCommunicator=communicator, StatelessProcessGroup=StatelessProcessGroup)
    with patch.dict(sys.modules, modules), patch.object(devices, "torch_device", lambda kind, index: CPU):
        yield


def received(receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    """One version."""
    held: dict[str, torch.Tensor] = {}
    receiver.receive(lambda weights: held.update((name, tensor.clone()) for name, tensor in weights), held=[])
    return held


def serve(pipe: Any, communicator: type[PyHcclCommunicator]) -> None:
    """A server's process: answers Join and each Sync, or with the error."""
    with ascend(communicator):
        pipe.send("imported")
        try:
            receiver = WeightReceiver("npu", pipe.recv(), 0, CPU, torch.float32)
            pipe.send(Joined())
            while sync := pipe.recv():
                held = received(receiver)
                pipe.send(Synced(sync["version"], 0.0, checksum(held.values())))
                pipe.send(held)
        except (RuntimeError, TimeoutError) as error:
            pipe.send(error)


class ProcessServers:
    """The rollout side as the sender sees it."""

    def __init__(self, count: int, communicator: type[PyHcclCommunicator]) -> None:
        self.names = [f"server-{i}" for i in range(count)]
        self.deaf = False
        context = multiprocessing.get_context("forkserver")
        ends = [context.Pipe() for _ in self.names]
        self.pipes = dict(zip(self.names, (ours for ours, _ in ends), strict=True))
        self.processes = [context.Process(target=serve, args=(theirs, communicator), daemon=True) for _, theirs in ends]
        for process in self.processes:
            process.start()
        self.replies(str, deadline_s=50)

    def require_idle(self) -> None:
        pass

    def tell(self, server: str, message: Message) -> None:
        if isinstance(message, Join) or not self.deaf:
            self.pipes[server].send(msgspec.to_builtins(message))

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        try:
            return {name: self.received(name, deadline_s) for name in self.names}
        except (TimeoutError, RuntimeError, EOFError) as error:
            raise RolloutError(f"no {kind.__name__}: {error}") from error

    def received(self, server: str, deadline_s: float) -> Any:
        if not self.pipes[server].poll(deadline_s):
            raise TimeoutError(f"{server} does not answer")
        answer = self.pipes[server].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failure(self, *, wait_s: float) -> Exception | None:
        for name, pipe in self.pipes.items():
            if pipe.poll(wait_s) and isinstance(answer := pipe.recv(), Exception):
                return WeightSyncError(f"{name}: {answer}")
        return None


@contextmanager
def servers(count: int, communicator: type[PyHcclCommunicator]) -> Iterator[ProcessServers]:
    """Server processes, and this process made a trainer on an npu."""
    with ExitStack() as stack:
        stack.enter_context(ascend(communicator))
        made = ProcessServers(count, communicator)
        for process in made.processes:
            stack.callback(process.kill)
        yield made
