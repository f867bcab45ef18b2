"""Real gloo process groups for tests: run a function of this folder's modules in N new processes.

They are forked from a server that has imported torch and transformers once; importing takes longer than most tests.
"""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pasync.parallel.ranks import join_ranks

multiprocessing.set_forkserver_preload(["pasync.checkpoint", "pasync.configfile", "pasync.parallel.pipeline", "pytest"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def copier(held: dict[str, torch.Tensor]) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """Loads weights as vLLM does."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            held[name].copy_(tensor)

    return load


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, pipeline: int = 1, tensor: int = 1, deadline_s: float = 60
) -> list[Any]:
    """`function(ranks, *args)` on every rank; returns their results in rank order. A failing rank fails the test."""
    # As torchrun does: the parent holds the store, so the port cannot be taken by somebody else before the ranks meet.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        inputs = (function, size, store.port, Path(folder), {"pipeline": pipeline, "tensor": tensor, "deadline_s": deadline_s}, args)
        mp.start_processes(_entry, inputs, nprocs=size, start_method="forkserver")
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(size)]


def _entry(
    rank: int, function: Callable[..., Any], size: int, port: int, results: Path, layout: dict[str, Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with join_ranks("cpu", **layout) as ranks:
        torch.save(function(ranks, *args), results / str(rank))
