"""The page of a run: whole, by itself, with every event, and thin where there is much."""

import itertools
import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from raytf.commands import report
from raytf.errors import ConfigError
from raytf.runs import history, run_log, timeline
from raytf.runs.report import charts, page, series
from raytf.runs.timeline import Span
from tests.support.runs import BEGIN, Script, a_run, add_result, add_steps

EVIL = "</script><script>alert('x')</script><img src=x onerror=\"y\">&amp;"
VOID = ("meta", "img", "br", "input")


class Page(HTMLParser):
    """Reads a page: its elements, the text of each table row, and whether all that was opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.rows, self.scripts, self.styles = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, text):
        if self.stack and self.stack[-1] == "script":
            self.scripts.append(text)
        elif self.stack and self.stack[-1] == "style":
            self.styles.append(text)
        elif "tr" in self.stack:
            self.rows[-1] += f"{text} "


@pytest.fixture
def drawn(tmp_path):
    run = a_run(EVIL).write(str(tmp_path / "a"))
    add_steps(run, lambda step: 1 / step)
    add_result(run)
    report.main(report.Report(str(tmp_path / "a"), str(tmp_path / "page.html")))
    return (tmp_path / "page.html").read_text(), history.load(run.uri)


def test_the_page_is_whole_and_needs_nothing_else(drawn):
    text, _ = drawn
    read = Page(text)
    assert read.stack == []
    for tag, attributes in read.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "srcset", "xlink:href", "onload", "onerror"} & attributes.keys(), tag
    assert "url(" not in "".join(read.styles)
    assert "@import" not in "".join(read.styles)
    assert not [word for word in ("fetch(", "XMLHttpRequest", "import(", "http") if word in "".join(read.scripts[1:])]
    assert "http" not in text


def test_text_of_others_stays_text(drawn):
    text, _ = drawn
    read = Page(text)
    assert len([tag for tag, _ in read.elements if tag == "script"]) == 2
    assert any(EVIL in row for row in read.rows)
    marks = json.loads(read.scripts[0])["marks"]
    assert any(EVIL in mark[2] for mark in marks)


def test_all_events_and_sums_are_on_the_page(drawn):
    text, run = drawn
    rows = Page(text).rows
    assert len(run.happenings) >= 10
    for h in run.happenings:
        assert any(h.text in row and h.kind in row for row in rows), h
    for category, seconds in run.seconds.items():
        assert any(row.split()[:2] == [category, f"{seconds:.1f}"] for row in rows), category
    (total,) = [row for row in rows if row.startswith("sum ")]
    assert total.split()[:3] == ["sum", "100.0", "100.0%"]
    assert len(json.loads(Page(text).scripts[0])["marks"]) == len(run.happenings)
    # Down, driver and all else that a worker cannot know is in the bars, too.
    labels = [attributes["aria-label"] for _, attributes in Page(text).elements if attributes.get("class") == "bar"]
    assert "down 10.0 s, driver 1.0 s, processes 4.0 s, first step 1.0 s" in labels


def test_drawings_have_titles_and_are_well_formed(drawn):
    text, _ = drawn
    drawings = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) == 5
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        title, about = root.find("title"), root.find("desc")
        assert title.text
        assert about.text
        assert root.get("aria-labelledby").split() == [title.get("id"), about.get("id")]
        assert "nan" not in drawing.lower()


def test_steps_that_stand_out_are_marked_with_the_command_that_shows_why(tmp_path):
    run = a_run().write(str(tmp_path / "a run"))
    add_steps(run, lambda step: 90.0 if step in (300, 301) else 1 + step % 7 / 10)
    text = page.draw(history.load(run.uri), run_log.read_steps(run.uri))
    (row,) = [row for row in Page(text).rows if "raytf replay" in row]
    assert row.split()[:5] == ["300", "2", "90", "(usually", "1.3)"]
    assert f"raytf replay '{tmp_path}/a run' --step 300 --dump step-300 -- COMMAND" in row
    assert "1 steps stand out." not in text
    assert "1 mark where steps stand out." in text


def test_a_thousand_faults_and_a_million_steps_stay_small(tmp_path):
    draw, line, now, step = random.Random(7), Script().at(0, "driver", state="started"), 1.0, 0
    for _ in range(1000):
        line.at(now, "group", workers=2).attempt(now + 8, 2, step, "memory", processes=8.0).trains(now + 8, step, True)
        now, step = now + 8 + draw.uniform(5, 60), step + 1000
        line.trains(now - 1, step).at(now, "fault", cause="peer_lost", step=step, silent=1.0, text="gone")
    steps = np.arange(1, step + 1)
    run = history.build("/x/a", line.events, None, False)
    losses, norms = 1 / steps + np.random.default_rng(7).random(len(steps)), np.full(len(steps), np.nan)
    text = page.draw(run, {"step": steps, "loss": losses, "gradient_norm": norms})
    data = json.loads(Page(text).scripts[0])
    assert len(data["loss"]) <= series.MOST_POINTS
    assert len(data["bands"]) <= series.MOST_PIECES
    assert len(text) < 3_000_000
    assert sum("gone" in row for row in Page(text).rows) >= 1000
    assert text.count("<svg") == 5


def a_failed_run() -> Script:
    line = Script().at(0, "driver", state="started").at(1, "group", workers=1).attempt(10, 1, 0, "new", processes=5.0)
    line.trains(10, 1, True).trains(12, 3).at(13, "fault", cause="job", text="a worker failed", step=4, silent=0.5)
    return line.at(16, "driver", state="ended", outcome="failed", text="label <12> is outside [0, 10)")


def test_a_failed_run_shows_its_error_first_and_nothing_that_cannot_work(tmp_path):
    run = history.load(a_failed_run().write(str(tmp_path / "train" / "1")).uri)
    assert run.name == "train/1"
    assert "restart" not in run.seconds
    assert run.seconds["finish"] == 3.5
    text = page.draw(run)
    assert text.index("label &lt;12&gt; is outside") < text.index('class="tiles"')
    assert "from the failure to the end of the run" in text
    for command in ("raytf export", "raytf verify", "raytf replay"):
        assert command not in text
    assert "raytf report" in text
    script = a_failed_run().at(20, "driver", state="started").at(21, "group", workers=1)
    again = history.load(script.write(str(tmp_path / "b")).uri)
    assert again.seconds["restart"] == 3.5  # the next start may make the next step


def test_few_points_are_drawn_without_a_line():
    frame = charts.Frame(0, 100)
    for count, classes in ((4, 'class="line dots"'), (5, 'class="line"')):
        curve = series.Curve(*[np.linspace(1.0, 10.0, count)] * 5)
        assert charts.loss(frame, curve, []).count(classes) == 1


@pytest.mark.parametrize("events", [[], [{"time": BEGIN, "kind": "driver", "state": "started"}]])
def test_a_run_of_which_little_is_known_has_a_page(events):
    read = Page(page.draw(history.build("/x/a", events, None, False)))
    assert read.stack == []


def test_the_page_says_what_the_run_was_made_with(tmp_path):
    settings, versions = {"--workers": "1:3", "--exact": "on"}, {"python": "3.11.7", "tensorflow": "2.21.0"}
    script = Script().at(0, "driver", state="started", settings={"--workers": "2"}, versions=versions)
    script.at(1, "driver", state="started", settings=settings, versions=versions)
    script.at(9, "attempt", from_step=0, tier="new", world_size=2, machine="A Processor, TensorFlow 2.21.0", phases={})
    run = history.load(script.write(str(tmp_path / "a")).uri)
    assert run.changed == settings
    plain = history.load(script.at(20, "driver", state="started", versions=versions).write(str(tmp_path / "b")).uri)
    assert plain.changed == {}
    assert run.made_with == {**versions, "machine": "A Processor"}
    text = page.draw(run)
    for name, value in {**settings, **run.made_with}.items():
        assert f'<tr><td>{name}</td><td class="why">{value}</td></tr>' in text


def test_a_page_that_cannot_be_written_is_one_clear_error(tmp_path):
    a_run().write(str(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"--html .* cannot be written: No such file or directory"):
        report.main(report.Report(str(tmp_path / "a"), str(tmp_path / "nowhere" / "page.html")))


# -- numbers -----------------------------------------------------------------------------------------------------------


def span(begin, end, category="training", workers=2, first=0, last=0):
    return Span(begin, end, category, workers, first, last)


def test_steps_have_the_time_at_which_they_were_made_last():
    spans = [span(0, 10, first=0, last=10), span(10, 20, "restart", 0, 10, 5), span(20, 25, "redone", first=5, last=10)]
    times = series.times_of_steps(spans, np.arange(13))
    assert times[1:6].tolist() == [1, 2, 3, 4, 5]
    assert times[6:11].tolist() == [21, 22, 23, 24, 25]
    assert np.isnan(times[[0, 11, 12]]).all()
    assert series.times_of_steps(spans, np.array([4, 9 * 10**11]))[0] == 4  # memory for two of them


def test_a_thin_curve_keeps_mean_and_extremes():
    steps = np.arange(1, 100_001)
    losses = np.where(steps == 50_000, 99.0, 1.0)
    times = series.times_of_steps([span(0, 1000, first=0, last=100_000)], steps)
    curve = series.loss_curve({"step": steps, "loss": losses, "time": times}, most=100)
    assert len(curve) == 100
    assert (curve.high.max(), curve.low.min()) == (99.0, 1.0)
    assert curve.values.mean() == pytest.approx(losses.mean())


def test_without_a_log_of_steps_the_loss_is_that_of_the_signs_of_life():
    line = Script().at(0, "driver", state="started").trains(1, 5, True, loss=0.5).trains(2, 9, loss=None)
    run = history.build("/x/a", line.trains(3, 12, loss=float("nan")).events, None, False)
    columns = series.step_columns(run, None)
    assert columns["step"].tolist() == [5, 12]
    assert (columns["time"] - BEGIN).tolist() == [1, 3]
    curves = series.learning_curves(run, columns)["steps"]
    assert (curves["loss"], curves["time"], curves["learning_rate"]) == ([0.5, None], [1, 3], [None, None])


def test_an_epoch_has_the_time_of_its_last_step():
    line = Script().at(0, "driver", state="started").trains(0, 0, True).trains(10, 10)
    run = replace(history.build("/x/a", line.events, None, False), epochs=({"epoch": 0, "step": 5, "loss": 0.25},))
    (epoch,) = series.learning_curves(run, series.step_columns(run, None))["epochs"]
    assert epoch == {"epoch": 1, "step": 5, "loss": 0.25, "time": 5}


def test_bands_keep_each_part_of_time_once():
    spans = [
        span(4 * i + j, 4 * i + j + k, c) for i in range(2500) for j, k, c in ((0, 3, "training"), (3, 1, "restart"))
    ]
    pieces = series.bands(spans)
    assert len(pieces) <= series.MOST_PIECES
    assert (pieces[0].begin, pieces[-1].end) == (0, 10_000)
    assert all(a.end == pytest.approx(b.begin) for a, b in itertools.pairwise(pieces))
    assert all(sum(piece.shares.values()) == pytest.approx(1) for piece in pieces)
    booked = sum(piece.shares["restart"] * (piece.end - piece.begin) for piece in pieces)
    assert booked == pytest.approx(2500)
    few = series.bands(spans[:4])
    assert [(p.begin, p.end, p.shares) for p in few[:2]] == [(0, 3, {"training": 1}), (3, 4, {"restart": 1})]


def test_world_size_is_zero_where_nobody_trains():
    spans = [span(0, 1, "startup", 0), span(1, 2), span(2, 3, "restart", 0), span(3, 4, workers=3), span(9, 10)]
    assert series.world(spans) == [(0, 0), (1, 2), (2, 0), (3, 3), (4, 0), (9, 2), (10, 2)]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (-2, 7), (0, 8), (3, 3), (0, 1e9)])
def test_ticks_are_few_round_and_inside(low, high):
    found = series.ticks(low, high, 4)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-9 <= t <= high * (1 + 1e-9) for t in found)
    assert all(math.copysign(1, t) > 0 for t in found if t == 0)


@pytest.mark.parametrize("seconds", [0.5, 9, 61, 3600, 86400 * 30])
def test_labels_of_time_do_not_crowd(seconds):
    assert 1 <= len(series.clock_ticks(seconds, 8)) <= 9


def test_curves_are_broken_where_nothing_was_trained():
    frame = charts.Frame(0, 100)
    curve = series.Curve(*[np.array([10.0, 20.0, 30.0, 60.0, 70.0])] * 5)
    assert charts.loss(frame, curve, [40.0]).count('class="line"') == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.23, "8.2 s"), (245, "4 min 5 s"), (12000, "3 h 20 min"), (187200, "2 d 4 h")]
)  # fmt: skip
def test_durations(seconds, text):
    assert page.duration(seconds) == text


def test_the_older_steps_of_a_segment_that_begins_again_are_gone(tmp_path):
    run = a_run().write(str(tmp_path))
    header = "step,epoch,loss,learning_rate\n"
    run.put("steps/000000000001-a.csv", (header + "".join(f"{s},0,1.0,0.1\n" for s in range(1, 9))).encode())
    run.put("steps/000000000004-b.csv", (header + "".join(f"{s},0,2.0,0.1\n" for s in range(4, 7))).encode())
    table = run_log.read_steps(str(tmp_path))
    assert table["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert table["loss"].tolist() == [1, 1, 1, 2, 2, 2]


def test_every_category_has_a_color():
    css = (page.resources.files("raytf.runs.report") / "page.css").read_text()
    for category in timeline.CATEGORIES:
        assert css.count(f"--{category}:") == 2, category  # light and dark
