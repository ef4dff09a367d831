"""Some of Keras's own tests, with `fit` carried out by a worker; `python -m tests.stress.keras_own_tests` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.keras_own_tests.__main__ import Arguments, main
from tests.stress.keras_own_tests.page import EXCLUDED

#: Two to three minutes on two cores.
SAMPLE = ("callbacks/lambda_callback_test", "callbacks/learning_rate_scheduler_test")


def test_at_most_ten_tests_are_excluded():
    assert len(EXCLUDED) <= 10


def test_keras_s_own_tests_pass_with_a_worker(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    failed = main(Arguments(workers=(1,), files=SAMPLE, results=tmp_path / "results", page=tmp_path / "page.md"))
    assert not failed, capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "| callbacks/lambda_callback_test.py LambdaCallbackTest test_lambda_callback | passed |" in page
