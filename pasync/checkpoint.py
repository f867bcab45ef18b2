"""Resumable checkpoints and the exported model.

    <run>/checkpoints/iteration-00010/rank-0-of-2.safetensors   that rank's slice of master weights and AdamW moments, float32
                                      rank-1-of-2.safetensors
                                      state.json                iteration; written before the folder gets its name
    <run>/model/                                                Hugging Face format, for transformers and vLLM

A folder appears under its name only when complete. The slices of all ranks in order are the whole flat vector, so a run may continue
on another number of ranks. Data order and schedule are functions of (seed, iteration) and need no state.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from pasync.config import CheckpointConfig, Config
from pasync.errors import TrainingError
from pasync.trainer import Trainer


def due(config: Config, iteration: int) -> bool:
    """Whether to save after this iteration: every n-th and the last, so that a finished run can be continued too."""
    every, done = config.checkpoint.every, iteration + 1
    return bool(every) and (done % every == 0 or done == config.iterations)


def save(trainer: Trainer, run: Path, iteration: int, config: CheckpointConfig) -> None:
    """Write what is needed to continue with `iteration` next, then delete the oldest beyond `config.keep`. A collective."""
    ranks, folder = trainer.ranks, run / "checkpoints" / f"iteration-{iteration:05d}"
    partial = folder.with_suffix(".partial")
    ranks.on_first(lambda: _empty_folder(partial))
    slices = {name: t.cpu().contiguous() for name, t in trainer.optimizer.state().items()}
    save_file(slices, partial / f"rank-{ranks.rank}-of-{ranks.size}.safetensors")
    dist.barrier()
    if ranks.is_first:
        state = {"iteration": iteration, "ranks": ranks.size, "parameters": trainer.optimizer.num_parameters}
        (partial / "state.json").write_text(json.dumps(state))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in _complete(run)[: -config.keep]:
            shutil.rmtree(old)


def resume(trainer: Trainer, run: Path) -> int:
    """Load the newest checkpoint of the run folder, if there is one. A collective.

    Returns:
        The iteration to do next; 0 without a checkpoint.

    Raises:
        TrainingError: on all ranks, if the checkpoint is of another model.
    """
    chosen = trainer.ranks.from_first(lambda: b"".join(str(p).encode() for p in _complete(run)[-1:])).decode()
    if not chosen:
        return 0
    state = json.loads((Path(chosen) / "state.json").read_text())
    if state["parameters"] != trainer.optimizer.num_parameters:
        raise TrainingError(f"{chosen} holds {state['parameters']} parameters, the model has {trainer.optimizer.num_parameters}")
    n = state["ranks"]
    trainer.optimizer.load_state([load_file(Path(chosen) / f"rank-{r}-of-{n}.safetensors") for r in range(n)])
    return state["iteration"]


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy in Hugging Face format, complete or not at all. Runs on rank 0."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    trainer.model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _complete(run: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    found = (run / "checkpoints").glob("iteration-*")
    return sorted(p for p in found if re.fullmatch(r"iteration-\d{5,}", p.name) and (p / "state.json").exists())
