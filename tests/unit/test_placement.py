from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasync.config import Config
from pasync.errors import ConfigError
from pasync.placement import Placement, misfits, place

ADDRESS = "tcp://127.0.0.1:5555"
small = st.integers(1, 5)


def config(servers: int = 1, tensor_parallel: int = 1, ranks: int = 1, **device: object) -> Config:
    return Config.model_validate(
        {
            "name": "x", "iterations": 1, "model": {"path": "m"}, "data": {"train": {"source": "t.jsonl"}},
            "rollout": {"servers": servers, "tensor_parallel": tensor_parallel, "max_tokens": 8, "kv_cache_bytes": 1 << 24},
            "algorithm": {"batch_groups": ranks, "group_responses": 2}, "optimizer": {"lr": 1e-6},
            "parallel": {"ranks": ranks}, "device": device,
        }
    )  # fmt: skip


@given(small, small, small, st.integers(0, 8))
def test_accelerators_are_never_shared_and_ranks_come_first(servers: int, size: int, ranks: int, spare: int) -> None:
    ids = list(range(servers * size + ranks + spare))
    placement = place(config(servers, size, ranks), "npu", ids, ADDRESS)
    flat = [i for group in placement.ranks + placement.servers for i in group]
    assert flat == ids[: servers * size + ranks]
    assert [len(s) for s in placement.servers] == [size] * servers and [len(r) for r in placement.ranks] == [1] * ranks


@given(small, small, small, st.integers(0, 40))
def test_enough_cores_are_all_used_and_none_is_shared(servers: int, size: int, ranks: int, spare: int) -> None:
    ids = list(range(servers * size + ranks + spare))
    placement = place(config(servers, size, ranks), "cpu", ids, ADDRESS)
    assert sorted(i for group in placement.ranks + placement.servers for i in group) == ids
    assert all(len(s) >= size for s in placement.servers)
    for sets in (placement.servers, placement.ranks):
        assert max(map(len, sets)) - min(map(len, sets)) <= 1


@given(small, small, small, st.integers(2, 40))
def test_scarce_cores_are_shared_among_servers_or_among_ranks_but_not_between_them(servers: int, size: int, ranks: int, cores: int) -> None:
    ids = list(range(cores))
    placement = place(config(servers, size, ranks), "cpu", ids, ADDRESS)
    server_cores, rank_cores = ({i for group in sets for i in group} for sets in (placement.servers, placement.ranks))
    assert server_cores and rank_cores and not server_cores & rank_cores and server_cores | rank_cores == set(ids)


def test_a_single_core_is_shared_by_all() -> None:
    placement = place(config(2, 1, 2), "cpu", [7], ADDRESS)
    assert placement.servers == [[7], [7]] and placement.ranks == [[7], [7]]


@given(small, st.integers(1, 4), st.integers(1, 20), st.sampled_from(["npu", "cpu"]), st.integers(4, 8), st.integers(0, 6))
def test_nodes_share_one_row_of_devices_and_no_server_is_on_two(
    servers: int, size: int, ranks: int, kind: str, count: int, first: int
) -> None:
    ids = list(range(first, first + count))
    fitting = [n for n in range(2, 12) if not misfits(config(servers, size, ranks, nodes=n, count=count), kind, ids)]
    assert len(fitting) == (servers * size + ranks > count), "as many nodes as are needed, and more than one"
    if not fitting:
        return
    given, nodes = config(servers, size, ranks, nodes=fitting[0], count=count), fitting[0]
    seen = [place(given, kind, ids, ADDRESS, node) for node in range(nodes)]
    assert all(replace(placement, node=0) == seen[0] for placement in seen), "every node sees the same"
    placement = seen[0]
    of_ranks = list(zip(placement.rank_nodes, placement.ranks, strict=True))
    of_servers = list(zip(placement.server_nodes, placement.servers, strict=True))
    used = [(node, i) for node, each in of_ranks + of_servers for i in each]
    assert len(set(used)) == len(used) == ranks + servers * size and {i for _, i in used} <= set(ids)
    assert [len(each) for _, each in of_servers] == [size] * servers
    assert of_ranks == [(i // count, [ids[i % count]]) for i in range(ranks)] and of_servers == sorted(of_servers)
    assert sorted(i for n in range(nodes) for i in placement.servers_on(n)) == list(range(servers))
    assert placement.servers_on(nodes - 1) or placement.ranks_on(nodes - 1)


def test_a_server_that_is_larger_than_a_node_and_a_node_without_work_are_refused() -> None:
    (problem,) = misfits(config(1, 4, 2, nodes=3, count=2), "npu", [0, 1])
    assert problem.startswith("rollout.tensor_parallel=4: a server is on one node, which has device.count=2 of 2 npu devices (0, 1)")
    (problem,) = misfits(config(1, 1, 2, nodes=3, count=2), "npu", [0, 1])
    assert problem == "device.nodes=3: the last has nothing to do, 3 devices are needed and each node has 2"
    (problem,) = misfits(config(1, 2, 4, nodes=2, count=2), "npu", [0, 1])
    assert "need 6 devices of their own, there are device.nodes=2 with device.count=2 of 2 npu devices (0, 1)" in problem


def test_the_torchruns_meet_beside_the_trainers_address() -> None:
    placement = Placement("npu", "tcp://10.0.0.1:29500", [[0]], [[1]])
    assert (placement.host, placement.rendezvous) == ("10.0.0.1", "10.0.0.1:29501")


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        place(config(4, 2, 4, count=8), "npu", [0, 1], ADDRESS)
    text = str(error.value)
    assert "device.count=8: this machine has 2 npu devices (0, 1)" in text
    assert "rollout.servers=4 x rollout.tensor_parallel=2 + parallel.ranks=4: need 12 devices" in text


def test_a_count_limits_the_devices_used() -> None:
    assert place(config(1, 1, 1, count=2), "cpu", [3, 4, 5, 6], ADDRESS).ranks == [[3]]
    with pytest.raises(ConfigError, match="need 2 devices"):
        place(config(1, 1, 1, count=1), "cuda", [0, 1], ADDRESS)


def test_a_placement_survives_saving(tmp_path: Path) -> None:
    placement = Placement("cpu", ADDRESS, [[1]], [[0]])
    placement.save(tmp_path / "placement.json")
    assert Placement.load(tmp_path / "placement.json") == placement
