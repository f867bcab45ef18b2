"""Score a model on the held-out sets of a configuration, without training: `python -m pasync.evaluate RUN|CONFIG [key.sub=value ...]`.

    RUN     the final model of a run, as the run itself evaluated it
    CONFIG  a configuration file; `model.path` names the model

Prints one line of JSON, keys as in metrics.jsonl. Servers run where the configuration places them; no rank is started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import PromptStream
from pasync.errors import ConfigError
from pasync.evaluation import Evaluation
from pasync.launch import CANNOT_WORK, launch, placed, run_commands
from pasync.messages import ON_DISK
from pasync.model.causal_lm import load_tokenizer
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal
from pasync.rollout.producer import RolloutProducer
from pasync.supervisor import Command
from pasync.transport.channel import Keys

SCORES = "scores.json"


def evaluate(config: Config) -> dict[str, float]:
    """Start the servers, evaluate what they have loaded, stop them.

    Raises:
        SystemExit: the run failed, with its exit code; the console says why.
    """
    def commands(placement: Placement, run: Path) -> list[Command]:
        *servers, ranks = run_commands(config, placement, run)
        return [*servers, Command("evaluate", [sys.executable, "-m", "pasync.evaluate", "--ask", str(run)], ranks.env)]

    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run), "max_restarts": 0})})
        with contextlib.redirect_stdout(sys.stderr):
            code = launch(config, placed(config, dry_run=False), commands)
        if code:
            raise SystemExit(code)
        return json.loads((run / SCORES).read_text())  # type: ignore[no-any-return]


def ask(run: Path) -> None:
    """The trainer's side."""
    config, placement = load(run / "config.yaml"), Placement.load(run / "placement.json")
    held_out = PromptStream(config, load_tokenizer(Path(config.model.path))).held_out
    with RolloutProducer(config, placement.address, Keys.load(placement.keys)) as producer:
        producer.muster()
        producer.admit(ON_DISK)
        evaluation, began = Evaluation(config, producer, held_out), time.time()
        evaluation.start(ON_DISK)
        evaluation.wait(None)
        values = evaluation.finish(began)
    (run / SCORES).write_text(json.dumps({key: value for key, value in values.items() if key.startswith("eval/")}))


def chosen(target: Path, overrides: list[str]) -> Config:
    """The configuration to evaluate. Raises ConfigError if it cannot be, or has no held-out set."""
    if target.is_dir():
        if not (target / "model").is_dir():
            raise ConfigError(f"{target}: holds no final model; python -m pasync.export makes one of a checkpoint, for model.path=FOLDER")
        target, overrides = target / "config.yaml", [f"model.path={target.resolve() / 'model'}", *overrides]
    config = load(target, overrides)
    if not config.data.eval:
        raise ConfigError("data.eval=null: there is no held-out set to evaluate on")
    return config


def main(argv: list[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pasync.evaluate", description="Score a model on held-out sets.")
    parser.add_argument("target", type=Path, metavar="RUN|CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ask:
        die_with_parent()
        with report_fatal(options.target, "evaluate"):
            ask(options.target)
        return 0
    try:
        print(json.dumps(evaluate(chosen(options.target, options.overrides))))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return CANNOT_WORK
    return 0


if __name__ == "__main__":
    sys.exit(main())
