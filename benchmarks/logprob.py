"""What chunked log-probs cost: `python -m benchmarks.logprob [--dtype bfloat16 ..]`, one JSON line per type.

Forward and backward through the LM head of T = 4,096 tokens, V = 151,936 (Qwen's vocabulary), hidden size 896:

    naive    log_softmax of all logits in float32, then gather
    chunked  pasync's token_logprobs, which also gives the entropy

CPU seconds of one pinned core, in turn, medians, on memory that the process keeps; peak memory in a round before, on fresh memory, over
inputs and with the gradients of hidden states and weight (`gradient_frac` is the weight's share of the naive peak).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import cpu_seconds, keep_memory, on_fresh_memory, own_pages
from pasync import device as devices
from pasync.model.logprob import token_logprobs

TOKENS, VOCABULARY, HIDDEN = 4096, 151_936, 896
REPEATS = 3


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[T] log-probs."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[T] log-probs."""
    return token_logprobs(hidden, weight, targets, temperature=1.0)[0]


WAYS = {"naive": naive, "chunked": chunked}


class Case:
    """Random inputs, and a step in both ways."""

    def __init__(self, dtype: torch.dtype, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
        self.weight = torch.randn(vocabulary, HIDDEN).mul_(0.03).to(dtype).requires_grad_()
        self.targets, self.grad = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)

    def step(self, way: str) -> list[Tensor]:
        """[log-probs, gradient of the hidden states, gradient of the weight]."""
        logp = WAYS[way](self.hidden, self.weight, self.targets)
        return [logp.detach(), *torch.autograd.grad(logp, (self.hidden, self.weight), self.grad)]


def measure(dtype: str) -> dict[str, Any]:
    """The JSON line of one type."""
    case, small = Case(getattr(torch, dtype)), Case(getattr(torch, dtype), 8, 1024)
    own_pages()
    peak, results = {}, {}
    for way in WAYS:
        small.step(way)
        _, peak[way], results[way] = on_fresh_memory(partial(case.step, way))
    logp, *gradients = ([a.float(), b.float()] for a, b in zip(results["chunked"], results["naive"], strict=True))
    off = [((a - b).norm() / b.norm()).item() for a, b in gradients]
    results.clear()
    keep_memory()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(1 + REPEATS):
        for way in WAYS:
            times[way].append(cpu_seconds(partial(case.step, way)))
    median = {way: statistics.median(t[1:]) for way, t in times.items()}
    return {
        "dtype": dtype,
        "time_ratio": median["chunked"] / median["naive"],
        "memory_frac": peak["chunked"] / peak["naive"],
        "gradient_frac": case.weight.nbytes / peak["naive"],
        "largest_difference": (logp[0] - logp[1]).abs().max().item(),
        "gradient_differences": off,
        "naive_s": median["naive"],
        "naive_bytes": peak["naive"],
        "repeats": REPEATS,
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=("bfloat16", "float32"))
    options = parser.parse_args()
    if len(options.dtype) == 1:
        devices.pin(devices.device_ids("cpu")[-1:])
        print(json.dumps(measure(options.dtype[0])))
        return
    for dtype in options.dtype:  # each in a process of its own: one that kept memory cannot measure it again
        subprocess.run([sys.executable, "-m", "benchmarks.logprob", "--dtype", dtype], check=True)


if __name__ == "__main__":
    main()
