import io
from pathlib import Path

import pytest
from rich.console import Console

from pasync.observe.console import Progress, Said, Screen, Tail, parse, progress, say


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


@pytest.mark.parametrize("line", ["INFO vllm started", "::progress:: {", '::progress:: {"a": 1}', ""])
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
