"""Does every choice learn? `python -m benchmarks.algorithms [--seeds N ..] [--losses NAME ..] [key=value ..]`: a JSON line per case.

The trainer, prompts, reward and model of `configs/tiny_cpu.yaml` in a few short iterations, in one process: responses are sampled by
transformers' `generate` instead of a server, because 27 cases and three seeds should take minutes. Accuracies are the exact chance that
a response sampled at temperature 1 is right, mean over the held-out rows: without any noise of sampling. On-policy all losses have one
gradient, so those with a ratio do two updates per batch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt, PromptStream
from pasync.data.tasks import sorting
from pasync.messages import Group, Response, float_bytes, int_bytes
from pasync.model.causal_lm import load_tokenizer
from pasync.model.prepare import prepare
from pasync.model.tiny import sampled_accuracy
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.rewards.functions import exact
from pasync.sections import Advantage, Normalizer, PolicyLoss
from pasync.trainer import Trainer

TINY = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"
RANGES = {"gspo": ("3e-4", "4e-4")}
"""Of the clipping, where 0.2 is not what the paper uses."""
SHORT = ("iterations=12", "algorithm.batch_groups=32", "optimizer.lr=1e-4")
Case = dict[str, str]


def cases() -> Iterator[Case]:
    """The overrides of each: every advantage with ppo, and every loss with grpo."""
    for normalizer in get_args(Normalizer):
        for advantage in get_args(Advantage):
            yield {"advantage": advantage, "loss": "ppo", "normalizer": normalizer, "updates_per_batch": "1"}
        for loss in get_args(PolicyLoss):
            low, high = RANGES.get(loss, ("0.2", "0.2"))
            updates = "1" if loss == "reinforce" else "2"
            case = {"advantage": "grpo", "loss": loss, "normalizer": normalizer, "updates_per_batch": updates}
            yield case | {"clip_low": low, "clip_high": high}


class Sampler:
    """Transformers' model with the trainer's weights."""

    def __init__(self, config: Config) -> None:
        self.config, self.tokenizer = config, load_tokenizer(Path(config.model.path))
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)

    def take(self, trainer: Trainer) -> None:
        """The trainer's weights of now."""
        self.model.load_state_dict(dict(trainer.models.weights()), strict=False)  # a tied head is not listed

    @torch.no_grad()
    def groups(self, prompts: list[Prompt], version: int) -> list[Group]:
        """One of each prompt, scored."""
        count, longest = self.config.algorithm.group_responses, max(len(prompt.ids) for prompt in prompts)
        pads = [longest - len(prompt.ids) for prompt in prompts]
        ids = torch.tensor([[0] * pad + list(prompt.ids) for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        out = self.model.generate(
            ids.repeat_interleave(count, 0), attention_mask=mask.repeat_interleave(count, 0), max_new_tokens=self.config.rollout.max_tokens,
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[:, longest:]  # [B K, R]
        logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        made = iter(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return [
            Group(version, i, int_bytes(prompt.ids), [self._scored(prompt, *next(made)) for _ in range(count)], 0.0, 0.0)
            for i, prompt in enumerate(prompts)
        ]

    def _scored(self, prompt: Prompt, ids: list[int], logprobs: list[float]) -> Response:
        ended = self.tokenizer.eos_token_id in ids
        length = ids.index(self.tokenizer.eos_token_id) + 1 if ended else len(ids)
        text = str(self.tokenizer.decode(ids[: length - 1]))
        reward = exact(prompt.text, text, ids[:length], dict(prompt.sample)) if ended else 0.0
        return Response(int_bytes(ids[:length]), float_bytes(logprobs[:length]), text, ended, reward)


def measure(config: Config, case: Case, ranks: Ranks) -> dict[str, object]:
    """Train from the starting weights and give the JSON line."""
    began = time.perf_counter()
    trainer, sampler = Trainer(config, Path(config.model.path), ranks), Sampler(config)
    prompts, clipped = PromptStream(config, sampler.tokenizer), 0.0
    torch.manual_seed(config.seed)
    start = sampled_accuracy(sampler.model, sorting()[1])
    for t in range(config.iterations):
        trainer.forward_backward([sampler.groups(prompts.batch(t), t)])
        clipped += trainer.optimizer_step(t)["policy/clipped_frac"] / config.iterations
        sampler.take(trainer)
    end = sampled_accuracy(sampler.model, sorting()[1])
    seconds = time.perf_counter() - began
    return case | {"seed": config.seed, "iterations": config.iterations, "start": start, "end": end, "clipped": clipped, "seconds": seconds}


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=get_args(PolicyLoss))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    common = [f"model.path={prepare('tiny-sort')}", *SHORT, *options.overrides]
    with join_ranks("cpu", deadline_s=60) as ranks:
        for seed in options.seeds:
            for case in (case for case in cases() if case["loss"] in options.losses):
                overrides = [f"algorithm.{key}={value}" for key, value in case.items()]
                print(json.dumps(measure(load(TINY, [*common, f"seed={seed}", *overrides]), case, ranks)), flush=True)


if __name__ == "__main__":
    main()
