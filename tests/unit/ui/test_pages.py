"""The pages of `raytf ui` in a real browser: desktop and phone, light and dark, keyboard, many runs, many steps, S3."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest

from raytf.runs import ledger
from raytf.storage.storage import Storage
from tests.support.runs import a_run, add_result, add_steps

MANY, STEPS = 50, 1_000_000
#: Where pictures are kept for people; nowhere else than in the test's folder by default.
PICTURES = os.environ.get("RAYTF_PICTURES")
#: Milliseconds until all is there that needs no further answer of the server.
PAINT = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
IS_NARROW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path):
    made = Storage(str(tmp_path / "runs") if request.param == "folder" else request.getfixturevalue("s3")("ui"))
    run = a_run().write(made.child("first").uri)
    add_steps(run, lambda step: 1 / step)
    add_result(run)
    return made


def shot(tmp_path: Path, name: str) -> list[str]:
    return ["shoot", str(Path(PICTURES or tmp_path) / f"{name}.png")]


def test_a_run_from_the_list_to_its_curves_on_desktop_and_phone(serving, look, storage, tmp_path):
    url = serving(storage)
    kind = "s3" if storage.uri.startswith("s3") else "folder"
    seen = look(
        ["open", url],
        ["see", "first"],
        ["is", "document.querySelectorAll('#rows tr').length === 1"],
        shot(tmp_path, f"list-{kind}"),
        ["do", "document.querySelector('#rows input').click()"],
        ["is", "document.querySelectorAll('#compare-chart canvas').length === 1"],
        ["click", "first"],
        ["see", "Where the time went"],
        ["is", "document.querySelectorAll('#learning-charts canvas').length >= 2"],
        ["tell", "[...document.querySelectorAll('#learning-charts figure')].map(f => f.getAttribute('aria-label'))"],
        ["do", "const by = document.getElementById('by'); by.value = 'time'; by.dispatchEvent(new Event('input'))"],
        ["is", "document.querySelector('#learning-charts figure').getAttribute('aria-label') === 'loss by time'"],
        shot(tmp_path, f"run-{kind}"),
        ["phone"],
        ["dark"],
        ["open", f"{url}/run/first"],
        ["is", "document.querySelectorAll('#learning-charts canvas').length >= 2"],
        ["is", IS_NARROW],
        ["tell", "getComputedStyle(document.body).backgroundColor"],
        shot(tmp_path, f"phone-dark-{kind}"),
        ["open", url],
        ["see", "first"],
        ["is", IS_NARROW],
    )
    assert "loss by step" in json.loads(seen[2])
    assert sum(map(int, json.loads(seen[3])[4:-1].split(","))) < 150, "the page is not dark"


def test_a_page_grows_with_its_run_and_keeps_what_somebody_chose(serving, look, storage):
    url = serving(storage)
    book = ledger.Ledger(storage.child("first"), "b")
    book.add([{"time": 2e9, "kind": "driver", "state": "started"}])
    script = "document.getElementById('smooth').value"
    timer = threading.Timer(4.0, book.flush)
    timer.start()
    try:
        seen = look(
            ["open", f"{url}/run/first"],
            ["see", "Events"],
            ["do", "const s = document.getElementById('smooth'); s.value = 0.9; s.dispatchEvent(new Event('input'))"],
            ["see", "driver started (process 0 on )"],
            ["tell", script],
        )
    finally:
        timer.join()
    assert json.loads(seen[-1]) == "0.9"


def trained(storage: Storage, name: str, losses: list[float], rate: float = 0.001) -> None:
    """A run that has finished, with an epoch for each loss, and its settings."""
    history = [{"epoch": e, "step": e + 1, "loss": x, "val_accuracy": 1 - x / 2} for e, x in enumerate(losses)]
    optimizer = f"Adam {json.dumps({'learning_rate': rate, 'name': 'adam'})}"
    document = {"steps": len(losses), "metrics": {"test_accuracy": 0.25}, "history": history}
    document["identity"] = {"--seed": "0", "model optimizer": optimizer}
    storage.put(f"{name}/result.json", json.dumps(document).encode())


def test_runs_side_by_side_with_the_choice_in_the_address(serving, look, tmp_path):
    made = Storage(str(tmp_path / "runs"))
    falling = [1 / (e + 1) for e in range(8)]
    trained(made, "one", falling)
    trained(made, "two", falling)
    trained(made, "other", [x + 0.2 for x in falling], rate=0.01)
    trained(made, "short", falling[:2])
    url = serving(made)
    charts = "[...document.querySelectorAll('#compare-chart figure')]"
    names = "[...document.querySelectorAll('#rows tr')].map(r => r.dataset.run)"
    seen = look(
        ["open", f"{url}/#run=one&run=two&run=other&metric=loss&metric=val_accuracy&log=1&sort=-last"],
        ["is", f"{charts}.length === 2"],
        ["tell", f"{charts}.map(f => [f.getAttribute('aria-label'), f.dataset.dashed])"],
        ["tell", "document.getElementById('equal').innerText"],
        ["tell", "document.getElementById('settings').innerText"],
        ["tell", names],
        ["do", "document.querySelector('th[data-sort=best] button').click()"],
        ["is", "location.hash.includes('sort=best')"],
        ["tell", names],
        ["tell", "document.querySelector('th[data-sort=best]').getAttribute('aria-sort')"],
        ["do", "document.getElementById('compare-together').click()"],
        ["is", f"{charts}.length === 1"],
        ["tell", "location.hash"],
        ["tell", "document.querySelectorAll('#compare-chart .u-legend .u-series').length"],
        ["do", "document.getElementById('clear').click()"],
        ["is", "document.getElementById('compare').hidden && !location.hash.includes('run=')"],
        ["tell", "[...document.querySelectorAll('[data-run=short] circle')].length"],
    )
    told = [json.loads(text) for text in seen]
    assert told[0] == [["loss by step", "1"], ["val_accuracy by step", "1"]]
    assert told[1] == "Equal curves, with dashes: loss: one, two; val_accuracy: one, two."
    assert "model optimizer, learning_rate" in told[2]
    assert "--seed" not in told[2]  # it is equal
    assert told[3] == ["one", "two", "other", "short"]
    assert told[4] == ["short", "other", "one", "two"]
    assert told[5] == "ascending"
    assert {"run=one", "metric=val_accuracy", "log=1", "together=1", "sort=best"} <= set(told[6][1:].split("&"))
    assert told[7] == 7  # x, and two metrics of three runs
    assert told[8] == 2  # points, and no line


def test_a_run_with_few_epochs_its_marks_and_its_metric(serving, look, tmp_path):
    made = Storage(str(tmp_path / "runs"))
    trained(made, "short", [1.0, 0.5])
    run = a_run().write(made.child("train/1").uri)
    add_steps(run, lambda step: 1 / step)
    add_result(run)
    url = serving(made)
    ready = ["is", "document.querySelectorAll('#learning-charts canvas').length >= 1"]
    seen = look(
        ["open", f"{url}/run/short"],
        ready,
        ["tell", "[...document.querySelectorAll('#learning-charts figure')].map(f => f.dataset.points)"],
        ["tell", "document.querySelector('.tiles').innerText"],
        ["open", f"{url}/run/train/1#by=time&log=1"],
        ready,
        ["tell", "document.querySelector('h1').innerText"],
        ["tell", "document.querySelector('#learning .legend').innerText"],
        ["tell", "[document.getElementById('by').value, document.getElementById('log').checked]"],
        ["tell", "document.querySelectorAll('section > details[open]').length"],
        ["phone"],
        ["open", f"{url}/run/train/1#by=step"],
        ["is", "document.getElementById('by') && document.getElementById('by').value === 'step'"],
        ["is", "document.querySelectorAll('section > details[open]').length === 1"],
        ["do", "document.querySelector('#events summary').click()"],
        ["is", "document.querySelectorAll('section > details[open]').length === 2"],
        ["is", IS_NARROW],
    )
    told = [json.loads(text) for text in seen]
    assert told[0] == ["1"]
    assert "val_accuracy\n0.75\nbest 0.75, test 0.25" in told[1]
    assert told[2] == "train/1"
    assert told[3].split() == ["faults", "resizes"]
    assert told[4] == ["time", True]
    assert told[5] >= 7


def test_fifty_runs_a_filter_and_the_keyboard(serving, look, tmp_path):
    made = Storage(str(tmp_path / "runs"))
    draw = random.Random(0)
    for number in range(MANY):
        history = [{"epoch": e, "step": 10 * (e + 1), "loss": draw.random()} for e in range(30)]
        document = {"steps": 300, "metrics": {"loss": 0.1}, "history": history}
        made.put(f"run-{number:02d}/result.json", json.dumps(document).encode())
    search = made.child("hpo")
    search.put("search/search.json", b"{}")
    for number in range(8):
        record = {"number": number, "parameters": {"learning-rate": 10.0**-number, "size": 2**number}}
        record |= {"outcome": "finished", "value": draw.random()}
        search.put(f"search/trials/{number:03d}.json", json.dumps(record).encode())
        search.put(f"trial-{number:03d}/result.json", json.dumps({"steps": 3}).encode())
    url = serving(made)
    seen = look(
        ["open", url],
        ["see", "51 runs"],
        ["tell", PAINT],
        ["tell", "document.querySelectorAll('#rows svg polyline').length"],
        ["type", "#filter", "run-07"],
        ["see", "1 of 51"],
        ["type", "#filter", "hpo"],
        ["see", "8 trials"],
        ["do", "document.querySelector('#rows button').focus()"],
        ["key", "Enter"],
        ["is", "document.querySelectorAll('.inside svg polyline').length === 8"],
        ["is", "document.activeElement.getAttribute('aria-label') === 'trials of hpo'"],
        shot(tmp_path, "search"),
        ["key", "Tab"],
        ["type", "#filter", ""],
        ["see", "51 runs"],
        ["do", "document.querySelector('[aria-label=\"draw run-03\"]').focus()"],
        ["key", "Space"],
        ["is", "document.querySelector('[aria-label=\"draw run-03\"]').checked"],
        ["is", "document.querySelectorAll('#compare-chart canvas').length === 1"],
    )
    assert json.loads(seen[1]) < 5000  # a second on a machine that does nothing else
    assert json.loads(seen[2]) == MANY


def test_a_million_steps_do_not_hold_up_the_page(serving, look, tmp_path):
    made = Storage(str(tmp_path / "runs"))
    run = a_run().write(made.child("long").uri)
    run.put("attempts/a.json", b"{}")
    rows = "".join(f"{step},{step // 1000},{1 / step:.6g},0.001,0.5\n" for step in range(1, STEPS + 1))
    run.put(
        "steps/000000000001-20261128T000000.000-aaaaaa.csv",
        f"step,epoch,loss,learning_rate,gradient_norm\n{rows}".encode(),
    )
    seen = look(
        ["open", f"{serving(made)}/run/long"],
        ["see", "Where the time went"],
        ["tell", PAINT],
        ["is", "document.querySelectorAll('#learning-charts canvas').length >= 3"],
        ["tell", "document.getElementById('data').textContent.length"],
        shot(tmp_path, "million"),
    )
    assert json.loads(seen[1]) < 5000  # a second on a machine that does nothing else
    assert json.loads(seen[2]) < 1_000_000
