"""One page about one or several runs: `python -m pasync.report RUN [RUN ...] [--iteration N] [--out FILE.html]`.

    <run>/config.yaml, metrics.jsonl, trace/, samples.jsonl --> RUN/report.html

Runs whose configurations differ in nothing but the seed become one line with a band. The page needs no network and holds no scripts;
it forbids them, so that nothing a model wrote can do anything.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pasync.errors import ConfigError
from pasync.observe import chart
from pasync.observe.metrics import METRICS, read_metrics
from pasync.observe.timeline import lanes, read_spans
from pasync.rollout.samples import most_changed, read_samples

STYLE = Path(__file__).with_suffix(".css")
POINTS = 250
"""Of a curve at most; more iterations are averaged, so the page stays small however long the run."""
CHANGED = 4
LEARNING = {
    "reward/mean": "Reward",
    "response/mean_tokens": "Response length, tokens",
    "response/truncated_frac": "Cut responses",
    "reward/equal_frac": "Groups that teach nothing",
}
POLICY = {
    "policy/kl": "KL to the start",
    "policy/entropy": "Entropy",
    "policy/clipped_frac": "Clipped tokens",
    "policy/engine_logprob_gap": "Log-prob gap, trainer to server",
    "optimizer/gradient_norm": "Gradient norm",
    "optimizer/lr": "Learning rate",
}
SPEED = {
    "time/of_ideal_frac": "Share of the ideal step",
    "throughput/tpspd": "Tokens per second and device",
    "time/sync_s": "Weight transfer, s",
}
PARTS = {
    "time/sync_s": ("sync", "weights to the servers"),
    "time/first_group_wait_s": ("wait", "waits for the first group"),
    "": ("train", "trains while servers generate"),
    "time/between_waits_s": ("wait later", "waits for later groups"),
    "time/tail_s": ("tail", "trains after the last group"),
}
"""Of a step as rank 0 sees it; "" is what remains."""
SPANS = {"group": "groups on their server", "micro-batch": "forward and backward", "optimizer": "optimizer step", "sync": "weights"}


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    config: dict[str, Any]
    """By dotted key."""
    lines: list[dict[str, Any]]

    @property
    def family(self) -> str:
        """The same for runs that differ only in seed, name and where they are."""
        return json.dumps({k: v for k, v in self.config.items() if k not in ("seed", "name") and not k.startswith("run.")}, sort_keys=True)

    def values(self, key: str) -> dict[int, float]:
        """By iteration, where it is known."""
        return {line["iteration"]: line[key] for line in self.lines if line.get(key) is not None}


@dataclass(frozen=True)
class Band:
    """Runs of one configuration and one color."""

    color: int
    label: str
    runs: list[Run]


def write_report(folders: list[Path], out: Path, iteration: int | None = None) -> None:
    """Write the page.

    Args:
        iteration: whose timeline is drawn; None takes the middle one.

    Raises:
        ConfigError: a folder is no run, or none has that iteration.
    """
    runs = [read_run(folder) for folder in folders]
    bands = banded(runs)
    sections = {
        "Runs": summary(bands),
        "Learning": panels(bands, {"eval/accuracy_frac": "Held-out accuracy"} | LEARNING | _scores(runs)),
        "Policy": panels(bands, POLICY),
        "Where the time of a step goes": "".join(anatomy(band) for band in bands),
        "Speed": panels(bands, SPEED),
        "One iteration": timelines(bands, iteration),
        "Responses": "".join(responses(band) for band in bands),
        "Configuration": configuration(runs),
    }
    title = html.escape(" · ".join(dict.fromkeys(str(run.config.get("name", run.folder.name)) for run in runs)))
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections.items() if content)
    page = (
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1">'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel=icon href="data:,"><title>{title}</title><style>{STYLE.read_text()}</style></head>'
        f"<body><h1>{title}</h1>{body}</body></html>\n"
    )
    out.write_bytes(page.encode("utf-8", "backslashreplace"))


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises ConfigError if it is none, or its first iteration is not over."""
    try:
        lines, tree = read_metrics(folder), yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: no run, or its first iteration is not over: there is no {Path(error.filename).name}") from None
    if not lines:
        raise ConfigError(f"{folder}: the run's first iteration is not over, metrics.jsonl is empty")
    return Run(folder, _flat(tree), lines)


def banded(runs: list[Run]) -> list[Band]:
    """Runs by configuration, each labelled by what it does not share with the others."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(run)
    firsts = [members[0] for members in families.values()]
    telling = [key for key in _differing(firsts) if key not in ("seed", "name") and not key.startswith("run.")]
    bands = []
    for color, members in enumerate(families.values()):
        told = ", ".join(f"{key.rpartition('.')[2]}={members[0].config.get(key)}" for key in telling)
        label = told if told and len(told) <= 60 else str(members[0].folder.resolve().name)
        bands.append(Band(color % 6, label, members))
    return bands


def summary(bands: list[Band]) -> str:
    """A table with one row per configuration."""
    columns: dict[str, Callable[[Run], float | None]] = {
        "iterations": lambda run: len(run.values("time/step_s")),
        "held-out": lambda run: _last(run, "eval/accuracy_frac", 1),
        "reward, last ten": lambda run: _last(run, "reward/mean", 10),
        "step, s": lambda run: _median(run, "time/step_s"),
        "of the ideal": lambda run: _median(run, "time/of_ideal_frac"),
        "tokens/s/device": lambda run: _median(run, "throughput/tpspd"),
    }
    rows = []
    for band in bands:
        cells = [f"<i class=c{band.color}></i>{html.escape(band.label)}", ", ".join(str(run.config.get("seed", "")) for run in band.runs)]
        cells += [", ".join("–" if (value := of(run)) is None else chart.short(value) for run in band.runs) for of in columns.values()]
        rows.append(cells)
    return _table(["", "seed", *columns], rows)


def panels(bands: list[Band], titles: dict[str, str]) -> str:
    """A small chart for every key that any run knows."""
    drawn, zero = "", []
    last = max(line["iteration"] for band in bands for run in band.runs for line in run.lines)
    for key, title in titles.items():
        shown = [chart.Curve(band.color, points) for band in bands if (points := over_seeds(band.runs, key))]
        if any(point.low or point.high for curve in shown for point in curve.points):
            drawn += chart.curves(title, METRICS.get(key, key), shown, last)
        elif shown:
            zero.append(title)
    nothing = f"<p class=note>Always 0: {', '.join(zero)}.</p>" if zero else ""
    return f"<div class=grid>{drawn}</div>{nothing}" if drawn or zero else ""


def over_seeds(runs: list[Run], key: str) -> list[chart.Point]:
    """Mean and range over the runs at every iteration where one knows the key; averaged over neighbours if there are many."""
    known = [run.values(key) for run in runs]
    xs = sorted(set().union(*known))
    width = -(-len(xs) // POINTS) or 1
    points = []
    for start in range(0, len(xs), width):
        some = xs[start : start + width]
        means = [statistics.fmean(of_run[x] for x in some if x in of_run) for of_run in known if any(x in of_run for x in some)]
        points.append(chart.Point(some[-1], statistics.fmean(means), min(means), max(means)))
    return points


def anatomy(band: Band) -> str:
    """Parts of a step, stacked over iterations, of the band's first run."""
    run = band.runs[0]
    steps = over_seeds([run], "time/step_s")
    if not steps:
        return ""
    known = {key: {p.x: p.mean for p in over_seeds([run], key)} for key in (*PARTS, "time/ideal_s") if key}
    xs, parts = [p.x for p in steps], {key: [known[key].get(p.x, 0.0) for p in steps] for key in known}
    ideal = parts.pop("time/ideal_s")
    parts[""] = [max(0.0, p.mean - sum(values[i] for values in parts.values())) for i, p in enumerate(steps)]
    layers = [chart.Layer(label, style, parts[key]) for key, (style, label) in PARTS.items()]
    return chart.stack(_named(band), "seconds as rank 0 sees them, dashed the ideal: max(T_g, T_t) + s", xs, layers, ideal)


def timelines(bands: list[Band], iteration: int | None) -> str:
    """What every process did in one iteration, the bands on one scale; "" if no run has a trace."""
    traced = [(band, read_spans(band.runs[0].folder)) for band in bands if any((band.runs[0].folder / "trace").glob("*.jsonl"))]
    numbers = sorted({span["iteration"] for _, spans in traced for span in spans if span["name"] == "optimizer"})
    if not numbers:
        return ""
    chosen = numbers[len(numbers) // 2] if iteration is None else iteration
    if chosen not in numbers:
        raise ConfigError(f"--iteration={chosen}: no run has a trace of it, there are {numbers[0]} to {numbers[-1]}")
    drawn = []
    for band, spans in traced:
        spans = [span for span in spans if span["iteration"] == chosen and span["name"] != "evaluate"]
        if spans:
            start = min(span["begin"] for span in spans)
            drawn.append((band, spans, start, max(span["end"] for span in spans) - start))
    longest = max(seconds for *_, seconds in drawn)
    figures = [
        chart.bars(f"{_named(band)}: iteration {chosen}, {seconds:.2f} s", "", _bars(spans, start), longest)
        for band, spans, start, seconds in drawn
    ]
    return chart.legend(SPANS.items()) + "".join(figures)


def responses(band: Band) -> str:
    """Best and worst of the first, middle and last batch, and the held-out answers that changed most, of the first run with any."""
    run = next((run for run in band.runs if read_samples(run.folder)), band.runs[0])
    samples = read_samples(run.folder)
    of_batches = [sample for sample in samples if sample["kind"] != "held-out"]
    numbers = sorted({sample["iteration"] for sample in of_batches})
    picked = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]}) if numbers else []
    shown = "".join(_sample(f"{s['kind']} of iteration {s['iteration']}", s) for s in of_batches if s["iteration"] in picked)
    changed = "".join(
        _sample(f"held-out problem {first['index']} at {first['iteration']}", first) + _sample(f"the same at {last['iteration']}", last)
        for first, last in most_changed(samples, CHANGED)
    )
    who = f"{html.escape(band.label)}, seed {run.config.get('seed')}"
    parts = [f"<h3>{who}: best and worst</h3><div class=pairs>{shown}</div>"] if shown else []
    parts += [f"<h3>{who}: changed most</h3><div class=pairs>{changed}</div>"] if changed else []
    return "".join(parts)


def configuration(runs: list[Run]) -> str:
    """What differs between the runs, and the whole of the first."""
    names = [run.folder.resolve().name for run in runs]
    rows = [[f"<code>{key}</code>", *(html.escape(str(run.config.get(key, "–"))) for run in runs)] for key in _differing(runs)]
    difference = _table(["differs", *map(html.escape, names)], rows) if len(runs) > 1 else ""
    whole = html.escape("\n".join(f"{key} = {value}" for key, value in runs[0].config.items()))
    return f"{difference}<details><summary>all of {html.escape(names[0])}</summary><pre>{whole}</pre></details>"


def _bars(spans: list[dict[str, Any]], start: float) -> list[chart.Bar]:
    found = []
    for span, lane in zip(spans, lanes(spans), strict=True):
        begin, end = span["begin"] - start, span["end"] - start
        facts = ", ".join(f"{key} {span[key]}" for key in ("group", "groups", "tokens") if key in span)
        found.append(chart.Bar(span["row"], lane, begin, end, span["name"], f"{span['name']} {begin:.2f} to {end:.2f} s {facts}"))
    return found


def _sample(title: str, sample: dict[str, Any]) -> str:
    facts = [f"reward {chart.short(sample['reward'])}", f"{sample['tokens']} tokens"] + ["cut"] * (not sample["ended"])
    facts += [html.escape(sample["reward_error"])] * bool(sample["reward_error"])
    style = "good" if sample["reward"] > 0 else "bad"
    texts = f"<pre class=asked dir=auto>{_visible(sample['prompt'])}</pre><pre dir=auto>{_visible(sample['response'])}</pre>"
    return f"<article><header>{html.escape(title)} <b class={style}>{' · '.join(facts)}</b></header>{texts}</article>"


def _visible(text: str) -> str:
    """As HTML text; control characters, which HTML has no room for, as their pictures."""
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: chr(0x2400 + min(ord(found[0]), 0x21)), text))


def _scores(runs: list[Run]) -> dict[str, str]:
    """Of the held-out sets; avg@k of the only one is the accuracy."""
    keys = {key for run in runs for line in run.lines for key in line if key.startswith("eval/") and "@" in key}
    means = {key for key in keys if "/avg@" in key}
    return {key: f"Held-out {key[5:]}" for key in sorted(keys - (means if len(means) == 1 else set()))}


def _named(band: Band) -> str:
    return f"{band.label}, seed {band.runs[0].config.get('seed')}"


def _last(run: Run, key: str, count: int) -> float | None:
    values = list(run.values(key).values())[-count:]
    return statistics.fmean(values) if values else None


def _median(run: Run, key: str) -> float | None:
    values = run.values(key).values()
    return statistics.median(values) if values else None


def _differing(runs: list[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if len({str(run.config.get(key)) for run in runs}) > 1]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Of HTML cells."""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{lines}</table></div>"


def main(argv: list[str] | None = None) -> int:
    """Entry of the command; 1 if there is nothing to report on."""
    parser = argparse.ArgumentParser(prog="python -m pasync.report", description="Write one HTML page about runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder; several seeds of a configuration become one band")
    parser.add_argument("--iteration", type=int, metavar="N", help="whose timeline to draw; by default the middle one")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="by default RUN/report.html of the first run")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0] / "report.html"
    try:
        write_report(options.runs, out, options.iteration)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
