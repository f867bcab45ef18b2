"""End to end against TRL's GRPOTrainer: `python -m benchmarks.against_trl [--case short|long|curve] [--kl-coef 0.04]`, one JSON line.

    TRL      one process on both cores, transformers' generate of the whole batch at once; does a step when told to
    pasync   a vLLM server on one core, a rank on the other; runs of a few iterations

The same weights, prompts, K, response length (every response is sampled to the end), type and reward; no gradient checkpointing. Runs
of pasync and steps of TRL alternate; what is compared are medians, without pasync's first step and after a small warm-up of TRL. Memory
is what all processes hold together at most (PSS). `limit` is how many times as fast pasync could be if a core computed as much in a second
on both sides: generation hidden, its one training core has what TRL's cores train on, less the repeated prompts.

`curve` compares what is learned instead: ten steps on `tiny-sort` with the same learning rate, normaliser (tokens), advantage (by the
group's standard deviation) and optimizer, over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared_prompt import operations_ratio
from benchmarks.work import END_UNUSED
from pasync.model import prepare
from pasync.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CURVE_STEPS = 10
LAYERS, ACROSS, HEAD, KV_BYTES = 106_168_320, 30 * 576, 49_152 * 576, 30 * 2 * 192 * 4
"""Of SmolLM2-135M: weights of linear layers, layers x hidden size, weights of the head, keys and values of a token."""
LIMIT_S = 900.0
"""Longest wait for a step of TRL or a run of pasync."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What both do."""

    model: str
    prompt_tokens: int
    response_tokens: int
    groups: int
    responses: int
    at_once: int
    """Responses that pasync's server samples at once; TRL samples all of them at once."""
    trl_micro_batch: int
    """Responses that TRL trains on at once: those with which it is fastest in the memory there is."""
    trl_threads: int | None = None
    """Unset: one for each core."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fixed_length: bool = True
    bar: float = 0.0
    """How many times as fast pasync should be."""


CASES = {
    "short": Case("smollm2-135m-instruct", 60, 64, groups=8, responses=8, at_once=16, trl_micro_batch=8, bar=3.0),
    "long": Case("smollm2-135m-instruct", 1024, 64, groups=2, responses=16, at_once=16, trl_micro_batch=4, bar=8.0),
    "curve": Case(
        "tiny-sort", 8, 10, groups=64, responses=8, at_once=64, trl_micro_batch=64, trl_threads=1,
        lr=3e-4, betas=(0.9, 0.99), eps=1e-6, fixed_length=False,
    ),
}  # fmt: skip


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
        threads = case.trl_threads or len(os.sched_getaffinity(0))
        spec = {
            "model": str(model_folder(case, folder)), "rows": str(write_rows(case, folder)), "threads": threads,
            "reward": "text" if case.fixed_length else "exact", "groups": case.groups, "responses": case.responses,
            "micro_batch": case.trl_micro_batch, "response_tokens": case.response_tokens, "fixed_length": case.fixed_length,
            "lr": case.lr, "betas": case.betas, "eps": case.eps, "kl_coef": options.kl_coef, "dtype": options.dtype, "seed": seed,
            "steps": steps, "scratch": str(folder / "trl"),
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
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
        line = self.process.stdout.readline() if wait([self.process.stdout], LIMIT_S) else ""  # type: ignore[list-item]
        if not line:
            raise SystemExit(f"no step of TRL:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


def peer_python() -> str:
    """Of the environment that has TRL, made on first use."""
    command = ["bash", str(ROOT / "setup.sh"), "trl"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=2 * LIMIT_S).stdout.strip()


def kv_cache_bytes(case: Case) -> int:
    """Room for the responses sampled at once even if each held the prompt, in float32, and a reserve."""
    return case.at_once * (case.prompt_tokens + case.response_tokens) * KV_BYTES + (64 << 20)


def configuration(case: Case, model: Path, rows: Path, options: argparse.Namespace) -> Line:
    """The run of pasync."""
    return {
        "name": "against-trl",
        "model": {"path": str(model), "dtype": options.dtype},
        "data": {"train": {"source": str(rows)}, "chat": False, "max_prompt_tokens": case.prompt_tokens},
        "rollout": {
            "max_tokens": case.response_tokens, "max_num_seqs": case.at_once, "kv_cache_bytes": kv_cache_bytes(case),
            "start_s": LIMIT_S, "deadline_s": LIMIT_S,
        },
        "rewards": {"function": "benchmarks.work:scored" if case.fixed_length else "exact", "truncated_is_wrong": not case.fixed_length},
        "algorithm": {"batch_groups": case.groups, "group_responses": case.responses, "kl_coef": options.kl_coef},
        "optimizer": {"lr": case.lr, "betas": list(case.betas), "eps": case.eps},
        "parallel": {"micro_batch_tokens": case.prompt_tokens + case.responses * case.response_tokens},
    }  # fmt: skip


def run(tree: Line, folder: Path, iterations: int, seed: int) -> list[Line]:
    """Metrics of a run of pasync through launch.sh."""
    path = folder / "pasync.yaml"
    path.write_text(json.dumps(tree | {"iterations": iterations, "seed": seed}))
    shutil.rmtree(folder / "run", ignore_errors=True)
    environment = os.environ | {"PASYNC_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "launch.sh"), str(path), f"run.dir={folder / 'run'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
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
        while not self._stop.wait(2.0):  # looking costs a core some hundredths of a second
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
    case, peak = CASES[name], Peak()
    theirs, ours = list[Line](), list[Line]()
    with scratch() as folder, Peer(case, folder, options, seed=0, steps=options.rounds) as peer:
        tree = configuration(case, folder / "model", folder / "rows.jsonl", options)
        for i in range(options.rounds):
            theirs.append(peer.step())
            ours += run(tree, folder, 1 + options.iterations, seed=i)[1:]
    peak.close()
    for line in ours:
        line |= {"tokens": line["tokens/prompt"] + line["tokens/response"], "step_s": line["time/step_s"]}
    our_rate, trl_rate = (statistics.median(line["tokens"] / line["step_s"] for line in lines) for lines in (ours, theirs))
    return {
        "case": name, "dtype": options.dtype, "kl_coef": options.kl_coef, "groups": case.groups, "responses": case.responses,
        "prompt_tokens": case.prompt_tokens, "response_tokens": case.response_tokens,
        "tokens_a_step": statistics.median(line["tokens"] for line in ours),
        "trl_tokens_a_step": statistics.median(line["tokens"] for line in theirs),
        "tokens_per_s": our_rate, "trl_tokens_per_s": trl_rate, "faster": our_rate / trl_rate,
        "limit": limit(case, theirs), "bar": case.bar,
        "peak_bytes": peak.of["pasync"], "trl_peak_bytes": peak.of["trl"], "less_memory": peak.of["trl"] / peak.of["pasync"],
        "of_ideal": statistics.median(line["time/of_ideal_frac"] for line in ours),
        "generate_s": statistics.median(line["time/generate_s"] for line in ours),
        "train_s": statistics.median(line["time/train_s"] for line in ours),
        "trl_step_s": statistics.median(line["step_s"] for line in theirs),
        "trl_generate_s": statistics.median(line["generate_s"] for line in theirs), "steps": len(ours), "trl_steps": len(theirs),
    }  # fmt: skip


def limit(case: Case, theirs: list[Line]) -> float:
    """How many times as fast pasync could be at TRL's rate per core."""
    ratio = operations_ratio(LAYERS, ACROSS, case.prompt_tokens, case.response_tokens, case.responses, HEAD)
    cores = len(os.sched_getaffinity(0))
    return statistics.median(line["step_s"] / ((line["step_s"] - line["generate_s"]) * cores / ratio) for line in theirs)


def curve(options: argparse.Namespace) -> Line:
    """The JSON line of `curve`: of each step the mean over seeds, and how far the means of the whole runs are apart."""
    case, ours, theirs = CASES["curve"], list[list[Line]](), list[list[Line]]()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with scratch() as folder, Peer(case, folder, options, seed, CURVE_STEPS) as peer:
            theirs.append([peer.step() for _ in range(CURVE_STEPS)])
            tree = configuration(case, Path(prepare.prepare(case.model)), folder / "rows.jsonl", options)
            ours.append(run(tree, folder, CURVE_STEPS, seed))
    line: Line = {"case": "curve", "kl_coef": options.kl_coef, "seeds": options.seeds}
    for what, key in (("reward", "reward/mean"), ("loss", "policy/loss"), ("gradient_norm", "optimizer/gradient_norm")):
        of_ours, of_theirs = ([[step[k] for step in steps] for steps in runs] for runs, k in ((ours, key), (theirs, what)))
        line |= {
            what: [statistics.fmean(step) for step in zip(*of_ours, strict=True)],
            f"trl_{what}": [statistics.fmean(step) for step in zip(*of_theirs, strict=True)],
            f"{what}_apart": apart(of_ours, of_theirs),
        }
    return line


def apart(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Difference of the means over all steps, in standard errors between seeds."""
    means = [[statistics.fmean(run) for run in runs] for runs in (ours, theirs)]
    error = math.sqrt(sum(statistics.variance(of_seeds) / len(of_seeds) for of_seeds in means))
    return (statistics.fmean(means[0]) - statistics.fmean(means[1])) / error


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="short")
    parser.add_argument("--kl-coef", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=1, help="of one step of TRL and one run of pasync each")
    parser.add_argument("--iterations", type=int, default=1, help="measured iterations of each run of pasync")
    parser.add_argument("--seeds", type=int, default=3, help="of curve")
    parser.add_argument("--first-seed", type=int, default=0, help="of curve")
    parser.add_argument("--trl-python", help="an interpreter that has TRL; by default made by setup.sh")
    options = parser.parse_args()
    print(json.dumps(curve(options) if options.case == "curve" else speed(options.case, options)))


if __name__ == "__main__":
    main()
