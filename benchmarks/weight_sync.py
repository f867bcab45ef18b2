"""What a weight transfer costs: `python -m benchmarks.weight_sync`. One JSON line per case, all gloo over loopback.

    core 1: makes tensors, sends  ==broadcast==>  core 0: a receiver that copies each tensor into weights it holds, as vLLM's load does

    raw         as many bytes in gloo broadcasts as large as a bucket, back to back, from and into one that stays in a cache: the limit
    in_place    the same, but received where every byte stays, as weights have to be
    per_tensor  one broadcast per tensor
    bucketed    one flat buffer: fill, send, load, one after the other
    overlapped  WeightSender and WeightReceiver; every place is known, so neither side copies
    reload      a safetensors file, written by the sender and read by the receiver; nothing forces it to the disk
    .._checked  the same with the sums of both sides, as after every sync that `sync.probe_every` names

The 7B list is that of the first layers (`--layers`) of Qwen2.5-7B; the sender makes them all from the memory of one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory import keep_memory
from benchmarks.reload import disk_folder, save, saved_weights
from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load
from pasync.messages import Joined, Message, Sync, Synced
from pasync.transport.broadcast import BroadcastGroup, Bucket, bucket_numel, views
from pasync.transport.weights import SUM_MODULUS, WeightReceiver, WeightSender, checksum

CHECKED = "_checked"
COMMANDS = ["in_place"] + [method + check for check in ("", CHECKED) for method in ("per_tensor", "bucketed", "overlapped")] + ["reload"]
MODELS = {"smollm2-135m": ("bfloat16", "float32"), "qwen2.5-7b": ("bfloat16",)}
DEADLINE_S = 60.0


def qwen2_shapes(hidden: int, intermediate: int, key_value: int, layers: int) -> Bucket:
    """Names and shapes of a Qwen2 model's layers."""
    sizes = {"q_proj": (hidden, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden)}
    attention = [(f"self_attn.{n}.{kind}", list(s)[: 1 + (kind == "weight")]) for n, s in sizes.items() for kind in ("weight", "bias")]
    mlp = [("gate_proj", [intermediate, hidden]), ("up_proj", [intermediate, hidden]), ("down_proj", [hidden, intermediate])]
    layer = [*attention, ("self_attn.o_proj.weight", [hidden, hidden]), *((f"mlp.{n}.weight", s) for n, s in mlp)]
    layer += [("input_layernorm.weight", [hidden]), ("post_attention_layernorm.weight", [hidden])]
    return [(f"model.layers.{i}.{name}", shape) for i in range(layers) for name, shape in layer]


def model_shapes(model: str, layers: int | None) -> Bucket:
    """Names and shapes of a model's weights; of its first `layers` without embedding if given or if all would take minutes."""
    if model == "qwen2.5-7b":
        return qwen2_shapes(3584, 18944, 512, layers or 2)
    of_layers = [(name, shape) for name, shape in qwen2_shapes(576, 1536, 192, layers or 30) if not name.endswith("bias")]
    return of_layers if layers else [("model.embed_tokens.weight", [49152, 576]), *of_layers, ("model.norm.weight", [576])]


class OneServer:
    """The rollout side as WeightSender sees it: one process, told through a pipe."""

    names = ["server-0"]

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.version = 0

    def require_idle(self) -> None:
        """It never samples."""

    def tell(self, server: str, message: Message) -> None:
        """Join, or Sync."""
        if isinstance(message, Sync):
            self.version = message.version
            self.pipe.send(f"overlapped{CHECKED if message.with_sum else ''}")
        else:
            self.pipe.send(msgspec.to_builtins(message))

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        """Joined, Synced with the sum, or the bare sum."""
        if not self.pipe.poll(deadline_s):
            raise TimeoutError("no answer from the receiver")
        answer = self.pipe.recv()
        return {"server-0": Synced(self.version, 0.0, answer) if kind is Synced else Joined() if kind is Joined else answer}

    def failure(self, *, wait_s: float) -> Exception | None:
        """It says nothing about its end."""
        return None


class Link:
    """One end of a connection of its own, with one buffer: raw and the simpler methods."""

    def __init__(
        self, pipe: Connection, buckets: list[Bucket], max_numel: int, dtype: torch.dtype, file: Path, *, is_sender: bool
    ) -> None:
        store = BroadcastGroup.open_store("127.0.0.1", 0 if is_sender else pipe.recv(), 2, DEADLINE_S, is_sender=is_sender)
        if is_sender:
            pipe.send(store.port)
        self.gloo: Any = dist.ProcessGroupGloo(store, int(not is_sender), 2, timedelta(seconds=DEADLINE_S))
        self.buckets, self.file = buckets, file
        sizes = [bucket_numel(bucket) for bucket in buckets]
        self.buffer = torch.zeros(max(sizes), dtype=dtype)
        self.flats = [self.buffer[:size] for size in sizes]
        self.pieces = [self.buffer[: min(max_numel, sum(sizes) - at)] for at in range(0, sum(sizes), max_numel)]
        self.max_numel = max_numel

    def broadcast(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Every tensor, once it has arrived."""
        for tensor in tensors:
            self.gloo.broadcast(tensor, 0).wait()
            yield tensor

    def send(self, method: str, weights: Iterator[tuple[str, Tensor]], checked: bool) -> int:
        """The sum of what was sent, if checked."""
        if method == "reload":
            save(self.file, weights)
            self.gloo.broadcast(self.buffer[:1], 0).wait()  # it is there
            return 0
        sent = self.pieces if method in ("raw", "in_place") else self._filled(weights) if method == "bucketed" else (t for _, t in weights)
        return sum(checksum([tensor]) if checked else 0 for tensor in self.broadcast(sent)) % SUM_MODULUS

    def receive(self, method: str, memory: Tensor, held: dict[str, Tensor]) -> None:
        """The other end of `send`; the weights go into `held`, parts of `memory`."""
        if method == "reload":
            self.gloo.broadcast(self.buffer[:1], 0).wait()
            for name, tensor in saved_weights(self.file):
                held[name].copy_(tensor)
            return
        if method in ("raw", "in_place"):
            deque(self.broadcast(self.pieces if method == "raw" else memory.split(self.max_numel)), maxlen=0)
            return
        if method == "per_tensor":
            coming = (self.buffer[: into.numel()].view(into.shape) for into in held.values())
            for tensor, into in zip(self.broadcast(coming), held.values(), strict=True):
                into.copy_(tensor)
            return
        for flat, bucket in zip(self.broadcast(self.flats), self.buckets, strict=True):
            for (name, _), tensor in zip(bucket, views(flat, bucket), strict=True):
                held[name].copy_(tensor)

    def _filled(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            for view in views(flat, bucket):
                view.copy_(next(weights)[1])
            yield flat


def serve(pipe: Connection, core: int, dtype: torch.dtype, file: Path) -> None:
    """The receiver's process: Join, then one method after the other until "end"; answers with the sum of what it holds."""
    keep_memory()
    devices.pin([core])
    receiver = WeightReceiver("cpu", join := pipe.recv(), 0, torch.device("cpu"), dtype)
    pipe.send(None)
    weights = list(chain.from_iterable(receiver.buckets))
    memory = torch.zeros(bucket_numel(weights), dtype=dtype)
    held = dict(zip((name for name, _ in weights), views(memory, weights), strict=True))
    link = Link(pipe, receiver.buckets, join["max_numel"], dtype, file, is_sender=False)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            held[name].copy_(tensor)

    while (command := pipe.recv()) != "end":
        method = command.removesuffix(CHECKED)
        if method == "overlapped":
            receiver.receive(load, held.values())
        else:
            link.receive(method, memory, held)
        pipe.send(checksum(held.values()) if command.endswith(CHECKED) else None)


@contextmanager
def receiver(core: int, dtype: torch.dtype, file: Path) -> Iterator[OneServer]:
    """A process that serves on a core of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, core, dtype, file), daemon=True)
    process.start()
    try:
        yield OneServer(ours)
        ours.send("end")
        process.join(DEADLINE_S)
    finally:
        process.kill()


def configuration(folder: Path, dtype: str) -> Config:
    """The parts of a configuration that the sender reads. Versions that are a multiple of two are checked."""
    tree = {
        "name": "weight-sync",
        "iterations": 1,
        "model": {"path": "none", "dtype": dtype},
        "data": {"train": {"source": "none"}},
        "rollout": {"max_tokens": 1},
        "algorithm": {"batch_groups": 1, "group_responses": 2},
        "optimizer": {"lr": 1e-6},
        "sync": {"probe_every": 2, "deadline_s": DEADLINE_S},
    }
    path = folder / "weight_sync.yaml"
    path.write_text(json.dumps(tree))
    return load(path)


def seconds(command: str, server: OneServer, sender: WeightSender, link: Link, weights: Iterator[tuple[str, Tensor]]) -> float:
    """One transfer, until the receiver says that it holds everything."""
    method, checked = command.removesuffix(CHECKED), command.endswith(CHECKED)
    began = time.perf_counter()
    if method == "overlapped":
        sender.publish(weights, version=2 if checked else 3)  # the first two are checked in any case
    else:
        server.pipe.send(command)
        sent = link.send(method, weights, checked)
        [held] = server.replies(int, deadline_s=DEADLINE_S).values()
        assert not checked or sent == held, f"sent {sent}, held {held}"
    return time.perf_counter() - began


def measure(model: str, dtype_name: str, layers: int | None, rounds: int, core: int) -> Iterator[dict[str, Any]]:
    """The JSON lines of one model: medians over rounds that try every method, after one round that is not counted."""
    dtype, shapes = getattr(torch, dtype_name), model_shapes(model, layers)
    memory = {tuple(shape): torch.randn(shape).to(dtype) for _, shape in shapes}
    times: dict[str, list[float]] = {command: [] for command in ("raw", *COMMANDS)}
    with tempfile.TemporaryDirectory(dir=disk_folder()) as folder, receiver(core, dtype, file := Path(folder) / "weights") as server:
        sender = WeightSender(configuration(Path(folder), dtype_name), server, shapes, "cpu")
        link = Link(server.pipe, sender.buckets, sender.max_numel, dtype, file, is_sender=True)
        sender.publish(((name, memory[tuple(shape)]) for name, shape in shapes), version=0)
        for _ in range(1 + rounds):
            for command, of_command in times.items():
                of_command.append(seconds(command, server, sender, link, ((name, memory[tuple(shape)]) for name, shape in shapes)))
    gigabytes = sum(math.prod(shape) for _, shape in shapes) * dtype.itemsize / 1e9
    raw = statistics.median(times["raw"][1:])
    for command in COMMANDS:
        median = statistics.median(times[command][1:])
        yield {
            "case": f"{model} {dtype_name} {command}",
            "seconds": round(median, 4),
            "gb_per_s": round(gigabytes / median, 3),
            "raw_gb_per_s": round(gigabytes / raw, 3),
            "of_limit": round(raw / median, 3),
            "gigabytes": round(gigabytes, 3),
        }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="only this one")
    parser.add_argument("--layers", type=int, help="only so many layers, without embedding")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = devices.device_ids("cpu")
    keep_memory()
    devices.pin(cores[-1:])
    for model, dtypes in MODELS.items():
        for dtype in dtypes if options.model in (None, model) else ():
            for line in measure(model, dtype, options.layers, options.rounds, cores[0]):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
