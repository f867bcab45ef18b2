"""Whether a run fits its devices, and what to change if not. No torch.

    `estimate.needs` of a rank, of a server --report--> what --dry-run prints, with values that would fit
                                            --problems--> why a run cannot start
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pasync.config import Config
from pasync.estimate import Machine, cache_bytes, cache_token_bytes, micro_batch_tokens, needs, pools, size_text, together
from pasync.geometry import Geometry
from pasync.sections import Section


def report(config: Config, geometry: Geometry, machine: Machine) -> str:
    """The table that --dry-run prints, and what to change if the memory is too small."""
    lines = ["memory of each process, estimated with the longest prompts and responses"]
    for name, need in needs(config, geometry, machine).items():
        lines.append(f"  {name:<14} {size_text(need.total_bytes)}")
        passing = sorted((part for part in need.passing if part.size_bytes), key=lambda part: -part.size_bytes)
        for i, part in enumerate([*need.lasting, *passing]):
            lines.append(f"    {'or' if i > len(need.lasting) else '':>12} {size_text(part.size_bytes)}  {part.what}")
    if machine.kind == "cpu":
        lines.append(f"  {'all processes':<14} {size_text(pools(config, geometry, machine)['run'])}")
    there = f"{'unknown':>10}" if machine.memory_bytes is None else size_text(machine.memory_bytes)
    assumed = f"  ASSUMED: no {machine.kind} device can be asked here" * machine.assumed
    lines.append(f"  {'this machine' if machine.kind == 'cpu' else 'each device':<14} {there}{assumed}")
    return "\n".join(lines + [f"  {text}" for text in warnings(config, geometry, machine)])


def warnings(config: Config, geometry: Geometry, machine: Machine) -> list[str]:
    """What does not fit, and values that would; nothing where the memory is unknown."""
    found = []
    for pool, total in pools(config, geometry, machine).items():
        if machine.memory_bytes is None or _fits(pool, config, geometry, machine):
            continue
        why = f"needs {size_text(total).strip()} of {size_text(machine.memory_bytes).strip()}"
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
    held = together(config, {name: need.lasting_bytes for name, need in needs(config, geometry, machine).items()})
    if held <= machine.memory_bytes:
        return []
    sizes = f"{size_text(held).strip()}, this machine has {size_text(machine.memory_bytes).strip()}"
    return [f"model.path={config.model.path}: without any micro-batch the run holds {sizes}; {advice('run', config, geometry, machine)}"]


def advice(pool: str, config: Config, geometry: Geometry, machine: Machine) -> str:
    """The first change, from the cheapest on, after which a pool fits; or what it needs at least."""
    tried = [(changes, _changed(config, changes)) for changes in _candidates(pool, config, geometry)]
    for changes, changed in tried:
        if _fits(pool, changed, geometry, machine):
            used = changed.parallel.ranks + changed.rollout.servers * changed.rollout.tensor_parallel
            return f"{_text(changes)} would fit" + f", on {used} devices" * (machine.kind != "cpu" and used > machine.count)
    least, changes = min(((pools(c, geometry, machine)[pool], changes) for changes, c in tried), key=lambda pair: pair[0])
    return f"even {_text(changes) or 'as it is, it'} needs {size_text(least).strip()}: take a smaller model or more memory"


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
    sliceable = config.replicas > 1 and config.parallel.accumulate == "float32" and not config.model.offload_reference
    slices: list[dict[str, Any]] = [{"parallel.data": "fsdp"}] * sliceable
    changes = [*({"parallel.tensor": n} for n in splits), *slices, *({"parallel.ranks": n} for n in more)] if more_ranks else []
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
