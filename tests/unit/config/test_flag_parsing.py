"""Which command lines raytf explains itself, and which it leaves to tyro."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

from raytf.config import flag_parsing


class Color(enum.Enum):
    RED = 1


@dataclass
class Plain:
    run: tyro.conf.Positional[str]
    rate: float = 0.1
    kind: Literal["a", "b"] | None = None
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    size: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "1"


@dataclass
class Aliased:
    epochs: Annotated[int, tyro.conf.arg(aliases=["-e"])] = 1


@dataclass
class Renamed:
    epochs: Annotated[int, tyro.conf.arg(name="passes")] = 1


@dataclass
class OfEnum:
    color: Color = Color.RED


@dataclass
class Either:
    size: int | str = 1


@dataclass
class Numbers:
    depth: Literal[18, 50] = 18
    size: tuple[int, int] | None = None


@dataclass
class Nothing:
    """It has no flags."""


@pytest.mark.parametrize("kind", [Aliased, Renamed, OfEnum, Either])
def test_a_flag_that_only_tyro_knows_leaves_the_command_to_it(kind: type):
    def main(job) -> None: ...

    main.__annotations__["job"] = kind
    assert flag_parsing.of_command(main) == []


def test_all_else_is_known():
    def main(job: Plain) -> None: ...

    (group,) = flag_parsing.of_command(main)
    assert [flag.name for flag in group.flags] == ["run", "rate", "kind", "env", "size"]
    assert set(flag_parsing.by_name([group])) == {"--rate", "--kind", "--env", "--size"}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", ""),
        ("--depth 50 --size 28 28", ""),
        ("--size None", ""),
        ("--depth 34", "--depth 34: expected one of 18, 50."),
        ("--size 28", "--size 28: expected N N."),
        ("--size 28 wide", "--size 28 wide: expected N N."),
        ("--size 28 28 28", "28: expected a flag, such as --help."),
        ("--size", "--size: expected a value, such as --size N N."),
    ],
)
def test_numbers_of_a_list_and_pairs_of_them(typed: str, said: str):
    def main(job: Numbers) -> None: ...

    assert flag_parsing.wrong(flag_parsing.of_command(main), typed.split()) == said


def test_a_command_without_flags_has_a_page_too():
    def main(job: Nothing) -> None: ...

    page = flag_parsing.page("raytf nothing", flag_parsing.of_command(main), False, 80)
    assert page.splitlines()[0] == "usage: raytf nothing"
    assert "It has no flags." in page
