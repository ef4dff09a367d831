"""What comes from outside does nothing on a terminal, and is still to be read."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from raytf.commands import _table
from raytf.commands.show import _text
from raytf.config.terminal_text import log_text, visible
from raytf.runs.display import Display

TABLE = {
    "plain name": "plain name",
    "é日本 naïve ñ Ω": "é日本 naïve ñ Ω",
    "a b": "a b",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[31mred": r"\x1b[31mred",
    "a\nb": r"a\nb",
    "a\rb\tc": r"a\rb\tc",
    "a\x00b\x08\x7f": r"a\x00b\x08\x7f",
    "\x9b31m": r"\x9b31m",
    "\x85": r"\x85",
    "abc\u202efdp.exe": r"abc\u202efdp.exe",
    "\u2066x\u2069\u200f\u061c": r"\u2066x\u2069\u200f\u061c",
    "a\u200bb\u2060\ufeff\u200d": r"a\u200bb\u2060\ufeff\u200d",
    "a\u2028b\u2029c": r"a\u2028b\u2029c",
    "half \ud800 pair": r"half \ud800 pair",
    "tag \U000e0041": r"tag \U000e0041",
    "[red]x[/red]": "[red]x[/red]",
    "back\\slash": "back\\slash",
}


LOG = {
    "epoch 1\n\tloss 0.5\r\n": "epoch 1\n\tloss 0.5\n",
    "10 %\r20 %\r30 %\n": "10 %\n20 %\n30 %\n",
    "\x1b[1m\x1b[31mred\x1b[0m\x1b[K bold": "red bold",
    "\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1bPq...\x1b\\c": "abc",
    "\x1b]0;a title without an end\nnext": "\nnext",
    "a\x1b[2J\x1b[1;1H\x1bc\x1b(0b": "ab",
    "cut off \x1b[38;5": "cut off 38;5",
    "cut off \x1b": "cut off ",
    "\x9b31m\x85\x00\x08\x7f\x0e": "31m",
    "é日本 Ω [red]": "é日本 Ω [red]",
    "abc\u202efdp\ud800": r"abc\u202efdp\ud800",
}


@pytest.mark.parametrize("text", LOG)
def test_the_output_of_a_program(text):
    assert log_text(text) == LOG[text]
    assert log_text(log_text(text)) == log_text(text)


@pytest.mark.parametrize("text", TABLE)
def test_a_text_from_outside(text):
    assert visible(text) == TABLE[text]
    assert visible(visible(text)) == visible(text)
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system=None, width=200, highlight=False)
        _table.show(("name",), [(text,)], console)
        with Display(console) as display:
            display.say(text.replace("\n", "").replace("\t", ""))
        console.print(_text(text))
        shown = out.getvalue()
        assert TABLE[text] in shown
        shown.encode()  # nothing that no encoding has
        assert not {"\x1b]", "\x07", "\u202e", "\x9b", "\x85", "\u2028"} & {shown[i : i + n] for i in range(len(shown))
                                                                         for n in (1, 2)}  # fmt: skip


def test_several_lines_stay_several():
    assert visible("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("command", ["show", "runs", "verify", "report", "check"])
def test_a_name_that_sets_the_title_is_only_read(tmp_path, command, encoding):
    name = tmp_path / "x\x1b]0;owned\x07\ny\u202e\udcff é"
    done = subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", command, str(name)],
        capture_output=True, timeout=120, env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert b"Traceback" not in said, said.decode(errors="replace")
    assert b"\x1b]0;" not in said
    assert b"\x07" not in said
    assert "\u202e".encode() not in said
    assert b"\\x1b]0;owned" in said or b"the name contains a control character" in said, said


def test_what_is_wrong_with_a_file_is_said_in_its_own_rows(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text('"a\\e]0;t\\a\\n    fix: nothing": 1\nprovider: {type: "x\\u202e"}\n')
    done = subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", "check", "--offline", str(file)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "    fix: nothing" not in done.stdout.splitlines()
    assert r"\x1b]0;t" in done.stdout
