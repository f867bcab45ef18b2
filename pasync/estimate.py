"""Memory of every process before anything starts, from the model's config.json and the configuration. No torch.

    Geometry of the model -------------------+
    config ----------------------------------+--needs--> of a rank, of a server --report--> what --dry-run prints
    kind, number and memory of the devices --+                                  --problems--> why a run cannot start

Everything is an upper bound in one respect: prompts and responses are as long as allowed, and micro-batches as full.

Letters: E hidden size, I intermediate size, L layers, H query heads, G key/value heads, D head size, V vocabulary, W replicas, P prompt and
R response tokens, K responses of a group, T rows of a micro-batch, N of them that predict a response token, s bytes of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pasync import device as devices
from pasync.config import Config, Section
from pasync.geometry import Geometry

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
KEPT_LOGITS_BYTES = 768 << 20
LOGITS_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 26, "npu": 1 << 26}
SMALLEST_LOGITS_BLOCK = 256
"""These three as in `pasync.model.logprob`, which loads torch."""


@dataclass(frozen=True)
class Machine:
    """The devices of a run."""

    kind: str
    """cpu, cuda or npu."""
    count: int
    """Devices that the run may use."""
    memory_bytes: int | None
    """Of each device; on cpu of the whole machine; None if unknown."""


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

    Lasting, of the n numbers of its stage and shard: weights s n, the gradient's sum 4 n (8 n if exact), 12 n / W of `ShardedAdamW`.
    """
    numbers, ranks, exact = rank_parameters(config, geometry), config.replicas, config.parallel.accumulate == "exact"
    weights = Part(numbers * ITEM_BYTES[config.model.dtype], f"weights, {config.model.dtype}")
    lasting = [
        weights,
        Part(numbers * (8 if exact else 4), f"sum of gradients, {'int64' if exact else 'float32'}"),
        Part(12 * numbers // ranks, "master weights and two moments, float32" + f", one of {ranks} slices" * (ranks > 1)),
    ]
    always = config.algorithm.tri_model == "always"
    if always or (config.algorithm.kl_coef and not config.model.offload_reference):
        lasting.append(Part(weights.size_bytes, "reference model"))
    if always:
        lasting.append(Part(weights.size_bytes, "old policy"))
    if not config.replayed_run:
        lasting.append(Part(sent_bytes(config, geometry), "buffers of the weight transfer"))
    groups = sum(n > 1 for n in (ranks, config.parallel.tensor, config.parallel.pipeline)) + (not config.replayed_run)
    lasting.append(Part(devices.overhead_bytes(kind, "rank", groups), "runtime"))
    passing = [Part(_update_bytes(config, numbers, kind), "optimizer step")]
    if config.trains:
        rows = micro_batch_tokens(config)[0]
        how = "layers computed again" if config.model.gradient_checkpointing else "all layers kept"
        passing.append(Part(micro_batch_bytes(config, geometry, kind), f"micro-batch of {rows} tokens, {how}"))
    return Need(lasting, passing)


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
    checkpointing its input, s E), rotary angles 2 s D, and the head's gradient s V E (a tied one waits for that of the embedding).
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
    block = min(logits, max(LOGITS_BLOCK[kind], SMALLEST_LOGITS_BLOCK * predicting))
    in_head = rows * (4 + item) * g.hidden + predicting * (4 + item) * g.hidden + min(KEPT_LOGITS_BYTES, logits * item) + 3 * 4 * block
    in_layer = rows * (again * layer + item * (2 * g.intermediate // shards + g.hidden))
    exact = 16 if config.parallel.accumulate == "exact" else 0  # a parameter's gradient in float64 and in int64
    return kept + max(in_head, in_layer) + g.vocabulary * g.hidden // shards * (item + exact)


def server_need(config: Config, geometry: Geometry, machine: Machine) -> Need:
    """Of a server, on each of its devices: weights, KV cache, and beside what vLLM counts a buffer for new weights."""
    size = config.rollout.tensor_parallel
    lasting = [Part(geometry.num_parameters * ITEM_BYTES[config.server_dtype] // size, f"weights, {config.server_dtype}")]
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
    return {"run": _together(config, each)} if machine.kind == "cpu" else each


def report(config: Config, geometry: Geometry, machine: Machine) -> str:
    """The table that --dry-run prints, and what to change if the memory is too small."""
    lines = ["memory of each process, estimated with the longest prompts and responses"]
    for name, need in needs(config, geometry, machine).items():
        lines.append(f"  {name:<14} {_size(need.total_bytes)}")
        passing = sorted((part for part in need.passing if part.size_bytes), key=lambda part: -part.size_bytes)
        for i, part in enumerate([*need.lasting, *passing]):
            lines.append(f"    {'or' if i > len(need.lasting) else '':>12} {_size(part.size_bytes)}  {part.what}")
    if machine.kind == "cpu":
        lines.append(f"  {'all processes':<14} {_size(pools(config, geometry, machine)['run'])}")
    there = f"{'unknown':>10}" if machine.memory_bytes is None else _size(machine.memory_bytes)
    lines.append(f"  {'this machine' if machine.kind == 'cpu' else 'each device':<14} {there}")
    return "\n".join(lines + [f"  {text}" for text in warnings(config, geometry, machine)])


def warnings(config: Config, geometry: Geometry, machine: Machine) -> list[str]:
    """What does not fit, and values that would; nothing where the memory is unknown."""
    found = []
    for pool, total in pools(config, geometry, machine).items():
        if machine.memory_bytes is None or _fits(pool, config, geometry, machine):
            continue
        why = f"needs {_size(total).strip()} of {_size(machine.memory_bytes).strip()}"
        if total <= machine.memory_bytes:
            why = "has a KV cache for less than one group of the longest responses"
        found.append(f"does not fit: the {pool} {why}; {advice(pool, config, geometry, machine)}")
    return found


def problems(config: Config, geometry: Geometry, machine: Machine) -> list[str]:
    """Why a run cannot start: on cpu, what all processes hold from start to end is more than there is.

    Micro-batches are not counted here, because they may stay far below the largest; nor devices, which have allocators that say so.
    """
    if machine.kind != "cpu" or machine.memory_bytes is None:
        return []
    held = _together(config, {name: need.lasting_bytes for name, need in needs(config, geometry, machine).items()})
    if held <= machine.memory_bytes:
        return []
    sizes = f"{_size(held).strip()}, this machine has {_size(machine.memory_bytes).strip()}"
    return [f"model.path={config.model.path}: without any micro-batch the run holds {sizes}; {advice('run', config, geometry, machine)}"]


def advice(pool: str, config: Config, geometry: Geometry, machine: Machine) -> str:
    """The first change, from the cheapest on, after which a pool fits; or what it needs at least."""
    tried = [(changes, _changed(config, changes)) for changes in _candidates(pool, config, geometry)]
    for changes, changed in tried:
        if _fits(pool, changed, geometry, machine):
            used = changed.parallel.ranks + changed.rollout.servers * changed.rollout.tensor_parallel
            return f"{_text(changes)} would fit" + f", on {used} devices" * (machine.kind != "cpu" and used > machine.count)
    least, changes = min(((pools(c, geometry, machine)[pool], changes) for changes, c in tried), key=lambda pair: pair[0])
    return f"even {_text(changes) or 'as it is, it'} needs {_size(least).strip()}: take a smaller model or more memory"


def _fits(pool: str, config: Config, geometry: Geometry, machine: Machine) -> bool:
    """Whether a pool fits and, of a server, its KV cache holds a group."""
    assert machine.memory_bytes is not None
    cache = cache_bytes(config, geometry, machine) or 0
    group = config.algorithm.group_responses * config.max_model_tokens * cache_token_bytes(config, geometry)
    serves = pool != "rank" and not config.replayed_run
    return pools(config, geometry, machine)[pool] <= machine.memory_bytes and (cache >= group or not serves)


def _candidates(pool: str, config: Config, geometry: Geometry) -> Iterator[dict[str, Any]]:
    """Changes that make a pool smaller, as {"section.key": value}; on cpu more processes would make it larger."""
    if pool == "rank":
        yield from _training_changes(config, geometry.kv_heads, more_ranks=True)
    elif pool == "server":
        yield from _serving_changes(config, geometry.kv_heads)
    else:
        for serving in _serving_changes(config, 1):
            yield from (training | serving for training in _training_changes(config, 1, more_ranks=False))


def _training_changes(config: Config, kv_heads: int, more_ranks: bool) -> Iterator[dict[str, Any]]:
    """None, gradient checkpointing, with it smaller micro-batches, with these more shards of the same ranks, with these more ranks."""
    yield {}
    again: dict[str, Any] = {} if config.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    largest, smallest = micro_batch_tokens(config)[0], config.data.max_prompt_tokens + config.rollout.max_tokens
    powers = [1 << n for n in reversed(range(32)) if smallest < 1 << n < largest]
    tokens: list[dict[str, Any]] = [{}, *({"parallel.micro_batch_tokens": n} for n in [*powers, smallest] if n < largest)]
    batch, cut, shards = config.algorithm.batch_groups, config.parallel.pipeline * config.parallel.tensor, config.parallel.tensor
    splits = [n for n in range(shards + 1, kv_heads + 1) if kv_heads % n == 0 and config.parallel.ranks % (cut // shards * n) == 0]
    more = [cut * n for n in range(config.replicas + 1, batch + 1) if batch % n == 0]
    changes = [{"parallel.tensor": n} for n in splits] + [{"parallel.ranks": n} for n in more] if more_ranks else []
    for change in ({}, *changes):
        yield from (again | smaller | change for smaller in tokens)


def _serving_changes(config: Config, most_devices: int) -> Iterator[dict[str, Any]]:
    """None, a smaller KV cache, with any of these more devices for each server: the KV heads are dealt out evenly."""
    rollout = config.rollout
    if rollout.kv_cache_bytes is None:
        caches = [{"rollout.memory_frac": n / 20} for n in reversed(range(1, 20)) if n / 20 < rollout.memory_frac]
    else:
        caches = [{"rollout.kv_cache_bytes": 1 << n} for n in reversed(range(20, 50)) if 1 << n < rollout.kv_cache_bytes]
    sizes = [n for n in range(rollout.tensor_parallel + 1, most_devices + 1) if most_devices % n == 0]
    for size in ({}, *({"rollout.tensor_parallel": n} for n in sizes)):
        yield from (size | cache for cache in ({}, *caches))


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        name, field = key.split(".")
        section: Section = getattr(config, name)
        config = config.model_copy(update={name: section.model_copy(update={field: value})})
    return config


def _text(changes: dict[str, Any]) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())


def _together(config: Config, each: dict[str, int]) -> int:
    """Of all processes, from that of one of each."""
    counts = {"rank": config.parallel.ranks, "server": config.rollout.servers * config.rollout.tensor_parallel}
    return sum(counts[name] * size_bytes for name, size_bytes in each.items())


def _update_bytes(config: Config, numbers: int, kind: str) -> int:
    """The worst of an optimizer step: reducing gradients, AdamW, and writing the weights.

    With n / W numbers in a slice: the reduced gradient 4; in reducing, gloo's copy of the whole sum (4 W, exact 8 W) and exact's
    float64 (16); AdamW on npu two temporaries (8); the slice in the weights' type (s, none in float32) and all slices of it (s W).
    """
    item, ranks, exact = ITEM_BYTES[config.model.dtype], config.replicas, config.parallel.accumulate == "exact"
    alone = ranks == 1
    gradient = 0 if alone and not exact else 4
    reducing = (8 if exact else 4) * ranks * (kind == "cpu" and not alone) + 16 * exact
    writing = item * (item < 4) + item * ranks * (not alone)
    return numbers // ranks * (gradient + max(reducing, 8 * (kind == "npu"), writing))


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:6.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:6.0f} MiB"
