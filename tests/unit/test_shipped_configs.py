import json
from pathlib import Path

import pytest

from pasync import launch
from pasync.configfile import load
from pasync.data.prepare import KNOWN as DATASETS
from pasync.data.prepare import TEMPLATE
from pasync.data.tasks import addition, sorting, write
from pasync.geometry import PUBLISHED, read_geometry
from pasync.model.prepare import KNOWN, problems
from pasync.sections import DatasetConfig

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
DEVICE_FILES = [path for path in FILES if not path.stem.endswith("_cpu")]

# What the geometry and the checks read of the published config.json files, and the number of weights in the published checkpoints.
CHECKPOINTS = {
    "Qwen2.5-7B-Instruct": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 32768},
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "vocab_size": 151936, "tie_word_embeddings": False,
         "max_position_embeddings": 40960},
        8_190_735_360,
    ),
    "DeepSeek-R1-Distill-Qwen-32B": (
        {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
         "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072},
        32_763_876_352,
    ),
}  # fmt: skip


def checkpoint(name: str, folder: Path) -> Path:
    """A folder of that name with the published config.json, and as if its weights were there."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(CHECKPOINTS[name][0]))
    (folder / name / "model.safetensors.index.json").touch()
    return folder / name


def datasets(path: Path) -> list[DatasetConfig]:
    return list(load(path).data.sets.values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_is_named_after_its_file(path):
    assert load(path).name.startswith(path.stem.split("_")[0])


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.endswith("_cpu")], ids=lambda path: path.stem)
def test_a_cpu_config_needs_nothing_that_is_not_shipped(path):
    config = load(path)
    assert config.model.path in KNOWN
    assert config.rollout.kv_cache_bytes
    assert all(part.source.startswith("reasoning-gym:") or Path(part.source).is_file() for part in datasets(path))
    assert config.rollout.servers == config.parallel.ranks == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_can_be_planned_for_before_it_is_there(name, tmp_path):
    assert read_geometry(checkpoint(name, tmp_path)) == PUBLISHED[name]
    assert PUBLISHED[name].num_parameters == CHECKPOINTS[name][1]


@pytest.mark.parametrize("kind", ["npu", "cuda"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dry_run_on_eight_devices_needs_none(path, kind, capsys):
    assert launch.main([str(path), "--dry-run", f"device.kind={kind}", "device.count=8"]) == 0
    shown = capsys.readouterr().out
    assert f"\ndevices ({kind})\n" in shown and "  server-0 " in shown
    if path in DEVICE_FILES:
        assert "\nmemory of each process" in shown and "does not fit" not in shown
        assert f"{'60.9' if kind == 'npu' else '79.0'} GiB  ASSUMED: no {kind} device can be asked here" in shown


@pytest.mark.parametrize("path", DEVICE_FILES, ids=lambda path: path.stem)
def test_a_device_config_fits_its_model(path, tmp_path):
    model = checkpoint(Path(load(path).model.path).name, tmp_path)
    assert problems(load(path, [f"model.path={model}"])) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_on_published_data_uses_files_and_template_of_the_command_that_makes_them(path):
    names = [Path(part.source).stem for part in datasets(path)]
    published = [name for name in names if name.rpartition("_")[0] in DATASETS]
    assert all(name.rpartition("_")[2] in DATASETS[name.rpartition("_")[0]].files for name in published)
    assert not published or load(path).data.template == TEMPLATE
    assert bool(published) is not path.stem.endswith("_cpu")


def test_shipped_data_is_what_the_code_makes(tmp_path):
    write(tmp_path)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {name: (CONFIGS / "data" / name).read_text() for name in made} and len(made) == 4


def test_no_held_out_addition_is_a_training_row_or_its_mirror_or_an_example():
    pairs = [{frozenset(row["question"].rstrip("=").split("+")) for row in part} for part in addition()]
    examples = {frozenset("34"), frozenset("85"), frozenset("20")}
    assert not pairs[0] & pairs[1] and not examples & (pairs[0] | pairs[1])
    assert len(pairs[0] | pairs[1] | examples) == 55  # every unordered pair of digits


def test_held_out_additions_are_a_third_and_span_all_sums_and_digits():
    train, held_out = addition()
    assert 0.3 < len(held_out) / (len(train) + len(held_out)) < 0.37
    sums = {int(row["answer"]) for row in held_out}
    assert {0, 18} <= sums and len(sums) >= 14
    assert {c for row in held_out for c in row["question"] if c.isdigit()} == set("0123456789")


def test_additions_are_right():
    assert all(sum(map(int, row["question"].rstrip("=").split("+"))) == int(row["answer"]) for part in addition() for row in part)


def test_no_held_out_sorting_row_has_the_answer_of_a_training_row():
    train, held_out = sorting()
    assert (len(train), len(held_out)) == (1000, 200)
    answers = [row["answer"] for row in train + held_out]
    assert len(set(answers)) == 1200
    assert all("".join(sorted(row["question"].rstrip(">"))) == row["answer"] for row in train + held_out)


def test_held_out_sorting_rows_are_as_long_as_training_rows():
    lengths = [sum(len(row["answer"]) for row in part) / len(part) for part in sorting()]
    assert abs(lengths[0] - lengths[1]) < 0.1
