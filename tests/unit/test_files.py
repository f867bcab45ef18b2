"""What is read of a checkpoint against transformers' own reader."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pasync.errors import ConfigError
from pasync.model.causal_lm import empty_model
from pasync.model.files import WeightFiles
from pasync.model.stage import Stage
from pasync.model.tiny import random_model
from pasync.sections import ModelConfig


def filled(folder: Path, dtype: str = "float32", index: int = 0, count: int = 1) -> Stage:
    """One of `count` stages."""
    stage = Stage(empty_model(ModelConfig(path=str(folder), dtype=dtype), folder), index, count)
    tied = stage.tied_weight
    with WeightFiles(folder) as files:
        names = {name: "model.embed_tokens.weight" if p is tied else name for name, p in stage.named_parameters()}
        files.fill(stage, {name: (of, None) for name, of in names.items()}, 0, 1)
    return stage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True)])
def test_a_filled_model_is_the_one_that_transformers_reads(tmp_path, family, tied, dtype):
    random_model(tmp_path, family, tied=tied)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    ours = filled(tmp_path, dtype)
    expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    found = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied


def test_scaled_rotary_angles_are_those_of_transformers(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=scaling)).save_pretrained(tmp_path)
    theirs, plain = AutoModelForCausalLM.from_pretrained(tmp_path), 1 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(filled(tmp_path).model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    assert not torch.allclose(theirs.model.rotary_emb.inv_freq, plain)


def test_stages_hold_their_part_and_a_tied_head_is_read_from_the_embedding(tmp_path):
    random_model(tmp_path, "llama", tied=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    first, last = (filled(tmp_path, index=i, count=2) for i in range(2))
    assert torch.equal(first.model.embed_tokens.weight, theirs.lm_head.weight) and torch.equal(last.lm_head.weight, theirs.lm_head.weight)
    assert {n for n, _ in first.named_parameters()} & {n for n, _ in last.named_parameters()} == set()


@pytest.mark.parametrize(("dim", "index"), [(None, 0), (0, 0), (0, 2), (1, 1)])
def test_a_part_of_a_weight_comes_from_the_file_that_the_index_names(tmp_path, dim, index):
    whole = torch.randn(6, 9)
    save_file({"a": whole}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"b": whole + 1}, tmp_path / "model-00001-of-00002.safetensors")
    places = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with WeightFiles(tmp_path) as files:
        for name, expected in (("a", whole), ("b", whole + 1)):
            assert torch.equal(files.part(name, dim, index, 3), expected if dim is None else expected.chunk(3, dim)[index])


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no model.safetensors; weights must be in safetensors files"):
        WeightFiles(tmp_path)
    random_model(tmp_path, "llama", tied=True)
    save_file({"model.embed_tokens.weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight is of \[3, 5\], its config.json says \["):
        filled(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="has no weight model.embed_tokens.weight"):
        filled(tmp_path)


def test_two_models_filled_from_one_file_share_no_memory(tmp_path):
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with WeightFiles(tmp_path) as files:
        for module in (first, second):
            files.fill(module, {"weight": ("weight", None), "bias": ("bias", None)}, 0, 1)
    first.weight.data.zero_()
    assert second.weight.eq(1).all()
