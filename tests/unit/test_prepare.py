import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pasync.errors import ConfigError
from pasync.model import prepare, tiny

TEXTS = ["5312>", "  two  spaces ", "line\n\nbreaks\r\n\ttab", "0123456789", "emoji \U0001f600 and \u00e9\u4e16", "<|im_end|> inside"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_random_model_loads_as_saved(tmp_path, family, tied):
    tiny.random_model(tmp_path, family, tied, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family and model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.model.layers[0].self_attn.head_dim == 32 and model.config.vocab_size % 8 == 0
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert all(weight.std() > 0 for weight in model.parameters())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_saved_tokenizer_returns_every_text_and_adds_nothing(tmp_path, family, text):
    tiny.random_model(tmp_path, family, tied=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<|im_end|>", "!").encode())


def test_the_saved_tokenizer_has_a_chat_template(tmp_path):
    tiny.random_model(tmp_path, "qwen2", tied=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_seed_fixes_a_random_model_and_leaves_the_global_state_alone(tmp_path):
    before = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny.random_model(tmp_path / name, "llama", tied=True, seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_sampled_accuracy_is_the_share_that_sampling_gets_right(tmp_path):
    tiny.random_model(tmp_path, "qwen2", tied=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rows = [{"question": "21>", "answer": "12"}, {"question": "7654>", "answer": "4567"}]
    one_by_one = [tiny.answer_logprobs(model, [row]) for row in rows]
    assert torch.allclose(tiny.answer_logprobs(model, rows), torch.cat(one_by_one), atol=1e-5)
    tokenizer, row = tiny.byte_tokenizer(), rows[0]
    ids = tokenizer(row["question"] + row["answer"] + tiny.END, return_tensors="pt")["input_ids"]
    logp = model(ids).logits.log_softmax(-1)[0, [2, 3, 4], ids[0, 3:]].sum()  # "1", "2" and the end token
    assert torch.allclose(one_by_one[0][0], logp, atol=1e-5)


def test_a_folder_of_ones_own_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert prepare.folder(str(tmp_path)) == tmp_path == prepare.prepare(str(tmp_path))


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path=tiny-srot: .* Did you mean tiny-sort\?"):
        prepare.folder("tiny-srot")
    with pytest.raises(ConfigError, match=r"config\.json"):
        prepare.prepare(str(tmp_path))


def test_a_known_model_is_found_once_it_is_made(cache):
    assert prepare.cached("tiny-sort") is None
    with pytest.raises(ConfigError, match=r"python -m pasync\.model\.prepare tiny-sort"):
        prepare.folder("tiny-sort")
    (cache / "tiny-sort").mkdir(parents=True)
    (cache / "tiny-sort" / "config.json").write_text("{}")
    assert prepare.folder("tiny-sort") == prepare.cached("tiny-sort") == prepare.prepare("tiny-sort") == cache / "tiny-sort"


def test_a_model_appears_complete_or_not_at_all(cache, monkeypatch):
    def interrupted(into: Path) -> None:
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    def made(into: Path) -> None:
        tiny.random_model(into, "qwen2", tied=True)

    monkeypatch.setattr(tiny, "sort_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare("tiny-sort")
    assert prepare.cached("tiny-sort") is None
    monkeypatch.setattr(tiny, "sort_model", made)
    assert prepare.prepare("tiny-sort") == cache / "tiny-sort"
    assert not list(cache.glob("*.unfinished"))


def test_two_processes_that_ask_at_once_make_one_model(cache):
    code = (
        "import time; from pasync.model import prepare\n"
        "def build(name):\n"
        "    place = prepare._models() / name\n"
        "    place.mkdir(); time.sleep(0.3); (place / 'config.json').write_text('{}'); print('made')\n"
        "    return place\n"
        "prepare._build = build; prepare.prepare('tiny-sort')"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=20)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "".join(outputs).count("made") == 1


def test_importing_prepare_is_cheap():
    code = "import sys, pasync.model.prepare; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
