from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasync.config import Config
from pasync.errors import ConfigError
from pasync.placement import Placement, place

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
