"""The model of any checkpoint of a run, in Hugging Face format: `python -m pasync.export RUN [--iteration N] [--to FOLDER]`.

    <run>/checkpoints/iteration-N --master weights, in the type that the ranks compute in--> <run>/model-N, for transformers and vLLM

Any layout may have written the checkpoint. Needs no devices, and no other process; a run that goes on is not disturbed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PreTrainedModel

from pasync import checksums
from pasync.checkpoint import OWN_FILES, write_model
from pasync.config import Config
from pasync.configfile import load
from pasync.errors import CheckpointError, ConfigError, PasyncError
from pasync.model.causal_lm import empty_model, load_tokenizer
from pasync.model.files import WeightFiles
from pasync.model.lora import merged


def export(run: Path, iteration: int | None = None, to: Path | None = None) -> Path:
    """Write the weights that a run had after `iteration` iterations; the newest checkpoint's by default.

    Args:
        run: the run folder.
        to: <run>/model-N by default.

    Returns:
        The folder, which appears complete or not at all.

    Raises:
        ConfigError: there is no such run or checkpoint; says which there are.
        CheckpointError: it is damaged.
    """
    config, chosen = load(run / "config.yaml"), _chosen(run, iteration)
    listed = checksums.read(chosen, "*.distcp", *OWN_FILES)
    if wrong := [name for name, digest in listed.items() if not checksums.is_intact(chosen / name, digest)]:
        raise CheckpointError(f"{chosen} is damaged: gone or not what was written: {', '.join(wrong)}")
    folder = Path(config.model.path)
    model = empty_model(config.model, folder)
    sizes = dcp.FileSystemReader(chosen).read_metadata().state_dict_metadata
    masters = {name: torch.empty(about.size) for name, about in sizes.items() if name.startswith("master.")}  # type: ignore[union-attr]
    dcp.load(masters, checkpoint_id=chosen, no_dist=True)
    weights = {name.removeprefix("master."): weight.to(model.dtype) for name, weight in masters.items()}
    if config.lora.rank:
        weights = _merged(weights, model, config)
    to = to or run / f"model-{int(chosen.name.removeprefix('iteration-'))}"
    write_model(to, weights, model.config, model.generation_config, load_tokenizer(folder))
    return to


def _merged(adapters: dict[str, Tensor], model: PreTrainedModel, config: Config) -> dict[str, Tensor]:
    """The starting weights with the adapters added."""
    with WeightFiles(Path(config.model.path)) as files:
        started = {name: files.part(name, None, 0, 1).to(model.dtype) for name, _ in model.named_parameters()}
        return {name: merged(name, weight, adapters, config.lora) for name, weight in started.items()}


def _chosen(run: Path, iteration: int | None) -> Path:
    there = sorted((run / "checkpoints").glob("iteration-?????"))
    wanted = [path for path in there if iteration in (None, int(path.name.removeprefix("iteration-")))]
    if not wanted:
        names = ", ".join(str(int(path.name.removeprefix("iteration-"))) for path in there) or "none"
        raise ConfigError(f"--iteration={iteration}: {run} has no checkpoint of it, there are {names}")
    return wanted[-1]


def main(argv: list[str] | None = None) -> int:
    """Entry of the command; 1 if it could not be done."""
    parser = argparse.ArgumentParser(prog="python -m pasync.export", description="Write the model of a checkpoint in Hugging Face format.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--iteration", type=int, help="of the checkpoint; by default the newest")
    parser.add_argument("--to", type=Path, help="folder to write; by default RUN/model-N")
    options = parser.parse_args(argv)
    try:
        print(export(options.run, options.iteration, options.to))
    except (PasyncError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
