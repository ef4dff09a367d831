"""The space of a search: expressions such as `learning_rate=loguniform(1e-4,1e-1)`, and the values of each trial.

The values depend only on the seed, the trial's number and the flag's name. A search that continues tries the same
values, a search with more trials starts with the same ones, and the order of `--search` flags does not matter. The
distributions are those of Ray Tune.
"""

from __future__ import annotations

import ast
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytf.errors import ConfigError, one_line

#: Kind -> its arguments, as shown to users.
KINDS = {
    "uniform": "LOW, HIGH",
    "loguniform": "LOW, HIGH",
    "quniform": "LOW, HIGH, STEP",
    "randint": "LOW, HIGH",
    "choice": "A, B, ...",
    "grid": "A, B, ...",
}
_LISTS = ("choice", "grid")
_EXAMPLE = "--search 'learning_rate=loguniform(1e-4,1e-1)'"


@dataclass(frozen=True)
class Dimension:
    """A flag, named with underscores, and the values to try for it: bounds (and a step), or a list."""

    name: str
    kind: str
    values: tuple[Any, ...]

    def sample(self, seed: int, index: int) -> Any:
        """Draw the value of one trial, as a plain Python number or text."""
        import numpy as np
        from ray import tune

        random = np.random.default_rng([seed, index, zlib.crc32(self.name.encode())])
        make = {name: getattr(tune, name) for name in ("uniform", "loguniform", "quniform", "randint")}
        try:
            domain = tune.choice(list(self.values)) if self.kind == "choice" else make[self.kind](*self.values)
            value = domain.sample(random_state=random)
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"--search '{self.name}={self}': no value can be drawn ({one_line(error, 200)}). Expected bounds "
                "nearer to 0."
            ) from None
        return value.item() if isinstance(value, np.generic) else value

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.values))})"


class SearchSpace:
    """All searched flags, parsed from the values of `--search`."""

    def __init__(self, texts: Sequence[str]):
        if not texts:
            raise ConfigError(f"there is nothing to search. Expected {_EXAMPLE}, once for each flag.")
        parsed = [parse(text) for text in texts]
        names = [dimension.name for dimension in parsed]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--search: {name} appears twice; pass each flag once.")
        self.dimensions = sorted(parsed, key=lambda d: d.name)
        grids = [d for d in self.dimensions if d.kind == "grid"]
        points = itertools.product(*(d.values for d in grids))
        self._points = [dict(zip((d.name for d in grids), point, strict=True)) for point in points]

    @property
    def names(self) -> list[str]:
        return [d.name for d in self.dimensions]

    @property
    def grid_points(self) -> int | None:
        """The number of points of the grid; None if some values are drawn."""
        return len(self._points) if all(d.kind == "grid" for d in self.dimensions) else None

    def point(self, seed: int, index: int) -> dict[str, Any]:
        """Return the values of a trial by its index from 0. Grid points repeat, and other values are drawn."""
        drawn = {d.name: d.sample(seed, index) for d in self.dimensions if d.kind != "grid"}
        values = drawn | self._points[index % len(self._points)]
        return {name: values[name] for name in self.names}

    def describe(self) -> dict[str, str]:
        """Return the dimensions as texts, by name."""
        return {d.name: str(d) for d in self.dimensions}


def parse(text: str) -> Dimension:
    """Parse `NAME=KIND(VALUES)`, or raise a ConfigError that says what is wrong with it."""
    name, equals, expression = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--search {text!r}: expected FLAG=KIND(VALUES), such as {_EXAMPLE}.")
    kind, paren, _ = expression.strip().partition("(")
    if not paren or kind not in KINDS:
        kinds = ", ".join(f"{k}({takes})" for k, takes in KINDS.items())
        raise ConfigError(f"--search {text!r}: {expression.strip()!r} is none of {kinds}.")
    try:
        call = ast.parse(expression.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.keywords:
            raise ValueError
        values = tuple(_constant(argument) for argument in call.args)
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"--search {text!r}: expected {kind}({KINDS[kind]}) with numbers or words; put others in quotes, such as "
            "'a b' or '/data/x'."
        ) from None
    _check(text, kind, values)
    return Dimension(name, kind, values)


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id  # a word without quotes
    value = ast.literal_eval(node)
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ValueError
    return value


def _check(text: str, kind: str, values: tuple[Any, ...]) -> None:
    if kind in _LISTS:
        if not values:
            raise ConfigError(f"--search {text!r}: {kind} has no values. Expected {kind}({KINDS[kind]}).")
        if len(set(map(repr, values))) < len(values):
            raise ConfigError(f"--search {text!r}: a value appears twice; pass each value once.")
        return
    takes = KINDS[kind]
    if len(values) != takes.count(",") + 1:
        raise ConfigError(f"--search {text!r}: {kind} takes {takes}, and there are {len(values)} values.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"--search {text!r}: {value!r} is not a number. Expected {kind}({takes}).")
        if kind == "randint" and value != int(value):
            raise ConfigError(f"--search {text!r}: randint draws whole numbers, from LOW to HIGH - 1, not {value}.")
    if not values[0] < values[1]:
        raise ConfigError(f"--search {text!r}: LOW {values[0]} is not below HIGH {values[1]}.")
    if kind == "loguniform" and values[0] <= 0:
        raise ConfigError(f"--search {text!r}: loguniform needs LOW above 0.")
    if kind == "quniform":
        _check_steps(text, *values)


def _check_steps(text: str, low: float, high: float, step: float) -> None:
    if step <= 0:
        raise ConfigError(f"--search {text!r}: STEP {step} is not above 0.")
    if not all(math.isfinite(bound / step) for bound in (low, high)):
        raise ConfigError(f"--search {text!r}: STEP {step} is too small for values from LOW {low} to HIGH {high}.")
    for name, bound in (("LOW", low), ("HIGH", high)):
        if not math.isclose(bound / step, round(bound / step)):
            least, most = math.ceil(low / step), math.floor(high / step)
            inner = f", such as quniform({least * step:.12g},{most * step:.12g},{step})" if least < most else ""
            raise ConfigError(
                f"--search {text!r}: {name} {bound} is not a multiple of STEP {step}, and only multiples are drawn. "
                f"Expected LOW and HIGH that are multiples{inner}."
            )


def flags(values: dict[str, Any]) -> list[str]:
    """Return values as arguments of a command."""
    args = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            args.append(f"--{flag}={value}")
    return args


def short(value: Any) -> str:
    """Return a value as short text for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
