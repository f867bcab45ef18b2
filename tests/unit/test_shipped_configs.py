from pathlib import Path

import pytest

from pasync.config import DatasetConfig
from pasync.configfile import load
from pasync.data.prepare import KNOWN as PUBLISHED
from pasync.data.prepare import TEMPLATE
from pasync.data.tasks import addition, sorting, write
from pasync.model.prepare import KNOWN

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def datasets(path: Path) -> list[DatasetConfig]:
    data = load(path).data
    return [part for part in (data.train, data.eval) if part]


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_on_published_data_uses_files_and_template_of_the_command_that_makes_them(path):
    names = [Path(part.source).stem for part in datasets(path)]
    published = [name for name in names if name.rpartition("_")[0] in PUBLISHED]
    assert all(name.rpartition("_")[2] in PUBLISHED[name.rpartition("_")[0]].files for name in published)
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
