"""What servers and ranks can do, estimated from the sizes of a model and what devices were seen to do. No torch.

    Geometry, config, Device --estimate--> Rates --scaled (calibration.py)--> Rates of this machine

Letters: N parameters without the embedding, E hidden size, L layers, H query heads, D head size, n devices of a server or of a replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pasync.config import Config
from pasync.estimate import ITEM_BYTES, Machine, cache_bytes, cache_token_bytes, rank_need, rank_parameters
from pasync.geometry import Geometry
from pasync.simulate import Rates


@dataclass(frozen=True)
class Device:
    """What one device reaches in practice, not its peaks; each with its source."""

    train_flops: tuple[float, str]
    """Operations a second in forward and backward."""
    prefill_flops: tuple[float, str]
    """The same of a server, in prompts and in what decoding computes per response."""
    read_bytes: tuple[float, str]
    """Weights and KV cache read a second in decoding."""
    reduce_bytes: tuple[float, str]
    """Bytes of a tensor that are all-reduced a second within a node."""
    send_bytes: tuple[float, str]
    """Bytes of weights a second from the trainer to all servers at once."""
    host_bytes: tuple[float, str]
    """Bytes a second between a device and its host's memory."""
    step_s: tuple[float, str]
    """What a decode step costs beyond reading, on the host."""


NOT_MEASURED = "assumed"
DEVICES = {
    "npu": Device(
        train_flops=(107e12, "Qwen2.5-72B, 125327 tokens/s on 512 Ascend 910B at 6 N a token; github.com/janelu9/EasyLLM README"),
        prefill_flops=(160e12, "half of 328e12, matrix products in bfloat16 on one 910B; github.com/gameofdimension/limulidae README"),
        read_bytes=(0.59e12, "Qwen3-8B, 16.4 GB of weights, 27.6 ms a token, vLLM as it is on one 910B; docs.gpustack.ai, qwen3-8b/910b"),
        reduce_bytes=(72e9, "all-reduce over the 8 NPUs of a node; github.com/gameofdimension/limulidae README"),
        send_bytes=(20e9, "80% of one 200 Gbit/s port per NPU; " + NOT_MEASURED),
        host_bytes=(20e9, "PCIe 4.0 x16 at 63%; " + NOT_MEASURED),
        step_s=(0.0, "in the 27.6 ms"),
    ),
    "cuda": Device(
        train_flops=(400e12, "40% of the 989e12 of an H100 SXM data sheet; " + NOT_MEASURED),
        prefill_flops=(500e12, "half of it; " + NOT_MEASURED),
        read_bytes=(2.3e12, "70% of the 3.35e12 of the data sheet; " + NOT_MEASURED),
        reduce_bytes=(200e9, "NVLink 4; " + NOT_MEASURED),
        send_bytes=(40e9, "80% of 400 Gbit/s; " + NOT_MEASURED),
        host_bytes=(40e9, "PCIe 5.0 x16 at 63%; " + NOT_MEASURED),
        step_s=(1e-3, NOT_MEASURED),
    ),
    "cpu": Device(  # only the proportions matter: --measure scales them
        train_flops=(50e9, "a core; " + NOT_MEASURED),
        prefill_flops=(50e9, "a core; " + NOT_MEASURED),
        read_bytes=(10e9, "a core; " + NOT_MEASURED),
        reduce_bytes=(1e9, "gloo; " + NOT_MEASURED),
        send_bytes=(1e9, "gloo over loopback; " + NOT_MEASURED),
        host_bytes=(float("inf"), "all processes share one memory"),
        step_s=(5e-3, "vLLM's own work; " + NOT_MEASURED),
    ),
}


def estimate(config: Config, geometry: Geometry, machine: Machine) -> Rates:
    """Seconds of one server and one replica of `config`.

    decode step:  s N / n / read, per response 2 N / n / prefill, per token of context its KV cache / read; prompt token 2 N / n / prefill
    training row: 6 N / n / train, 8 N if layers are computed again, + 2 N of a reference; pair 4 L H D in place of 2 N
    shards:       two all-reduces of E numbers per layer in each forward and each backward
    optimizer:    32 bytes of every number of the slice through memory, gradient and weights of the stage over the replicas
    sync:         all weights at `send`
    """
    device, model = DEVICES[machine.kind], geometry
    cache, token_bytes = cache_bytes(config, model, machine), cache_token_bytes(config, model)
    active = model.num_parameters - (0 if model.tied else model.vocabulary * model.hidden)
    size, shards, item = config.rollout.tensor_parallel, config.parallel.tensor, ITEM_BYTES[config.model.dtype]
    served, cut = ITEM_BYTES[config.server_dtype], shards * config.parallel.pipeline
    passes = 3 + config.model.gradient_checkpointing + bool(config.algorithm.kl_coef)  # forwards; a backward counts two
    compute_s = 2 * active / device.prefill_flops[0] / size + _reduce_s(device, model, served, size)
    reduces = 2 + config.model.gradient_checkpointing + bool(config.algorithm.kl_coef)
    numbers, replicas = rank_parameters(config, model), config.replicas
    between_s = 2 * 4 * numbers * (replicas - 1) / replicas / device.send_bytes[0]
    return Rates(
        step_s=device.step_s[0] + served * active / size / device.read_bytes[0],
        sequence_s=compute_s,
        context_s=token_bytes / device.read_bytes[0],
        prompt_s=compute_s,
        micro_batch_s=0.0,
        token_s=passes * 2 * active / device.train_flops[0] / cut + reduces * _reduce_s(device, model, item, shards),
        pair_s=passes * 4 * model.layers * model.heads * model.head_size / device.train_flops[0] / cut,
        optimizer_s=32 * numbers / replicas / device.read_bytes[0] + between_s,
        sync_s=served * model.num_parameters / device.send_bytes[0],
        cache_tokens=math.inf if cache is None else cache / token_bytes,
    )


def _reduce_s(device: Device, model: Geometry, item: int, shards: int) -> float:
    """Of one row in one pass: nothing without shards."""
    return 2 * model.layers * model.hidden * item / device.reduce_bytes[0] * (shards > 1)


def switch_time(config: Config, geometry: Geometry, kind: str) -> float:
    """Seconds in which devices that do both change from training to generation and back: what a rank holds goes to the host's memory and
    comes back."""
    held = sum(part.size_bytes for part in rank_need(config, geometry, kind).lasting)
    return 2 * held / DEVICES[kind].host_bytes[0]


def sources(kind: str) -> list[str]:
    """Each assumed rate and where it is from."""
    return [f"{kind} {name} {value:.3g}: {source}" for name, (value, source) in vars(DEVICES[kind]).items()]
