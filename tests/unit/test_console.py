import io
import os
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from pasync.observe.console import WATCHED, Progress, Said, Screen, Status, Tail, parse, progress, say, status
from pasync.observe.dashboard import sparkline
from pasync.supervisor import Command, Supervisor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def screen_on(clock: Clock, terminal: bool = False) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=terminal, width=120), clock), out


def test_what_is_sent_in_a_run_is_what_is_parsed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASYNC_RUN_ID", "x")
    say("two\nlines")
    progress("generating", 3, 8)
    sent = capsys.readouterr().out.splitlines()
    assert [parse(line) for line in sent] == [Said("two"), Said("lines"), Progress("generating", 3, 8)]


def test_outside_a_run_both_print_plainly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PASYNC_RUN_ID", raising=False)
    say("hello")
    progress("generating", 3, 8)
    assert capsys.readouterr().out == "hello\ngenerating 3/8\n"


def test_facts_are_only_sent_if_somebody_watches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WATCHED, raising=False)
    status(ready=1)
    monkeypatch.setenv(WATCHED, "1")
    status(ready=2, servers=[3, None])
    assert [parse(line) for line in capsys.readouterr().out.splitlines()] == [Status({"ready": 2, "servers": [3, None]})]


@pytest.mark.parametrize("line", ["::status:: [1]", "INFO vllm started", "::progress:: {", '::progress:: {"a": 1}', ""])
def test_other_lines_are_not_for_the_user(line: str) -> None:
    assert parse(line) is None


def test_only_servers_are_named_and_markup_is_left_alone(clock: Clock) -> None:
    screen, out = screen_on(clock)
    screen.show(Said("ready [bold]"), "server-0")
    screen.show(Said("iteration 1"))
    assert out.getvalue() == "server-0 | ready [bold]\niteration 1\n"


def test_plain_progress_appears_only_when_it_changed_and_not_too_often(clock: Clock) -> None:
    screen, out = screen_on(clock)
    for second in range(12):
        clock.now = second
        screen.show(Progress("training", min(second, 6), 40))
        screen.tick()
    assert out.getvalue().splitlines() == [
        "training 0/40 (0 s)",
        "training 5/40 (5 s, about 35 s left)",
        "training 6/40 (10 s, about 57 s left)",
    ]


def test_a_terminal_shows_one_live_line_with_the_newest_label(clock: Clock) -> None:
    screen, out = screen_on(clock, terminal=True)
    screen.show(Progress("starting servers", 0, 2))
    screen.tick()
    screen.show(Progress("training", 3, 40))
    screen.tick()
    screen.close()
    assert "starting servers" in out.getvalue() and "3/40" in out.getvalue().rpartition("training")[2]


def test_a_tail_gives_complete_new_lines_once(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("of an earlier run\n")
    tail = Tail(log)
    with log.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\n")
        file.flush()
        assert tail.lines() == ["two"] and tail.lines() == []
    assert tail.gained() == "one\ntwo\n"


def test_rewards_become_a_line_of_bars() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([0.3]) == "▁" and len(sparkline([0.1] * 100)) == 40


SENDER = """
from pasync.observe.console import progress, say, status
progress("training", 3, 40)
status(generate_s=5.5, train_s=2.75, sync_s=0.5, step_s=6.1, of_ideal_frac=0.98, rewards=[0.1, 0.2, 0.9])
status(ready=3, waiting=12, servers=[8, None])
say("iteration 3/40")
"""


def test_a_run_on_a_real_terminal_has_a_dashboard_that_is_gone_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = os.openpty()
    seen = bytearray()

    def read() -> None:
        while not seen.endswith(b"THE END"):
            seen.extend(os.read(ours, 1 << 16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        screen = Screen(Console(file=terminal, width=100))
        with Supervisor(tmp_path / "run", screen, 60) as processes:
            processes.wait_for(processes.start(Command("ranks", [sys.executable, "-c", SENDER])))
            screen.tick()
        terminal.write("THE END")
        terminal.flush()
        reader.join(20)
    text = seen.decode()
    for part in ("training", "3/40", "generate", "5.50 s", "6.10 s", "0.98 of the ideal", "▁▂█", "0.900", "3 ready, 12 not begun",
                 "server-0 has 8, server-1 is away", "iteration 3/40"):  # fmt: skip
        assert part in text, part
    assert "\x1b[2K" in text.rpartition("server-1 is away")[2]  # the rows were erased


def test_without_a_terminal_nobody_watches(tmp_path: Path) -> None:
    screen, out = screen_on(Clock())
    with Supervisor(tmp_path / "run", screen, 60) as processes:
        processes.wait_for(processes.start(Command("ranks", [sys.executable, "-c", SENDER])))
    assert "::status::" not in (tmp_path / "run" / "logs" / "ranks.log").read_text() and "server-0" not in out.getvalue()
