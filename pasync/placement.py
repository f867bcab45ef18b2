"""Who runs on which devices. No torch.

    devices  0 1 2 3   4 5 6 7
             ranks     servers        disjoint on npu and cuda; on cpu as far as there are cores
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pasync.config import Config
from pasync.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The devices of every process of a run."""

    kind: str
    """npu, cuda or cpu."""
    address: str
    """ZeroMQ address at which the trainer binds and to which the servers connect."""
    servers: list[list[int]]
    """Device ids of each server; none in a replayed run."""
    ranks: list[list[int]]
    """Device ids of each training rank; more than one only on cpu, where an id is a core."""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def place(config: Config, kind: str, ids: list[int], address: str) -> Placement:
    """Give every server and every rank its devices.

    Args:
        config: the whole tree.
        kind: npu, cuda or cpu.
        ids: devices that are there.
        address: of the trainer.

    Raises:
        ConfigError: lists everything that does not fit the devices.
    """
    problems = misfits(config, kind, ids)
    if problems:
        raise ConfigError("the configuration does not fit this machine:\n" + "\n".join(f"  {p}" for p in problems))
    used = ids[: config.device.count]
    if kind == "cpu":
        servers, ranks = _cores(_num_servers(config), config.rollout.tensor_parallel, config.parallel.ranks, used)
    else:
        rest, size = used[config.parallel.ranks :], config.rollout.tensor_parallel
        ranks = [[i] for i in used[: config.parallel.ranks]]
        servers = [rest[i * size : (i + 1) * size] for i in range(_num_servers(config))]
    return Placement(kind, address, servers, ranks)


def misfits(config: Config, kind: str, ids: list[int]) -> list[str]:
    """What does not fit the devices `ids`, each as `key=value: why, what is there`."""
    found, count = [], config.device.count or len(ids)
    there = f"{len(ids)} {kind} {'core' if kind == 'cpu' else 'device'}{'s' * (len(ids) != 1)} ({', '.join(map(str, ids)) or 'none'})"
    if count > len(ids):
        found.append(f"device.count={count}: this machine has {there}")
    servers, size, ranks = _num_servers(config), config.rollout.tensor_parallel, config.parallel.ranks
    if kind != "cpu" and servers * size + ranks > min(count, len(ids)):
        allowed = f"device.count={count} of {there}" if config.device.count else there
        found.append(
            f"rollout.servers={servers} x rollout.tensor_parallel={size} + parallel.ranks={ranks}: "
            f"need {servers * size + ranks} devices of their own, there are {allowed}"
        )
    if kind == "cpu" and servers and config.rollout.kv_cache_bytes is None:
        found.append("rollout.kv_cache_bytes=null: must be given on cpu, for instance 268435456")
    return found


def _num_servers(config: Config) -> int:
    return 0 if config.replayed_run else config.rollout.servers


def _cores(servers: int, size: int, ranks: int, ids: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks get the first cores, servers the others, in proportion to their number; a core is shared only if it must be."""
    if len(ids) == 1 or not servers:
        return [ids] * servers, _split(ids, ranks)
    wanted = servers * size + ranks
    enough = len(ids) >= wanted
    smallest, largest = (ranks, len(ids) - servers * size) if enough else (1, len(ids) - 1)
    cut = min(max(round(len(ids) * ranks / wanted), smallest), largest)
    if enough:
        return _split(ids[cut:], servers), _split(ids[:cut], ranks)
    return [ids[cut:]] * servers, [ids[:cut]] * ranks


def _split(ids: list[int], parts: int) -> list[list[int]]:
    """Contiguous parts whose sizes differ by at most one; every part is all of them if there are too few."""
    if len(ids) < parts:
        return [ids] * parts
    edges = [i * len(ids) // parts for i in range(parts + 1)]
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
