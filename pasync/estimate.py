"""Memory of every process before anything starts, from the model's config.json and the configuration. No torch.

    Geometry of the model -------------------+
    config ----------------------------------+--needs--> of a rank, of a server; whether it fits: `advice.py`
    kind, number and memory of the devices --+

Everything is an upper bound in one respect: prompts and responses are as long as allowed, and micro-batches as full.

Letters: E hidden size, I intermediate size, L layers, H query heads, G key/value heads, D head size, V vocabulary, W replicas, P prompt and
R response tokens, K responses of a group, T rows of a micro-batch, N of them that predict a response token, s bytes of a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pasync import device as devices
from pasync.config import Config
from pasync.geometry import Geometry

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
KEPT_LOGITS_BYTES = 768 << 20
SMALLEST_LOGITS_BLOCK = 256
"""These two as in `pasync.model.logprob`, which loads torch."""


@dataclass(frozen=True)
class Machine:
    """The devices of a run."""

    kind: str
    """cpu, cuda or npu."""
    count: int
    """Devices that the run may use."""
    memory_bytes: int | None
    """Of each device; on cpu of the whole machine; None if unknown."""
    assumed: bool = False
    """The memory is that of a usual device, as none could be asked."""


@dataclass(frozen=True)
class Part:
    """Some memory and what it is for."""

    size_bytes: int
    what: str


@dataclass(frozen=True)
class Need:
    """Memory of one process (of a server: on each of its devices)."""

    lasting: list[Part]
    """Held from start to end."""
    passing: list[Part]
    """Held at times, never two at once."""

    @property
    def lasting_bytes(self) -> int:
        return sum(part.size_bytes for part in self.lasting)

    @property
    def total_bytes(self) -> int:
        """At the worst moment."""
        return self.lasting_bytes + max((part.size_bytes for part in self.passing), default=0)


def needs(config: Config, geometry: Geometry, machine: Machine) -> dict[str, Need]:
    """What each "rank" and each "server" needs; a replayed run has no server, and one that only samples trains nothing."""
    servers = {} if config.replayed_run else {"server": server_need(config, geometry, machine)}
    return {"rank": rank_need(config, geometry, machine.kind), **servers}


def rank_need(config: Config, geometry: Geometry, kind: str) -> Need:
    """Of a training rank; of rank 0, which also sends the weights, where there are servers.

    Lasting, of the n numbers of its stage and shard: weights s n, the gradient's sum 4 n (8 n if exact), 12 n / W of `ZeroAdamW`; or
    16 n / W of `FullyShardedAdamW`. With `lora.rank` the n of all but the weights are those of the adapters.
    """
    numbers, ranks, lora = rank_parameters(config, geometry), config.replicas, config.lora
    frozen = numbers if lora.rank else 0
    trained = geometry.adapter_parameters(lora.rank, lora.targets) if lora.rank else numbers
    lasting = _models(config, trained, frozen)
    if not config.replayed_run:
        lasting.append(Part(sent_bytes(config, geometry), "buffers of the weight transfer"))
    groups = sum(n > 1 for n in (ranks, config.parallel.tensor, config.parallel.pipeline)) + (not config.replayed_run)
    lasting.append(Part(devices.overhead_bytes(kind, "rank", groups), "runtime"))
    passing = [Part(_update_bytes(config, trained, kind), "optimizer step")]
    if config.trains:
        rows = micro_batch_tokens(config)[0]
        how = "layers computed again" if config.model.gradient_checkpointing else "all layers kept"
        size_bytes = micro_batch_bytes(config, geometry, kind) + _gathered_bytes(config, geometry)
        passing.append(Part(size_bytes, f"micro-batch of {rows} tokens, {how}"))
    return Need(lasting, passing)


def _models(config: Config, numbers: int, frozen: int) -> list[Part]:
    """Weights, gradients and optimizer of n numbers, weights beside them that are not trained, and the frozen models."""
    ranks, item = config.replicas, ITEM_BYTES[config.model.dtype]
    exact, sharded = config.parallel.accumulate == "exact", config.parallel.data == "fsdp"
    slices, held = f", one of {ranks} slices" * (ranks > 1), numbers // ranks if sharded else numbers
    parts = [Part(16 * held, "weights, gradients and two moments, float32" + slices)]
    if not sharded:
        parts = [
            Part(item * (held + frozen), f"weights, {config.model.dtype}"),
            Part((8 if exact else 4) * held, f"sum of gradients, {'int64' if exact else 'float32'}"),
            Part(12 * numbers // ranks, "master weights and two moments, float32" + slices),
        ]
    always = config.algorithm.tri_model == "always"
    if not frozen and (always or (config.algorithm.kl_coef and not config.model.offload_reference)):
        parts.append(Part(item * held, "reference model"))
    return parts + [Part(item * (held + frozen), "old policy")] * always


def _gathered_bytes(config: Config, geometry: Geometry) -> int:
    """What FSDP2 makes whole at a time: embedding, head and two layers, each as gathered and as parameters, 2 s, and their gradients, s
    and in float32."""
    if config.parallel.data != "fsdp" or config.replicas == 1:
        return 0
    outermost = geometry.vocabulary * geometry.hidden * (1 if geometry.tied or config.parallel.pipeline > 1 else 2)
    return (outermost + 2 * geometry.layer_parameters) // config.parallel.tensor * (3 * ITEM_BYTES[config.model.dtype] + 4)


def rank_parameters(config: Config, geometry: Geometry) -> int:
    """n: of the largest stage, one shard."""
    return -(-geometry.stage_parameters(config.parallel.pipeline) // config.parallel.tensor)


def micro_batch_tokens(config: Config) -> tuple[int, int]:
    """(T, N) of the largest micro-batch there can be: as large as the key allows, no larger than this replica's part of the batch.

    A response that is longer than the key allows is not cut.
    """
    prompt, response, count = config.data.max_prompt_tokens, config.rollout.max_tokens, config.algorithm.group_responses
    group = prompt + count * response if config.model.shared_prompt else count * (prompt + response)
    groups = 1 if config.parallel.accumulate == "exact" else math.ceil(config.algorithm.batch_groups / config.replicas)
    rows = min(max(config.parallel.micro_batch_tokens, prompt + response), groups * group)
    return rows, min(rows, groups * count * response)


def micro_batch_bytes(config: Config, geometry: Geometry, kind: str) -> int:
    """Forward and backward of the largest micro-batch.

    The worst moment is in the LM head or in a layer's backward. Kept all the while: what autograd keeps of every layer (with gradient
    checkpointing its input, s E), rotary angles 2 s D, and, if it is trained, the
    head's gradient s V E (a tied one waits for that of the embedding).
    The first of several stages keeps as many micro-batches as there are stages, each of its share of the layers; shards divide what
    is cut.
      head:  the last norm (4 + s) E, its output s E for N rows, kept logits, three blocks of them, float32 gradient 4 N E
      layer: with gradient checkpointing all that it keeps; and the gradients of gate, up and the residual, s (2 I + E)
    """
    g, item, (rows, predicting) = geometry, ITEM_BYTES[config.model.dtype], micro_batch_tokens(config)
    stages, shards, again = config.parallel.pipeline, config.parallel.tensor, config.model.gradient_checkpointing
    layer, layers = g.layer_row_bytes(item, shards), -(-g.layers // stages)
    kept = rows * stages * (layers * (item * g.hidden if again else layer) + 2 * item * g.head_size)
    logits = predicting * g.vocabulary // shards
    block = min(logits, max(devices.LOGITS_BLOCK[kind], SMALLEST_LOGITS_BLOCK * predicting))
    in_head = rows * (4 + item) * g.hidden + predicting * (4 + item) * g.hidden + min(KEPT_LOGITS_BYTES, logits * item) + 3 * 4 * block
    in_layer = rows * (again * layer + item * (2 * g.intermediate // shards + g.hidden))
    exact = 16 if config.parallel.accumulate == "exact" else 0  # a parameter's gradient in float64 and in int64
    head = 0 if config.lora.rank else g.vocabulary * g.hidden // shards * (item + exact)
    return kept + max(in_head, in_layer) + head


def server_need(config: Config, geometry: Geometry, machine: Machine) -> Need:
    """Of a server, on each of its devices: weights, KV cache, and beside what vLLM counts a buffer for new weights."""
    size = config.rollout.tensor_parallel
    weights = geometry.num_parameters * ITEM_BYTES[config.server_dtype] // size
    lasting = [Part(weights, f"weights, {config.server_dtype}")]
    if machine.kind == "cpu":
        lasting.append(Part(weights, "the same, packed for this processor"))  # rollout/engine.py
    cache = cache_bytes(config, geometry, machine)
    if cache is not None:
        tokens = cache // cache_token_bytes(config, geometry)
        room = f"KV cache: {tokens} tokens, {tokens // config.max_model_tokens} of the longest responses at once"
        lasting.append(Part(cache, room))
    runtime = Part(devices.overhead_bytes(machine.kind, "server", 1 + (size > 1)), "runtime")
    return Need([*lasting, Part(received_bytes(config, geometry), "buffers of the weight transfer"), runtime], [])


def cache_bytes(config: Config, geometry: Geometry, machine: Machine) -> int | None:
    """KV cache of a server on each device: as given, or what its share of the device leaves beside the weights; None if unknown."""
    rollout = config.rollout
    if rollout.kv_cache_bytes is not None or machine.memory_bytes is None:
        return rollout.kv_cache_bytes
    weights = geometry.num_parameters * ITEM_BYTES[config.server_dtype] // rollout.tensor_parallel
    runtime = devices.overhead_bytes(machine.kind, "server", 1 + (rollout.tensor_parallel > 1))
    return max(0, int(machine.memory_bytes * rollout.memory_frac) - weights - runtime)


def cache_token_bytes(config: Config, geometry: Geometry) -> int:
    """KV cache of one token on each device: 2 L G D s, heads spread over the devices but none cut."""
    heads = max(1, geometry.kv_heads // config.rollout.tensor_parallel)
    return 2 * geometry.layers * heads * geometry.head_size * ITEM_BYTES[config.server_dtype]


def sent_bytes(config: Config, geometry: Geometry) -> int:
    """What a weight transfer holds on the sending side: two buffers, one travels and one is filled.

    Large weights are sent from where they lie, unless the servers have another type: then two of them are converted.
    """
    return _buckets_bytes(config, geometry, 0 if config.server_dtype == config.model.dtype else 2)


def received_bytes(config: Config, geometry: Geometry) -> int:
    """What a weight transfer holds on the receiving side: two buffers, or of larger weights the one that arrives, the one that is loaded,
    and the one before, which vLLM still has."""
    return _buckets_bytes(config, geometry, 3)


def _buckets_bytes(config: Config, geometry: Geometry, large: int) -> int:
    """Two buffers, and so many consecutive weights that are larger: an embedding, and those of a layer next to it."""
    item, layer = ITEM_BYTES[config.server_dtype], geometry.hidden * max(geometry.intermediate, geometry.heads * geometry.head_size)
    weights = [numbers * item for numbers in [geometry.largest_tensor, *[layer] * (large - 1)][:large]]
    held = 2 * config.sync.bucket_bytes + sum(size for size in weights if size > config.sync.bucket_bytes)
    return min(held, geometry.num_parameters * item)


def pools(config: Config, geometry: Geometry, machine: Machine) -> dict[str, int]:
    """Bytes that share one memory: on cpu those of the whole "run", elsewhere of each "rank" and each "server" its own."""
    each = {name: need.total_bytes for name, need in needs(config, geometry, machine).items()}
    return {"run": together(config, each)} if machine.kind == "cpu" else each


def together(config: Config, each: dict[str, int]) -> int:
    """Of all processes, from that of one of each."""
    counts = {"rank": config.parallel.ranks, "server": config.rollout.servers * config.rollout.tensor_parallel}
    return sum(counts[name] * size_bytes for name, size_bytes in each.items())


def _update_bytes(config: Config, numbers: int, kind: str) -> int:
    """The worst of an optimizer step: reducing gradients, AdamW, and writing the weights (with fsdp, neither first nor last).

    With n / W numbers in a slice: the reduced gradient 4; in reducing, gloo's copy of the whole sum (4 W, exact 8 W) and exact's
    float64 (16); AdamW its temporaries; the slice in the weights' type (s, none in float32) and all slices of it (s W).
    """
    item, ranks, exact = ITEM_BYTES[config.model.dtype], config.replicas, config.parallel.accumulate == "exact"
    alone = ranks == 1 or config.parallel.data == "fsdp"
    gradient = 0 if ranks == 1 and not exact else 4
    reducing = (8 if exact else 4) * ranks * (kind == "cpu" and not alone) + 16 * exact
    writing = item * (item < 4) * (config.parallel.data == "zero1") + item * ranks * (not alone)
    return numbers // ranks * (gradient + max(reducing, devices.ADAMW_TEMPORARY_BYTES[kind], writing))


def size_text(size_bytes: int) -> str:
    """For people, in a column."""
    return f"{size_bytes / 2**30:6.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:6.0f} MiB"
