"""metrics.jsonl: one line per iteration, keys `area/name_unit`. The table of all keys is METRICS.

    groups, times, trainer's numbers --RunLog--> <run>/metrics.jsonl and one console line
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pasync.messages import KILLED, Group
from pasync.observe.console import progress, say, status
from pasync.observe.dashboard import SHOWN, STEP_FACTS
from pasync.observe.trace import drop_lines, whole_lines
from pasync.observe.trackers import Trackers

METRICS = {
    "iteration": "number of the iteration, from 0; the last line only evaluates the final weights",
    "policy/version": "version of the weights that the iteration began with",
    "policy/lag": "optimizer steps between the weights that sampled this batch and these: 0 is on-policy",
    "policy/loss": "divided loss of the batch",
    "policy/kl": "k3 estimate of KL to the starting model, mean over trained tokens (0 without reference, null if none)",
    "policy/entropy": "entropy of the sampling distribution in nats, mean over trained tokens (null if none)",
    "policy/engine_logprob_gap": "mean |trainer - server| log-prob over trained tokens (null if none)",
    "policy/engine_ratio": "mean trainer / server probability, of tokens (algorithm.importance=response: of responses): 1 if they agree",
    "policy/engine_sample_frac": "effective share of samples under these ratios, (sum r)^2 / (n sum r^2): 1 if they agree",
    "policy/engine_capped_frac": "share of trained tokens whose ratio exceeds algorithm.importance_cap (0 with algorithm.importance=none)",
    "policy/clipped_frac": "share of trained tokens whose ratio was clipped, in the last update of the batch",
    "policy/probe_gap": "the same on the probe sequence, after the sync",
    "policy/trained_groups": "groups with a gradient (unequal rewards, or a KL or entropy term)",
    "policy/skipped_micro_batches": "left out because they were not finite (algorithm.on_nonfinite=skip)",
    "optimizer/lr": "learning rate of the step",
    "optimizer/gradient_norm": "norm of the divided gradient before clipping",
    "reward/mean": "mean reward of all responses of the batch",
    "reward/std": "standard deviation of the same",
    "reward/equal_frac": "share of groups whose rewards are all equal",
    "reward/refilled_groups": "extra prompts sampled for these (algorithm.filter_zero_variance=refill)",
    "reward/dropped_groups": "groups left out because of such a failure (rewards.on_error=drop)",
    "reward/errors": "responses without a reward (scored 0)",
    "reward/timeouts": "of these, killed after rewards.timeout_s",
    "reward/crashes": "of these, whose reward process died",
    "reward/out_of_memory": "of these, whose reward process reached rewards.memory_bytes",
    "response/mean_tokens": "mean length",
    "response/truncated_frac": "share cut at max_tokens",
    "tokens/prompt": "prompt tokens of the batch, counted once per response",
    "tokens/response": "response tokens of the batch",
    "wire/dropped_frames": "frames that broke the protocol, or came twice, too late or from a server given up, on both ends so far",
    "eval/accuracy_frac": "mean of avg@k over the held-out sets, of the weights named by policy/version (absent if one is not finished)",
    "eval/<set>/avg@<k>": "mean reward on one held-out set, k responses to each problem",
    "eval/<set>/pass@<j>": "probability that one of j responses is right (reward 1), estimated without bias from k",
    "eval/<set>/maj@<k>": "mean reward of the answer that most of the k responses give",
    "eval/problems": "held-out problems of the sets that have scores",
    "eval/unfinished": "held-out problems that were cancelled after eval.max_delay_s; their sets have no scores",
    "time/step_s": "sync, generation, training and optimizer step of this iteration, and the delay by evaluation",
    "time/generate_s": "T_g: from submission of the batch to its last group",
    "time/train_s": "T_t: time in forward, backward and optimizer step (slowest rank)",
    "time/sync_s": "s: sending the weights, acknowledgements and probe",
    "time/mean_train_s": "the same, mean over ranks",
    "time/first_group_wait_s": "from submission to the first group",
    "time/between_waits_s": "rank 0 waited for later groups",
    "time/tail_s": "training left when the last group had arrived, optimizer step included",
    "time/ideal_s": "max(T_g, T_t) + s",
    "time/of_ideal_frac": "ideal / step: 1 is perfect overlap",
    "time/rank_idle_frac": "share of the step in which a rank did not compute, mean over ranks",
    "time/server_idle_frac": "share of the step in which a server had no group, mean over servers",
    "time/eval_s": "from the first held-out prompt that a server began with to the last that it finished",
    "time/eval_bubble_s": "time in which a server evaluated and training went on, mean over servers",
    "time/eval_delay_s": "training waited for the evaluation",
    "rollout/requeued_groups": "groups so far that a lost server left to others",
    "throughput/tpspd": "(prompt + response tokens) / (step seconds x devices)",
    "throughput/response_tpspd": "response tokens / (step seconds x devices)",
}


def batch_metrics(groups: list[Group]) -> dict[str, float]:
    """What the groups of one iteration say without the model."""
    responses = [r for g in groups for r in g.responses]
    rewards = [r.reward for r in responses]
    lengths = [len(r.ids) // 4 for r in responses]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/equal_frac": statistics.fmean(len(set(g.rewards)) == 1 for g in groups),
        "reward/errors": sum(bool(r.reward_error) for r in responses),
        **{f"reward/{key}": sum(r.reward_error == why for r in responses) for key, why in zip(_KILLED, KILLED, strict=True)},
        "response/mean_tokens": statistics.fmean(lengths),
        "response/truncated_frac": statistics.fmean(not r.ended for r in responses),
        "tokens/prompt": sum(len(g.prompt_ids) // 4 * len(g.responses) for g in groups),
        "tokens/response": sum(lengths),
    }


_KILLED = ("timeouts", "crashes", "out_of_memory")
_ORDER = {key: place for place, key in enumerate(METRICS)}

LEARNED = {
    "eval/accuracy_frac": "held-out {:.3f}",
    "reward/mean": "reward {:.3f}",
    "response/mean_tokens": "length {:.1f}",
    "policy/engine_logprob_gap": "gap {:.1e}",
    "time/step_s": "step {:.2f} s",
    "time/of_ideal_frac": "of ideal {:.2f}",
    "throughput/tpspd": "tokens/s/device {:.0f}",
}
TIMES = {
    "time/generate_s": "generate {:.2f}",
    "time/train_s": "train {:.2f}",
    "time/sync_s": "sync {:.2f}",
    "time/first_group_wait_s": "first wait {:.2f}",
    "time/between_waits_s": "later waits {:.2f}",
    "time/tail_s": "tail {:.2f}",
    "time/server_idle_frac": "servers idle {:.0%}",
    "time/rank_idle_frac": "ranks idle {:.0%}",
}
TROUBLE = {
    "reward/errors": "REWARDS FAILED {:.0f}",
    "reward/dropped_groups": "GROUPS DROPPED {:.0f}",
    "policy/skipped_micro_batches": "MICRO-BATCHES SKIPPED {:.0f}",
    "wire/dropped_frames": "FRAMES DROPPED {:.0f}",
    "policy/lag": "OFF-POLICY by {:.0f}",
    "eval/unfinished": "EVALUATION CUT, {:.0f} PROBLEMS LEFT",
}
EVALUATED = {"eval/problems": "{:.0f} problems", "time/eval_s": "in {:.2f} s", "time/eval_delay_s": "delay {:.2f}"}
"""What the console shows of a line, in this order; of TROUBLE only what is not 0, EVALUATED after the scores of each set."""


class Times(NamedTuple):
    """Unix times of one iteration."""

    began: float
    submitted: float
    """When the batch was handed to the servers (in `one_step_off` an iteration earlier)."""
    arrivals: list[float]
    """Of each group."""
    finished: float
    """The optimizer step's end."""
    ended: float
    """That of the iteration, after its evaluation."""


def step_times(times: Times, *, sync_s: float, train_s: float, mean_train_s: float, waits_s: list[float]) -> dict[str, float]:
    """Where the time of one iteration went.

    ideal = max(T_g, T_t) + s;  step = ended - began

    Args:
        sync_s: seconds of weight sync.
        train_s, mean_train_s: seconds of training, of the slowest rank and the mean.
        waits_s: rank 0's waits for groups.
    """
    generate_s = max(times.arrivals) - times.submitted
    step_s = times.ended - times.began
    ideal_s = max(generate_s, train_s) + sync_s
    return {
        "time/step_s": step_s,
        "time/generate_s": generate_s,
        "time/train_s": train_s,
        "time/mean_train_s": mean_train_s,
        "time/sync_s": sync_s,
        "time/first_group_wait_s": min(times.arrivals) - times.submitted,
        "time/between_waits_s": sum(waits_s[1:]),
        "time/tail_s": times.finished - max(*times.arrivals, times.began),
        "time/ideal_s": ideal_s,
        "time/of_ideal_frac": ideal_s / step_s,
        "time/rank_idle_frac": 1 - mean_train_s / step_s,
    }


def idle_share(groups: list[Group], servers: int, step_s: float) -> float:
    """Share of the step in which a server had no group, mean over servers.

    At least 0: in `one_step_off` groups were sampled in the step before, which may have been longer.
    """
    return max(0.0, 1 - busy_s(groups, servers, math.inf) / (servers * step_s))


def busy_s(groups: list[Group], servers: int, end: float) -> float:
    """Seconds before `end` in which a server had one of these groups, added up over servers."""
    seconds = 0.0
    for server in range(servers):
        until = 0.0
        for began, ended in sorted((g.started, min(g.finished, end)) for g in groups if g.server == server):
            seconds += max(0.0, ended - max(began, until))
            until = max(until, ended)
    return seconds


class RunLog:
    """Collects one iteration's numbers and writes them as one line. Used on rank 0 only.

    Args:
        run: folder; metrics.jsonl is appended to. Lines of iterations from `first` on are removed: they are done again.
        devices: how many devices the run uses, for throughput.
        trackers: get every line, too.
    """

    def __init__(self, run: Path, iterations: int, devices: int, first: int, trackers: Trackers | None = None) -> None:
        self.path, self.iterations, self.devices = run / "metrics.jsonl", iterations, devices
        self._values: dict[str, float] = {}
        self._trackers, self._rewards = trackers, deque[float](maxlen=SHOWN)
        drop_lines(self.path, first)

    def add(self, values: dict[str, float]) -> None:
        """Add numbers to this iteration's line."""
        unknown = set(map(described, values)) - METRICS.keys()
        assert not unknown, f"metrics without a description: {unknown}"
        self._values.update(values)

    @contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Add the seconds spent in the block."""
        began = time.perf_counter()
        yield
        self._values[key] = self._values.get(key, 0.0) + time.perf_counter() - began

    def value(self, key: str) -> float:
        """A number added before; 0 if it was not."""
        return self._values.get(key, 0.0)

    def write(self, iteration: int) -> None:
        """Append the line of this iteration and show it."""
        values = self._values
        if "time/step_s" in values:
            device_s = values["time/step_s"] * self.devices
            values["throughput/tpspd"] = (values["tokens/prompt"] + values["tokens/response"]) / device_s
            values["throughput/response_tpspd"] = values["tokens/response"] / device_s
        keys = sorted(values, key=lambda key: _ORDER[described(key)])
        line = {"iteration": iteration, "policy/version": iteration, **{k: _finite(values[k]) for k in keys}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._trackers:
            self._trackers.log(line)
        say(_console_line(line, self.iterations))
        self._show(line)
        progress("training", min(iteration + 1, self.iterations), self.iterations)
        self._values = {}


    def _show(self, line: dict[str, float | None]) -> None:
        reward, times = line.get("reward/mean"), {key: line.get(f"time/{key}") for key in STEP_FACTS}
        if reward is not None and None not in times.values():
            self._rewards.append(reward)
            status(rewards=list(self._rewards), **times)


def read_metrics(run: Path) -> list[dict[str, float | None]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in whole_lines(run / "metrics.jsonl")]


def described(key: str) -> str:
    """The key in METRICS of one in a line: that of `eval/gsm8k/pass@4` is `eval/<set>/pass@<j>`."""
    if key.count("/") < 2:
        return key
    kind = key.split("/")[-1].split("@")[0]
    return f"eval/<set>/{kind}@<{'j' if kind == 'pass' else 'k'}>"


def _console_line(line: dict[str, float | None], iterations: int) -> str:
    """One line about what was learned, one about where the time went, and one about held-out sets."""
    trouble = _shown({key: value or None for key, value in line.items()}, TROUBLE)
    learned = f"iteration {line['iteration']:>4}/{iterations}  {_shown(line, LEARNED)}  {trouble}".rstrip()
    times = _shown(line, TIMES)
    return "\n".join([learned, *(f"{' ' * 11}{text}" for text in (times, _evaluated(line)) if text)])


def _evaluated(line: dict[str, float | None]) -> str:
    """The scores of each held-out set, and what they have cost."""
    sets: dict[str, list[str]] = {}
    for key, value in line.items():
        if described(key) != key:
            _, name, score = key.split("/")
            sets.setdefault(name, []).append(f"{score} {value:.3f}")
    texts = [f"{name}: {' '.join(of_set)}" for name, of_set in sets.items()]
    return "  ".join([*texts, _shown(line, EVALUATED)]) if sets else ""


def _shown(line: dict[str, float | None], texts: dict[str, str]) -> str:
    values = ((text, line.get(key)) for key, text in texts.items())
    return "  ".join(text.format(value) for text, value in values if value is not None)


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
