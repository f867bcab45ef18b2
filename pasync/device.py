"""The only file that knows npu, cuda and cpu. Importing it does not import torch.

A device id is a core on cpu and the index of an accelerator elsewhere.
"""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pasync.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

Role = Literal["server", "rank"]
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
NODES = {"cuda": "/dev/nvidia", "npu": "/dev/davinci"}
OVERHEAD_BYTES = {
    "cpu": {"rank": 1200 << 20, "server": 1600 << 20},  # measured, with torchrun and one reward process
    "cuda": {"rank": 1 << 30, "server": 2 << 30},
    "npu": {"rank": 1 << 30, "server": 2 << 30},
}
GROUP_BYTES = {"cpu": 0, "cuda": 400 << 20, "npu": 400 << 20}
"""HCCL: two buffers of HCCL_BUFFSIZE, 200 MB unless set; NCCL is of the same size."""


def detect() -> str:
    """The kind of this machine: "npu", "cuda" or "cpu", in this order."""
    return next((kind for kind in ("npu", "cuda") if _node_ids(kind)), "cpu")


def device_ids(kind: str) -> list[int]:
    """Ids of the devices this process may use."""
    if kind == "cpu":
        return sorted(os.sched_getaffinity(0))
    visible = os.environ.get(VISIBLE[kind])
    return [int(i) for i in visible.split(",") if i.strip()] if visible is not None else _node_ids(kind)


def memory_bytes(kind: str) -> int | None:
    """Memory of the smallest device, on cpu of the whole machine; None where there is no device, or no torch that sees it."""
    if kind == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not _node_ids(kind):
        return None
    try:
        import torch

        if kind == "npu":
            import torch_npu  # noqa: F401  registers torch.npu
        module = torch.get_device_module(kind)
        return min((module.mem_get_info(i)[1] for i in range(module.device_count())), default=None)
    except (ImportError, OSError, RuntimeError, AssertionError):  # an installation that cannot reach its driver
        return None


def overhead_bytes(kind: str, role: Role, groups: int) -> int:
    """What a process holds besides its tensors: libraries and the device's context, and the buffers of its process groups."""
    return OVERHEAD_BYTES[kind][role] + groups * GROUP_BYTES[kind]


def process_environment(kind: str, ids: list[int], role: Role) -> dict[str, str]:
    """Environment of a process that owns the devices `ids`."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env[VISIBLE.get(kind, "OMP_NUM_THREADS")] = str(len(ids)) if kind == "cpu" else ",".join(map(str, ids))
    if kind == "cpu":  # keep freed memory: a gigabyte of fresh pages costs more than the arithmetic done on it
        env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    if role == "rank":
        return env | {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # or the transfer group's own store finds no master
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if kind == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the launcher pins; vLLM would ask for a NUMA node per worker
        env["TORCH_COMPILE_DISABLE"] = "1"  # log-probs would compile C++ at the first batch, about 10 s
    if kind == "npu":
        env["VLLM_ASCEND_ENABLE_NZ"] = "0"  # weights in the NZ format cannot be loaded again
    return env


def torch_device(kind: str, local_index: int) -> torch.device:
    """The device of this process, made current."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        import torch_npu  # noqa: F401  registers torch.npu
    device = torch.device(kind, local_index)
    torch.get_device_module(device).set_device(device)
    return device


def adamw_flags(device: torch.device) -> dict[str, bool]:
    """Arguments that make torch's AdamW fast there: one fused kernel, without temporaries the size of the weights."""
    return {"foreach": False} if device.type == "npu" else {"fused": True}


def make_deterministic() -> None:
    """Equal inputs give equal bits from here on: no algorithm that adds in varying order, and on cpu one thread."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


def collective_backend(kind: str) -> str:
    """Backends of the training ranks' process group; host tensors always go over gloo."""
    return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[kind]


def require_loadable_weights(kind: str) -> None:
    """Raise WeightSyncError if vLLM would hold weights in a format into which new ones cannot be loaded."""
    if kind == "npu" and os.environ.get("VLLM_ASCEND_ENABLE_NZ") != "0":
        raise WeightSyncError("VLLM_ASCEND_ENABLE_NZ is not 0: vllm-ascend may hold weights in the NZ format, which takes no new ones")


def pin(ids: list[int]) -> None:
    """Bind this process to the cores `ids` and give torch as many threads."""
    import torch

    os.sched_setaffinity(0, ids)
    torch.set_num_threads(len(ids))


def _node_ids(kind: str) -> list[int]:
    names = (Path(p).name.removeprefix(Path(NODES[kind]).name) for p in glob(f"{NODES[kind]}[0-9]*"))
    return sorted(int(n) for n in names if n.isdigit())
