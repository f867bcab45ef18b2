"""Weights from training rank 0 to every vLLM worker, once per iteration.

    rank 0: WeightSender.publish  == flat buckets, process-group broadcast (gloo | NCCL | HCCL) ==>  worker: WeightReceiver.receive

    sender     fill 0 | fill 1, sum 0 | fill 2, sum 1 | ..        while a bucket travels the next is made ready,
    transfer          |    bucket 0   |    bucket 1   | ..        and the one before is loaded:
    receiver                          |     load 0    | ..        two buffers on either side

The transfer group lies outside torch's default group: rank 0 of it is the trainer, the workers of all servers follow. Names are those
of the Hugging Face checkpoint; vLLM's own `load_weights` maps them onto its fused layers. Three checks make sure that weights
which did not arrive are noticed: every server acknowledges the version; the float64 sum over the weights it then holds equals
the sum over what was sent; and the log-probs of a fixed sequence agree.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices
from pasync.config import Config
from pasync.errors import PasyncError, WeightSyncError
from pasync.messages import Join, Joined, Message, Probe, Probed, Sync, Synced, float_bytes, floats, int_bytes
from pasync.transport.broadcast import BUFFERS, BroadcastGroup, Bucket, flat_buffers, plan_buckets, views

SUM_PIECE = {"cpu": 1 << 16}
"""Numbers that `sums` converts at a time, by type of device: on cpu what stays in a core's cache, elsewhere 16M, few kernel launches."""


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
    """

    def __init__(self, config: Config, servers: Servers, shapes: list[tuple[str, list[int]]], kind: str) -> None:
        self.config, self.servers = config, servers
        self._first: int | None = None  # version of the first sync: a continued run does not begin at 0
        self.dtype = getattr(torch, config.server_dtype)
        self.buckets = plan_buckets(shapes, config.sync.bucket_bytes // self.dtype.itemsize)
        self._flats = flat_buffers(self.buckets, self.dtype, devices.torch_device(kind, 0))
        self.group = self._join(kind)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give every server the weights of `version` and wait until each says that it holds them, with empty prefix caches.

        Waits for the servers, at most `sync.deadline_s` for every bucket and again for the acknowledgements.

        Args:
            weights: (name, tensor) in the order of `shapes`, made as slowly as they need to be: a tensor is copied at once and may be
                reused for the next. Taken to the end, on the calling thread, while buckets before are on their way.

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
            total, abs_total = self._send(weights, with_sum, version)
        synced = self.servers.replies(Synced, deadline_s=self.config.sync.deadline_s)
        for name, reply in synced.items():
            if reply.version != version:
                raise WeightSyncError(f"{name} acknowledged version {reply.version} instead of {version}")
            if reply.weight_sum is not None:
                _compare_sums(name, version, (total, abs_total), (reply.weight_sum, reply.weight_abs_sum))

    def due(self, version: int) -> bool:
        """Whether this version is one that is checked (`sync.probe_every`); the first sync of a run always is."""
        return version == self._first or version % self.config.sync.probe_every == 0

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

    def _join(self, kind: str) -> BroadcastGroup:
        width, limit = self.config.rollout.tensor_parallel, self.config.sync.deadline_s
        world = 1 + width * len(self.servers.names)
        store = BroadcastGroup.open_store("127.0.0.1", 0, world, limit, is_sender=True)
        for i, name in enumerate(self.servers.names):
            self.servers.tell(name, Join("127.0.0.1", store.port, 1 + i * width, world, limit, self.buckets))
        with self._all_answering(Joined), _naming("joining the transfer group", self.servers.failure):
            group = BroadcastGroup(kind, store, 0, world, limit)
        self.servers.replies(Joined, deadline_s=limit)
        return group

    def close(self) -> None:
        """Leave the transfer group."""
        if group := self.__dict__.pop("group", None):
            group.close()

    @contextmanager
    def _all_answering(self, kind: type[Any]) -> Iterator[None]:
        """If what is inside fails, wait until every server has come out of it, so that no answer to it is taken for a later one's."""
        try:
            yield
        except WeightSyncError as error:
            traceback.clear_frames(error.__traceback__)  # they hold broadcasts, and so the connections of the group
            self.close()
            with suppress(PasyncError):  # the first error says more
                self.servers.replies(kind, deadline_s=self.config.sync.deadline_s)
            raise

    def _send(self, weights: Iterable[tuple[str, Tensor]], with_sum: bool, version: int) -> tuple[float, float]:
        source, total, abs_total = iter(weights), 0.0, 0.0
        collecting = f"collecting the weights of version {version}"
        works: deque[dist.Work] = deque()  # of the broadcasts under way
        with _naming(f"sending version {version}", self.servers.failure):
            for bucket, flat in zip(self.buckets, self._flats, strict=True):
                if len(works) == BUFFERS:
                    works.popleft().wait()  # or the bucket before the last one would be overwritten on its way
                with _naming(collecting):
                    _fill(flat, bucket, source)
                works.append(self.group.start(flat))
                if with_sum:
                    bucket_total, bucket_abs_total = sums([flat])
                    total, abs_total = total + bucket_total, abs_total + bucket_abs_total
            with _naming(collecting):
                _require_end(source)
            for work in works:
                work.wait()
        return total, abs_total


class WeightReceiver:
    """Lives in every vLLM worker; one call of `receive` takes one version."""

    def __init__(self, kind: str, join: dict[str, Any], rank: int, device: torch.device, dtype: torch.dtype) -> None:
        store = BroadcastGroup.open_store(join["host"], join["port"], join["world_size"], join["timeout_s"], is_sender=False)
        self.group = BroadcastGroup(kind, store, join["rank_offset"] + rank, join["world_size"], join["timeout_s"])
        self.buckets: list[Bucket] = join["buckets"]
        self._flats = flat_buffers(self.buckets, dtype, device)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every weight; a tensor is overwritten once the next bucket's first one is asked for.

        Waits for each bucket, at most the timeout of the group. The next one arrives meanwhile, in the other buffer.

        Raises:
            RuntimeError: the sender is gone or late.
        """
        # What the caller did with a buffer is over before the broadcast that overwrites it: on cpu it is done when the generator
        # continues, on accelerators `start` queues the broadcast behind the caller's copies on the current stream.
        coming = self.group.start(self._flats[0])
        for i, bucket in enumerate(self.buckets):
            work = coming
            if i + 1 < len(self.buckets):
                coming = self.group.start(self._flats[i + 1])
            work.wait()
            yield from zip((name for name, _ in bucket), views(self._flats[i], bucket), strict=True)


def sums(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Float64 sum, and sum of absolute values, over all elements."""
    total = abs_total = 0.0
    for t in tensors:
        for part in t.flatten().split(SUM_PIECE.get(t.device.type, 1 << 24)):  # beats torch's own sum(dtype=float64) by 5x on cpu
            wide = part.double()
            total += wide.sum().item()
            abs_total += wide.abs_().sum().item()
    return total, abs_total


def _compare_sums(name: str, version: int, sent: tuple[float, float], held: tuple[float, float]) -> None:
    # Both are float64 sums of the same numbers in different order; 1e-12 is far above that rounding and below one optimizer step.
    if any(not abs(a - b) <= 1e-12 * sent[1] for a, b in zip(sent, held, strict=True)):
        raise WeightSyncError(f"{name} holds weights that sum to {held} after sync {version}, sent were {sent} (sum, sum of |w|)")


def _fill(flat: Tensor, bucket: Bucket, source: Iterator[tuple[str, Tensor]]) -> None:
    """Copy the next tensors of `source` into a bucket."""
    for (name, shape), view in zip(bucket, views(flat, bucket), strict=True):
        given, tensor = next(source, ("nothing", view))
        if (given, list(tensor.shape)) != (name, shape):
            raise ValueError(f"{given} {list(tensor.shape)} came where {name} {shape} was planned")
        view.copy_(tensor)


def _require_end(source: Iterator[tuple[str, Tensor]]) -> None:
    for name, _ in source:
        raise ValueError(f"{name} came after the last planned weight")


@contextmanager
def _naming(doing: str, failure: Callable[..., Exception | None] | None = None) -> Iterator[None]:
    """Raise what fails inside as a WeightSyncError that says what was being done (innermost) and why it failed.

    Args:
        failure: the servers' own word (`Servers.failure`): it explains a broken transfer better than the transfer's error.
    """
    began = time.monotonic()
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        cause = (failure and failure(wait_s=1.0)) or f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightSyncError(f"{doing} failed after {time.monotonic() - began:.1f} s: {cause}") from error
