"""Pipeline parallelism for micro-batches that come one by one, of any number and length.

    source --bytes--> stage 0 --control: (status, size), bytes---> stage 1 --control--> .. stage P-1    over the host
                              --forward: hidden [M, T, E]-------->         --forward-->
                              <-backward: gradient [T, E]---------         <-backward--  loss

Each stage does one forward, one backward, in turns (1F1B): of the P stages, stage s holds at most P - s micro-batches whose backward is
still to come. Below that it takes the next micro-batch, which may mean to wait for it; at that, and after the end, it waits for the
gradient of its oldest one. What comes next travels ahead of the hidden states, and each stage decodes it itself, so nothing about a
batch is agreed on beforehand.

Why no order of arrivals can hang it: sending never waits, and a stage that holds its P - s has sent them all to the next one, which may
hold only P - s - 1, so that one gets full, too, and has to run its oldest backward; the last stage waits for no gradient. And the order
of a stage's forwards and backwards depends on nothing but the order of micro-batches: delays cannot change a bit.

Letters: P stages, M models, T packed tokens, E hidden size, N response tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from pasync.data.packing import MicroBatch
from pasync.errors import error_named
from pasync.model.stage import Stage
from pasync.parallel.mesh import Axis

Loss = Callable[[MicroBatch, list[Tensor], Tensor], Tensor]
"""(micro-batch, [N] log-probs of each model, [N] entropy of the policy) -> scalar to differentiate."""
News = bytes | None | Exception
"""What comes next: a micro-batch, the end of the batch, or why there is nothing more."""
Result = TypeVar("Result")

_BATCH, _END, _FAILED = 0, 1, 2


class Pipeline:
    """This process's stage, and the way to its neighbours.

    Making one is a collective of all training processes, unless there is only one stage: then nothing is ever sent.

    Args:
        stages: the same stage of M models of one architecture: the policy, then frozen ones, which are computed without gradient.
        axis: the mesh's pipeline axis.
        device: of the models.
        decode: reads a micro-batch from the source's bytes. Must give the same on all stages.
        deadline_s: longest wait for a neighbour, so longer than the source may take.
    """

    def __init__(
        self, stages: Sequence[Stage], axis: Axis, device: torch.device, decode: Callable[[bytes], MicroBatch], *, deadline_s: float
    ) -> None:
        self.stages, self.axis, self.device, self.decode = list(stages), axis, device, decode
        self.limit = axis.size - axis.index
        """Of micro-batches between forward and backward."""
        self._in_flight: deque[_InFlight] = deque()
        if axis.size > 1:
            self._control, self._forward, self._backward = _make_lanes(axis, timedelta(seconds=deadline_s))

    def run(self, source: Iterator[bytes] | None, loss: Loss, *, temperature: float) -> None:
        """Forward and backward of one batch; gradients add up in the parameters.

        Under `torch.no_grad()` (on all stages) only forward, and `loss` is merely shown the log-probs.

        Runs on all stages at once; each waits for its neighbours. Returns when this stage has no more to do, and all it sent was received.
        A failure of a stage's own, unlike one of the source, is not told: its neighbours fail at the deadline, or once its process ends.

        Args:
            source: on the first stage, micro-batches as bytes; waits for the next one as long as it takes. None elsewhere.
            loss: only called on the last stage.
            temperature: the sampling temperature.

        Raises:
            Exception: what `source` raised, after the backward of all before it: the original on the first stage, a `PasyncError` of the
                same name and text on the others. The pipeline is ready for another run then.
        """
        assert (source is not None) == self.axis.is_first
        news: News = b""
        while isinstance(news, bytes) or self._in_flight:
            if isinstance(news, bytes) and len(self._in_flight) < self.limit:
                news = self._next(source)
                if isinstance(news, bytes):
                    batch = self.decode(news).to(self.device)
                    with torch.set_grad_enabled(torch.is_grad_enabled() and not batch.forward_only):
                        self._step_forward(batch, loss, temperature)
            else:
                self._step_backward()
        if self.axis.size > 1:
            for lane in (self._control, self._forward, self._backward):
                lane.finish()
        if news is not None:
            raise news

    def _next(self, source: Iterator[bytes] | None) -> News:
        """Waits for the source, or for the stage before, and tells the stage behind at once."""
        news = self._receive_news() if source is None else _pull(source)
        if not self.axis.is_last:
            self._send_news(news)
        return news

    def _step_forward(self, batch: MicroBatch, loss: Loss, temperature: float) -> None:
        """Waits for the hidden states of the stage before."""
        policy, inputs = self.stages[0], list[Tensor | None]([None for _ in self.stages])
        if not self.axis.is_first:
            message = torch.empty(len(self.stages), batch.num_tokens, policy.hidden_size, dtype=policy.dtype, device=self.device)
            own, *others = self._forward.receive(message)  # M of [T, E]
            inputs = [own.requires_grad_(torch.is_grad_enabled()), *others]
        if self.axis.is_last:
            results = self._of_all(lambda stage, x: stage.logprobs(batch, x, temperature=temperature), inputs)
            output = loss(batch, [logp for logp, _ in results], results[0][1])
        else:
            hidden = self._of_all(lambda stage, x: stage(batch, x), inputs)
            self._forward.send(torch.stack([h.detach() for h in hidden]))  # [M, T, E]
            output = hidden[0]
        if torch.is_grad_enabled():
            self._in_flight.append(_InFlight(inputs[0], output))

    def _step_backward(self) -> None:
        """Waits for the gradient of the oldest micro-batch from the stage behind."""
        oldest = self._in_flight.popleft()
        gradient = None if self.axis.is_last else self._backward.receive(torch.empty_like(oldest.output))  # [T, E]
        oldest.output.backward(gradient)
        if oldest.input is not None:
            assert oldest.input.grad is not None
            self._backward.send(oldest.input.grad)

    def _of_all(self, compute: Callable[[Stage, Tensor | None], Result], inputs: list[Tensor | None]) -> list[Result]:
        """Results of all models; only the policy's have a gradient."""
        policy = compute(self.stages[0], inputs[0])
        with torch.no_grad():
            return [policy, *map(compute, self.stages[1:], inputs[1:])]

    def _send_news(self, news: News) -> None:
        if isinstance(news, Exception):
            status, body = _FAILED, msgspec.msgpack.encode((type(news).__name__, str(news)))
        else:
            status, body = (_END, b"") if news is None else (_BATCH, news)
        self._control.send(torch.tensor([status, len(body)]))
        if body:
            self._control.send(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def _receive_news(self) -> News:
        status, size = self._control.receive(torch.empty(2, dtype=torch.int64)).tolist()
        body = self._control.receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes() if size else b""
        if status == _FAILED:
            return error_named(*msgspec.msgpack.decode(body, type=tuple[str, str]))
        return body if status == _BATCH else None


@dataclass(frozen=True)
class _InFlight:
    """The policy's part of a micro-batch between its forward and backward."""

    input: Tensor | None
    """[T, E] from the stage before; None on the first."""
    output: Tensor
    """[T, E] for the stage behind, the loss on the last."""


class _Lane:
    """Tensors that flow one way along the pipeline: from one neighbour, to the other.

    Args:
        limit: of sent tensors that are kept because they may not have been received.
    """

    def __init__(self, group: dist.ProcessGroup, origin: int | None, target: int | None, limit: int) -> None:
        self._group, self._origin, self._target, self._limit = group, origin, target, limit
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill the tensor with the next one. Waits for it, at most the group's timeout."""
        dist.recv(tensor, self._origin, self._group)
        return tensor

    def send(self, tensor: Tensor) -> None:
        """Waits only for one sent `limit` tensors ago."""
        assert self._target is not None
        self._sent.append((dist.isend(tensor, self._target, self._group), tensor))
        self._wait(self._limit)

    def finish(self) -> None:
        """Wait until all were received."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._sent) > left:
            work, _ = self._sent.popleft()
            assert work is not None
            work.wait()


def _pull(source: Iterator[bytes]) -> News:
    try:
        return next(source, None)
    except Exception as error:
        return error


def _make_lanes(axis: Axis, timeout: timedelta) -> tuple[_Lane, _Lane, _Lane]:
    """Control, forward and backward, each on a group of its own: on one, a device would run their transfers in order of submission.

    A collective of all processes: each makes the groups of every pipeline, in the same order.
    """
    mine = torch.tensor(axis.ranks)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    for line in sorted({tuple(ranks.tolist()) for ranks in every}):
        made = [dist.new_group(list(line), timeout, backend) for backend in ("gloo", None, None)]
        if line == axis.ranks:
            control, forward, backward = made
    before = None if axis.is_first else axis.ranks[axis.index - 1]
    behind = None if axis.is_last else axis.ranks[axis.index + 1]
    # Where each micro-batch has a gradient no send waits: the stage behind has received all but the P of our newest micro-batches (their
    # gradients are here), the stage before has, as it can hold no more, all but our P newest gradients. Control sends two tensors for each.
    # After one without gradient a stage may wait for the next to receive it, which does not wait in turn: its gradients never do.
    limit = axis.size
    return (
        _Lane(control, before, behind, 2 * limit),
        _Lane(forward, before, behind, limit),
        _Lane(backward, behind, before, limit),
    )
