"""Who carries a broadcast: gloo, NCCL or HCCL, all behind the one call of vllm-ascend's communicator.

    cpu   ProcessGroupGloo --+
    cuda  ProcessGroupNCCL --+--> broadcast(tensor, src, stream): put on the stream, on cpu done when it returns
    npu   PyHcclCommunicator-+

The only file that imports vllm_ascend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.errors import WeightSyncError


class Communicator(Protocol):
    """One process's end of a group outside torch's default one."""

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None: ...

    def abort(self) -> None:
        """From another thread: end a broadcast that is under way, if this backend can."""

    def close(self) -> None:
        """Leave the group. Not during a broadcast."""


class TorchCommunicator:
    """A process group of torch's own.

    Args:
        timeout: after which gloo raises and NCCL's watchdog ends the process.
    """

    def __init__(self, kind: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        if kind == "cpu":
            self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Bring rank `src`'s tensor to all others."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        with torch.get_device_module(tensor.device).stream(stream):
            self._group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """NCCL can. Gloo goes on until a connection is closed or its time is up."""
        self._group.abort()

    def close(self) -> None:
        """Close the connections: whoever waits for this process in gloo comes out with an error."""
        del self._group


class HcclCommunicator:
    """vllm-ascend's PyHcclCommunicator."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Put on the stream: bring rank `src`'s tensor to all others."""
        self._made.broadcast(tensor, src, stream)

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
    if kind != "npu":
        return TorchCommunicator(kind, store, rank, world_size, timeout)
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
