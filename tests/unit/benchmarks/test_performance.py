"""benchmarks/performance.py: the tables of the pages, and the goals; the pages show the results that are kept."""

from __future__ import annotations

import pytest

from benchmarks import performance
from benchmarks.harness import ROOT, Comparison, Grid, Reading, Report

REPORTS = performance.load(ROOT / "benchmarks" / "results")


def comparison(configuration, peer="Keras", ours=(2.0,), goal=None, unit="steps/s"):
    return Comparison(configuration, peer, unit, list(ours), [1.0] * len(ours), goal=goal)


def table(mark, *rows):
    report = Report("mine", "A benchmark")
    for row in rows:
        (report.comparisons if isinstance(row, Comparison) else report.readings).append(row)
    head, _, *lines = performance.table_of(mark, {"mine": report}).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.stem)
def test_the_pages_have_the_tables_of_the_results(page):
    text = page.read_text()
    assert performance.filled(text, lambda mark: performance.table_of(mark, REPORTS)) == text, "make docs"


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_each_result_is_shown(name):
    assert any(f"<!-- table {name} " in page.read_text() for page in performance.PAGES)


def test_a_page_keeps_its_text_around_a_table():
    page = "Hello.\n\n<!-- table mine -->\nold\n<!-- end -->\n\nBye.\n"
    new = performance.filled(page, str.upper)
    assert new == "Hello.\n\n<!-- table mine -->\n\nMINE\n\n<!-- end -->\n\nBye.\n"
    assert performance.filled(new, str.upper) == new


@pytest.mark.parametrize("mark", ["nobody comparisons", "mine curves"])
def test_a_mark_without_a_table_is_an_error(mark):
    with pytest.raises(KeyError):
        performance.table_of(mark, {"mine": Report("mine", "A benchmark")})


def test_comparisons_have_a_row_per_configuration_and_a_column_per_peer():
    rows = [comparison("MLP", ours=(2.0, 1.0, 4.0), goal=3.0), comparison("MLP", "Ray"), comparison("CNN", "Ray")]
    assert table("mine comparisons", *rows) == [
        ["steps/s", "raytf", "Keras; ratio", "Ray; ratio"],
        ["MLP", "2", "1; **2.00 (1.00-4.00)**", "1; 2.00"],
        ["CNN", "2", "", "1; 2.00"],
    ]
    rows[2] = comparison("CNN", "Ray", unit="s")
    assert [line[0] for line in table("mine comparisons", *rows)] == ["configuration", "MLP, steps/s", "CNN, s"]
    assert [line[0] for line in table("mine comparisons MLP.*Keras", *rows)] == ["steps/s", "MLP"]


def test_variants_have_a_column_each():
    rows = [comparison(f"1 MB: {variant}", "gRPC", unit="ms") for variant in ("ring", "raytf")]
    assert table("mine variants", *rows) == [
        ["ms", "gRPC", "ring; ratio", "raytf; ratio"],
        ["1 MB", "1", "2; 2.00", "2; 2.00"],
    ]


@pytest.mark.parametrize(
    ("names", "head", "lines"),
    [
        ([("a", "x"), ("b", "x")], ["configuration", "x, s"], [["a", "0"], ["b", "1"]]),
        ([("a", "x"), ("a", "y")], ["quantity", "a"], [["x, s", "0"], ["y, s", "1"]]),
        ([("1 MB: a", "x"), ("1 MB: b", "x")], ["x, s", "a", "b"], [["1 MB", "0", "1"]]),
    ],
)
def test_readings_have_few_columns(names, head, lines):
    rows = [Reading(*name, "s", [float(number)]) for number, name in enumerate(names)]
    assert table("mine readings", *rows) == [head, *lines]


def test_a_grid_is_shown_as_it_is():
    grid = Grid("Phases", ["phase", "s"], [["import", "3.1"], ["build", "1|2"]])
    reports = {"mine": Report("mine", "A benchmark", grids=[grid])}
    assert performance.table_of("mine grids build", reports) == "| phase | s |\n| --- | --- |\n| build | 1\\|2 |"


def test_a_goal_has_its_rows_and_those_that_miss_it():
    reports = {
        "step_overhead": Report("step_overhead", "Steps", [comparison("MLP", "Keras fit", goal=1.0)]),
        "scale": Report("scale", "Scale", [comparison("MLP", ours=(0.5,), goal=1.0)]),
    }
    text = performance.table_of("goals", reports)
    assert "times Keras `fit` on every model | 1 of 1 |  |" in text
    assert "| scale: MLP, Keras | **0 of 1** | MLP, Keras: 0.500 |" in text
    assert "| Recovery: P95 of 20 s or less | not measured |  |" in text


def test_a_goal_has_its_rows_by_name():
    recovery = Report("recovery", "Restarts")
    recovery.readings += [Reading("SIGKILL", f"P{p}", "s", [9.0], at_most=10.0) for p in (50, 95)]
    recovery.comparisons.append(Comparison("SIGKILL", "stock Ray", "s", [9.0], [18.0], more_is_better=False, goal=3.0))
    found = performance.goals([recovery])
    assert [row.found for row in found["Recovery: P95 of 20 s or less"]] == ["9 s"]
    assert [row.reached for row in found["Recovery: at least 3 times faster than stock Ray"]] == [False]
    assert len(found["Recovery: P50 of 10 s or less"]) == 1


def test_each_goal_is_about_a_benchmark_that_was_run():
    assert {name for goal in performance.GOALS for name in goal.benchmarks} <= set(REPORTS)


@pytest.mark.parametrize(
    ("benchmark", "name", "goal"),
    [
        ("step_overhead", "MLP, raytf (as it is), Keras fit (32 steps a call)", "Keras `fit`"),
        ("step_overhead", "MLP, memory of raytf's worker", "Memory of a worker"),
        ("distributed", "MNIST CNN, 2 workers, MWMS by hand", "a script by hand"),
        ("distributed", "MNIST CNN, 2 workers, Ray TensorflowTrainer", "stock Ray, MNIST"),
        ("distributed", "MNIST CNN, 2 workers, DDP through Ray", "PyTorch DDP"),
        ("distributed", "MNIST CNN, 2 workers, exact, raytf, float", "Exact mode"),
        ("exact_cost", "mnist, 421,642 weights, 2 workers, exact, float", "Exact mode"),
        ("checkpoint_cost", "1 GB: stall, to memory, one copy in memory", "A checkpoint's stall"),
        ("checkpoint_cost", "1 GB: time to durable, the disk: write and fsync", "80 % of the raw rate"),
        ("snapshot_cost", "2 workers, to memory every 10 steps, the same without", "1 % or less"),
        ("recovery", "raytf, worker, P95 to a new step, n = 20", "P95"),
        ("recovery", "worker lost, seconds to a new step, Ray TensorflowTrainer", "stock Ray"),
        ("input", "arrays, 28x28 uint8, raytf", "from arrays"),
        ("input", "Parquet, local, raytf", "from Parquet"),
        ("startup", "cold start, 2 workers, to the 20th step, Ray TensorflowTrainer", "twice as fast as stock Ray"),
        ("startup", "warm start, one worker, to the 20th step, Keras fit", "2.5 times as long as Keras"),
        ("startup", "second run of a process, 2 workers, to the 20th step", "of a second run"),
        ("startup", "jobs/mnist.py, two workers, whole", "README's job"),
        ("scale", "a row of nobody's goal", "scale: a row of nobody's goal"),
    ],
)
def test_rows_of_the_benchmarks_find_their_goals(benchmark, name, goal):
    assert goal in performance._goal_of(benchmark, name)


def test_a_command_is_told_without_the_file_of_its_result():
    assert performance.command("python -m benchmarks.scale.scale --quick --json /tmp/x/scale.json.part") == (
        "python -m benchmarks.scale.scale --quick"
    )
