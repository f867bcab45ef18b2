"""Parameter counts against Hugging Face models, activations against what autograd really keeps and allocates."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_batch, make_group, response_logprobs
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from pasync import launch
from pasync.advice import advice, problems, report, warnings
from pasync.config import Config
from pasync.configfile import load
from pasync.data.packing import MicroBatch
from pasync.device import memory_bytes
from pasync.errors import ConfigError
from pasync.estimate import (
    KEPT_LOGITS_BYTES,
    SMALLEST_LOGITS_BLOCK,
    Machine,
    micro_batch_bytes,
    micro_batch_tokens,
    needs,
    pools,
    rank_need,
)
from pasync.geometry import PUBLISHED, Geometry, read_geometry
from pasync.model import logprob, shared_prompt

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN_7B = PUBLISHED["Qwen2.5-7B-Instruct"]
QWEN_05B = Geometry(896, 4864, 24, 14, 2, 64, 151936, True, True, False, False, False)
SIZES = {
    "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 264,
}  # fmt: skip


def config(**sections: dict[str, object]) -> Config:
    tree: dict[str, dict[str, object]] = {
        "model": {"path": "m"}, "data": {"train": {"source": "t.jsonl"}, "max_prompt_tokens": 512},
        "rollout": {"max_tokens": 1024}, "algorithm": {"batch_groups": 32, "group_responses": 16}, "optimizer": {"lr": 1e-6},
    }  # fmt: skip
    merged = {name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}}
    return Config.model_validate({"name": "x", "iterations": 1, **merged})


def cuda(gigabytes: int, count: int = 8) -> Machine:
    return Machine("cuda", count, gigabytes << 30)


def biases(family: str) -> list[dict[str, bool]]:
    return {"qwen2": [{}], "qwen3": [{}, {"attention_bias": True}], "llama": [{}, {"attention_bias": True, "mlp_bias": True}]}[family]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "bias"), [(f, b) for f in shared_prompt.FAMILIES for b in biases(f)])
def test_parameters_are_counted_as_hugging_face_makes_them(tmp_path: Path, family: str, bias: dict[str, bool], tied: bool) -> None:
    settings = AutoConfig.for_model(family, **SIZES, **bias, tie_word_embeddings=tied)
    settings.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    geometry = read_geometry(tmp_path)
    assert geometry.num_parameters == sum(p.numel() for p in model.parameters())
    assert geometry.largest_tensor == max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("text", [None, "{", '{"max_position_embeddings": 1024}', '{"model_type": "gemma2", "hidden_size": 8}'])
def test_a_folder_without_a_known_model_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model.path="):
        read_geometry(tmp_path)


def test_constants_are_those_of_the_log_probs() -> None:
    assert (logprob.KEPT_BYTES, logprob.SMALLEST_BLOCK) == (KEPT_LOGITS_BYTES, SMALLEST_LOGITS_BLOCK)


def random_model(family: str, dtype: torch.dtype, layers: int, again: bool = False) -> torch.nn.Module:
    settings = AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": layers}, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="pasync_auto")
    shared_prompt.choose("auto", torch.device("cpu"), dtype, 4, 2, 32)  # its self-test is no part of the model
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def kept_bytes(model: torch.nn.Module, batch: MicroBatch) -> int:
    """Of every storage that autograd keeps."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        response_logprobs(model, batch, temperature=1.0)  # type: ignore[arg-type]
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in own)


def geometry_of(model: torch.nn.Module, folder: Path) -> Geometry:
    model.config.save_pretrained(folder)  # type: ignore[operator,union-attr]
    return read_geometry(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", shared_prompt.FAMILIES)
def test_a_layer_keeps_what_the_formula_says(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    batch = make_batch([make_group(np.random.default_rng(0), 20, [30, 20, 30])])
    one, two = (random_model(family, dtype, layers) for layers in (1, 2))
    measured = (kept_bytes(two, batch) - kept_bytes(one, batch)) / batch.num_tokens
    assert geometry_of(one, tmp_path).layer_row_bytes(dtype.itemsize) == pytest.approx(measured, rel=0.01)


def peak_bytes(model: torch.nn.Module, batch: MicroBatch) -> int:
    """Largest sum of torch's allocations in a forward and backward pass whose gradients are dropped as they come."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        response_logprobs(model, batch, temperature=1.0)[0].sum().backward()  # type: ignore[arg-type]
    assert run.profiler
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_micro_batch_allocates_what_the_estimate_says(tmp_path: Path, family: str, again: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    model = random_model(family, getattr(torch, dtype), 6, again)
    batch = make_batch([make_group(rng, 64, [64] * 4) for _ in range(6)])
    c = config(
        model={"path": "m", "dtype": dtype, "gradient_checkpointing": again}, rollout={"max_tokens": 64, "kv_cache_bytes": 1 << 24},
        data={"max_prompt_tokens": 64}, algorithm={"batch_groups": 6, "group_responses": 4},
    )  # fmt: skip
    assert micro_batch_tokens(c) == (batch.num_tokens, len(batch.targets))
    assert 1 / 1.5 < micro_batch_bytes(c, geometry_of(model, tmp_path), "cpu") / peak_bytes(model, batch) < 1.5


def test_a_micro_batch_is_no_larger_than_the_key_or_the_batch_allows() -> None:
    assert micro_batch_tokens(config()) == (16384, 16384)
    assert micro_batch_tokens(config(algorithm={"batch_groups": 2, "group_responses": 2})) == (2 * 2560, 2 * 2048)
    assert micro_batch_tokens(config(parallel={"micro_batch_tokens": 100}))[0] == 512 + 1024  # a response is never cut
    exact = {"accumulate": "exact", "micro_batch_tokens": 1 << 20}
    assert micro_batch_tokens(config(parallel=exact))[0] == 512 + 16 * 1024  # one group at a time


def lasting(c: Config) -> dict[str, int]:
    return {part.what.split(",")[0]: part.size_bytes for part in rank_need(c, QWEN_7B, "cuda").lasting}


def test_what_lasts_scales_with_type_ranks_accumulation_and_reference() -> None:
    n, plain = QWEN_7B.num_parameters, lasting(config())
    assert (plain["weights"], plain["sum of gradients"], plain["master weights and two moments"]) == (2 * n, 4 * n, 12 * n)
    assert "reference model" not in plain
    other = config(model={"dtype": "float32"}, parallel={"ranks": 4, "accumulate": "exact"}, algorithm={"kl_coef": 0.1})
    assert (lasting(other)["weights"], lasting(other)["sum of gradients"], lasting(other)["reference model"]) == (4 * n, 8 * n, 4 * n)
    assert lasting(other)["master weights and two moments"] == 3 * n


def test_with_fsdp_everything_that_lasts_is_a_slice_and_layers_are_made_whole_in_passing() -> None:
    n, c = QWEN_7B.num_parameters, config(parallel={"ranks": 4, "data": "fsdp"}, algorithm={"tri_model": "always"})
    found = lasting(c)
    assert found["weights"] == 4 * n and found["reference model"] == found["old policy"] == 2 * (n // 4)
    whole = config(parallel={"ranks": 4}, algorithm={"tri_model": "always"})
    passing = [rank_need(x, QWEN_7B, "cuda").passing[-1].size_bytes for x in (c, whole)]
    assert passing[0] - passing[1] == 10 * (2 * QWEN_7B.vocabulary * QWEN_7B.hidden + 2 * QWEN_7B.layer_parameters)


def test_checkpointing_keeps_a_layers_input_instead_of_all_of_it() -> None:
    plain, again = (micro_batch_bytes(config(model={"gradient_checkpointing": on}), QWEN_7B, "cuda") for on in (False, True))
    saved = 16384 * (27 * QWEN_7B.layer_row_bytes(2) - 28 * 2 * QWEN_7B.hidden)
    assert again < plain / 5 and plain - again == pytest.approx(saved, rel=0.1)


def test_a_server_takes_its_share_of_a_device_and_a_replayed_run_has_none(tmp_path: Path) -> None:
    server = needs(config(rollout={"memory_frac": 0.8}), QWEN_7B, cuda(80))["server"]
    outside = next(part.size_bytes for part in server.lasting if part.what.startswith("buffers"))
    assert server.total_bytes == pytest.approx(0.8 * (80 << 30) + outside, rel=1e-6)
    assert outside == (32 << 20) + (152064 + 2 * 18944) * 3584 * 2  # the embedding and two weights of a layer are larger than a bucket
    (tmp_path / "rollouts").mkdir()
    assert list(needs(config(rollout={"source": f"replay:{tmp_path}"}), QWEN_7B, cuda(80))) == ["rank"]


def test_kv_heads_are_spread_over_a_servers_devices() -> None:
    c = config(rollout={"kv_cache_bytes": 4 << 30, "tensor_parallel": 2})
    text = report(c, QWEN_7B, cuda(80))
    tokens = (4 << 30) // (2 * 28 * 2 * 128 * 2)
    assert f"KV cache: {tokens} tokens, {tokens // 1536} of the longest responses at once" in text


def applied(c: Config, text: str) -> Config:
    """The configuration with the values that an advice names."""
    for change in text.split(" would fit")[0].split():
        key, value = change.split("=")
        name, field = key.split(".")
        section = getattr(c, name)
        c = c.model_copy(update={name: type(section).model_validate(section.model_dump() | {field: value})})
    return c


@pytest.mark.parametrize(
    ("changes", "gigabytes", "keys"),
    [
        ({}, 24, ["model.gradient_checkpointing=true"]),
        ({}, 12, ["model.gradient_checkpointing=true", "parallel.micro_batch_tokens="]),
        ({"parallel": {"micro_batch_tokens": 1536}, "model": {"gradient_checkpointing": True}}, 11, ["parallel.ranks="]),
    ],
)
def test_advice_for_a_rank_names_values_that_fit(changes: dict[str, dict[str, object]], gigabytes: int, keys: list[str]) -> None:
    c, machine = config(**changes), cuda(gigabytes)
    text = advice("rank", c, QWEN_05B, machine)
    assert all(key in text for key in keys)
    assert pools(c, QWEN_05B, machine)["rank"] > gigabytes << 30 >= pools(applied(c, text), QWEN_05B, machine)["rank"]


def test_replicas_that_cannot_be_cut_further_are_told_to_hold_slices() -> None:
    c = config(parallel={"ranks": 3}, model={"gradient_checkpointing": True})
    assert "parallel.data=fsdp would fit" in advice("rank", c, QWEN_7B, cuda(80))


def test_a_7b_model_on_24_gb_is_told_what_it_needs_at_least() -> None:
    rank, = warnings(config(rollout={"memory_frac": 0.85}), QWEN_7B, cuda(24, 2))
    assert rank.startswith("does not fit: the rank needs ") and "of 24.0 GiB" in rank
    assert "even model.gradient_checkpointing=true" in rank and "parallel.ranks=32" in rank and rank.endswith("more memory")


def test_a_server_is_told_smaller_caches_before_more_devices() -> None:
    c = config(rollout={"kv_cache_bytes": 100 << 30})
    assert advice("server", c, QWEN_7B, cuda(64)) == f"rollout.kv_cache_bytes={1 << 35} would fit"
    assert advice("server", config(rollout={"memory_frac": 1.0}), QWEN_7B, cuda(64)) == "rollout.memory_frac=0.95 would fit"
    assert advice("server", config(), QWEN_7B, cuda(16, 2)) == "rollout.tensor_parallel=2 would fit, on 3 devices"


def test_only_a_cpu_whose_memory_is_clearly_too_small_is_refused() -> None:
    c = config(rollout={"kv_cache_bytes": 1 << 28}, model={"path": "m", "dtype": "float32"})
    [problem] = problems(c, QWEN_7B, Machine("cpu", 2, 64 << 30))
    assert problem.startswith("model.path=m: ") and "this machine has 64.0 GiB" in problem
    small = replace(QWEN_05B, layers=12)
    total = pools(c, small, Machine("cpu", 2, None))["run"]
    assert problems(c, small, Machine("cpu", 2, total // 2)) == [] != warnings(c, small, Machine("cpu", 2, total // 2))
    assert problems(c, QWEN_7B, Machine("cpu", 2, None)) == problems(c, QWEN_7B, cuda(1)) == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_cpu.yaml")), ids=lambda path: path.stem)
def test_shipped_cpu_configs_fit_16_gb(path: Path) -> None:
    smollm2 = Geometry(576, 1536, 30, 9, 3, 64, 49152, True, False, False, False, False)
    assert warnings(load(path), smollm2, Machine("cpu", 2, 16_000_000_000)) == []


def test_memory_of_the_machine() -> None:
    assert (memory_bytes("cpu") or 0) > 1 << 30
    assert memory_bytes("npu") is None or torch.get_device_module("npu").is_available()


def test_a_dry_run_shows_the_table_or_why_there_is_none(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PASYNC_CACHE", str(tmp_path))
    assert launch.main([str(CONFIGS / "demo_cpu.yaml"), "--dry-run"]) == 0
    assert "memory: model.path=smollm2-135m-instruct: not made yet" in capsys.readouterr().out
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path / "models" / "smollm2-135m-instruct")
    assert launch.main([str(CONFIGS / "demo_cpu.yaml"), "--dry-run", "algorithm.kl_coef=0.1"]) == 0
    out = capsys.readouterr().out
    assert "memory of each process" in out and "reference model" in out and "micro-batch of 512 tokens" in out
