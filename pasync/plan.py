"""How long an iteration will take, and how many devices should serve: `python -m pasync.plan CONFIG [key.sub=value ...]`.

    estimated rates (rates.py) [x those of a run: --measure] --every split of the devices--> simulate --> tables [and curves]

Prints T_g, T_t, s, both bubbles and throughput of each split and schedule, the same for devices that generate together and then train
together, and every assumption with its source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pasync import advice
from pasync import device as devices
from pasync.calibration import Calibration, calibrate
from pasync.config import Config
from pasync.configfile import load
from pasync.errors import ConfigError
from pasync.estimate import Machine
from pasync.geometry import PUBLISHED, Geometry, read_geometry
from pasync.model import prepare
from pasync.rates import estimate, sources, switch_time
from pasync.simulate import GroupWork, Iteration, generate, iteration

SCHEDULES = ("sync", "periodic", "one_step_off")
NODE_DEVICES = 8
"""Of a node of accelerators, where the configuration does not say."""
ROWS = 16
"""Of a table, at most; more splits are left out evenly."""
PROMPT_SPREAD, RESPONSE_SPREAD = 0.4, 0.4
"""Standard deviations of the logarithm of lengths: between prompts, and between the responses to one."""


@dataclass(frozen=True)
class Plan:
    """One split of the devices."""

    config: Config
    times: dict[str, Iteration]
    """Of each schedule."""
    problems: list[str]
    """Why it does not fit the memory."""

    @property
    def name(self) -> str:
        size = self.config.rollout.tensor_parallel
        return f"{self.config.rollout.servers}{f'x{size}' * (size > 1)}+{self.config.parallel.ranks}"


@dataclass(frozen=True)
class Planner:
    """What is the same for all splits of some devices."""

    geometry: Geometry
    machine: Machine
    groups: list[GroupWork]
    """Of one iteration."""
    calibration: Calibration | None = None
    """Of a run on such devices; without, the estimate is taken as it is."""

    def plan(self, config: Config) -> Plan:
        """The split that `config` says."""
        problems = advice.warnings(config, self.geometry, self.machine) if self.machine.kind != "cpu" else []
        return Plan(config, self._iterations(config, SCHEDULES), problems)

    def plans(self, config: Config) -> list[Plan]:
        """Every number of servers, each with the ranks that the other devices have room for."""
        size = config.rollout.tensor_parallel
        found = (split(config, n, self.machine.count - n * size) for n in range(1, self.machine.count // size + 1))
        return [self.plan(config) for config in found if config]

    def colocated(self, config: Config) -> Iteration | None:
        """All devices generate, then all train: as `sync` would on twice as many, and they change between the two. None if they cannot."""
        both = split(config, self.machine.count // config.rollout.tensor_parallel, self.machine.count)
        if not both:
            return None
        sync = self._iterations(both, ["sync"])["sync"]
        return replace(sync, step_s=sync.step_s + switch_time(both, self.geometry, self.machine.kind))

    def _iterations(self, config: Config, schedules: Sequence[str]) -> dict[str, Iteration]:
        rates = estimate(config, self.geometry, self.machine)
        rates = self.calibration.scaled(rates) if self.calibration else rates
        generated = generate(config, self.groups, rates)
        return {name: iteration(config.model_copy(update={"schedule": name}), self.groups, rates, generated) for name in schedules}


def split(config: Config, servers: int, left: int) -> Config | None:
    """The configuration with so many servers, and as many whole replicas as `left` devices hold and the batch can be dealt out to; None if
    there is no room for one."""
    cut, batch = config.parallel.pipeline * config.parallel.tensor, config.algorithm.batch_groups
    replicas = next((n for n in range(left // cut, 0, -1) if batch % n == 0), 0)
    rollout = config.rollout.model_copy(update={"servers": servers})
    parallel = config.parallel.model_copy(update={"ranks": replicas * cut})
    return config.model_copy(update={"rollout": rollout, "parallel": parallel}) if replicas and servers else None


def best(plans: Sequence[Plan], schedule: str = "periodic") -> Plan | None:
    """The one with the shortest iteration of those that fit."""
    return min((plan for plan in plans if not plan.problems), key=lambda plan: plan.times[schedule].step_s, default=None)


def assumed_groups(config: Config, mean_tokens: int, prompt_tokens: int) -> list[GroupWork]:
    """Groups whose lengths are drawn from log-normals with the given mean; none is longer than `rollout.max_tokens`, and the trainer
    has seen none of the prompts before."""
    rng, count = np.random.default_rng(0), config.algorithm.group_responses
    spread = PROMPT_SPREAD**2 + RESPONSE_SPREAD**2
    drawn = rng.normal(0, PROMPT_SPREAD, (config.algorithm.batch_groups, 1)) + rng.normal(
        0, RESPONSE_SPREAD, (config.algorithm.batch_groups, count)
    )  # [B, K]
    lengths = np.clip(mean_tokens * np.exp(drawn - spread / 2), 1, config.rollout.max_tokens).round().astype(int).tolist()
    return [GroupWork(prompt_tokens, tuple(row), prompt_tokens) for row in lengths]


def table(plans: Sequence[Plan], colocated: Iteration | None, count: int) -> str:
    """Every split, a line of each, and a bar as long as its throughput with `periodic`."""
    lines = [
        f"{'split':<8} {'T_g':>7} {'T_t':>7} {'s':>6} | {'sync':>8} {'periodic':>8} {'one_step_off':>12} | {'first wait':>10} {'tail':>7} "
        f"{'of ideal':>8} | tokens/s/device with periodic"
    ]
    most = max(plan.times["periodic"].tpspd(count) for plan in plans)
    chosen = best(plans)
    for plan in (plan for i, plan in enumerate(plans) if i % -(-len(plans) // ROWS) == 0 or plan is chosen):
        t, rate = plan.times["periodic"], plan.times["periodic"].tpspd(count)
        note = "  best" if plan is chosen else "  " + plan.problems[0].partition(";")[0] if plan.problems else ""
        lines.append(
            f"{plan.name:<8} {t.generate_s:7.2f} {t.train_s:7.2f} {t.sync_s:6.2f} | {plan.times['sync'].step_s:8.2f} {t.step_s:8.2f} "
            f"{plan.times['one_step_off'].step_s:12.2f} | {t.first_wait_s:10.2f} {t.tail_s:7.2f} {t.of_ideal_frac:8.2f} | {rate:7.1f} "
            f"{'#' * round(24 * rate / most)}{note}"
        )
    if colocated:
        c = colocated
        lines.append(f"colocated: all generate {c.generate_s:.2f} s, all train {c.train_s:.2f} s, sync and change of roles "
                     f"{c.step_s - c.generate_s - c.train_s:.2f} s: {c.step_s:.2f} s, {c.tpspd(count):.1f} tokens/s/device")  # fmt: skip
    return "\n".join(lines)


def draw(out: Path, title: str, plans: Sequence[Plan], count: int) -> None:
    """Write the picture: throughput over the number of serving devices."""
    from matplotlib import pyplot  # late: it takes a second

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    serving = [plan.config.rollout.servers * plan.config.rollout.tensor_parallel for plan in plans]
    for schedule in SCHEDULES:
        axes.plot(serving, [plan.times[schedule].tpspd(count) for plan in plans], "o-", label=schedule)
    axes.set(title=title, xlabel=f"devices of {count} that serve", ylabel="tokens/s/device")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=110)


def assumptions(planner: Planner, config: Config) -> list[str]:
    """What the figures rest on besides the rates of the devices (`sources`)."""
    groups, calibration = planner.groups, planner.calibration
    lengths = [n for group in groups for n in group.lengths]
    whose = "log-normal, an assumption" if not calibration else "of the run" + ", each its group's mean" * (not calibration.exact_lengths)
    found = [
        f"batch: {len(groups)} groups of {config.algorithm.group_responses}; prompts of {np.mean([g.prompt for g in groups]):.0f} tokens, "
        f"responses of {np.mean(lengths):.0f}, the longest {max(lengths)}: {whose}",
        f"layout: parallel.tensor={config.parallel.tensor} parallel.pipeline={config.parallel.pipeline} "
        f"rollout.tensor_parallel={config.rollout.tensor_parallel}, of every split",
        "every group has a gradient; rewards and messages take no time; the KV cache holds each response at half its length",
        "colocated: that training state and KV cache take turns in a device's memory; whether each fits is not looked at",
    ]
    if calibration:
        c = calibration
        found.append(
            f"rates of {c.iterations} iterations of the run, over those below: decoding x{1 / c.serve:.3g}, training x{1 / c.train:.3g} "
            f"and {c.micro_batch_s:.3g} s per micro-batch, optimizer x{1 / c.optimizer:.3g}, sync x{1 / c.sync:.3g}"
        )
    return found


def planned_geometry(config: Config) -> Geometry:
    """Sizes of the model, as published if it is not there. Raises ConfigError."""
    try:
        return read_geometry(prepare.folder(config.model.path))
    except ConfigError:
        if published := PUBLISHED.get(Path(config.model.path).name):
            return published
        raise


def counts(config: Config, kind: str, nodes: Sequence[int]) -> list[int]:
    """Devices of each number of nodes."""
    wanted = config.parallel.ranks + config.rollout.servers * config.rollout.tensor_parallel
    each = config.device.count or (NODE_DEVICES if kind != "cpu" else wanted)
    return [each * n for n in nodes or [config.device.nodes]]


def main() -> int:
    """Entry of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pasync.plan", description="Predict step times and the best split of devices.")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replaces a value of the file")
    parser.add_argument("--measure", type=Path, metavar="RUN", help="take rates and lengths from this run folder")
    parser.add_argument("--nodes", type=int, nargs="+", default=[], help="plan for so many nodes; several are compared")
    parser.add_argument("--mean-tokens", type=int, help="mean length of a response; default: half of rollout.max_tokens")
    parser.add_argument("--prompt-tokens", type=int, help="length of a prompt; default: half of data.max_prompt_tokens")
    parser.add_argument("--png", type=Path, help="draw the curve of the last table")
    args = parser.parse_intermixed_args()
    try:
        config = load(args.config, args.overrides)
        report(config, args)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return 0


def report(config: Config, args: argparse.Namespace) -> None:
    """Print the tables. Raises ConfigError."""
    kind = devices.detect() if config.device.kind == "auto" else config.device.kind
    geometry = planned_geometry(config)
    prompt_tokens = args.prompt_tokens or max(1, config.data.max_prompt_tokens // 2)
    groups, calibration = assumed_groups(config, args.mean_tokens or max(1, config.rollout.max_tokens // 2), prompt_tokens), None
    if args.measure:
        calibration, works = calibrate(args.measure)
        groups = works[len(works) // 2]
    scaling: dict[int, float] = {}  # devices: tokens/s of all
    for count in counts(config, kind, args.nodes):
        memory = devices.memory_bytes(kind) or devices.NOMINAL_BYTES[kind]
        planner = Planner(geometry, Machine(kind, count, memory), groups, calibration)
        plans = planner.plans(config)
        if not plans:
            raise ConfigError(
                f"--nodes={args.nodes or config.device.nodes}: {count} {kind} devices have no room for a server of "
                f"rollout.tensor_parallel={config.rollout.tensor_parallel} and one replica of "
                f"parallel.tensor x parallel.pipeline={config.parallel.tensor * config.parallel.pipeline}"
            )
        print(f"{config.name} on {count} {kind} devices: servers + ranks, seconds\n{table(plans, planner.colocated(config), count)}\n")
        if chosen := best(plans):
            scaling[count] = count * chosen.times["periodic"].tpspd(count)
    if len(scaling) > 1:
        steps = (f"{count} devices {rate:.0f} ({rate / next(iter(scaling.values())):.2f}x)" for count, rate in scaling.items())
        print(f"tokens/s of all with the best split, {config.algorithm.batch_groups} groups each: {', '.join(steps)}\n")
    print("\n".join(["assumptions:", *(f"  {text}" for text in [*assumptions(planner, config), *sources(kind)])]))
    if args.png:
        draw(args.png, f"{config.name}, {count} {kind} devices", plans, count)


if __name__ == "__main__":
    sys.exit(main())
