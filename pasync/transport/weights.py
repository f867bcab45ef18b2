"""Weights from training rank 0 to every vLLM worker, once per iteration.

    rank 0: WeightSender.publish  == flat buckets, process-group broadcast (gloo | NCCL | HCCL) ==>  worker: WeightReceiver.receive

The transfer group lies outside torch's default group: rank 0 of it is the trainer, the workers of all servers follow. Names are those
of the Hugging Face checkpoint; vLLM's own `load_weights` maps them onto its fused layers. Three checks make sure that weights
which did not arrive are noticed: every server acknowledges the version; the float64 sum over the weights it then holds equals
the sum over what was sent; and the log-probs of a fixed sequence agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices
from pasync.config import Config
from pasync.errors import WeightSyncError
from pasync.messages import Join, Joined, Message, Probe, Probed, Sync, Synced, float_bytes, floats, int_bytes

Buckets = list[list[tuple[str, list[int]]]]


class Servers(Protocol):
    """What the sender needs of the rollout side."""

    names: list[str]

    def require_idle(self) -> None: ...
    def tell(self, server: str, message: Message) -> None: ...
    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]: ...
    def failure(self, *, wait_s: float) -> Exception | None: ...


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

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor reaches all others. Raises RuntimeError when a peer is gone or the timeout has passed."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()


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
        self._buffer = torch.empty(max(map(_numel, self.buckets)), dtype=self.dtype, device=devices.torch_device(kind, 0))
        self._group = self._join(kind)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give every server the weights of `version` and wait until each says that it holds them, with empty prefix caches.

        Waits for the servers, at most `sync.deadline_s` for the transfer and again for the acknowledgements.

        Raises:
            RolloutError: requests are still in flight.
            WeightSyncError: a server did not take part, or does not hold what was sent.
        """
        self.servers.require_idle()
        self._first = version if self._first is None else self._first
        with_sum = self.due(version)
        for name in self.servers.names:
            self.servers.tell(name, Sync(version=version, with_sum=with_sum))
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
        group = self._guarded(lambda: BroadcastGroup(kind, store, 0, world, limit), "joining the transfer group")
        self.servers.replies(Joined, deadline_s=limit)
        return group

    def _send(self, weights: Iterable[tuple[str, Tensor]], with_sum: bool, version: int) -> tuple[float, float]:
        source, total, abs_total = iter(weights), 0.0, 0.0
        for bucket in self.buckets:
            flat = self._buffer[: _numel(bucket)]
            for (name, shape), view in zip(bucket, _views(flat, bucket), strict=True):
                given, tensor = next(source)
                assert (given, list(tensor.shape)) == (name, shape), f"{given} sent where {name} was planned"
                view.copy_(tensor)
            if with_sum:
                bucket_total, bucket_abs_total = sums([flat])
                total, abs_total = total + bucket_total, abs_total + bucket_abs_total
            self._guarded(partial(self._group.broadcast, flat), f"sending version {version}")
        return total, abs_total

    def _guarded(self, act: Callable[[], Any], doing: str) -> Any:
        began = time.monotonic()
        try:
            return act()
        except (RuntimeError, dist.DistError) as error:
            cause = self.servers.failure(wait_s=1.0) or str(error).splitlines()[0]  # a server's own word explains a broken transfer
            raise WeightSyncError(f"{doing} failed after {time.monotonic() - began:.1f} s: {cause}") from error


class WeightReceiver:
    """Lives in every vLLM worker; one call of `receive` takes one version."""

    def __init__(self, kind: str, join: dict[str, Any], rank: int, device: torch.device, dtype: torch.dtype) -> None:
        store = BroadcastGroup.open_store(join["host"], join["port"], join["world_size"], join["timeout_s"], is_sender=False)
        self._group = BroadcastGroup(kind, store, join["rank_offset"] + rank, join["world_size"], join["timeout_s"])
        self._buckets: Buckets = join["buckets"]
        self._buffer = torch.empty(max(map(_numel, self._buckets)), dtype=dtype, device=device)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every weight; a tensor is overwritten when the next bucket comes."""
        for bucket in self._buckets:
            flat = self._buffer[: _numel(bucket)]
            self._group.broadcast(flat)
            yield from zip((name for name, _ in bucket), _views(flat, bucket), strict=True)


def plan_buckets(shapes: list[tuple[str, list[int]]], max_numel: int) -> Buckets:
    """Cut a list of tensors into consecutive buckets of at most `max_numel` numbers; a larger tensor is a bucket of its own."""
    buckets: Buckets = []
    size = 0
    for name, shape in shapes:
        numel = math.prod(shape)
        if not buckets or size + numel > max_numel:
            buckets.append([])
            size = 0
        buckets[-1].append((name, list(shape)))
        size += numel
    return buckets


def sums(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Float64 sum, and sum of absolute values, over all elements."""
    total = abs_total = 0.0
    for t in tensors:
        for part in t.flatten().split(1 << 22):  # converting a part beats torch's own sum(dtype=float64) by 3x on cpu
            wide = part.double()
            total += wide.sum().item()
            abs_total += wide.abs_().sum().item()
    return total, abs_total


def _compare_sums(name: str, version: int, sent: tuple[float, float], held: tuple[float, float]) -> None:
    # Both are float64 sums of the same numbers in different order; 1e-12 is far above that rounding and below one optimizer step.
    if any(not abs(a - b) <= 1e-12 * sent[1] for a, b in zip(sent, held, strict=True)):
        raise WeightSyncError(f"{name} holds weights that sum to {held} after sync {version}, sent were {sent} (sum, sum of |w|)")


def _numel(bucket: list[tuple[str, list[int]]]) -> int:
    return sum(math.prod(shape) for _, shape in bucket)


def _views(flat: Tensor, bucket: list[tuple[str, list[int]]]) -> Iterator[Tensor]:
    at = 0
    for _, shape in bucket:
        numel = math.prod(shape)
        yield flat[at : at + numel].view(shape)
        at += numel
