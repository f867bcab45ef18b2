"""Many tensors as few large broadcasts: names and shapes in, flat buckets and the group that carries them out.

    shapes --plan_buckets()--> [[a b c] [d] [e f ..] ..]      one bucket = one broadcast
    bucket 0 2 4 .. --> buffer 0      bucket 1 3 5 .. --> buffer 1      so that one travels while the other is filled or read
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices

Bucket = list[tuple[str, list[int]]]
BUFFERS = 2


class BroadcastGroup:
    """A process group outside the default one, with the sender as rank 0.

    The sender makes the store first (`open_store`) and tells everyone its port; constructing the group then blocks until all are there.
    """

    def __init__(self, kind: str, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = store  # must outlive the group
        self._group = devices.process_group(kind, dist.PrefixStore("weights", store), rank, world_size, timeout)

    @staticmethod
    def open_store(host: str, port: int, world_size: int, timeout_s: float, *, is_sender: bool) -> dist.TCPStore:
        """Rendezvous; the sender passes port 0 and reads the chosen one from `.port`."""
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(host, port, world_size, is_master=is_sender, timeout=timeout, wait_for_workers=False)

    def close(self) -> None:
        """Leave the group: whoever waits in it comes out with an error, once no work of it is held any more."""
        del self._group

    def start(self, tensor: Tensor) -> dist.Work:
        """Begin to bring rank 0's tensor to all others and return at once; all ranks must start the same tensors in the same order.

        The tensor may be neither written to nor, off rank 0, read before the returned work's `wait()`. On gloo that blocks until the
        tensor is there, and raises RuntimeError when a peer is gone or the timeout has passed. On accelerators it returns at once and only
        puts what the current stream does next behind the broadcast, as `start` puts the broadcast behind what that stream did before.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self._group.broadcast([tensor], options)


def plan_buckets(shapes: Bucket, max_numel: int) -> list[Bucket]:
    """Cut a list of tensors into consecutive buckets of at most `max_numel` numbers; a larger tensor is a bucket of its own."""
    buckets: list[Bucket] = []
    size = 0
    for name, shape in shapes:
        numel = math.prod(shape)
        if not buckets or size + numel > max_numel:
            buckets.append([])
            size = 0
        buckets[-1].append((name, list(shape)))
        size += numel
    return buckets


def flat_buffers(buckets: list[Bucket], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One flat tensor per bucket; those of buckets i, i + 2, i + 4 .. share their memory."""
    sizes = [sum(math.prod(shape) for _, shape in bucket) for bucket in buckets]
    buffers = [torch.empty(max(sizes[i::BUFFERS], default=0), dtype=dtype, device=device) for i in range(BUFFERS)]
    return [buffers[i % BUFFERS][:size] for i, size in enumerate(sizes)]


def views(flat: Tensor, bucket: Bucket) -> Iterator[Tensor]:
    """The bucket's tensors, as parts of its flat one."""
    at = 0
    for _, shape in bucket:
        numel = math.prod(shape)
        yield flat[at : at + numel].view(shape)
        at += numel
