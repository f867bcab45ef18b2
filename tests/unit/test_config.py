import subprocess
import sys
from pathlib import Path

import pytest

from pasync.configfile import load, save
from pasync.data.prepare import KNOWN
from pasync.errors import ConfigError
from pasync.sections import PREPARED

MINIMAL = """
name: test
iterations: 4
model: {path: some-model}
data: {train: {source: rows.jsonl}}
rollout: {max_tokens: 16}
algorithm: {batch_groups: 8, group_responses: 4}
optimizer: {lr: 1e-6}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_replace_values_and_the_saved_tree_loads_to_the_same(file, tmp_path):
    config = load(file, ["optimizer.lr=2e-5", "algorithm.normalizer=sequence", "rollout.stop_token_prefixes=['\\n']"])
    assert config.optimizer.lr == 2e-5 and config.algorithm.normalizer == "sequence"
    save(config, tmp_path / "again.yaml")
    assert load(tmp_path / "again.yaml") == config


def test_scientific_notation_without_a_dot_is_a_number(file):
    assert load(file).optimizer.lr == 1e-6


def test_all_problems_are_reported_together_with_key_value_and_nearest_name(file):
    overrides = ["optimizer.learning_rate=3", "algorithm.normalizer=tokens", "rollout.servers=0", "algorithm.group_responses=one"]
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    text = str(caught.value)
    assert "4 problems" in text
    assert "optimizer.learning_rate=3: unknown key" in text
    assert "algorithm.normalizer=tokens" in text and "Did you mean token?" in text
    assert "rollout.servers=0" in text and "algorithm.group_responses=one" in text


def test_unknown_keys_do_not_hide_combinations_that_cannot_work_nor_what_the_machine_lacks(file):
    with pytest.raises(ConfigError) as caught:
        load(file, ["eval.evry=3", "algorithm.group_responses=1"], lambda config: [f"device.count: asked by {config.name}"])
    text = str(caught.value)
    assert "3 problems" in text and "Did you mean every?" in text and "at least 2" in text and "device.count: asked by test" in text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("itterations=3", "Did you mean iterations?"),
        ("algorithm.group_responses=1", "at least 2"),
        ("algorithm.group_responses=65", "rollout.max_num_seqs=64"),
        ("parallel.ranks=3", "multiple of the data-parallel replicas=3"),
        ("eval.every=2", "needs data.eval"),
        ("data.eval.sums.responses=5 data.eval.sums.source=x eval.every=1", "eval.temperature=0 all of them are the same"),
        ("data.eval.sums.responses=99 data.eval.sums.source=x eval.every=1", "data.eval.sums.responses=99: the responses to a problem"),
        ("data.eval.sums.source=reasoning-gym:x eval.every=1", "data.eval.sums.size=null"),
        ("data.eval.sums.source=x data.eval.sums.sorce=x", "data.eval.sums.sorce=x: unknown key, allowed are"),
        ("data.eval.a/b.source=x", "data.eval.a/b"),
        ("data.eval.source=x", "data.eval.source=x"),
        ("eval.max_delay_s=2000", "parallel.deadline_s=1800.0: must exceed"),
        ("rewards.function=mth", "Did you mean math?"),
        ("rollout.source=replay", "replay:<run folder>"),
        ("data.train.source=reasoning-gym:chain_sum", "data.train.size"),
        ("parallel.deadline_s=10", "exceed every other deadline"),
        ("rollout.silence_s=1", "twice rollout.heartbeat_s"),
        ("optimizer.lr", "key.sub=value"),
        ("rollout.replay_order=random", "only rollout.source=replay:<run folder>"),
        ("rollout.source=onyl", "Did you mean only?"),
        ("algorithm.refill_limit=3", "algorithm.filter_zero_variance=refill"),
        ("algorithm.max_kl=0.1", "set algorithm.kl_coef above 0"),
        ("rollout.admission=longest", "Did you mean longest_first?"),
        ("parallel.tensor=2", "parallel.ranks=1: must be a multiple of parallel.pipeline x parallel.tensor=2"),
        ("run.max_restarts=2", "needs checkpoint.every of at least 1"),
        ("algorithm.advantage=reinforce+", "Did you mean reinforce++?"),
        ("algorithm.kl_in=reward", "set algorithm.kl_coef above 0"),
        ("algorithm.overlong_tokens=99", "rollout.max_tokens=16"),
        ("device.nodes=2", "rollout.max_restarts=3: the trainer cannot have a server of another node ended"),
    ],
)
def test_impossible_values_are_named(file, override, says):
    with pytest.raises(ConfigError) as caught:
        load(file, override.split())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["kl_coef=0.1", "kl_estimate=k1"], "algorithm.kl_estimate=k1: the gradient of k1 in the loss is zero on average"),
        (["kl_coef=0.1", "kl_in=reward", "mask_truncated=true"], "algorithm.mask_truncated=true: the KL of a response"),
        (["advantage=reinforce++", "kl_coef=0.1"], "algorithm.kl_in=loss: algorithm.advantage=reinforce++ divides"),
        (["advantage=reinforce++", "entropy_coef=0.1"], "algorithm.entropy_coef=0.1: algorithm.advantage=reinforce++ divides"),
        (["loss=reinforce", "updates_per_batch=2"], "algorithm.updates_per_batch=2: algorithm.loss=reinforce has no ratio"),
    ],
)
def test_choices_whose_gradient_would_be_wrong_are_refused(file, overrides, says):
    with pytest.raises(ConfigError) as caught:
        load(file, [f"algorithm.{override}" for override in overrides])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [("loss=reinforce", "schedule=one_step_off: algorithm.loss"), ("importance=token", "the ratio of one_step_off is to the servers'")],
)
def test_one_step_off_refuses_what_knows_no_ratio_or_corrects_twice(file, override, says):
    with pytest.raises(ConfigError) as caught:
        load(file, ["schedule=one_step_off", f"algorithm.{override}"])
    assert says in str(caught.value)


@pytest.mark.parametrize("other", ["parallel.accumulate=exact", "model.offload_reference=true"])
def test_what_fsdp_cannot_be_combined_with_is_named(file, other):
    with pytest.raises(ConfigError, match=f"parallel.data=fsdp: .*{other.split('=')[0]}="):
        load(file, ["parallel.data=fsdp", other])


def test_a_file_that_is_no_mapping_is_named(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(tmp_path / "list.yaml")


def test_the_tree_is_frozen(file):
    with pytest.raises(ValueError):
        load(file).optimizer.lr = 1  # type: ignore[misc]


def test_relative_paths_become_absolute_if_they_exist_beside_the_file(file, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    assert load(file).data.train.source == str(tmp_path / "rows.jsonl")


def test_a_prepared_data_set_is_named_by_its_name(file, tmp_path):
    data = load(file, ["data.train.source=gsm8k", "data.eval.easy.source=gsm8k", "data.eval.hard.source=aime24", "eval.every=1"]).data
    assert {key: part.source for key, part in data.sets.items()} == {
        "data.train": str(tmp_path / "data" / "gsm8k_train.jsonl"),
        "data.eval.easy": str(tmp_path / "data" / "gsm8k_test.jsonl"),
        "data.eval.hard": str(tmp_path / "data" / "aime24_test.jsonl"),
    }
    assert set(PREPARED) == KNOWN.keys()


def test_config_and_messages_import_without_torch_or_vllm():
    heavy = "{'torch', 'vllm', 'transformers'}"
    code = f"import sys, pasync.config, pasync.messages, pasync.placement, pasync.launch; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
