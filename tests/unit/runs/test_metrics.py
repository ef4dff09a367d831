"""The figures that go to Prometheus, and the dashboard that asks for them."""

import json
import re
from pathlib import Path

import pytest

from raytf.runs import history
from raytf.runs.metrics import COUNTERS, GAUGES, RunFigures
from tests.support.runs import BEGIN, a_run

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "grafana.json"


def test_figures_are_those_of_the_history():
    events = a_run().events
    figures = RunFigures(clock=lambda: BEGIN + 100)
    figures.add(events)
    figures.update()
    told = history.build("/x/a", events, None, False)
    counters = figures.counters()
    assert {label: v for (name, label), v in counters.items() if name == "raytf_seconds_total"} == pytest.approx(
        told.seconds
    )
    assert figures.goodput == pytest.approx(told.goodput)
    assert figures.restarts == len(told.restarts) - 1 == 3
    restarts = {label: v for (name, label), v in counters.items() if name == "raytf_restarts_total"}
    assert restarts == {"peer_lost": 1, "driver": 1, "resize": 1}
    assert counters["raytf_faults_total", "peer_lost"] == 1
    assert counters["raytf_saves_total", ""] == 1


def test_gauges_follow_the_latest_sign_of_life():
    now = [BEGIN + 30.0]
    figures = RunFigures(clock=lambda: now[0])
    assert figures.gauges() == {("raytf_goodput", ""): 0, ("raytf_world_size", ""): 0}
    events = a_run().events
    fault = next(i for i, e in enumerate(events) if e["kind"] == "fault")
    figures.add(events[:fault])
    figures.update()
    found = figures.gauges()
    assert {name: found[f"raytf_{name}", ""] for name in ("step", "steps_wanted", "world_size", "snapshot_bytes")} == {
        "step": 200,
        "steps_wanted": 1000,
        "world_size": 2,
        "snapshot_bytes": 4096,
    }
    assert (found["raytf_checkpoint_step", "durable"], found["raytf_checkpoint_step", "memory"]) == (95, 195)
    assert found["raytf_checkpoint_age_seconds", "memory"] == pytest.approx(0.5)
    figures.add(events[fault : fault + 1])
    figures.update()
    assert figures.gauges()["raytf_world_size", ""] == 0  # nobody trains


def test_what_earlier_drivers_did_counts_for_goodput_and_is_not_repeated():
    events = a_run().events
    second = next(i for i, e in enumerate(events) if e["kind"] == "driver" and i)
    figures = RunFigures()
    figures.add(events[second:])
    figures.update(events[:second])
    whole = RunFigures()
    whole.add(events)
    whole.update()
    assert figures.counters() == whole.counters()
    assert (figures.goodput, figures.restarts) == (whole.goodput, whole.restarts)


def test_no_counter_goes_down():
    figures, before = RunFigures(), {}
    for event in a_run().events:
        figures.add([event])
        figures.update()
        now = figures.counters()
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert before


def test_all_names_and_labels_are_declared():
    figures = RunFigures()
    figures.add(a_run().events[:-1])
    figures.update()
    for (name, label), table in [
        *((key, GAUGES) for key in figures.gauges()),
        *((key, COUNTERS) for key in figures.counters()),
    ]:
        assert bool(label) == bool(table[name][1]), name
    assert all(name.endswith("_total") for name in COUNTERS)
    assert not [name for name in GAUGES if name.endswith("_total")]


def test_the_dashboard_asks_only_for_what_is_exported():
    document = json.loads(DASHBOARD.read_text())
    variables = {v["name"]: v for v in document["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["run"]["type"] == "query"
    labels = {name: {"run", *of} for name, (_, of) in {**GAUGES, **COUNTERS}.items()}
    asked = set()
    assert len(document["panels"]) >= 10
    for panel in document["panels"]:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            names = re.findall(r"ray_(raytf_\w+)", target["expr"])
            assert names, target["expr"]
            asked.update(names)
            for name in names:
                assert name in labels, target["expr"]
                used = re.findall(r"{{(\w+)}}", target["legendFormat"])
                used += [x.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for x in by.split(",")]
                assert set(used) <= labels[name], target["expr"]
            assert target["expr"].count('{run=~"$run"}') == len(names)
    assert "ray_raytf_goodput" in variables["run"]["query"]["query"]
    assert asked == set(labels), "what is exported is shown"


def test_panels_do_not_overlap():
    cells = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & mine, panel["title"]
        cells |= mine
