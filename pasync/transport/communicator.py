"""Who carries tensors from rank 0 to all others: gloo, NCCL or HCCL, behind one call.

    cpu   ProcessGroupGloo --+
    cuda  ProcessGroupNCCL --+--> broadcast(tensors, stream) --> call that waits for the end
    npu   PyHcclCommunicator-+

The only file that imports vllm_ascend.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.errors import WeightSyncError

Call = Callable[[], None]


class Communicator(Protocol):
    """One process's end of a group outside torch's default one."""

    def broadcast(self, tensors: list[Tensor], stream: Any) -> Call:
        """Begin to bring rank 0's tensors to all others, which give as many of the same shapes to write into.

        Returns:
            Blocks until this rank is done with them.
        """

    def abort(self) -> None:
        """From another thread: end a broadcast that is under way, if this backend can."""

    def close(self) -> None:
        """Leave the group. Not during a broadcast."""


class GlooCommunicator:
    """Sends and receives of torch's gloo: of many tensors one follows the other at once, while in broadcasts all wait for each.

    Args:
        timeout: after which it raises.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self._others = range(1, world_size) if rank == 0 else None

    def broadcast(self, tensors: list[Tensor], stream: Any) -> Call:
        """As in `Communicator`; no stream, as there is no device that has one."""
        group, others = self._group, self._others
        if others is None:
            works = [group.recv([tensor], 0, i) for i, tensor in enumerate(tensors)]
        else:
            works = [group.send([tensor], to, i) for i, tensor in enumerate(tensors) for to in others]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def abort(self) -> None:
        """Gloo cannot: it goes on until a connection is closed or its time is up."""

    def close(self) -> None:
        """Close the connections: whoever waits for this process in gloo comes out with an error."""
        del self._group


class NcclCommunicator:
    """A process group of torch's own.

    Args:
        timeout: after which the watchdog ends the process.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def broadcast(self, tensors: list[Tensor], stream: Any) -> Call:
        """As in `Communicator`, on the stream."""
        with torch.get_device_module(tensors[0].device).stream(stream):
            for tensor in tensors:
                self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return _end(tensors, stream)

    def abort(self) -> None:
        """End what is under way."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        del self._group


class HcclCommunicator:
    """vllm-ascend's PyHcclCommunicator."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def broadcast(self, tensors: list[Tensor], stream: Any) -> Call:
        """As in `Communicator`, on the stream."""
        for tensor in tensors:
            self._made.broadcast(tensor, 0, stream)
        return _end(tensors, stream)

    def abort(self) -> None:
        """HCCL cannot: it goes on until HCCL_EXEC_TIMEOUT."""

    def close(self) -> None:
        """Free what the group holds of the device, which has room for few of them."""
        self._made.hccl.hcclCommDestroy(self._made.comm)


def communicator(kind: str, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Communicator:
    """Enter a group of `world_size` processes that meet at `store`; blocks until all are there.

    On npu this is the communicator that vllm-ascend's own transfer engine and its workers use, because a process group of torch_npu
    made by hand is private API that nobody tests outside the default group, and the engine itself has no deadline and sends no sums.

    Raises:
        WeightSyncError: HCCL cannot be loaded.
    """
    if kind == "cpu":
        return GlooCommunicator(store, rank, world_size, timeout)
    if kind == "cuda":
        return NcclCommunicator(store, rank, world_size, timeout)
    from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator, StatelessProcessGroup

    class Meeting(StatelessProcessGroup):  # type: ignore[misc]
        """Hands HCCL's root id over as bytes; the base class would unpickle what it finds in the store."""

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            if self.rank == src:
                self.store.set("root id", bytes(obj))
            return type(obj).from_buffer_copy(self.store.get("root id"))

    made = PyHcclCommunicator(Meeting(rank=rank, world_size=world_size, store=store), device)
    if made.disabled or not made.available:
        raise WeightSyncError("HCCL could not be loaded (libhccl.so, or HCCL_SO_PATH): its communicator would send nothing, in silence")
    return HcclCommunicator(made)


def _end(tensors: list[Tensor], stream: Any) -> Call:
    """Blocks until the tensors' device has done what the stream has been given so far."""
    event = torch.get_device_module(tensors[0].device).Event()
    event.record(stream)
    return event.synchronize  # type: ignore[no-any-return]
