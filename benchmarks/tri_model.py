"""What one pass for three models saves: `python -m benchmarks.tri_model [--stages 2]`, one JSON line.

Policy, old policy and reference, four layers of SmolLM2-135M's widths, over two pipeline stages on a core each; eight micro-batches of one
group (8 responses of 64 tokens to a prompt of 64):

    together  one pass: three forwards and the policy's backward per micro-batch, hidden states of the three in one message
    apart     three passes, as systems with a job per model do: each prepares the data, fills and drains the pipeline; the log-probs of
              old policy and reference are kept for the policy's pass

Wall seconds of the slower stage, in turn, medians. Bytes and messages are those between the stages.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pasync import device as devices
from pasync.algorithm.objective import Tokens, objective
from pasync.data.packing import MicroBatch, Part, pack, rows
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.model import shared_prompt
from pasync.model.stage import Stage
from pasync.model.tiny import new_model
from pasync.parallel import pipeline as lanes
from pasync.parallel.pipeline import Pipeline
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.parallel.tri_model import encode
from pasync.sections import AlgorithmConfig

GROUPS, RESPONSES, PROMPT_TOKENS, TOKENS = 8, 8, 64, 64
REPEATS = 7
ALGORITHM = AlgorithmConfig(batch_groups=GROUPS, group_responses=RESPONSES, kl_coef=0.1)
_decoder = msgspec.msgpack.Decoder(list[Part])


def some_groups() -> list[Group]:
    """Random tokens and rewards."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(GROUPS):
        responses = [
            Response(int_bytes(rng.integers(0, 256, TOKENS)), float_bytes(-rng.random(TOKENS)), "", True, float(k % 2))
            for k in range(RESPONSES)
        ]
        made.append(Group(0, i, int_bytes(rng.integers(0, 256, PROMPT_TOKENS)), responses, 0.0, 0.0))
    return made


def prepared(groups: list[Group]) -> Iterator[bytes]:
    """Micro-batches of one group each."""
    for group in groups:
        for row in rows([group], ALGORITHM, budget=1 << 20, shared_prompt=True):
            yield encode(row)


class Case:
    """The three models on this stage, in one pipeline and in one each."""

    def __init__(self, ranks: Ranks) -> None:
        torch.manual_seed(0)
        model: Any = new_model("llama", hidden=576, layers=4, heads=18, intermediate=1536, positions=1024, tied=False)
        model.set_attn_implementation(shared_prompt.implementation("auto"))
        self.axis = ranks.mesh.pipeline
        policy = Stage(model, self.axis.index, self.axis.size)
        stages = [policy, *(copy.deepcopy(policy).requires_grad_(False) for _ in range(2))]
        self.together_, *self.apart_ = (
            Pipeline(part, self.axis, ranks.device, decode, deadline_s=60.0) for part in (stages, *([stage] for stage in stages))
        )
        self.policy, self.groups = policy, some_groups()

    def together(self) -> None:
        """One pass."""
        self._pass(self.together_, lambda batch, logps, _: self._loss(batch, *logps))

    def apart(self) -> None:
        """Three passes."""
        kept: list[list[Tensor]] = [[], []]
        with torch.no_grad():
            for pipe, logprobs in zip(self.apart_[1:], kept, strict=True):
                self._pass(pipe, lambda batch, logps, _, logprobs=logprobs: (logprobs.append(logps[0]), logps[0])[1])
        others = iter(zip(*kept, strict=True))
        self._pass(self.apart_[0], lambda batch, logps, _: self._loss(batch, logps[0], *next(others)))

    def _pass(self, pipe: Pipeline, loss: Callable[..., Tensor]) -> None:
        pipe.run(prepared(self.groups) if self.axis.is_first else None, loss, temperature=1.0)

    def _loss(self, batch: MicroBatch, logp: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        tokens = Tokens(
            logp, torch.zeros_like(old), old, reference, batch.engine_logprobs, batch.credit, batch.layout.owner, batch.lengths
        )
        return objective(ALGORITHM, tokens)[0]


def decode(body: bytes) -> MicroBatch:
    """A micro-batch from its bytes."""
    return pack(_decoder.decode(body), shared_prompt=True)


class Counted:
    """Bytes and messages that this stage sends."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        send = lanes._Lane.send

        def counting(lane: Any, tensor: Tensor) -> None:
            self.bytes += tensor.nbytes
            self.messages += 1
            send(lane, tensor)

        lanes._Lane.send = counting  # type: ignore[method-assign, assignment]

    def take(self) -> tuple[int, int]:
        """Since the last time."""
        found = self.bytes, self.messages
        self.bytes = self.messages = 0
        return found


def measure(ranks: Ranks) -> dict[str, Any]:
    """The JSON line."""
    case, counted = Case(ranks), Counted()
    ways: dict[str, Callable[[], None]] = {"together": case.together, "apart": case.apart}
    times: dict[str, list[float]] = {way: [] for way in ways}
    traffic: dict[str, dict[str, float]] = {}
    gradients: dict[str, Tensor] = {}
    for way, work in [*ways.items()] * (1 + REPEATS):
        case.policy.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        work()
        times[way].append(ranks.max({"s": time.perf_counter() - began})["s"])
        sent, messages = counted.take()
        traffic[way] = ranks.sum({"bytes": sent, "messages": messages})
        gradients[way] = torch.cat([p.grad.flatten() for p in case.policy.parameters() if p.grad is not None])
    assert torch.equal(gradients["together"], gradients["apart"])
    median = {way: statistics.median(t[1:]) for way, t in times.items()}
    return {
        "case": f"{ranks.mesh.pipeline.size} stages, {GROUPS} groups of {RESPONSES} x {TOKENS}",
        "together_s": median["together"],
        "apart_s": median["apart"],
        "gain": median["apart"] / median["together"],
        "together_bytes": traffic["together"]["bytes"],
        "apart_bytes": traffic["apart"]["bytes"],
        "together_messages": traffic["together"]["messages"],
        "apart_messages": traffic["apart"]["messages"],
        "repeats": REPEATS,
    }


def main() -> None:
    """Entry of the command, and of each stage under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.stages}"]
        raise SystemExit(subprocess.run([*command, "-m", "benchmarks.tri_model", f"--stages={options.stages}"]).returncode)
    cores = devices.device_ids("cpu")
    devices.pin([cores[int(os.environ["RANK"]) % len(cores)]])
    with join_ranks("cpu", deadline_s=60, pipeline=options.stages) as ranks:
        line = measure(ranks)
        if ranks.is_first:
            print(json.dumps(line))


if __name__ == "__main__":
    main()
