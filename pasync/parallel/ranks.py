"""The training processes of one torchrun and the few collectives the loop needs.

Rank 0 talks to the servers; the others learn from it what to do. Whatever fails on rank 0 inside `from_first` is raised under the
same name on every rank, so no rank is left waiting in a collective. A rank that hangs in work of its own, where nobody may wait for it,
ends itself (`Ranks.alive`).
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices
from pasync.errors import PasyncError, RankLost, error_named
from pasync.parallel.mesh import Axis, Mesh, make_mesh
from pasync.processes import named_error

_OK, _FAILED, _CALL = 0, 1, 2
_WAITED = re.compile(r"gloo|NCCL|HCCL|Timed out|Connection closed by peer|Connection reset by peer")
"""In the texts of a backend's errors; only some have a type of their own."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the training ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: Mesh
    deadline_s: float

    def alive(self) -> None:
        """Say that the loop goes on. If it is not said again within 1.5 `deadline_s` (others give up waiting after 1), this process ends.

        With code 1 and the tracebacks of all its threads; the thread that waits for it needs no lock of the interpreter.
        """
        faulthandler.dump_traceback_later(1.5 * self.deadline_s, exit=True, file=2)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, produce: Callable[[], bytes], axis: Axis | None = None) -> bytes:
        """Run `produce` on rank 0 and give its result to every rank.

        Waits for rank 0 (at most the group's timeout). Any exception of rank 0 is raised on all ranks: the original there, a
        `PasyncError` of the same name and text elsewhere.

        Args:
            axis: only the ranks of an axis that begins with rank 0 take part.
        """
        if not self.is_first:
            status, payload = self._receive(axis)
            if status == _FAILED:
                raise error_named(*msgspec.msgpack.decode(payload, type=tuple[str, str]))
            return payload
        try:
            payload = produce()
        except Exception as error:
            self._send(_FAILED, msgspec.msgpack.encode((type(error).__name__, str(error))), axis)
            raise
        self._send(_OK, payload, axis)
        return payload

    def on_first(self, act: Callable[[], object], calls: Mapping[str, Callable[[bytes], object]] | None = None) -> None:
        """Run `act` on rank 0 while the others wait, and do what it calls for; its exception is raised on all.

        Args:
            calls: what rank 0 may `call` for, by name.
        """
        if self.is_first:
            self.from_first(lambda: (act(), b"")[1])
            return
        while True:
            status, payload = self._receive(None)
            if status == _OK:
                return
            if status == _FAILED:
                raise error_named(*msgspec.msgpack.decode(payload, type=tuple[str, str]))
            name, argument = msgspec.msgpack.decode(payload, type=tuple[str, bytes])
            assert calls is not None
            calls[name](argument)

    def call(self, name: str, argument: bytes) -> None:
        """On rank 0 inside `on_first`: have all other ranks run `calls[name](argument)`, now, while rank 0 goes on."""
        self._send(_CALL, msgspec.msgpack.encode((name, argument)), None)

    def from_last_stage(self, tensor: Tensor) -> Tensor | None:
        """A host tensor of the last pipeline stage, on the first; on stages between None. A collective.

        Args:
            tensor: of the same shape everywhere; filled on the first stage.
        """
        if self.mesh.pipeline.size == 1:
            return tensor
        ends = self.mesh.ends
        if ends is None:
            return None
        dist.broadcast(tensor, ends.ranks[1], group=ends.group)
        return tensor

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Add up numbers over all ranks, in float64. All ranks must pass the same keys."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: dict[str, float]) -> dict[str, float]:
        """The largest of each number over all ranks. All ranks must pass the same keys."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        keys = sorted(values)  # dict order could differ between ranks and would then pair different numbers
        flat = torch.tensor([values[k] for k in keys], dtype=torch.float64)
        dist.all_reduce(flat, op)
        return dict(zip(keys, flat.tolist(), strict=True))

    def _send(self, status: int, payload: bytes, axis: Axis | None) -> None:
        self.alive()
        group = axis.group if axis else None
        dist.broadcast(torch.tensor([status, len(payload)]), src=0, group=group)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0, group=group)

    def _receive(self, axis: Axis | None) -> tuple[int, bytes]:
        self.alive()
        group = axis.group if axis else None
        head = torch.empty(2, dtype=torch.int64)
        dist.broadcast(head, src=0, group=group)
        status, size = head.tolist()
        body = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(body, src=0, group=group)
        return status, body.numpy().tobytes()


@contextmanager
def join_ranks(kind: str, *, deadline_s: float, pipeline: int = 1, tensor: int = 1) -> Iterator[Ranks]:
    """Enter the process group of this torchrun (reads its environment variables) and leave it at the end of the block.

    Args:
        kind: "cpu", "cuda" or "npu"; collectives on host tensors always go over gloo.
        deadline_s: longest wait of one rank for another.
        pipeline: stages; tensor: shards of each layer. See `make_mesh`.
    """
    device = devices.torch_device(kind, int(os.environ["LOCAL_RANK"]))
    with naming_lost_ranks(deadline_s):
        dist.init_process_group(devices.collective_backend(kind), timeout=timedelta(seconds=deadline_s))
        try:
            mesh = make_mesh(pipeline=pipeline, tensor=tensor, deadline_s=deadline_s)
            yield Ranks(dist.get_rank(), dist.get_world_size(), device, mesh, deadline_s)
        finally:
            faulthandler.cancel_dump_traceback_later()
            dist.destroy_process_group()


@contextmanager
def naming_lost_ranks(deadline_s: float) -> Iterator[None]:
    """Raise a backend's error about a peer as RankLost, unless it only follows from an error with a name of ours."""
    try:
        yield
    except RuntimeError as error:
        about_peer = isinstance(error, dist.DistError) or _WAITED.search(str(error))
        if not about_peer or isinstance(named_error(error), PasyncError):
            raise
        raise RankLost(
            f"rank-{os.environ['RANK']} waited for another rank, which ended or was silent for parallel.deadline_s={deadline_s}; "
            f"the last line of each rank in ranks.log says where it was: {str(error).splitlines()[0]}"
        ) from error
