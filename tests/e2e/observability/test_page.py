"""report.html in a real browser: what is drawn, what is said on the console, and how it fits."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gkd.config import load
from gkd.observability.page.write import write_page
from gkd.observability.run_files import RunFiles
from gkd.planning.layout import Layout, cpu_hardware, models_of
from gkd.planning.memory.colocation import all_memory
from tests.observability.runs import NASTY, WORKERS, lines, make_run, row, sample

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDE = 1600
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")

PROBE = """<script>addEventListener('load', () => setTimeout(() => {
  const box = document.querySelector('.tokens span[data-gap]');
  if (box) box.focus();
  const column = name => {
    const heads = [...document.querySelectorAll('.samples th')];
    const at = heads.findIndex(head => head.textContent === name);
    if (at < 0) return [];
    heads[at].querySelector('button').click();
    return [...document.querySelectorAll('.samples tbody > tr')]
      .filter(row => row.childElementCount === heads.length).map(row => row.children[at].textContent);
  };
  const lanes = () => {
    const plot = document.querySelector('svg[aria-label="timeline of a step"]');
    return plot && [...plot.children].map(part => [
      part.tagName, part.firstElementChild ? part.firstElementChild.textContent : part.textContent,
      ...['x', 'y', 'width'].map(name => Number(part.getAttribute(name)))]);
  };
  const chosen = at => {
    const choose = document.querySelector('select[aria-label="step"]');
    if (!choose) return null;
    choose.selectedIndex = at;
    choose.dispatchEvent(new Event('change'));
    return [choose.value, lanes().length];
  };
  const under = (metric, step) => {
    const chart = Charts.drawn.find(({ lines }) => lines.some(line => line.metric === metric));
    if (!chart) return null;
    chart.plot.setCursor({ left: chart.plot.valToPos(step, 'x'), top: 10 });
    return document.querySelector(`[data-metric="${metric}"] b`).textContent;
  };
  const ends = () => {
    const text = document.querySelector('#samples .prompt')?.firstChild, range = document.createRange();
    return text && [0, text.length - 1].map(at => {
      range.setStart(text, at);
      range.setEnd(text, at + 1);
      return range.getBoundingClientRect().left;
    });
  };
  const tip = (document.querySelector('.tip') || document.body).innerText, text = document.body.innerText;
  const cards = document.querySelectorAll('#samples .grid .card').length;
  const gaps = [...document.querySelectorAll('.tokens span')]
    .map(span => [span.dataset.gap, span.style.backgroundColor]);
  const sorted = ['tokens', 'tokens', 'step', 'response'].map(column);
  parent.document.body.append(el('pre', { id: 'probe' }, JSON.stringify({
    title: document.title, scripts: document.scripts.length, images: document.images.length,
    lines: Charts.drawn.flatMap(({ plot, lines }) => lines.map((line, i) => [
      line.metric, line.label, Array.from(plot.data[0]), Array.from(plot.data[i + 1], v => v ?? null)])),
    pixels: Charts.drawn.map(({ plot }) => plot.width), width: innerWidth,
    over: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    back: getComputedStyle(document.body).backgroundColor, tip, gaps, cards, text, ends: ends(), sorted,
    seconds: [59.4, 59.7, 119.6, 3599.7, 7300].map(seconds),
    ticks: [[1, 1e-7], [1.0000002, 1e-7], [2e-7, 1e-7], [1.5e-6, 2.5e-7], [2e6, 1e6], [0.25, 0.25]]
      .map(tick => tickText(...tick)),
    selectable: [...document.querySelectorAll('select option')].map(o => o.value),
    strokes: Charts.drawn.flatMap(({ lines }) => lines.map(line => [line.metric, line.colour % 8, line.dash % 4])),
    bounds: Charts.drawn.map(({ plot, lines }) => [lines[0].metric, plot.scales.y.min, plot.scales.y.max]),
    drawn: Number(document.documentElement.dataset.drawn), lanes: lanes(), earlier: chosen(0),
    under: [['own/metric', 6], ['timing_s/update', 7], ['val/accuracy', 10], ['val/accuracy', 14]]
      .map(at => under(...at)),
    verdict: [...document.querySelectorAll('.outcome tr')].map(row => [...row.children].map(cell => cell.innerText)),
  })));
}))</script>"""


@dataclass(frozen=True)
class Seen:
    """What the page had to say of itself, and the browser of the page."""

    page: dict[str, Any]
    console: list[str]


def see(runs: list[Path], tmp_path: Path, *flags: str, width: int = WIDE) -> Seen:
    """Open the page of ``runs`` from the disk."""
    file = tmp_path / "seen.html"
    write_page([RunFiles(run) for run in runs], file)
    text = file.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>")
    if width < 500:  # which is as narrow as Chromium's window gets
        text = f'<iframe width="{width}" height="800" style="border: 0" srcdoc="{html.escape(text)}"></iframe>'
    file.write_text(text, encoding="utf-8")
    return open_in_browser(file, tmp_path, *flags, width=width)


def open_in_browser(file: Path, tmp_path: Path, *flags: str, width: int) -> Seen:
    """Open a page that has the probe."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", *flags, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probe is not None, done.stderr
    return Seen(json.loads(html.unescape(probe[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [sample(step, index) for step in (1, 10, 20) for index in range(2)]
    samples += [sample(15, 0, n=11), sample(16, 0, n=9)]
    return make_run(tmp_path_factory.mktemp("page") / "run", samples=samples)


@pytest.fixture(scope="module")
def look(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seen]:
    """Open the page of the run in a window of some width, with flags; for all tests once in each way."""

    @cache
    def look(width: int, *flags: str) -> Seen:
        return see([run], tmp_path_factory.mktemp("seen"), *flags, width=width)

    return look


def test_charts_draw_the_figures_of_the_run(look: Callable[..., Seen]) -> None:
    seen = look(WIDE)
    assert seen.console == []
    drawn = {metric: (steps, values) for metric, _, steps, values in seen.page["lines"] if metric is not None}
    for name in row(10).keys() - {"step", "epoch"} - {name for name in row(10) if name.startswith("timing_s/")}:
        expected = [row(step).get(name) for step in range(21)]
        steps, values = drawn[name]
        assert steps == list(range(21))
        for value, known in zip(values, expected, strict=True):
            assert value == (None if known is None else pytest.approx(known, rel=1e-6)), name
    # The band around the accuracy after 20 steps, 45 of 100: its ends are those of the verdict's interval.
    upper, lower = (values for metric, label, _, values in seen.page["lines"] if (metric, label) == (None, ""))
    assert (lower[20], upper[20]) == (pytest.approx(0.35615, abs=1e-5), pytest.approx(0.54756, abs=1e-5))
    # Stages that add up to a step lie on each other: sync over update over wait. Others may overlap.
    wait, update, sync, step = (drawn[f"timing_s/{stage}"][1][7] for stage in ("wait", "update", "sync", "step"))
    assert (wait, update, sync, step) == pytest.approx((1.25, 1.757, 2.007, 2.007))
    assert drawn["timing_s/generate"][1][7] == 1.0
    assert {metric: low for metric, low, _ in seen.page["bounds"]}["timing_s/sync"] == 0


def test_figures_are_those_under_the_cursor(look: Callable[..., Seen], run: Path, tmp_path: Path) -> None:
    """Not the sums that stages are drawn with; of what is measured now and then the newest until there."""
    seen = look(WIDE)
    assert seen.console == []
    assert seen.page["under"] == ["2", "0.507", "0.35", "0.35"]
    over_each_other = see([run, make_run(tmp_path / "other", 30)], tmp_path)
    assert over_each_other.console == [] and over_each_other.page["under"] == seen.page["under"]


def test_samples_are_coloured_and_no_text_is_markup(look: Callable[..., Seen]) -> None:
    page = look(WIDE).page
    assert (page["title"], page["scripts"], page["images"]) == ("run", 3, 0)  # data, scripts, and the probe
    assert NASTY.split("\u2028")[0] in page["text"]
    assert page["cards"] == 2  # the last prompt's samples, side by side
    (gap, same), (never, red), (less, some) = page["gaps"][:3]
    assert (gap, never, less) == ("0.0000", "-inf", "-2.0000")
    assert same == "" and red != some and "0.75" in red
    assert "likeliest" in page["tip"] and "0.9048" in page["tip"]  # exp(-0.1)


def test_a_prompt_is_read_from_the_side_that_its_language_begins_at(look: Callable[..., Seen], tmp_path: Path) -> None:
    (first, last) = look(WIDE).page["ends"]
    assert first < last
    hebrew = make_run(tmp_path / "run", 2, [sample(1, 0, text="\u05e9\u05dc\u05d5\u05dd.")])
    (first, last) = see([hebrew], tmp_path).page["ends"]
    assert first > last


def test_a_step_is_drawn_as_lanes_with_the_causes_of_waits(look: Callable[..., Seen], tmp_path: Path) -> None:
    """The last one of timeline.json at first, and any other by choice."""
    seen = look(WIDE)
    assert seen.console == []
    names = {y: text for tag, text, x, y, _ in seen.page["lanes"] if tag == "text" and x == 0}
    assert tuple(names[y] for y in sorted(names)) == WORKERS
    boxes = [(text, x, y, width) for tag, text, x, y, width in seen.page["lanes"] if tag == "rect"]
    drawn = {(WORKERS[int(y // 20)], text) for text, _, y, _ in boxes}
    assert drawn == {
        ("driver", "generate: 1.5 s"),
        ("driver", "update: 0.5 s"),
        ("actor 0", "waits-for-batch: 1.5 s, batch"),
        ("actor 0", "update: 0.5 s"),
        ("rollout 0", "sample: 1.25 s"),
        ("rollout 0", "waits-for-tickets: 0.25 s, tickets"),
    }
    (waits,) = (box for box in boxes if box[0].startswith("waits-for-batch"))
    (update,) = (box for box in boxes if box[0].startswith("update") and box[2] == waits[2])
    assert update[1] == pytest.approx(waits[1] + waits[3]) and waits[3] == pytest.approx(3 * update[3])
    assert seen.page["earlier"] == ["19", len(seen.page["lanes"])]
    assert seen.page["selectable"] == ["19", "20"]  # not what the driver still does after the last one
    bare = make_run(tmp_path / "bare", 2)
    (bare / "timeline.json").unlink()
    without = see([bare], tmp_path)
    assert without.console == [] and without.page["lanes"] is None


def test_durations_round_up_to_whole_minutes_and_hours(look: Callable[..., Seen]) -> None:
    assert look(WIDE).page["seconds"] == ["59.4 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 1 min"]


def test_ticks_that_are_close_together_are_told_apart(look: Callable[..., Seen]) -> None:
    """As of an importance ratio that is 1 to the seventh digit."""
    assert look(WIDE).page["ticks"] == ["1", "1.0000002", "2.0e-7", "1.5e-6", "2.0e+6", "0.25"]


def test_a_metric_that_is_0_or_1_throughout_is_drawn_as_a_share(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    shares = {"actor/clip_fraction": 0.0, "response/clip_ratio": 1.0}
    (run / "metrics.jsonl").write_text(lines([row(step) | shares for step in range(3)]))
    bounds = {metric: ends for metric, *ends in see([run], tmp_path).page["bounds"]}
    assert bounds["actor/clip_fraction"] == bounds["response/clip_ratio"] == [0, 1]
    assert bounds["response/length_mean"][0] > 50


@pytest.mark.parametrize("values", [(1.0, 0.99999994, 1.0), (3.000001, 3.000003, 3.000002), (-1.0, -0.9999999, -1.0)])
def test_values_that_differ_in_their_last_digits_are_drawn(values: tuple[float, ...], tmp_path: Path) -> None:
    """As sums of probabilities in float32 do. The page had no end of ticks to draw, and stayed blank."""
    run = make_run(tmp_path / "run", 2)
    (run / "metrics.jsonl").write_text(lines([row(step) | {"actor/entropy": values[step]} for step in range(3)]))
    seen = see([run], tmp_path)
    low, high = next(ends for metric, *ends in seen.page["bounds"] if metric == "actor/entropy")
    assert low < min(values) and high > max(values) and high - low < 1e-3
    assert seen.console == []


def test_a_run_without_a_teacher_is_not_explained_the_colours_of_one(look: Callable[..., Seen], tmp_path: Path) -> None:
    assert "3 nats" in look(WIDE).page["text"]
    samples = [sample(1, 0)]
    del samples[0]["tokens"]["teacher"]
    assert "3 nats" not in see([make_run(tmp_path / "run", 2, samples)], tmp_path).page["text"]


def test_runs_lie_over_each_other(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 30)
    seen = see([run, other], tmp_path)
    assert seen.console == []
    labels = {label for metric, label, *_ in seen.page["lines"] if metric == "own/metric"}
    assert labels == {"run", "other"}
    (values,) = (values for metric, label, _, values in seen.page["lines"] if (metric, label) == ("own/metric", "run"))
    assert len(values) == 31 and values[20] == pytest.approx(20 / 3) and values[21] is None


def test_as_many_runs_as_a_small_sweep_has_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed_{n}", 2) for n in range(9)]
    strokes = [stroke for metric, *stroke in see(runs, tmp_path).page["strokes"] if metric == "own/metric"]
    assert len(strokes) == 9 and all(strokes.count(stroke) == 1 for stroke in strokes)


@pytest.mark.parametrize("width", [400, WIDE])
@pytest.mark.parametrize(("flags", "back"), [((), "rgb(255, 255, 255)"), (("--force-dark-mode",), "rgb(17, 19, 22)")])
def test_it_fits_a_telephone_and_the_dark(
    width: int, flags: tuple[str, ...], back: str, look: Callable[..., Seen]
) -> None:
    seen = look(width, *flags)
    assert (seen.console, seen.page["width"], seen.page["back"]) == ([], width, back)
    assert seen.page["over"] <= 0
    assert all(200 <= drawn <= width for drawn in seen.page["pixels"])


def test_samples_sort_by_number_and_by_text_both_ways(look: Callable[..., Seen]) -> None:
    most, fewest, newest, first = look(WIDE).page["sorted"]
    assert (most, fewest) == (["11", "9", *["4"] * 6], [*["4"] * 6, "9", "11"])  # as numbers, not as texts
    assert newest == ["20", "20", "16", "15", "10", "10", "1", "1"]
    assert first == sorted(first)


def test_the_verdict_has_a_column_for_a_teacher_where_there_is_one(look: Callable[..., Seen], tmp_path: Path) -> None:
    (head, accuracy) = look(WIDE).page["verdict"]
    assert head == ["", "before", "after", "change"]
    assert accuracy == ["val/accuracy", "0.25 [0.1755, 0.343]", "0.45 [0.3561, 0.5476]", "+0.2"]
    taught = make_run(tmp_path / "taught")
    summary = json.loads((taught / "summary.json").read_text()) | {"teacher": {"val/accuracy": 1.0}}
    (taught / "summary.json").write_text(json.dumps(summary))
    (head, accuracy) = see([taught], tmp_path).page["verdict"]
    assert (head[-1], accuracy[-1]) == ("teacher", "1 [0.963, 1]")


def test_a_set_has_its_interval_and_its_band(tmp_path: Path) -> None:
    """Of its standard error over questions, which is no row and no chart of its own."""
    run = make_run(tmp_path / "run", 2)
    at = [{"val/hard/accuracy": 0.5, "val/hard/stderr": 0.05}, {}, {"val/hard/accuracy": 0.75, "val/hard/stderr": 0.1}]
    (run / "metrics.jsonl").write_text(lines([row(step) | own for step, own in enumerate(at)]))
    summary = json.loads((run / "summary.json").read_text()) | {"before": at[0], "after": at[2]}
    (run / "summary.json").write_text(json.dumps(summary))
    seen = see([run], tmp_path)
    assert seen.console == []
    assert seen.page["verdict"][1:] == [["val/hard/accuracy", "0.5 [0.402, 0.598]", "0.75 [0.554, 0.946]", "+0.25"]]
    assert not any(metric == "val/hard/stderr" for metric, *_ in seen.page["lines"])
    bands = [values for metric, label, _, values in seen.page["lines"] if (metric, label) == (None, "")]
    (upper, lower) = bands[-2:]
    assert (upper[2], lower[2]) == pytest.approx((0.946, 0.554), abs=1e-3) and lower[1] is None


def test_what_is_equal_in_validation_is_drawn_once(tmp_path: Path) -> None:
    """As the accuracy, the reward for it and the mean of rewards are where it is the only one; with its interval."""
    run = make_run(tmp_path / "run", 2)
    same = ("val/reward/accuracy", "val/reward/mean", "val/accuracy")
    at = [dict.fromkeys(same, 0.25) | {"val/reward/format": 0.5}, {}, dict.fromkeys((*same, "val/reward/format"), 0.75)]
    (run / "metrics.jsonl").write_text(lines([own | row(step) | own for step, own in enumerate(at)]))
    seen = see([run], tmp_path)
    drawn = [metric for metric, *_ in seen.page["lines"] if metric is not None and metric.startswith("val/")]
    assert (seen.console, drawn) == ([], ["val/accuracy", "val/reward/format"])
    assert ", ".join(same) in seen.page["text"]
    assert len([1 for metric, label, *_ in seen.page["lines"] if (metric, label) == (None, "")]) == 2  # the band


def test_memory_lies_beside_what_was_planned(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    own = {"model": {"size": "0.5b"}, "data": {"train_files": ["a"], "val_files": ["b"]}}
    tree = (
        json.loads((run / "config.yaml").read_text().partition("\n")[2]) | own | {"reward": {"functions": ["length"]}}
    )
    (run / "config.yaml").write_text(json.dumps(tree))
    seen = see([run], tmp_path)
    (planned,) = (values for metric, label, _, values in seen.page["lines"] if label == "planned")
    assert seen.console == [] and "actor: GB of its" in seen.page["text"]
    groups = all_memory(Layout(load(tree), models_of(load(tree)), cpu_hardware(load(tree).plan)))
    (total,) = (group.total for group in groups if group.group == "actor")
    assert planned == [pytest.approx(total / 1e9)] * 21


def test_a_long_run_is_drawn(tmp_path: Path) -> None:
    """10,000 steps and 2,000 samples of 50 tokens."""
    samples = [sample(5 * step, index, n=50, text="word") for step in range(1, 501) for index in range(4)]
    seen = see([make_run(tmp_path / "run", 10_000, samples)], tmp_path)
    assert seen.console == [] and "of 2000 samples" in seen.page["text"]
    assert all(len(steps) == 10_001 for _, _, steps, _ in seen.page["lines"])
    assert seen.page["drawn"] > 0
