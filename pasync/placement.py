"""Who runs on which devices. No torch.

    devices  0 1 2 3   4 5 6 7
             ranks     servers        disjoint on npu and cuda; on cpu as far as there are cores

Of several nodes each has the same number of devices, and they are dealt out as if they were one row; every node places the whole
run and starts its own part.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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
    node: int = 0
    """Which of several nodes this one is."""
    server_nodes: list[int] = field(default_factory=list)
    """Where each server runs; empty if all run here. Ids of another node's devices are those of this one's at the same places."""
    rank_nodes: list[int] = field(default_factory=list)
    """The same of each training rank."""
    keys: str = ""
    """File with the keys of the sockets, on several nodes."""

    @property
    def host(self) -> str:
        """Of rank 0."""
        return self.address.removeprefix("tcp://").rpartition(":")[0]

    @property
    def rendezvous(self) -> str:
        """HOST:PORT at which the torchruns of several nodes meet: the port after that of the address."""
        return f"{self.host}:{int(self.address.rpartition(':')[2]) + 1}"

    def servers_on(self, node: int) -> list[int]:
        """Numbers of the servers of a node."""
        return [i for i in range(len(self.servers)) if not self.server_nodes or self.server_nodes[i] == node]

    def ranks_on(self, node: int) -> list[int]:
        """Numbers of the training ranks of a node."""
        return [i for i in range(len(self.ranks)) if not self.rank_nodes or self.rank_nodes[i] == node]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def place(config: Config, kind: str, ids: list[int], address: str, node: int = 0) -> Placement:
    """Give every server and every rank its devices.

    Args:
        config: the whole tree.
        kind: npu, cuda or cpu.
        ids: devices that are there.
        address: of the trainer.
        node: which of `device.nodes` this is.

    Raises:
        ConfigError: lists everything that does not fit the devices.
    """
    problems = misfits(config, kind, ids)
    if problems:
        raise ConfigError("the configuration does not fit this machine:\n" + "\n".join(f"  {p}" for p in problems))
    used = ids[: config.device.count]
    if kind == "cpu" and config.device.nodes == 1:
        return Placement(kind, address, *_cores(_num_servers(config), config.rollout.tensor_parallel, config.parallel.ranks, used))
    count = len(used)
    ranks, servers = _row(config, count)
    rank_ids, server_ids = ([[used[i % count] for i in places] for places in each] for each in (ranks, servers))
    rank_nodes, server_nodes = ([places[0] // count for places in each] if config.device.nodes > 1 else [] for each in (ranks, servers))
    return Placement(kind, address, server_ids, rank_ids, node, server_nodes, rank_nodes)


def misfits(config: Config, kind: str, ids: list[int]) -> list[str]:
    """What does not fit the devices `ids`, each as `key=value: why, what is there`."""
    found, count, nodes = [], config.device.count or len(ids), config.device.nodes
    there = f"{len(ids)} {kind} {'core' if kind == 'cpu' else 'device'}{'s' * (len(ids) != 1)} ({', '.join(map(str, ids)) or 'none'})"
    if count > len(ids):
        found.append(f"device.count={count}: this machine has {there}")
    servers, size, ranks = _num_servers(config), config.rollout.tensor_parallel, config.parallel.ranks
    own = kind != "cpu" or nodes > 1
    if nodes > 1 and servers and size > count:
        found.append(f"rollout.tensor_parallel={size}: a server is on one node, which has device.count={count} of {there}")
    elif own and (needed := max(places[-1] for each in _row(config, count) for places in each) + 1) > nodes * min(count, len(ids)):
        allowed = (f"device.nodes={nodes} with " * (nodes > 1)) + (f"device.count={count} of " * bool(config.device.count)) + there
        found.append(
            f"rollout.servers={servers} x rollout.tensor_parallel={size} + parallel.ranks={ranks}: "
            f"need {needed} devices of their own, there are {allowed}"
        )
    elif nodes > 1 and needed <= (nodes - 1) * count:
        found.append(f"device.nodes={nodes}: the last has nothing to do, {needed} devices are needed and each node has {count}")
    if kind == "cpu" and servers and config.rollout.kv_cache_bytes is None:
        found.append("rollout.kv_cache_bytes=null: must be given on cpu, for instance 268435456")
    return found


def _row(config: Config, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Places of every rank and of every server in the row of all nodes' devices, `count` each; no server is on two nodes."""
    ranks, size = config.parallel.ranks, config.rollout.tensor_parallel
    servers: list[list[int]] = []
    for _ in range(_num_servers(config)):
        first = servers[-1][-1] + 1 if servers else ranks
        if count and first // count != (first + size - 1) // count:
            first += count - first % count
        servers.append(list(range(first, first + size)))
    return [[i] for i in range(ranks)], servers


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
