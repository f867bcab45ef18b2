"""Rows come out plain and complete, or the config is told what is wrong."""

import json
from pathlib import Path

import datasets
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasync.data.sources import load_rows
from pasync.errors import ConfigError
from pasync.sections import DatasetConfig

ROWS = [{"question": "1+1=", "answer": 2, "level": 0.5}, {"question": "2+2=", "answer": 4, "level": 1.5}]

PLAIN = st.none() | st.booleans() | st.floats() | st.integers() | st.text()


def write(path: Path, text: str) -> DatasetConfig:
    path.write_bytes(text.encode())
    return DatasetConfig(source=str(path))


def test_reasoning_gym_generates_the_same_problems_from_the_same_seed() -> None:
    config = DatasetConfig(source="reasoning-gym:chain_sum", size=3, seed=7, options={"max_terms": 2})
    rows = load_rows("data.train", config)
    assert rows == load_rows("data.train", config) and len(rows) == 3
    assert isinstance(rows[0]["question"], str) and json.loads(str(rows[0]["metadata"]))["num_terms"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "reasoning-gym:chain_sun"}, "no task chain_sun. Did you mean chain_sum"),
        ({"options": {"max_term": 2}}, "Did you mean max_terms"),
        ({"options": {"max_terms": 0}}, "max_terms must be >= min_terms"),
        ({"options": {"max_terms": "many"}}, "data.train.options"),
        ({"prompt_column": "questoin"}, "there are question, answer, metadata. Did you mean question"),
        ({"source": "rows.csv"}, "unknown kind of source"),
        ({"source": "/nowhere/rows.jsonl"}, "no such file"),
    ],
)
def test_a_wrong_source_says_what_is_allowed(change: dict[str, object], message: str) -> None:
    config = DatasetConfig(source="reasoning-gym:chain_sum", size=2).model_copy(update=change)
    with pytest.raises(ConfigError, match=message):
        load_rows("data.train", config)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_same_rows_come_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path, data = tmp_path / f"rows.{kind}", datasets.Dataset.from_list(ROWS)
    {"jsonl": data.to_json, "parquet": data.to_parquet, "folder": data.save_to_disk}[kind](str(path))
    assert load_rows("data.train", DatasetConfig(source=str(path))) == ROWS
    assert load_rows("data.train", DatasetConfig(source=str(path), size=1)) == ROWS[:1]


def test_named_columns_become_question_and_answer(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", '{"problem": "p", "solution": "s", "answer": "other"}\n')
    rows = load_rows("data.train", config.model_copy(update={"prompt_column": "problem", "answer_column": "solution"}))
    assert rows == [{"problem": "p", "solution": "s", "answer": "s", "question": "p"}]


@pytest.mark.parametrize(("text", "message"), [("[{]", "is not JSON"), ('{"question": 1}', "holds dict, must be"), ("[1]", "an array")])
def test_a_json_file_must_be_an_array_of_rows(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows("data.train", write(tmp_path / "rows.json", text))


def test_only_the_newline_byte_ends_a_line(tmp_path: Path) -> None:
    text = '\ufeff{"question": "a\u2028b\u2029\x85\U0001f600", "answer": 1}\r\n\n{"question": "c", "answer": 2}'
    rows = load_rows("data.train", write(tmp_path / "a.jsonl", text))
    assert [r["question"] for r in rows] == ["a\u2028b\u2029\x85\U0001f600", "c"]


@settings(max_examples=50, deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_any_value_of_a_column_survives_the_wire(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps({"question": "q\ud800", "answer": value, "\udc00": value}) + "\n")
    (row,) = load_rows("data.train", DatasetConfig(source=str(path)))
    assert row["question"] == "q?"
    msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=dict[str, str | int | float | bool | None])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": 1, "answer": 2}\n{"question": \n', "line 2 is not JSON"),
        ("[1]\n", "line 1 holds list"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("\n", "has no rows"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows("data.train", write(tmp_path / "a.jsonl", text))


def test_a_folder_or_parquet_of_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not written by datasets.save_to_disk"):
        load_rows("data.eval", DatasetConfig(source=str(tmp_path)))
    with pytest.raises(ConfigError, match="not a Parquet file"):
        load_rows("data.eval", write(tmp_path / "a.parquet", "no"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="holds the splits train"):
        load_rows("data.eval", DatasetConfig(source=str(tmp_path / "splits")))
