"""Weights from training rank 0 to every vLLM worker, once per iteration.

    rank 0: WeightSender.publish  == buckets, broadcast (gloo | NCCL | HCCL) ==>  worker: WeightReceiver.receive

    sender     make 0 | make 1, sum 0 | make 2, sum 1 | ..        while a bucket travels the next is made ready,
    transfer          |    bucket 0   |    bucket 1   | ..        and the one before is loaded
    receiver                          |     load 0    | ..

On an accelerator a bucket is one flat tensor: copies within its memory cost little, each broadcast a launch. On cpu the copies of both
sides cost as much as the transfer. There a bucket's tensors travel from where they lie, and once it is known where the loader puts
them (`Places`), to where they stay.

The transfer group lies outside torch's default group: rank 0 of it is the trainer, the workers of all servers follow. Names are those
of the Hugging Face checkpoint; vLLM's own `load_weights` maps them onto its fused layers. Three checks make sure that weights
which did not arrive are noticed: every server acknowledges the version; the sum over the bits of the weights it then holds equals
that over what was sent; and the log-probs of a fixed sequence agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pasync import device as devices
from pasync.config import Config
from pasync.errors import PasyncError, WeightSyncError
from pasync.messages import Join, Joined, Message, Probe, Probed, Sync, Synced, float_bytes, floats, int_bytes
from pasync.transport.broadcast import BroadcastGroup, Bucket, Buffers, Work, plan_buckets, views
from pasync.transport.places import Places

Item = TypeVar("Item")
Weights = Iterable[tuple[str, Tensor]]
BITS = {2: torch.int16, 4: torch.int32}
SUM_MODULUS = 1 << 32
SUM_PIECE = {"cpu": 1 << 15}
"""Numbers that `checksum` takes at a time, by type of device: on cpu what stays in a core's cache, elsewhere 16M, few kernel launches."""


class Servers(Protocol):
    """What the sender needs of the rollout side."""

    names: list[str]

    def require_idle(self) -> None: ...
    def tell(self, server: str, message: Message) -> None: ...
    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]: ...
    def failure(self, *, wait_s: float) -> Exception | None: ...


class WeightSender:
    """Runs on rank 0's main thread.

    Args:
        config: the run's configuration.
        servers: the rollout side; its servers are ready.
        shapes: names and shapes of all weights, in the order in which `publish` gets them.
        kind: "cpu", "cuda" or "npu".
        host: of this process, as the servers reach it.
    """

    def __init__(
        self, config: Config, servers: Servers, shapes: list[tuple[str, list[int]]], kind: str, host: str = "127.0.0.1"
    ) -> None:  # fmt: skip
        self.config, self.servers, self.host = config, servers, host
        self._first: int | None = None  # version of the first sync: a continued run does not begin at 0
        self.dtype = getattr(torch, config.server_dtype)
        self.device = devices.torch_device(kind, 0)
        self.max_numel = config.sync.bucket_bytes // self.dtype.itemsize
        self.buckets = plan_buckets(shapes, self.max_numel)
        self._apart = kind == "cpu"
        flat = [] if self._apart else [bucket for bucket in self.buckets if len(bucket) > 1]
        self._buffers = Buffers(flat, self.max_numel, self.dtype, self.device)
        self.group = self._join(kind)

    def publish(self, weights: Weights, version: int, meanwhile: Callable[[], Item | None] = lambda: None) -> Item | None:
        """Give every server the weights of `version` and wait until each says that it holds them, with empty prefix caches.

        Waits for the servers, at most `sync.deadline_s` for every bucket and again for the acknowledgements.

        Args:
            weights: (name, tensor) in the order of `shapes`, made as slowly as they need to be. Taken to the end, on the calling thread,
                while buckets before are on their way. Sent from where they lie: none may be written to before this returns.
            meanwhile: called when all weights are sent, while the servers get ready to compute with them.

        Returns:
            What `meanwhile` returned.

        Raises:
            WeightSyncError: a server did not take part or does not hold what was sent, or `weights` failed. The group is closed then, and
                every server has answered or is given up.
            RolloutError: requests are still in flight, or a server was lost.
        """
        self.servers.require_idle()
        self._first = version if self._first is None else self._first
        with_sum = self.due(version)
        for name in self.servers.names:
            self.servers.tell(name, Sync(version=version, with_sum=with_sum))
        with self._all_answering(Synced):
            total = self._send(weights, with_sum, version)
        result = meanwhile()
        synced = self.servers.replies(Synced, deadline_s=self.config.sync.deadline_s)
        for name, reply in synced.items():
            if reply.version != version:
                raise WeightSyncError(f"{name} acknowledged version {reply.version} instead of {version}")
            if reply.weight_sum not in (None, total):
                raise WeightSyncError(f"{name} holds weights whose bits sum to {reply.weight_sum} after sync {version}, sent were {total}")
        return result

    def due(self, version: int) -> bool:
        """Whether this version is one that is checked (`sync.probe_every`).

        The first always is, and the second, where for the first time weights arrive where they stay.
        """
        assert self._first is not None
        return version <= self._first + 1 or version % self.config.sync.probe_every == 0

    def probe(self, ids: list[int], logprobs: Tensor, version: int) -> float:
        """Compare log-probs of a fixed sequence.

        Args:
            ids: P tokens.
            logprobs: [P - 1] the trainer's log-probs of tokens 1 .. P-1 at temperature 1.

        Returns:
            The largest mean |trainer - server| difference over the servers.

        Raises:
            WeightSyncError: it exceeds `config.probe_tolerance`.
        """
        for name in self.servers.names:
            self.servers.tell(name, Probe(version=version, ids=int_bytes(ids)))
        ours = floats(float_bytes(logprobs.tolist()))
        answers = self.servers.replies(Probed, deadline_s=self.config.sync.deadline_s)
        gaps = {name: float(abs(floats(a.logprobs) - ours).mean()) for name, a in answers.items()}
        tolerance = self.config.probe_tolerance
        wrong = {name: gap for name, gap in gaps.items() if not gap <= tolerance}  # NaN is wrong too
        if wrong:
            raise WeightSyncError(
                f"after sync {version} the mean log-prob difference on the probe sequence is {wrong}, allowed is {tolerance}: "
                "these servers do not compute with the trainer's weights"
            )
        return max(gaps.values())

    def close(self) -> None:
        """Leave the transfer group."""
        if group := self.__dict__.pop("group", None):
            group.close()

    def _join(self, kind: str) -> BroadcastGroup:
        width, limit = self.config.rollout.tensor_parallel, self.config.sync.deadline_s
        world = 1 + width * len(self.servers.names)
        store = BroadcastGroup.open_store(self.host, 0, world, limit, is_sender=True)
        for i, name in enumerate(self.servers.names):
            self.servers.tell(name, Join(self.host, store.port, 1 + i * width, world, limit, self.buckets, self.max_numel))
        with self._all_answering(Joined), _naming("joining the transfer group", self.servers.failure):
            group = BroadcastGroup(kind, store, 0, world, self.device, limit)
        self.servers.replies(Joined, deadline_s=limit)
        return group

    @contextmanager
    def _all_answering(self, kind: type[Any]) -> Iterator[None]:
        """If what is inside fails, wait until every server has come out of it, so that no answer to it is taken for a later one's."""
        try:
            yield
        except WeightSyncError:
            self.close()
            with suppress(PasyncError):  # the first error says more
                self.servers.replies(kind, deadline_s=self.config.sync.deadline_s)
            raise

    def _send(self, weights: Weights, with_sum: bool, version: int) -> int:
        source, total = iter(weights), 0
        collecting = f"collecting the weights of version {version}"
        under_way: deque[tuple[Work, list[Tensor]]] = deque()
        with _naming(f"sending version {version}", self.servers.failure):
            for bucket in self.buckets:
                with _naming(collecting):
                    parcel = self._parcel(bucket, source)
                under_way.append((self.group.start(parcel), parcel))
                if with_sum:
                    total += checksum(parcel)
                if len(under_way) > 1:
                    under_way.popleft()[0].wait()
            with _naming(collecting):
                _require_end(source)
            for work, _ in under_way:
                work.wait()
        return total % SUM_MODULUS

    def _parcel(self, bucket: Bucket, source: Iterator[tuple[str, Tensor]]) -> list[Tensor]:
        """The next tensors of `source`, as they lie if they are of the servers' type, or copied into one buffer."""
        tensors = [_take(source, name, shape) for name, shape in bucket]
        if self._apart or len(tensors) == 1:
            return [tensor.to(self.device, self.dtype).contiguous() for tensor in tensors]
        flat = self._buffers.take(bucket)
        for view, tensor in zip(views(flat, bucket), tensors, strict=True):
            view.copy_(tensor)
        return [flat]


class WeightReceiver:
    """Lives in every vLLM worker; one call of `receive` takes one version."""

    def __init__(self, kind: str, join: dict[str, Any], rank: int, device: torch.device, dtype: torch.dtype) -> None:
        self.buckets: list[Bucket] = join["buckets"]
        self.dtype, self._apart, self._places = dtype, kind == "cpu", Places()
        self._buffers = Buffers(self.buckets, join["max_numel"], dtype, device)
        world, limit = join["world_size"], join["timeout_s"]
        store = BroadcastGroup.open_store(join["host"], join["port"], world, limit, is_sender=False)
        self.group = BroadcastGroup(kind, store, join["rank_offset"] + rank, world, device, limit)

    def receive(self, load: Callable[[Weights], object], held: Iterable[Tensor]) -> None:
        """Take every weight of one version.

        Waits for each bucket, at most the timeout of the group. The next bucket arrives while one is loaded.

        Args:
            load: gets (name, tensor) of every weight and copies them, one after the other, into `held`; a tensor is overwritten once the
                next bucket's first one is asked for. Those that it copied as they are may not be given to it again: later versions arrive
                where it put them.
            held: all weights.

        Raises:
            TimeoutError, RuntimeError: the sender is late or gone.
        """
        with self._places if self._apart else nullcontext():
            load(self._places.watched(self._arriving(), held))

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that have no place yet. Of the two buffers one is loaded, one filled; buckets that need none start at once."""
        started: deque[tuple[list[tuple[str, Tensor]], Work]] = deque()
        for bucket in self.buckets:
            started.append(self._start(bucket))
            while sum(bool(weights) for weights, _ in started) == 2:
                yield from _arrived(*started.popleft())
        for weights, work in started:
            yield from _arrived(weights, work)

    def _start(self, bucket: Bucket) -> tuple[list[tuple[str, Tensor]], Work]:
        """What is to be loaded when the work is done."""
        places = self._places.known
        rest = [weight for weight in bucket if weight[0] not in places]
        if not rest:
            return [], self.group.start([places[name] for name, _ in bucket])
        flat = self._buffers.take(rest)
        buffered = dict(zip((name for name, _ in rest), views(flat, rest), strict=True))
        where = places | buffered
        return list(buffered.items()), self.group.start([where[name] for name, _ in bucket] if self._apart else [flat])


def _arrived(weights: list[tuple[str, Tensor]], work: Work) -> list[tuple[str, Tensor]]:
    work.wait()
    return weights


def checksum(tensors: Iterable[Tensor]) -> int:
    """Sum over the bit patterns of all numbers, modulo 2^32: exact, whatever their order."""
    total = 0
    for t in tensors:
        bits = t.flatten().view(BITS[t.dtype.itemsize])
        for part in bits.split(SUM_PIECE.get(t.device.type, 1 << 24)):
            total += part.int().sum(dtype=torch.int32).item()
    return total % SUM_MODULUS


def _take(source: Iterator[tuple[str, Tensor]], name: str, shape: list[int]) -> Tensor:
    given, tensor = next(source, ("nothing", torch.empty(shape, device="meta")))
    if (given, list(tensor.shape)) != (name, shape):
        raise ValueError(f"{given} {list(tensor.shape)} came where {name} {shape} was planned")
    return tensor


def _require_end(source: Iterator[tuple[str, Tensor]]) -> None:
    for name, _ in source:
        raise ValueError(f"{name} came after the last planned weight")


@contextmanager
def _naming(doing: str, failure: Callable[..., Exception | None] | None = None) -> Iterator[None]:
    """Raise what fails inside as a WeightSyncError that says what was being done (innermost) and why it failed.

    Args:
        failure: the servers' own word (`Servers.failure`), which often explains more than the transfer's error on this side.
    """
    began = time.monotonic()
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        if word := failure and failure(wait_s=1.0):
            cause = f"{word} (here: {cause})"
        raise WeightSyncError(f"{doing} failed after {time.monotonic() - began:.1f} s: {cause}") from error
