from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from aoffpolicy.recorded import read_run
from aoffpolicy.report import gantt, svg
from aoffpolicy.report.__main__ import SLOWEST, main
from aoffpolicy.report.page import COLUMNS, ROLLOUT_TIMES, TRAINER_TIMES, render
from aoffpolicy.report.svg import Series, line_chart, stacked_bars, ticks
from aoffpolicy.timeline import Span
from tests.recorded import group, row, run_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@dataclass(frozen=True)
class Element:
    tag: str
    attributes: dict[str, str | None]


class Elements(HTMLParser):
    """All elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.all: list[Element] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append(Element(tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def with_data(self, *names: str) -> list[dict[str, str]]:
        return [
            {name: str(e.attributes[f"data-{name}"]) for name in names}
            for e in self.all
            if all(f"data-{name}" in e.attributes for name in names)
        ]


def page_of(folder: Path) -> str:
    return render(read_run(folder, SLOWEST))


# --- Figures -------------------------------------------------------------------------------------------------------


def test_every_figure_in_the_table_and_in_the_curves_is_that_of_metrics_jsonl(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 12)
    rows = {str(r["step"]): r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    elements = Elements(page_of(folder))
    cells = elements.with_data("key", "value")
    assert len(cells) == 12 * len(COLUMNS)
    for index, cell in enumerate(cells):
        assert float(cell["value"]) == rows[str(index // len(COLUMNS))][cell["key"]]
    keys = {"mean": "reward_mean", "loss": "loss", "oldest token": "staleness_max", "send": "time_sync"}
    drawn = [
        p for p in elements.with_data("step", "series", "value") if p["series"] in ("loss", "oldest token", "send")
    ]
    assert len(drawn) == 3 * 12
    assert all(float(p["value"]) == rows[p["step"]][keys[p["series"]]] for p in drawn)
    for metric in (key for times in (TRAINER_TIMES, ROLLOUT_TIMES) for _, _, key in times):
        totals = {t["total"]: float(t["value"]) for t in elements.with_data("total", "value")}
        assert totals[metric] == pytest.approx(sum(r[metric] for r in rows.values()))


def test_a_points_height_is_its_value() -> None:
    steps, values = list(range(5)), [0.0, 2.0, -1.0, 4.0, 3.0]
    dots = [e for e in ElementTree.fromstring(line_chart("x", steps, [Series("a", "s", values)])).iter("circle")]
    heights = [float(e.attrib["cy"]) for e in dots]
    slope = (heights[3] - heights[0]) / 4
    assert slope < 0
    assert heights == pytest.approx([heights[0] + slope * value for value in values], abs=0.02)
    assert [float(e.attrib["cx"]) for e in dots] == sorted(float(e.attrib["cx"]) for e in dots)


def test_stacked_bars_are_as_high_as_their_sum() -> None:
    parts = [Series("train", "t", [4.0, 2.0]), Series("wait", "w", [1.0, None])]
    bars = list(ElementTree.fromstring(stacked_bars("x", [0, 1], parts)).iter("rect"))
    heights = {(b.attrib["data-step"], b.attrib["data-series"]): float(b.attrib["height"]) for b in bars}
    unit = heights["0", "wait"]
    assert heights["0", "train"] == pytest.approx(4 * unit, rel=1e-2)
    assert heights["1", "train"] == pytest.approx(2 * unit, rel=1e-2)
    assert heights["1", "wait"] == 0
    top, below = (next(b for b in bars if b.attrib["data-series"] == name) for name in ("wait", "train"))
    assert float(top.attrib["y"]) + unit == pytest.approx(float(below.attrib["y"]), abs=0.02)


def test_the_gantt_shows_generation_of_the_next_step_over_training_of_this_one() -> None:
    chart = gantt.draw(
        [
            Span("generate", "generate 1", 100, 6, 1, 0),
            Span("train", "train 0", 100, 10, 0, 0),
            Span("rollout 0", "g", 100, 6),
        ]
    )
    assert chart is not None
    boxes = {r.attrib["data-track"]: r.attrib for r in ElementTree.fromstring(chart.svg).iter("rect")}
    assert boxes["generate"]["x"] == boxes["train"]["x"] == boxes["rollout 0"]["x"]
    assert float(boxes["train"]["width"]) / float(boxes["generate"]["width"]) == pytest.approx(10 / 6, rel=1e-2)
    rows = [float(boxes[track]["y"]) for track in ("generate", "train", "rollout 0")]
    assert rows == sorted(set(rows))


def test_a_gap_in_a_metric_is_a_gap_in_its_line() -> None:
    chart = ElementTree.fromstring(line_chart("x", [0, 1, 2, 3], [Series("a", "s", [1.0, None, math.nan, 2.0])]))
    assert len(list(chart.iter("polyline"))) == 2
    assert len(list(chart.iter("circle"))) == 2


# --- Bounds --------------------------------------------------------------------------------------------------------


def test_ten_thousand_steps_make_a_page_of_bounded_size_that_keeps_every_spike(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [row(step, loss=0.1 if step != 7777 else 99.5) for step in range(10_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = page_of(folder)
    assert len(page) < 2_000_000
    losses = [p for p in Elements(page).with_data("step", "series", "value") if p["series"] == "loss"]
    assert len(losses) <= svg.MAX_POINTS + 2
    assert {"step": "7777", "series": "loss", "value": "99.5"} in losses


def test_the_gantt_of_a_long_run_draws_the_newest_steps_and_so_many_workers(tmp_path: Path) -> None:
    spans = [Span("train", f"train {step}", step * 10.0, 9.0, step, step) for step in range(1000)]
    spans += [Span(f"rollout {rank}", "g", 9990.0, 1.0) for rank in range(100)]
    chart = gantt.draw(spans)
    assert chart is not None
    drawn = [r.attrib for r in ElementTree.fromstring(chart.svg).iter("rect")]
    assert chart.first_step == 1000 - gantt.MAX_STEPS
    assert chart.workers_left_out == 100 - gantt.MAX_WORKERS
    assert len(drawn) == gantt.MAX_STEPS + gantt.MAX_WORKERS
    assert float(ElementTree.fromstring(chart.svg).attrib["width"]) < gantt.MOST_PX + 200


def test_long_texts_are_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "run", 2, group(0, 1.0, text="x" * 5000)))
    assert "x" * 2001 not in page
    assert "3000 characters more" in page


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 1e-9), (-5, 3), (0.99, 1.01), (0, 1e7), (1e5, 1e5 + 1)])
def test_ticks_are_round_few_and_inside(low: float, high: float) -> None:
    made = ticks(low, high, 5)
    assert 2 <= len(made) <= 11
    assert all(low - 1e-9 * abs(high) <= tick <= high * (1 + 1e-9) for tick in made)


# --- Odd runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_runs_of_few_steps_have_a_page(tmp_path: Path, steps: int) -> None:
    assert "policy_version" in page_of(run_folder(tmp_path / "run", steps))


def test_a_run_that_goes_on_has_a_page_without_timeline_samples_and_summary(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 3, state="")
    for name in ("timeline.json", "samples.jsonl", "config.toml"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    text = "".join(Elements(page_of(folder)).text)
    assert "not finished, 3 steps" in text
    assert "no timeline.json yet" in text
    assert "no samples were kept" in text


def test_skipped_steps_and_missing_metrics_are_told_as_such(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 1)
    rows = [row(0), {"step": 1, "skipped": True, "reward_mean": None, "time_step": 1.0}, row(2, loss=None)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = page_of(folder)
    assert ">skipped</td>" in page
    assert [p["step"] for p in Elements(page).with_data("step", "series", "value") if p["series"] == "loss"] == ["0"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\nnonsense\n', r"metrics\.jsonl, row 2: not a step's metrics"),
        ("metrics.jsonl", "[1]\n", r"metrics\.jsonl, row 1"),
        ("summary.json", "{}", r"summary\.json: not the summary of a run"),
        ("timeline.json", "{}", r"timeline\.json: not the timeline of a run"),
        ("samples.jsonl", "{}\n", r"samples\.jsonl, row 1"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run", 2)
    (folder / name).write_text(text)
    assert main([str(folder)]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_the_command_writes_the_page_into_the_run_folder_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run", 2)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main([str(tmp_path / "nowhere")]) == 1


# --- Safety and the browser ----------------------------------------------------------------------------------------

HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=1">" \x1b[2J & </td></table>'


def test_nothing_is_loaded_and_no_text_becomes_markup(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "<b>run", 2, group(0, 1.0, text=HOSTILE, prompt=HOSTILE))
    elements = Elements(page_of(folder))
    assert not {e.tag for e in elements.all} & {"script", "img", "link", "iframe", "object", "b>run"}
    assert not {name for e in elements.all for name in e.attributes} & {"src", "href", "onerror", "onclick", "srcset"}
    page = page_of(folder)
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert "url(" not in page and "@import" not in page
    assert "\x1b" not in page


def browse(page: Path, *flags: str) -> str:
    """The document after the browser has laid it out."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", profile, *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


MEASURE = """
<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] };
document.querySelectorAll("details").forEach(e => e.open = true);
const told = {
  wide: document.documentElement.scrollWidth, window: window.innerWidth,
  background: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  charts: [...document.querySelectorAll("section svg")].map(box),
  dots: [...document.querySelectorAll("circle[data-series=loss]")].map(e => [+e.dataset.value, ...box(e)]),
  train: [...document.querySelectorAll('rect[data-track="train"]')].map(e => [+e.dataset.seconds, ...box(e)]),
  cells: [...document.querySelectorAll("#steps td")].map(e => [e.dataset.key, e.innerText]),
  texts: [...document.querySelectorAll("text")].map(e => e.getBBox().width),
};
const pre = document.createElement("pre"); pre.id = "told"; pre.textContent = JSON.stringify(told);
document.body.append(pre);
</script>
"""


def measured(page: str, path: Path, *flags: str) -> dict[str, Any]:
    """What a script sees of the laid out page; the page itself forbids scripts, so this is a copy without that."""
    path.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("</body>", MEASURE + "</body>"))
    told = re.search(r'<pre id="told">(.*?)</pre>', browse(path, *flags), re.DOTALL)
    assert told is not None
    measures: dict[str, Any] = json.loads(told[1].replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<"))
    return measures


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (700, True)], ids=["wide-light", "narrow-dark"])
def test_the_page_renders_and_its_figures_are_those_of_metrics_jsonl(tmp_path: Path, width: int, dark: bool) -> None:
    folder = run_folder(tmp_path / "run", 12)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    told = measured(page_of(folder), tmp_path / "page.html", f"--window-size={width},2000", scheme)

    assert told["wide"] <= told["window"]  # only the boxes meant for it scroll sideways
    assert told["background"] == ("rgb(21, 21, 20)" if dark else "rgb(247, 247, 245)")
    assert told["ink"] != told["background"]
    assert len(told["charts"]) == 9
    assert all(w > 300 and h > 100 for _, _, w, h in told["charts"])
    assert all(w > 0 for w in told["texts"])

    assert [value for value, *_ in told["dots"]] == [r["loss"] for r in rows]
    heights = [y + h / 2 for _, _, y, _, h in told["dots"]]
    slope = (heights[-1] - heights[0]) / (rows[-1]["loss"] - rows[0]["loss"])
    assert slope < 0
    assert heights == pytest.approx([heights[0] + slope * (r["loss"] - rows[0]["loss"]) for r in rows], abs=0.1)

    assert [seconds for seconds, *_ in told["train"]] == pytest.approx([r["time_train"] for r in rows])
    widths = [w / seconds for seconds, _, _, w, _ in told["train"]]
    assert max(widths) == pytest.approx(min(widths), rel=0.02)

    shown = iter(told["cells"])
    for r in rows:
        for key in COLUMNS:
            name, text = next(shown)
            assert name == key
            assert float(text) == pytest.approx(r[key], rel=1e-3, abs=1e-9)


@pytest.mark.browser
@needs_chromium
def test_the_browser_runs_nothing_that_a_completion_holds(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 2, group(0, 1.0, text=HOSTILE, prompt=HOSTILE))
    main([str(folder)])
    assert "<title>run</title>" in browse(folder / "report.html")
