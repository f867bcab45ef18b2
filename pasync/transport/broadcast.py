"""Many tensors as few large broadcasts: names and shapes in, flat buckets and the group that carries them out.

    shapes --plan_buckets()--> [[a b c] [d] [e f ..] ..]      a bucket is one broadcast, if too large several

    caller        start 0 | start 1 | wait 0 |    ..          never waits longer than the timeout
    group thread      | broadcast 0 | broadcast 1 | ..        in the order of the starts, until the device is done
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import cycle
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from pasync.transport.communicator import Communicator, communicator

Bucket = list[tuple[str, list[int]]]
Call = Callable[[], None]


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
        self._calls: SimpleQueue[tuple[Call, Future[None]]] = SimpleQueue()
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

    def start(self, tensor: Tensor) -> Work:
        """Begin to bring rank 0's tensor to all others and return at once; all ranks must start the same tensors in the same order.

        The broadcast begins after what the current stream has been given so far. The tensor may be neither written to nor, off rank 0,
        read before the returned work's `wait()`.
        """
        ready = self._module.Event()
        ready.record()
        return self._submit(partial(self._broadcast, tensor, ready))

    def close(self) -> None:
        """Leave the group and return at once; what was started and has not begun never will. A second time does nothing.

        A broadcast under way comes first. It ends when a peer's connection is closed, and by twice the timeout; with NCCL at once, with
        HCCL maybe never. Then the thread ends, and whoever waits for this process comes out with an error, unless his own timeout came
        before.
        """
        if self._closed:
            return
        if self._communicator:
            self._communicator.abort()
        self._closed = True
        self._submit(_nothing)

    def _submit(self, call: Call) -> Work:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return Work(done, self._timeout_s, self._missing)

    def _serve(self) -> None:
        """The thread: woken by `_submit`, ended by `close`, also when that came before it had entered."""
        while not self._closed:
            _run(*self._calls.get())  # a function of its own, so that the idle thread keeps no tensor
        if self._communicator:
            self._communicator.close()

    def _enter(self, kind: str, rank: int, world_size: int, timeout: timedelta) -> None:
        self._module.set_device(self._device)  # a thread begins on device 0
        self._stream = self._module.Stream()
        self._communicator = communicator(kind, self._store, rank, world_size, self._device, timeout)

    def _broadcast(self, tensor: Tensor, ready: torch.Event) -> None:
        ready.synchronize()  # and no wait of streams: a call of HCCL bypasses the queue through which torch_npu launches its own
        assert self._communicator
        self._communicator.broadcast(tensor, 0, self._stream)
        done = self._module.Event()
        done.record(self._stream)
        done.synchronize()


def _nothing() -> None:
    """Only wakes the thread."""


def _run(call: Call, done: Future[None]) -> None:
    try:
        call()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)


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


def plan_buckets(shapes: Bucket, max_numel: int, alone_numel: int) -> list[Bucket]:
    """Cut a list of tensors into consecutive buckets of at most `max_numel` numbers; larger ones, and from `alone_numel` on, are alone."""
    buckets: list[Bucket] = []
    room = 0
    for name, shape in shapes:
        numel = math.prod(shape)
        if numel > room or numel >= alone_numel:
            buckets.append([])
            room = 0 if numel >= alone_numel else max_numel
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
