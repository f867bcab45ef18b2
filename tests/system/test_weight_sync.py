"""Trained weights reach a real vLLM server: tied and untied heads, three families, two types; and missing ones are noticed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from every_layout import LAYOUTS, TEXTS
from harness import ROOT, free_port, gone_within
from transformers import AutoModelForCausalLM, AutoTokenizer

from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load, save
from pasync.data.prompts import Prompt
from pasync.errors import WeightSyncError
from pasync.messages import Group, Sampling, ints
from pasync.model.prepare import prepare
from pasync.model.tiny import random_model
from pasync.parallel.ranks import join_ranks
from pasync.placement import Placement
from pasync.processes import kill_run
from pasync.rollout.producer import RolloutProducer
from pasync.trainer import Trainer
from pasync.transport.weights import WeightSender

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PROMPT = Prompt(0, tuple(range(20, 60)), "", {"answer": ""})
ENDS = list(range(60, 70))
"""End tokens that generation_config.json names."""


def tiny_config(run: Path, model: Path, dtype: str, batch_groups: int = 1) -> Config:
    run.mkdir()
    (run / "rows.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (run / "source.yaml").write_text(
        f"{{name: sync, iterations: 1, model: {{path: {model}, dtype: {dtype}}}, "
        "data: {train: {source: rows.jsonl}, max_prompt_tokens: 64}, "
        "rollout: {max_tokens: 24, max_num_seqs: 8, kv_cache_bytes: 67108864}, rewards: {function: exact}, "
        f"algorithm: {{batch_groups: {batch_groups}, group_responses: 8}}, optimizer: {{lr: 1e-3}}, sync: {{bucket_bytes: 65536}}}}"
    )
    config = load(run / "source.yaml")
    save(config, run / "config.yaml")
    return config


@contextmanager
def server(run: Path, address: str) -> Iterator[None]:
    """A real `pasync.serve` process on core 0."""
    (run / "logs").mkdir()
    Placement(kind="cpu", address=address, servers=[[0]], ranks=[[0]]).save(run / "placement.json")
    env = os.environ | devices.process_environment("cpu", [0], "server") | {"PYTHONPATH": str(ROOT), "PASYNC_RUN_ID": str(run)}
    with (run / "logs" / "server-0.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "pasync.serve", str(run), "0"], env=env, stdout=log, stderr=log)
    try:
        yield
        assert process.wait(20) == 0
    finally:
        kill_run(str(run))  # as the launcher does: an engine may outlive its server
        assert gone_within(run, 10)


@contextmanager
def connected(run: Path, config: Config) -> Iterator[tuple[Trainer, RolloutProducer, WeightSender]]:
    """A trainer of one rank, a server, and the weight transfer between them."""
    address = f"tcp://127.0.0.1:{free_port()}"
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with server(run, address), join_ranks("cpu", deadline_s=60) as ranks, RolloutProducer(config, address) as producer:
        trainer = Trainer(config, Path(config.model.path), ranks)
        producer.muster()
        yield trainer, producer, WeightSender(config, producer, trainer.models.shapes, "cpu")


def perturb(trainer: Trainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in trainer.models.policy.parameters():
            p += torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1 * p.float().std().nan_to_num(0.1)


def sampled_gap(trainer: Trainer, producer: RolloutProducer, version: int) -> float:
    """Mean |trainer - server| log-prob over a freshly sampled group."""
    producer.admit(version)
    producer.submit([PROMPT], version, Sampling(8, 1.0, 24))
    group = producer.next_group(version)
    assert isinstance(group, Group)
    gaps = []
    for response in group.responses:
        ids = [*ints(group.prompt_ids).tolist(), *response.token_ids.tolist()]
        ours = trainer.sequence_logprobs(ids)[len(PROMPT.ids) - 1 :]
        gaps.append((ours - torch.tensor(response.token_logprobs)).abs().mean().item())
        if response.ended:
            assert not set(response.token_ids[:-1].tolist()) & set(ENDS)
        else:
            assert len(response.token_ids) == 24 and not set(response.token_ids.tolist()) & set(ENDS)
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "tolerance"),
    [
        ("qwen2", False, "float32", 1e-4),
        ("qwen3", True, "float32", 1e-4),
        ("llama", True, "bfloat16", 0.08),
    ],
)
def test_synced_weights_sample_like_the_trainer_and_unsynced_ones_are_noticed(tmp_path, family, tied, dtype, tolerance):
    model = tmp_path / "model"
    random_model(model, family, tied, seed=3)
    # Sampling values that users did not ask for: if they leaked in, the sampled log-probs would not be the trainer's.
    leaking = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0}
    (model / "generation_config.json").write_text(json.dumps(leaking | {"eos_token_id": ENDS}))
    config = tiny_config(tmp_path / "run", model, dtype)
    ids = list(PROMPT.ids)
    with connected(tmp_path / "run", config) as (trainer, producer, sender):
        for version in range(3):
            if version:
                perturb(trainer, version)
            sender.publish(trainer.models.weights(), version)
            assert sender.probe(ids, trainer.sequence_logprobs(ids), version) < tolerance
            assert sampled_gap(trainer, producer, version) < tolerance
        perturb(trainer, 9)  # changed here and not sent
        with pytest.raises(WeightSyncError, match="do not compute with the trainer's weights"):
            sender.probe(ids, trainer.sequence_logprobs(ids), 2)


def test_greedy_tokens_and_log_probs_after_a_sync_from_any_layout_are_those_of_the_exported_model(tmp_path):
    run, address, model = tmp_path / "run", f"tcp://127.0.0.1:{free_port()}", prepare("tiny-sort")
    tiny_config(run, model, "float32", batch_groups=8)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
    command = [*torchrun, str(Path(__file__).with_name("every_layout.py")), str(run), address, str(model)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PASYNC_RUN_ID": str(run)}
    with server(run, address):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
    tokenizer, first = AutoTokenizer.from_pretrained(model), dict[str, torch.Tensor]()
    for i, layout in enumerate(LAYOUTS):
        said = json.loads((run / f"layout-{i}.json").read_text())
        exported = AutoModelForCausalLM.from_pretrained(run / f"layout-{i}" / "model")
        first = first or exported.state_dict()
        assert all((w - first[name]).norm() <= 1e-5 * first[name].norm() for name, w in exported.state_dict().items()), layout
        for text, greedy, (sampled, logprobs) in zip(TEXTS, said["greedy"], said["sampled"], strict=True):
            ids = tokenizer(text, return_tensors="pt").input_ids
            ours = exported.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            assert ours.tolist() == greedy, (layout, text)
            whole = torch.cat([ids, torch.tensor([sampled])], 1)
            expected = exported(whole).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
            assert (expected - torch.tensor(logprobs)).abs().max() < 1e-4, (layout, text)
