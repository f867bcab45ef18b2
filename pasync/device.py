"""The only file that knows npu, cuda and cpu. Importing it does not import torch.

A device id is a core on cpu and the index of an accelerator elsewhere (on npu its chip's logic id).
"""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pasync import npu_smi
from pasync.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

Role = Literal["server", "rank"]
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
NODES = {"cuda": "/dev/nvidia", "npu": "/dev/davinci"}
NOMINAL_BYTES = {"cuda": 79 << 30, "npu": 6090 * 2**30 // 100}
"""What torch can use of an 80 GB GPU and of a 64 GB Ascend 910B, for estimates where no device can be asked."""
OVERHEAD_BYTES = {
    "cpu": {"rank": 1200 << 20, "server": 1600 << 20},  # measured, with torchrun and one reward process
    "cuda": {"rank": 1 << 30, "server": 2 << 30},
    "npu": {"rank": 1 << 30, "server": 2 << 30},
}
GROUP_BYTES = {"cpu": 0, "cuda": 400 << 20, "npu": 400 << 20}
"""HCCL: two buffers of HCCL_BUFFSIZE, 200 MB unless set; NCCL is of the same size."""
LOGITS_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 26, "npu": 1 << 26}
"""Logits made at a time: on cpu few enough for the caches, elsewhere enough to keep the device busy."""
ADAMW_TEMPORARY_BYTES = {"cpu": 0, "cuda": 0, "npu": 8}
"""For every number of an optimizer step: where it is not fused (`adamw_flags`), two temporaries in float32."""
HARMLESS_HEALTH = ("OK", "Warning")


def detect() -> str:
    """The kind of this machine: "npu", "cuda" or "cpu", in this order."""
    return next((kind for kind in ("npu", "cuda") if _node_ids(kind) or _there(kind)), "cpu")


def device_ids(kind: str) -> list[int]:
    """Ids of the devices this process may use: those that the user names in the variable for it, else all that are fit for use."""
    if kind == "cpu":
        return sorted(os.sched_getaffinity(0))
    named = _named_ids(kind)
    return [i for i in _there(kind) if i not in unfit(kind)] if named is None else named


def unfit(kind: str) -> dict[int, str]:
    """Devices that are there but not fit for use, and why: broken, or in use by other processes. Only npu-smi can tell."""
    npus = npu_smi.npus() if kind == "npu" else []
    busy = {npu.logic_id: f"in use by {', '.join(npu.users)}" for npu in npus if npu.users}
    return busy | {npu.logic_id: f"health {npu.health}" for npu in npus if npu.health not in HARMLESS_HEALTH}


def left_out(kind: str) -> list[str]:
    """What `device_ids` leaves out because the user names no devices."""
    return [f"left out {kind} {i}: {why}" for i, why in sorted(unfit(kind).items())] if _named_ids(kind) is None else []


def device_problems(kind: str) -> list[str]:
    """Why devices that the user names cannot be used, each as `variable=value: why`."""
    named = _named_ids(kind)
    if named is None:
        return []
    there, bad, given = _there(kind), unfit(kind), f"{VISIBLE[kind]}={os.environ[VISIBLE[kind]]}"
    if not named and given[-1] != "=":
        return [f"{given}: must be numbers of devices, separated by commas"]
    absent = f"not there, there are {', '.join(map(str, there)) or 'none'}"
    return [f"{given}: {kind} {i} is {bad.get(i, absent)}" for i in named if i in bad or i not in there]


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
        module = torch.get_device_module(kind)  # torch.accelerator's memory functions need torch_npu 2.13
        return min((module.mem_get_info(i)[1] for i in range(module.device_count())), default=None)
    except (ImportError, OSError, RuntimeError, AssertionError):  # an installation that cannot reach its driver
        return None


def overhead_bytes(kind: str, role: Role, groups: int) -> int:
    """What a process holds besides its tensors: libraries and the device's context, and the buffers of its process groups."""
    return OVERHEAD_BYTES[kind][role] + groups * GROUP_BYTES[kind]


def process_environment(kind: str, ids: list[int], role: Role, *, exact: bool = False, deadline_s: float = 0.0) -> dict[str, str]:
    """What a process that owns the devices `ids` needs in its environment, on top of the launcher's.

    A default gives way to what the user has set; a value that the run depends on does not (`environment_problems` tells the user).

    Args:
        exact: equal inputs must give equal bits (`parallel.accumulate`).
        deadline_s: longest wait of ours for another process.
    """
    env = {name: os.environ.get(name, value) for name, value in _defaults(kind, role, deadline_s).items()}
    for name, (allowed, _) in _needed(kind, role, exact).items():
        env[name] = value if (value := os.environ.get(name)) in allowed else allowed[0]
    if kind != "cpu":
        return env | {VISIBLE[kind]: ",".join(map(str, ids))}
    if role == "server":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the launcher pins; vLLM would ask for a NUMA node per worker
    return env | {"OMP_NUM_THREADS": str(len(ids))}


def environment_problems(kind: str, *, exact: bool) -> list[str]:
    """Variables that the user has set and that would break a run, each as `NAME=value: why, what is allowed`."""
    found = []
    for name, (allowed, why) in (_needed(kind, "rank", exact) | _needed(kind, "server", exact)).items():
        if os.environ.get(name, allowed[0]) not in allowed:
            found.append(f"{name}={os.environ[name]}: {why}, allowed is {' or '.join(allowed)}")
    if kind == "npu" and os.environ.get("RANK_TABLE_FILE"):
        found.append(f"RANK_TABLE_FILE={os.environ['RANK_TABLE_FILE']}: HCCL would not form the groups that this run needs, unset it")
    if kind == "npu" and os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        found.append("HCCL_OP_EXPANSION_MODE=AIV: HCCL would wait for no peer longer than 1091 s, whatever the deadlines say, unset it")
    return found


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
    """Equal inputs give equal bits from here on: no algorithm that adds in varying order, and on cpu one thread.

    The libraries below torch are told by `process_environment(exact=True)`.
    """
    import torch

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


def _defaults(kind: str, role: Role, deadline_s: float) -> dict[str, str]:
    """Values that the user may replace."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if kind == "cpu":  # keep freed memory: a gigabyte of fresh pages costs more than the arithmetic done on it
        env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    if role == "server":
        env["VLLM_NO_USAGE_STATS"] = "1"
    if role == "server" and kind == "cpu":
        env["TORCH_COMPILE_DISABLE"] = "1"  # log-probs would compile C++ at the first batch, about 10 s
    if kind != "npu":
        return env
    env |= {
        # Ranks and servers share hosts and each has several communicators: of HCCL's own 16 ports some would be taken.
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
        # Our deadlines end a wait first, with names; HCCL's own are 120 s (at most 7200) for peers to come and 1836 s for an operation.
        "HCCL_CONNECT_TIMEOUT": str(min(7200, max(120, int(deadline_s)))),
        "HCCL_EXEC_TIMEOUT": str(max(1836, int(2 * deadline_s))),
        "TASK_QUEUE_ENABLE": "1",  # a second host thread launches the kernels; 2 prepares them there too, and takes more memory
    }
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch_npu takes one of the two
        env["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"  # no two micro-batches are of one length: less is lost between blocks
    if role == "rank":
        env["CPU_AFFINITY_CONF"] = "1"  # host threads stay on cores near their NPU; vllm-ascend binds its own
        return env
    with suppress(importlib.metadata.PackageNotFoundError):
        # vllm-ascend asks for an equal version, and a vLLM built for no device calls itself 0.23.0+empty
        env["VLLM_VERSION"] = importlib.metadata.version("vllm").partition("+")[0]
    return env


def _needed(kind: str, role: Role, exact: bool) -> dict[str, tuple[tuple[str, ...], str]]:
    """{variable: (allowed values, the first for who has set none; why)}."""
    env: dict[str, tuple[tuple[str, ...], str]] = {}
    if role == "server":
        env["VLLM_WORKER_MULTIPROC_METHOD"] = ("spawn",), "a forked worker cannot open the device of its parent"
    if role == "server" and kind == "npu":
        env["VLLM_ASCEND_ENABLE_NZ"] = ("0",), "weights in the NZ format cannot be loaded again"
    if role == "rank" and exact and kind == "cuda":
        env["CUBLAS_WORKSPACE_CONFIG"] = (":4096:8", ":16:8"), "parallel.accumulate=exact needs equal sums in every run"
    if role == "rank" and exact and kind == "npu":
        env["HCCL_DETERMINISTIC"] = ("true", "strict"), "parallel.accumulate=exact needs equal sums in every run"
    return env


def _named_ids(kind: str) -> list[int] | None:
    """Devices that the user names; none of them if they are no numbers, None if the user does not."""
    named = os.environ.get(VISIBLE.get(kind, ""))
    parts = [part.strip() for part in (named or "").split(",") if part.strip()]
    return None if named is None else [int(part) for part in parts] if all(map(str.isdecimal, parts)) else []


def _there(kind: str) -> list[int]:
    """Ids of all devices: on npu logic ids, where npu-smi tells them."""
    npus = npu_smi.npus() if kind == "npu" else []
    return [npu.logic_id for npu in npus] or _node_ids(kind)


def _node_ids(kind: str) -> list[int]:
    names = (Path(p).name.removeprefix(Path(NODES[kind]).name) for p in glob(f"{NODES[kind]}[0-9]*"))
    return sorted(int(n) for n in names if n.isdigit())
