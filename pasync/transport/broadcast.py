"""Many tensors in few parcels: names and shapes in, buckets and the group that carries them out.

    shapes --plan_buckets()--> [[a b c] [d] [e f ..] ..]      a bucket travels as one parcel

    caller        start 0 | start 1 | wait 0 |    ..           never waits longer than the timeout
    group thread      begin 0 | begin 1 | end 0 | end 1 | ..   in the order of the starts; waits for an end when there is nothing to begin
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import cycle
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.transport.communicator import Call, Communicator, communicator

Bucket = list[tuple[str, list[int]]]
Begin = Callable[[], Call]
"""Begins something; what it returns waits for the end of it."""


class Work:
    """What the group's thread was asked to do."""

    def __init__(self, done: Future[None], timeout_s: float, missing: str) -> None:
        self._done, self._timeout_s, self._missing = done, timeout_s, missing

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            TimeoutError: it was not done after the timeout of the group; says which side may be the one that is missing.
            RuntimeError: the communicator's own error, such as a connection that a peer has closed.
        """
        try:
            self._done.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self._missing} did not take part within {self._timeout_s:g} s") from None


class BroadcastGroup:
    """A communicator with the sender as rank 0, made again only when the servers are others.

    NCCL and HCCL know no timeout that ends in an exception. So all their calls run on one daemon thread, and whoever waits for it gives
    up at the timeout; a thread that hangs in a collective ends with it, at the latest with the process.

    The sender makes the store first (`open_store`) and tells everyone its port; constructing the group then blocks until all are there.
    """

    def __init__(self, kind: str, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s, self._module = device, timeout_s, torch.get_device_module(device)
        self._missing = "a server" if rank == 0 else "the trainer or another server"
        self._store = dist.PrefixStore("weights", store)
        self._asked: SimpleQueue[tuple[Begin, Future[None]]] = SimpleQueue()
        self._communicator: Communicator | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="broadcasts", daemon=True)
        self._thread.start()
        # Torch's own timeout would only come first in a race, and with NCCL it ends the process.
        try:
            self._submit(partial(self._enter, kind, rank, world_size, timedelta(seconds=2 * timeout_s))).wait()
        except Exception:
            self.close()
            raise

    @staticmethod
    def open_store(host: str, port: int, world_size: int, timeout_s: float, *, is_sender: bool) -> dist.TCPStore:
        """Rendezvous; the sender passes port 0 and reads the chosen one from `.port`."""
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(host, port, world_size, is_master=is_sender, timeout=timeout, wait_for_workers=False)

    def start(self, parcel: list[Tensor]) -> Work:
        """Begin to bring rank 0's tensors to all others and return at once; all ranks must start the same parcels in the same order.

        The broadcast begins after what the current stream has been given so far. The tensors may be neither written to nor, off rank 0,
        read before the returned work's `wait()`.
        """
        ready = self._module.Event()
        ready.record()
        return self._submit(partial(self._broadcast, parcel, ready))

    def close(self) -> None:
        """Leave the group and return at once; what was started and has not begun never will. A second time does nothing.

        Broadcasts under way come first. They end when a peer's connection is closed, and by twice the timeout; with NCCL at once, with
        HCCL maybe never. Then the thread ends, and whoever waits for this process comes out with an error, unless his own timeout came
        before.
        """
        if self._closed:
            return
        if self._communicator:
            self._communicator.abort()
        self._closed = True
        self._submit(lambda: _nothing)  # only wakes the thread

    def _submit(self, begin: Begin) -> Work:
        done: Future[None] = Future()
        self._asked.put((begin, done))
        return Work(done, self._timeout_s, self._missing)

    def _serve(self) -> None:
        """The thread: woken by `_submit`, ended by `close`, also when that came before it had entered."""
        begun: deque[tuple[Call, Future[None]]] = deque()
        while not self._closed:  # in functions of their own, so that the idle thread keeps no tensor
            if begun and self._asked.empty():
                _end(*begun.popleft())
            else:
                begun.append(_begin(*self._asked.get()))
        for broadcast in begun:
            _end(*broadcast)
        if self._communicator:
            self._communicator.close()

    def _enter(self, kind: str, rank: int, world_size: int, timeout: timedelta) -> Call:
        self._module.set_device(self._device)  # a thread begins on device 0
        self._stream = self._module.Stream()
        self._communicator = communicator(kind, self._store, rank, world_size, self._device, timeout)
        return _nothing

    def _broadcast(self, parcel: list[Tensor], ready: torch.Event) -> Call:
        ready.synchronize()  # and no wait of streams: a call of HCCL bypasses the queue through which torch_npu launches its own
        assert self._communicator
        return self._communicator.broadcast(parcel, self._stream)


def _nothing() -> None:
    pass


def _begin(begin: Begin, done: Future[None]) -> tuple[Call, Future[None]]:
    try:
        return begin(), done
    except Exception as error:
        return partial(_raise, error), done


def _end(end: Call, done: Future[None]) -> None:
    try:
        end()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)


def _raise(error: Exception) -> None:
    raise error


class Buffers:
    """Two flat tensors used in turn, as large as the largest of `buckets` of at most `max_numel` numbers.

    Always the same two, because on cpu memory that is still in a cache is faster than what an allocator hands out.
    """

    def __init__(self, buckets: list[Bucket], max_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = max((n for n in map(bucket_numel, buckets) if n <= max_numel), default=0)
        self._make = partial(torch.empty, dtype=dtype, device=device)
        self._turn = cycle([self._make(self.numel), self._make(self.numel)])

    def take(self, bucket: Bucket) -> Tensor:
        """The one not taken last; for a larger bucket, memory of its own."""
        numel = bucket_numel(bucket)
        return next(self._turn)[:numel] if numel <= self.numel else self._make(numel)


def plan_buckets(shapes: Bucket, max_numel: int) -> list[Bucket]:
    """Cut a list of tensors into consecutive buckets of at most `max_numel` numbers; larger tensors are alone."""
    buckets: list[Bucket] = []
    room = 0
    for name, shape in shapes:
        numel = math.prod(shape)
        if numel > room:
            buckets.append([])
            room = max_numel
        buckets[-1].append((name, list(shape)))
        room -= numel
    return buckets


def bucket_numel(bucket: Bucket) -> int:
    """Numbers of all its tensors."""
    return sum(math.prod(shape) for _, shape in bucket)


def views(flat: Tensor, bucket: Bucket) -> Iterator[Tensor]:
    """The bucket's tensors, as parts of its flat one."""
    at = 0
    for _, shape in bucket:
        numel = math.prod(shape)
        yield flat[at : at + numel].view(shape)
        at += numel
