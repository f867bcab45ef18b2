"""End to end against TRL's GRPOTrainer: `python -m benchmarks.against_trl [--case short|long|curve] [--kl]`, one JSON line.

    TRL      one process on both cores, transformers' generate, micro-batches of K responses; does a step when told to
    pasync   a vLLM server on one core, a rank on the other; runs of a few iterations

The same weights, prompts, K, response length (every response is sampled to the end), type and reward; no gradient checkpointing. Runs
of pasync and steps of TRL alternate; what is compared are medians, without the first step of each. Memory is what all processes hold
together at most (PSS).

`curve` compares what is learned instead: rewards of ten steps on `tiny-sort` with the same learning rate, normaliser (tokens), advantage
(by the group's standard deviation) and optimizer, over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.work import END_UNUSED
from pasync.model import prepare
from pasync.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What both do."""

    model: str
    prompt_tokens: int
    response_tokens: int
    groups: int
    responses: int
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fixed_length: bool = True


CASES = {
    "short": Case("smollm2-135m-instruct", 60, 64, groups=8, responses=8),
    "long": Case("smollm2-135m-instruct", 1024, 64, groups=2, responses=16),
    "curve": Case("tiny-sort", 8, 10, groups=64, responses=8, lr=3e-4, betas=(0.9, 0.99), eps=1e-6, fixed_length=False),
}


def model_folder(case: Case, folder: Path) -> Path:
    """The case's model; of fixed length: a copy whose end token is one that is never sampled."""
    prepared = Path(prepare.prepare(case.model))
    if not case.fixed_length:
        return prepared
    copy = shutil.copytree(prepared, folder / "model")
    for name, key, value in (
        ("config.json", "eos_token_id", END_UNUSED[0]),
        ("generation_config.json", "eos_token_id", END_UNUSED[0]),
        ("tokenizer_config.json", "eos_token", END_UNUSED[1]),
    ):
        path = copy / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return copy


def write_rows(case: Case, folder: Path) -> Path:
    """Prompts, as many tokens long as the case says; for `curve` those of the sorting task."""
    path = folder / "rows.jsonl"
    if not case.fixed_length:
        shutil.copyfile(ROOT / "configs" / "data" / "sort_train.jsonl", path)
        return path
    word = " the"  # one token
    rows = [{"question": str(i % 10) + word * (case.prompt_tokens - 1), "answer": ""} for i in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Peer:
    """A TRL process."""

    def __init__(self, case: Case, folder: Path, options: argparse.Namespace, seed: int, steps: int) -> None:
        spec = {
            "model": str(model_folder(case, folder)), "rows": str(write_rows(case, folder)), "threads": len(os.sched_getaffinity(0)),
            "reward": "text" if case.fixed_length else "exact", "groups": case.groups, "responses": case.responses,
            "micro_batch": case.responses, "response_tokens": case.response_tokens, "fixed_length": case.fixed_length, "lr": case.lr,
            "betas": case.betas, "eps": case.eps, "kl_coef": options.kl_coef, "dtype": options.dtype, "seed": seed, "steps": steps,
            "scratch": str(folder / "trl"),
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])}
        command = [options.trl_python or peer_python(), "-m", "benchmarks.trl_peer", str(folder / "spec.json")]
        self.log = folder / "trl.log"
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=environment, cwd=ROOT
        )

    def step(self) -> Line:
        """One step."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            print("step", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"TRL ended:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)


def peer_python() -> str:
    """Of the environment that has TRL, made on first use."""
    return subprocess.run(["bash", str(ROOT / "setup.sh"), "trl"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def configuration(case: Case, model: Path, rows: Path, options: argparse.Namespace) -> Line:
    """The run of pasync."""
    return {
        "name": "against-trl",
        "model": {"path": str(model), "dtype": options.dtype},
        "data": {"train": {"source": str(rows)}, "chat": False, "max_prompt_tokens": case.prompt_tokens},
        "rollout": {"max_tokens": case.response_tokens, "max_num_seqs": 2 * case.responses, "kv_cache_bytes": 512 << 20},
        "rewards": {"function": "benchmarks.work:scored" if case.fixed_length else "exact", "truncated_is_wrong": not case.fixed_length},
        "algorithm": {"batch_groups": case.groups, "group_responses": case.responses, "kl_coef": options.kl_coef},
        "optimizer": {"lr": case.lr, "betas": list(case.betas), "eps": case.eps},
        "parallel": {"micro_batch_tokens": case.prompt_tokens + case.responses * case.response_tokens},
    }


def run(tree: Line, folder: Path, iterations: int, seed: int) -> list[Line]:
    """Metrics of a run of pasync through launch.sh."""
    path = folder / "pasync.yaml"
    path.write_text(json.dumps(tree | {"iterations": iterations, "seed": seed}))
    shutil.rmtree(folder / "run", ignore_errors=True)
    environment = os.environ | {"PASYNC_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", str(ROOT / "launch.sh"), str(path), f"run.dir={folder / 'run'}"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return [line for line in read_metrics(folder / "run") if "time/step_s" in line]


class Peak:
    """Most memory that all children of a kind held together, sampled by a thread."""

    def __init__(self) -> None:
        self.of = {"trl": 0, "pasync": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            held = {"trl": 0, "pasync": 0}
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    kind = "trl" if "benchmarks.trl_peer" in process.cmdline() else "pasync"
                    held[kind] += process.memory_full_info().pss
            self.of = {kind: max(most, held[kind]) for kind, most in self.of.items()}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def speed(name: str, options: argparse.Namespace) -> Line:
    """The JSON line of `short` and `long`."""
    case, rounds, peak = CASES[name], options.rounds, Peak()
    theirs, ours = list[Line](), list[Line]()
    with scratch() as folder:
        peer = Peer(case, folder, options, seed=0, steps=1 + rounds)
        peer.step()  # warm-up
        tree = configuration(case, folder / "model", folder / "rows.jsonl", options)
        for i in range(rounds):
            theirs.append(peer.step())
            ours += run(tree, folder, 1 + options.iterations, seed=i)[1:]
        peer.process.kill()
        peer.process.wait()
    peak.close()
    tokens = [line["tokens/prompt"] + line["tokens/response"] for line in ours]
    trl_rate = statistics.median(line["tokens"] / line["step_s"] for line in theirs)
    our_rate = statistics.median(n / line["time/step_s"] for n, line in zip(tokens, ours, strict=True))
    return {
        "case": name, "dtype": options.dtype, "kl_coef": options.kl_coef, "groups": case.groups, "responses": case.responses,
        "prompt_tokens": case.prompt_tokens, "response_tokens": case.response_tokens, "tokens_a_step": statistics.median(tokens),
        "trl_tokens_a_step": statistics.median(line["tokens"] for line in theirs), "tokens_per_s": our_rate, "trl_tokens_per_s": trl_rate,
        "faster": our_rate / trl_rate, "peak_bytes": peak.of["pasync"], "trl_peak_bytes": peak.of["trl"],
        "of_ideal": statistics.median(line["time/of_ideal_frac"] for line in ours), "steps": len(ours), "trl_steps": len(theirs),
    }  # fmt: skip


def curve(options: argparse.Namespace) -> Line:
    """The JSON line of `curve`."""
    case, steps = CASES["curve"], 10
    ours, theirs = list[list[float]](), list[list[float]]()
    for seed in range(options.seeds):
        with scratch() as folder:
            peer = Peer(case, folder, options, seed, steps)
            theirs.append([peer.step()["reward"] for _ in range(steps)])
            tree = configuration(case, Path(prepare.prepare(case.model)), folder / "rows.jsonl", options)
            ours.append([line["reward/mean"] for line in run(tree, folder, steps, seed)])
    return {
        "case": "curve",
        "rewards": [statistics.fmean(step) for step in zip(*ours, strict=True)],
        "trl_rewards": [statistics.fmean(step) for step in zip(*theirs, strict=True)],
        "last_three": [statistics.fmean(run[-3:]) for run in ours],
        "trl_last_three": [statistics.fmean(run[-3:]) for run in theirs],
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="short")
    parser.add_argument("--kl-coef", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=2, help="of one step of TRL and one run of pasync each")
    parser.add_argument("--iterations", type=int, default=2, help="measured iterations of each run of pasync")
    parser.add_argument("--seeds", type=int, default=3, help="of curve")
    parser.add_argument("--trl-python", help="an interpreter that has TRL; by default made by setup.sh")
    options = parser.parse_args()
    print(json.dumps(curve(options) if options.case == "curve" else speed(options.case, options)))


if __name__ == "__main__":
    main()
