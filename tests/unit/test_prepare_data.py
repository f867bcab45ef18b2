"""Published data sets, small ones in their real layouts, become rows that a run reads and `math` compares."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from pasync.config import Config
from pasync.data.prepare import KNOWN, TEMPLATE, main, prepare
from pasync.data.prompts import PromptStream
from pasync.data.sources import load_rows
from pasync.errors import ConfigError
from pasync.model.tiny import byte_tokenizer
from pasync.rewards.functions import math_reward
from pasync.sections import DatasetConfig

ROOT = Path(__file__).parents[2]
WORKED = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
ROWS = {
    "gsm8k": [{"question": "How many clips\u2028in all?", "answer": WORKED}, {"question": "And {half}?", "answer": "Half.\n#### -5"}],
    "deepscaler": [{"problem": "What is $x$?", "answer": "-\\frac{2}{3}", "solution": "Let $x$ be \\ldots"}],
    "aime24": [
        {"id": 60, "problem": "Find $s$.", "solution": "...", "answer": "025", "url": "elsewhere", "year": "2024"},
        {"id": 61, "problem": "Find $t$.", "solution": "...", "answer": "204", "url": "elsewhere", "year": "2024"},
    ],
    "math500": [
        {"problem": "Convert.", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus", "level": 2,
         "unique_id": "test/precalculus/807.json"},
    ],
}  # fmt: skip
RIGHT = {"gsm8k": "\\boxed{1072}", "deepscaler": "\\boxed{-2/3}", "aime24": "so it is 25.", "math500": "\\boxed{(3, \\pi/2)}"}


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("[" + ",".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines))
    return path


def published(name: str, folder: Path) -> Path:
    """The files of a data set as they lie on the hub."""
    for file in KNOWN[name].files.values():
        write(folder / file, ROWS[name])
    return folder


@pytest.mark.parametrize("name", KNOWN)
def test_published_files_become_prompts_whose_right_answers_score(tmp_path, name):
    counts = prepare(name, published(name, tmp_path / "hub"), tmp_path / "data")
    assert counts == {f"{name}_{part}.jsonl": len(ROWS[name]) for part in KNOWN[name].files}
    source = {"source": str(tmp_path / "data" / next(iter(counts)))}
    config = Config.model_validate({
        "name": "t", "iterations": 1, "model": {"path": "m"}, "optimizer": {"lr": 1}, "rollout": {"max_tokens": 1},
        "algorithm": {"batch_groups": len(ROWS[name]), "group_responses": 2},
        "data": {"train": source, "template": TEMPLATE, "chat": False},
    })  # fmt: skip
    prompts = sorted(PromptStream(config, byte_tokenizer()).batch(0), key=lambda prompt: prompt.index)
    question, answer = ROWS[name][0][KNOWN[name].question], ROWS[name][0]["answer"]
    assert prompts[0].text == f"{question}\nReason step by step and put the final answer into \\boxed{{}}."
    assert prompts[0].sample == {"question": question, "answer": answer}
    assert math_reward("", RIGHT[name], [], prompts[0].sample) == 1 and math_reward("", "\\boxed{7}", [], prompts[0].sample) == 0


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_same_rows_come_from_every_kind_of_file(tmp_path, name, suffix):
    prepare(name, published(name, tmp_path / "hub"), tmp_path / "a")
    for file in KNOWN[name].files.values():
        place = write(tmp_path / "mine" / f"{Path(file).name.split('-')[0].split('.')[0]}.{suffix}", ROWS[name])
    prepare(name, place if len(KNOWN[name].files) == 1 else place.parent, tmp_path / "b")
    for part in KNOWN[name].files:
        assert (tmp_path / "a" / f"{name}_{part}.jsonl").read_bytes() == (tmp_path / "b" / f"{name}_{part}.jsonl").read_bytes()


def test_the_manifest_has_the_checksums_of_what_was_read_and_written_and_the_same_input_gives_the_same_bytes(tmp_path):
    hub = published("gsm8k", tmp_path / "hub")
    for to in ("a", "b"):
        prepare("gsm8k", hub, tmp_path / to)
    files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()} and len(files) == 3
    manifest = json.loads(files["gsm8k.json"])
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest["written"]["gsm8k_test.jsonl"] == {"sha256": sums["gsm8k_test.jsonl"], "rows": 2, "left_out": 0}
    read = "main/train-00000-of-00001.parquet"
    assert manifest["read"][read] == hashlib.sha256((hub / read).read_bytes()).hexdigest()
    assert manifest["repository"] == "openai/gsm8k" and manifest["template"] == TEMPLATE


def test_rows_without_a_needed_column_are_refused_by_its_name_and_nothing_is_written(tmp_path):
    write(tmp_path / "hub" / "train.jsonl", ROWS["gsm8k"])
    write(tmp_path / "hub" / "test.jsonl", [{"question": "q", "anwser": "1"}])
    with pytest.raises(ConfigError, match=r"answer_column=answer: no such column, there are question, anwser. Did you mean anwser"):
        prepare("gsm8k", tmp_path / "hub", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_rows_that_math_could_not_score_are_left_out_and_counted(tmp_path):
    bad = [{"problem": "p", "answer": answer} for answer in (None, " ", "#### ", "1" * 401)] + [{"problem": "", "answer": "1"}]
    place = write(tmp_path / "hub" / "deepscaler.json", [*bad, *ROWS["deepscaler"]])
    assert prepare("deepscaler", place, tmp_path) == {"deepscaler_train.jsonl": 1}
    written = json.loads((tmp_path / "deepscaler.json").read_text())["written"]
    assert written["deepscaler_train.jsonl"]["left_out"] == len(bad)


def test_files_from_the_hub_are_read_like_a_users_own(tmp_path, monkeypatch):
    hub = published("aime24", tmp_path / "hub")
    asked = []

    def download(repository: str, file: str, *, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        return str(hub / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    prepare("aime24", None, tmp_path / "data")
    assert asked == [("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", "dataset")]
    rows = load_rows("data.eval", DatasetConfig(source=str(tmp_path / "data" / "aime24_test.jsonl")))
    assert [row["answer"] for row in rows] == ["025", "204"]


@pytest.mark.parametrize("name", KNOWN)
def test_without_the_hub_every_file_and_its_place_are_named_and_following_that_works(tmp_path, name):
    command = [sys.executable, "-m", "pasync.data.prepare", name, "--to", "out"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    offline = subprocess.run(command, capture_output=True, text=True, timeout=50, env=env, cwd=tmp_path)
    assert offline.returncode == 1 and offline.stdout == ""
    first, *places, last = offline.stderr.splitlines()
    assert first.startswith(f"{name}: {KNOWN[name].repository} cannot be fetched from the hub")
    assert [place.strip() for place in places] == [f"out/{name}/{file}" for file in KNOWN[name].files.values()]
    for place in places:
        write(tmp_path / place.strip(), ROWS[name])
    advised = last.split("pasync.data.prepare ")[1].split()
    assert main([advised[0], "--from", str(tmp_path / advised[2]), "--to", str(tmp_path / "out")]) == 0


def test_a_folder_without_the_files_is_told_what_they_are_called(tmp_path, capsys):
    assert main(["gsm8k", "--from", str(tmp_path), "--to", str(tmp_path)]) == 1
    names = "main/train-00000-of-00001.parquet, train-00000-of-00001.parquet, train.jsonl, train.json, train.parquet"
    assert f"gsm8k: {tmp_path} holds none of {names}" in capsys.readouterr().err
