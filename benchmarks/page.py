"""docs/benchmarks.md and its plots, from the JSON lines that the benchmarks printed: what is run, for how long, what is shown of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
Records = Mapping[str, Line]
"""Of each command that was run, by name: command, machine, versions, busy cores before it, seconds and lines."""
QUIET = 0.5
"""So many cores may be busy just before a command."""


class Command(NamedTuple):
    """One benchmark with its options."""

    args: str
    """Behind `python -m benchmarks.`"""
    minutes: float
    """On two quiet cores, about."""


class Column(NamedTuple):
    """Of a table."""

    heading: str
    key: str
    digits: int = 2
    unit: float = 1.0
    """Values are shown divided by it."""


class Chart(NamedTuple):
    """A bar per line, with a mark at its limit."""

    title: str
    label: str
    """Format string over the line."""
    value: str
    limit: str | Callable[[Line], float]


class Section(NamedTuple):
    """Of the page."""

    title: str
    text: str
    commands: dict[str, Command]
    columns: tuple[Column, ...]
    chart: Chart | None = None
    rows: Callable[[list[Line]], Iterable[Line]] = iter
    """Rows of the table, from the JSON lines."""


def by_step(lines: list[Line]) -> Iterator[Line]:
    """A row for each step of `against_trl --case curve`, and how far the means are apart."""
    kinds = ("reward", "loss", "gradient_norm")
    for line in lines:
        for i in range(len(line["reward"])):
            yield {"step": str(i + 1)} | {key: line[key][i] for kind in kinds for key in (kind, f"trl_{kind}")}
        yield {"step": "apart, in standard errors"} | {kind: line[f"{kind}_apart"] for kind in kinds}


def slopes(lines: list[Line]) -> Iterator[Line]:
    """A row for each quantity of `growth`."""
    for line in lines:
        ends = {f"{end}_{what}": line[what][i] for what in ("values", "results") for end, i in (("first", 0), ("last", -1))}
        yield line | ends


SECTIONS = (
    Section(
        "End to end against TRL",
        "GRPOTrainer of TRL on both cores (transformers' generate of the whole batch at once, its fastest micro-batches) and pasync "
        "with one core to serve and one to train: the same SmolLM2-135M, prompts, *K*, response length and type, one step of each after "
        "a warm-up. The limit is what pasync could reach if a core computed as much in a second on both sides: generation hidden, and its "
        "one training core has the work of TRL's cores without the repeated prompts. *Of the ideal*: max(T_g, T_t) + s over pasync's "
        "step. Memory: peak of all processes. The bar is what was hoped for before it was measured; what stands in its way: "
        "[reproducing.md](reproducing.md#against-trl).",
        {
            "trl-short": Command("against_trl --case short", 3.5),
            "trl-short-kl": Command("against_trl --case short --kl-coef 0.04", 4),
            "trl-long": Command("against_trl --case long", 7.5),
        },
        (
            Column("case", "case"), Column("prompt", "prompt_tokens", 0), Column("response", "response_tokens", 0),
            Column("*K*", "responses", 0), Column("KL", "kl_coef"), Column("tokens/s", "tokens_per_s", 0),
            Column("TRL", "trl_tokens_per_s", 0), Column("faster", "faster"), Column("limit", "limit"), Column("bar", "bar", 0),
            Column("of the ideal", "of_ideal"),
            Column("peak, GB", "peak_bytes", 1, 1e9), Column("TRL", "trl_peak_bytes", 1, 1e9),
        ),
        Chart("times as fast as TRL (mark: limit)", "{case}, KL {kl_coef}", "faster", "limit"),
    ),
    Section(
        "The same learning as TRL",
        "Ten steps of both on the sorting task, means over seeds; the same learning rate, normaliser, advantage, clipping and optimizer. "
        "Below: how far the means of whole runs are apart, in standard errors between seeds; up to 2.8 is what chance does (three seeds "
        "each, 95%).",
        {"trl-curve": Command("against_trl --case curve", 3)},
        (
            Column("step", "step"), Column("reward", "reward", 3), Column("TRL", "trl_reward", 3), Column("loss", "loss", 3),
            Column("TRL", "trl_loss", 3), Column("gradient norm", "gradient_norm"), Column("TRL", "trl_gradient_norm"),
        ),
        rows=by_step,
    ),
    Section(
        "What each part is worth",
        "One server and one rank, the same work in every variant, one iteration of each in turn. *Speed-up* and its limit are against the"
        " first line; `python -m benchmarks.ablation --help` says how limits follow from that line's times. On one server with responses "
        "of one length all admissions have the same limit.",
        {"ablation": Command("ablation", 3)},
        (
            Column("variant", "case"), Column("T_g, s", "generate_s"), Column("T_t, s", "train_s"), Column("s, s", "sync_s"),
            Column("step, s", "step_s"), Column("speed-up", "speedup"), Column("limit", "limit"), Column("of the limit", "of_limit"),
        ),
        Chart("speed-up of the parts (mark: limit)", "{case}", "speedup", "limit"),
    ),
    Section(
        "Sync and periodic",
        "Limit: max(T_g, T_t) + s.",
        {"overlap": Command("overlap --pairs 2", 2)},
        (
            Column("case", "case"), Column("T_g : T_t", "generate_over_train"), Column("sync, s", "sync_step_s", 1),
            Column("periodic, s", "periodic_step_s", 1), Column("limit, s", "ideal_step_s", 1), Column("speed-up", "speedup"),
            Column("of the limit", "of_ideal", 3),
        ),
    ),
    Section(
        "The prompt, once",
        "Forward and backward against *K* copies and against prefix-grouper; the limit counts operations. TRL's GRPOTrainer computes the "
        "prompt with every response. Only its experimental AsyncGRPOTrainer folds prefixes into a tree "
        "(`trl/experimental/async_grpo/packing.py` of 1.16), and that is no peer here: its attention is a FlashAttention-3 kernel for "
        "CUDA (on ROCm another one), and it wants a vLLM server on a device of its own. On a CPU it does not run.",
        {"shared-prompt": Command("shared_prompt --case 64,256,8 1024,64,16 --dtype float32", 2.5)},
        (
            Column("prompt, response, *K*", "case"), Column("faster", "gain"), Column("limit", "limit"), Column("of the limit", "of_limit"),
            Column("less memory", "memory_gain"), Column("than prefix-grouper: faster", "vs_prefix_grouper"),
            Column("less memory", "memory_vs_prefix_grouper"),
        ),
        Chart("the prompt once: times as fast (mark: limit)", "{case}", "gain", "limit"),
    ),
    Section(
        "Weight sync",
        "Limit: bare broadcasts of the same bytes over loopback. *reload* is a file that the sender writes and the receiver loads from "
        "the page cache: a real disk is slower.",
        {"weight-sync": Command("weight_sync --model smollm2-135m", 1)},
        (
            Column("weights and method", "case"), Column("seconds", "seconds", 3), Column("GB/s", "gb_per_s"),
            Column("limit", "raw_gb_per_s"), Column("of the limit", "of_limit"),
        ),
        Chart("weight sync, share of bare broadcasts (mark: limit)", "{case}", "of_limit", lambda _: 1.0),
    ),
    Section(
        "How costs grow",
        "Slope in a log-log plot: 1 grows in proportion, 0 not at all.",
        {"growth": Command("growth --rounds 2", 1)},
        (
            Column("of", "of"), Column("what", "what"), Column("from", "first_values", 0), Column("to", "last_values", 0),
            Column("at first, s", "first_results", 4), Column("at last, s", "last_results", 4), Column("slope", "slope"),
        ),
        rows=slopes,
    ),
)  # fmt: skip
COMMANDS = {name: command for section in SECTIONS for name, command in section.commands.items()}


def shown(line: Line, column: Column) -> str:
    """A cell."""
    value = line.get(column.key, "")
    return value if isinstance(value, str) else f"{value / column.unit:.{column.digits}f}"


def text_of(records: Records) -> str:
    """The text of docs/benchmarks.md."""
    parts = [
        "# Benchmarks\n\nWritten by `python -m benchmarks.all` on one machine, the lines that it rests on are in "
        "[benchmarks.jsonl](benchmarks.jsonl). Compare ratios: both sides of each are measured in turn; absolute times are those of this "
        "machine. `python -m benchmarks.all --only overlap` measures one again and keeps the others. What eight devices would do is "
        "computed, not measured: [scale.md](scale.md)."
    ]
    for key, title in (("machine", "Machine"), ("versions", "Versions")):
        parts += [f"{title}: {value}." for value in dict.fromkeys(record[key] for record in records.values())]
    if records:
        parts.append(f"All of it took {sum(record['seconds'] for record in records.values()) / 60:.0f} minutes.")
        parts.append("![the same as plots](benchmarks.png)")
    return "\n\n".join([*parts, *(part for section in SECTIONS for part in of_section(section, records))]) + "\n"


def of_section(section: Section, records: Records) -> Iterator[str]:
    """Its paragraphs."""
    yield f"## {section.title}"
    yield section.text
    yield "\n".join(f"- `python -m benchmarks.{command.args}`{how(records.get(name))}" for name, command in section.commands.items())
    if lines := lines_of(section, records):
        headings = [column.heading for column in section.columns]
        rows = [[shown(line, column) for column in section.columns] for line in section.rows(lines)]
        yield "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))


def how(record: Line | None) -> str:
    """How a command was run."""
    if record is None:
        return ": not measured yet"
    busy = f", on a machine that was **not quiet** ({record['busy']:.1f} cores busy)" if record["busy"] > QUIET else ""
    return f": {record['seconds']:.0f} s{busy}"


def lines_of(section: Section, records: Records) -> list[Line]:
    """What its commands printed."""
    return [line for name in section.commands if name in records for line in records[name]["lines"]]


def draw(out: Path, records: Records) -> None:
    """Write the plots."""
    from matplotlib import pyplot

    drawn = [(section.chart, lines) for section in SECTIONS if section.chart and (lines := lines_of(section, records))]
    if not drawn:
        return
    heights = [len(lines) + 1 for _, lines in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(9, 0.3 * sum(heights) + len(drawn)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for ax, (chart, lines) in zip(axes[:, 0], drawn, strict=True):
        labels = [chart.label.format_map(line) for line in lines]
        limits = [chart.limit(line) if callable(chart.limit) else line[chart.limit] for line in lines]
        ax.barh(range(len(lines)), [line[chart.value] for line in lines], color="tab:blue")
        ax.plot(limits, range(len(lines)), "k|", markersize=14)
        ax.set_yticks(range(len(lines)), labels)
        ax.invert_yaxis()
        ax.set_title(chart.title, loc="left", fontsize=10)
    figure.savefig(out, dpi=110)
