"""One TRL GRPOTrainer, step by step: `python -m benchmarks.trl_peer SPEC.json`, in the environment of `bash setup.sh trl`.

    stdin   a line: do one step (the end of the input: stop)
    stdout  a JSON line per step: seconds, of these generating, tokens of prompts and responses, mean reward, loss, gradient norm
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
out = os.fdopen(os.dup(1), "w")  # libraries print, too
os.dup2(2, 1)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # noqa: E402

from benchmarks.work import text_reward  # noqa: E402


class Measured(GRPOTrainer):  # type: ignore[misc]
    """Counts the tokens of each step, and how long they took to generate."""

    tokens, generate_s = 0, 0.0

    def _generate(self, prompts: Any) -> Any:
        began = time.perf_counter()
        generated = super()._generate(prompts)
        self.generate_s = time.perf_counter() - began
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        return batch


class OnCommand(TrainerCallback):
    """Begins a step when told to, and tells how it went."""

    began = 0.0
    trainer: Measured

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Waits for a line; the step includes generation, which TRL does inside the first forward pass."""
        if not sys.stdin.readline():
            os._exit(0)
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After every step."""
        if "reward" in (logs := more["logs"]):
            line = {"step_s": time.perf_counter() - self.began, "tokens": self.trainer.tokens, "generate_s": self.trainer.generate_s}
            line |= {"reward": logs["reward"], "loss": logs["loss"], "gradient_norm": logs["grad_norm"]}
            print(json.dumps(line), file=out, flush=True)


def warm_up(trainer: Measured, prompt: str) -> None:
    """Forward and backward of one micro-batch of prompts, and two new tokens."""
    batch = trainer.processing_class([prompt] * spec["micro_batch"], return_tensors="pt")
    trainer.model.generate(**batch, max_new_tokens=2)
    trainer.model(**batch, logits_to_keep=2).logits.sum().backward()
    trainer.model.zero_grad()


def main() -> None:
    """Entry of the process."""
    torch.set_num_threads(spec["threads"])
    rows = [json.loads(line) for line in Path(spec["rows"]).read_text().splitlines()]
    exact = spec["reward"] == "exact"

    def reward(completions: list[str], answer: list[str], **more: Any) -> list[float]:
        return [float(c.strip() == a) if exact else text_reward(c) for c, a in zip(completions, answer, strict=True)]

    on_command, size = OnCommand(), spec["groups"] * spec["responses"]
    config = GRPOConfig(
        output_dir=spec["scratch"], use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=spec["steps"],
        per_device_train_batch_size=spec["micro_batch"], gradient_accumulation_steps=size // spec["micro_batch"],
        num_generations=spec["responses"], max_completion_length=spec["response_tokens"], temperature=1.0, beta=spec["kl_coef"],
        loss_type="dapo", scale_rewards="group", num_iterations=1, learning_rate=spec["lr"], lr_scheduler_type="constant",
        adam_beta1=spec["betas"][0], adam_beta2=spec["betas"][1], adam_epsilon=spec["eps"], max_grad_norm=1.0, weight_decay=0.0,
        generation_kwargs={"min_new_tokens": spec["response_tokens"]} if spec["fixed_length"] else None, seed=spec["seed"],
        model_init_kwargs={"dtype": spec["dtype"]}, shuffle_dataset=True, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, mask_truncated_completions=False, use_bias_correction_kl=False,
    )  # fmt: skip
    on_command.trainer = Measured(
        model=spec["model"], reward_funcs=reward, args=config, callbacks=[on_command],
        train_dataset=Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
    )  # fmt: skip
    warm_up(on_command.trainer, rows[0]["question"])
    on_command.trainer.train()


if __name__ == "__main__":
    main()
