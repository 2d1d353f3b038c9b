from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, MONOKAI, NIGHT_OWLISH, TerminalTheme

from aoffpolicy.status.bars import phase_bar, sparkline
from aoffpolicy.status.picture import Phase, Picture
from aoffpolicy.status.screen import Screen
from aoffpolicy.text import duration, size
from aoffpolicy.transport.events import AnyEvent, ErrorEvent, PhaseEvent, RunEvent, StepEvent, WorkerEvent
from tests.recorded import recorded_events, row

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]\u202e" + "x" * 300 + "\nsecond line"


def picture_of(events: Sequence[AnyEvent]) -> Picture:
    picture = Picture()
    for event in events:
        picture.add(event)
    return picture


def draw(picture: Picture, width: int, height: int = 0, now: float | None = None) -> list[str]:
    """The screen's lines as a terminal of this size gets them, styles left out."""
    console = Console(width=width, height=height or None, file=io.StringIO(), color_system=None, legacy_windows=False)
    screen = Screen(picture, picture.time if now is None else now)
    options = console.options.update(height=height) if height else console.options
    lines = console.render_lines(screen, options, pad=False)
    drawn = ["".join(segment.text for segment in line).rstrip() for line in lines]
    while drawn and not drawn[-1]:
        drawn.pop()
    return drawn


def trouble() -> Picture:
    """A run in which much is going on and much is wrong."""
    events: list[AnyEvent] = [RunEvent(name=HOSTILE, state="running", steps=100_000, run_dir="/r", time=1000.0)]
    events += [StepEvent(step=step, metrics=row(step), time=900.0 + step) for step in range(64)]
    events += [
        WorkerEvent(
            role="rollout",
            rank=rank,
            state=("lost", "starting", "busy", "ready")[min(rank, 3)],
            host="node-" + "y" * 80,
            pid=4_000_000 + rank,
            device="npu:7 (cores 0,1,2,3,4,5,6,7,8,9,10,11)",
            detail=HOSTILE,
            version=12_345,
            load=100_000,
            tokens_per_s=123_456.0,
            memory_bytes=2**41,
            time=1000.0,
        )
        for rank in range(1000)
    ]
    events += [ErrorEvent(role="trainer", rank=0, cause=HOSTILE, time=1000.0) for _ in range(9)]
    events += [
        PhaseEvent(name="generate", step=64, version=63, state="begin", time=990.0),
        PhaseEvent(name="train", step=63, version=63, state="begin", time=989.0),
        PhaseEvent(name="send", step=62, version=63, state="end", seconds=1e6, time=990.0),
    ]
    return picture_of(events)


# --- Size ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("height", [24, 50])
def test_at_every_moment_of_a_recorded_run_the_screen_fits_the_terminal(width: int, height: int) -> None:
    events = recorded_events()
    picture = Picture()
    for event in events:
        picture.add(event)
        for later in (0.0, 7.7):
            lines = draw(picture, width, height, picture.time + later)
            assert max(map(cell_len, lines)) <= width
            assert len(lines) <= height


@pytest.mark.parametrize("width", [60, 80, 100, 160, 300])
@pytest.mark.parametrize("height", [24, 40])
def test_a_thousand_workers_and_endless_texts_fit_too(width: int, height: int) -> None:
    lines = draw(trouble(), width, height)
    assert max(map(cell_len, lines)) <= min(width, 160)
    assert len(lines) <= height
    shown = "\n".join(lines)
    assert "rollout 0" in shown and "lost" in shown  # what is wrong comes first
    assert "more ready" in shown
    assert "\x1b" not in shown and "\u202e" not in shown and "\x07" not in shown


def test_no_line_of_a_wide_screen_is_a_wrapped_one() -> None:
    picture = picture_of(recorded_events())
    assert len(draw(picture, 160)) <= len(draw(picture, 80)) <= len(draw(picture, 160)) + 1  # the verdict in two parts


def test_before_any_event_there_is_a_screen() -> None:
    assert draw(Picture(), 80) == ["no news of a run yet"]


# --- Truth ---------------------------------------------------------------------------------------------------------


def test_the_screen_says_what_everybody_does_since_when() -> None:
    events = recorded_events()
    began = next(e for e in events if isinstance(e, PhaseEvent) and (e.name, e.step) == ("train", 3))
    recorded = next(i for i, e in enumerate(events) if isinstance(e, StepEvent) and e.step == 2)
    picture = picture_of(events[: recorded + 1])
    shown = "\n".join(draw(picture, 160, now=began.time + 4.2))
    assert "train 3, 4.2 s" in shown
    assert "3 of 6 steps" in shown
    assert "running" in shown
    reward = picture.values("reward_mean")[-1]
    assert f"{reward:.4g}" in shown


def test_an_ended_run_is_shown_as_ended() -> None:
    shown = "\n".join(draw(picture_of(recorded_events()), 160))
    assert "finished" in shown and "6 of 6 steps" in shown
    assert shown.count("stopped") >= 3
    assert "train 5," not in shown and "to go" not in shown


def test_silence_is_said() -> None:
    events = [event for event in recorded_events() if not (isinstance(event, RunEvent) and event.state == "finished")]
    picture = picture_of(events)
    assert "silent" not in draw(picture, 80, now=picture.time + 2)[0]
    assert "silent for 2 min" in draw(picture, 80, now=picture.time + 120)[0]


def test_a_bar_is_as_long_as_its_phase_and_the_shortest_is_seen() -> None:
    phases = [Phase("train", 7, 7, 10.0, 15.0), Phase("train", 8, 8, 15.0, 15.01), Phase("train", 9, 9, 19.0, 30.0)]
    bar = phase_bar(phases, 10.0, 20.0, 40).plain
    assert len(bar) == 40
    assert bar[:20] == "7" + "▓" * 19
    assert bar[20] == "█"
    assert bar[21:36] == "·" * 15
    assert bar[36:] == "9" + "▓" * 3


def test_phases_outside_the_window_are_left_out() -> None:
    assert (
        phase_bar([Phase("train", 1, 1, 0.0, 5.0), Phase("train", 2, 2, 20.0, 25.0)], 5.0, 20.0, 10).plain == "·" * 10
    )


def test_a_sparkline_shows_the_newest_values_from_lowest_to_highest() -> None:
    assert sparkline([9, 0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([], 8) == ""


def test_times_and_sizes_are_said_as_people_do() -> None:
    assert [duration(s) for s in (3.2, 600, 7200, 400_000)] == ["3 s", "10 min", "2.0 h", "4.6 days"]
    assert [size(n) for n in (3 * 2**20, 3 * 2**30)] == ["3 MiB", "3.0 GiB"]


# --- Light and dark ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "theme", [DEFAULT_TERMINAL_THEME, MONOKAI, DIMMED_MONOKAI, NIGHT_OWLISH], ids=["light", "dark", "dim", "owl"]
)
@pytest.mark.parametrize("picture", [trouble(), picture_of(recorded_events())], ids=["trouble", "recorded"])
def test_every_colour_can_be_read_on_a_light_and_on_a_dark_terminal(theme: TerminalTheme, picture: Picture) -> None:
    console = Console(width=160, file=io.StringIO(), color_system="standard", force_terminal=True)
    seen = set()
    for segment in console.render(Screen(picture, picture.time), console.options.update(height=60)):
        if segment.style is None or not segment.text.strip():
            continue
        assert segment.style.bgcolor is None  # the terminal's own background, whatever it is
        if segment.style.color is not None:
            assert segment.style.color.is_system_defined  # from the terminal's own palette
            seen.add(segment.style.color.name)
            assert contrast(segment.style.color.get_truecolor(theme), theme.background_color) >= 2.5
    assert len(seen) >= 3


def contrast(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """Contrast ratio of WCAG 2.1, from 1 to 21."""
    brighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: tuple[int, int, int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
