"""Adapters against peft's own model, in float64, and as they are saved."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from groups import make_group
from safetensors.torch import load_file
from textbook import divisor, flat_gradient, small_config, textbook_loss
from textbook import logprobs as response_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from pasync.checkpoint import Checkpoints, export
from pasync.config import Config
from pasync.configfile import load, save
from pasync.errors import ConfigError
from pasync.estimate import rank_need
from pasync.export import export as export_checkpoint
from pasync.geometry import read_geometry
from pasync.model.tiny import byte_tokenizer, random_model
from pasync.parallel.ranks import Ranks
from pasync.trainer import Trainer

RNG = np.random.default_rng(5)
GROUPS = [make_group(RNG, 5, [3, 5, 2], rewards=[1, 0, 0], group_id=0), make_group(RNG, 2, [1, 8, 4], rewards=[1, 1, 0], group_id=1)]
LORA = ("lora.rank=4", "lora.alpha=16")


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    random_model(folder, request.param, tied=request.param != "llama", seed=1)
    return folder


def adapted(config: Config, model: Path, ranks: Ranks) -> Trainer:
    """A trainer whose adapters are not zero any more."""
    trainer, generator = Trainer(config, model, ranks), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trainer.models.parameters.values():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return trainer


def peft_model(model: Path, trainer: Trainer) -> peft.PeftModel:
    """The same in float64."""
    lora = trainer.config.lora
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), settings)
    ours = {f"base_model.model.{name}": p.detach().double() for name, p in trainer.models.parameters.items()}
    assert ours.keys() == {name for name, p in made.named_parameters() if p.requires_grad}
    made.load_state_dict(ours, strict=False)
    return made.double()


def test_gradients_are_those_of_pefts_model_and_the_reference_is_the_adapter_switched_off(tmp_path, model, ranks):
    trainer = adapted(small_config(tmp_path, model, *LORA, kl_coef=0.1), model, ranks)
    assert trainer.models.reference is not None and sum(p.numel() for p in trainer.models.policy.parameters()) < 2 * sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters()
    )
    trainer.forward_backward([GROUPS[:1], GROUPS[1:]])
    ours = flat_gradient(trainer, divisor(GROUPS, "token"))
    oracle, start = peft_model(model, trainer), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        old = [response_logprobs(oracle, group, k) for group in GROUPS for k in range(3)]
    textbook_loss(oracle, old, start, GROUPS, "token", 0.1).backward()
    theirs = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.requires_grad])
    assert theirs.norm() > 0 and (ours - theirs).norm() / theirs.norm() < 2e-6  # float32


def test_before_the_first_step_the_policy_is_the_starting_model_and_then_only_adapters_move(tmp_path, model, ranks):
    trainer = Trainer(small_config(tmp_path, model, *LORA), model, ranks)
    started = load_file(model / "model.safetensors")
    assert all(torch.equal(weight, started[name]) for name, weight in trainer.models.weights())
    trainer.forward_backward([GROUPS])
    assert trainer.optimizer_step(0)["optimizer/gradient_norm"] > 0
    moved = {name for name, weight in trainer.models.weights() if not torch.equal(weight, started[name])}
    assert moved == {name for name in started if name.rpartition(".")[0].endswith("_proj") and name.endswith("weight")}
    assert all(torch.equal(p, started[name]) for name, p in trainer.models._held.items())


def test_servers_get_merged_weights_and_peft_reads_what_is_saved(tmp_path, model, ranks):
    trainer = adapted(small_config(tmp_path, model, *LORA), model, ranks)
    byte_tokenizer().save_pretrained(model)
    export(trainer, AutoTokenizer.from_pretrained(model), tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    oracle = peft_model(model, trainer).merge_and_unload().state_dict()
    assert all((weight - oracle[name]).abs().max() < 1e-6 for name, weight in merged.state_dict().items())
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), tmp_path / "adapter")
    ids = torch.arange(20, 30)[None]
    assert (again.double()(ids).logits - merged(ids).logits).abs().max() < 1e-5


def test_a_checkpoint_holds_the_adapters_and_gives_the_same_model(tmp_path, model, ranks):
    config = small_config(tmp_path, model, *LORA, "checkpoint.every=1", f"run.dir={tmp_path}")
    save(config, tmp_path / "config.yaml")
    byte_tokenizer().save_pretrained(model)
    trainer = Trainer(config, model, ranks)
    for t in range(2):
        trainer.forward_backward([GROUPS])
        trainer.optimizer_step(t)
    checkpoints = Checkpoints(config, tmp_path, trainer)
    checkpoints.save(2)
    checkpoints.finish()
    other = Trainer(config, model, ranks)
    assert Checkpoints(config, tmp_path, other).resume() == 2
    ours, theirs = dict(trainer.models.weights()), dict(other.models.weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    exported = load_file(export_checkpoint(tmp_path) / "model.safetensors")
    assert exported.keys() == ours.keys() and all(torch.equal(exported[name], weight) for name, weight in ours.items())


def test_an_adapter_needs_little_memory(tmp_path, model, ranks):
    whole, adapter = (
        sum(part.size_bytes for part in rank_need(small_config(tmp_path, model, *o, kl_coef=0.1), read_geometry(model), "cpu").lasting)
        for o in ((), LORA)
    )
    geometry, lora = read_geometry(model), small_config(tmp_path, model, *LORA).lora
    trainer = Trainer(small_config(tmp_path, model, *LORA), model, ranks)
    assert geometry.adapter_parameters(lora.rank, lora.targets) == sum(p.numel() for p in trainer.models.parameters.values())
    assert adapter < whole


@pytest.mark.parametrize("override", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=fsdp", "model.offload_reference=true"])
def test_layouts_that_cut_the_layers_are_refused(tmp_path, override):
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        small_config(tmp_path, "m", *LORA, "parallel.ranks=2", override)


def test_a_target_that_is_not_there_is_named(tmp_path, model, ranks):
    config = load(small_config(tmp_path, model) and tmp_path / "c.yaml", ["lora.rank=2", "lora.targets=[q_proj, query]"])
    with pytest.raises(ConfigError, match="query.*down_proj"):
        Trainer(config, model, ranks)
