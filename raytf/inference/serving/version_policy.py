"""Which versions are served, and which one answers a request that names none. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raytf.errors import ConfigError
from raytf.inference.versions import number_of


@dataclass(frozen=True)
class Policy:
    """Which versions are loaded.

    Attributes:
        newest: this many of the newest; None for all.
        named: these, whatever is newer.
        default: the one that answers where a request names none; None for the newest that is loaded.
    """

    newest: int | None = 1
    named: tuple[int, ...] = ()
    default: int | None = None

    @classmethod
    def of(cls, text: str, default: int | None = None) -> Policy:
        """Return the policy for `latest`, `latest:N`, `all`, or versions such as `1,3`.

        Raises:
            ConfigError: it is none of these.
        """
        word, colon, count = text.partition(":")
        if word == "all" and not colon:
            return cls(None, (), default)
        if word == "latest" and (not colon or number_of(count)):
            return cls(number_of(count) if colon else 1, (), default)
        numbers = [number_of(part.strip()) for part in text.split(",")]
        if None not in numbers:
            named = tuple(sorted({number for number in numbers if number is not None}, reverse=True))
            if default is not None and default not in named:
                raise ConfigError(f"--version {default} is not among --versions {text}. Add it there.")
            return cls(0, named, default)
        raise ConfigError(f"--versions {text}: expected latest, latest:N, all, or versions such as 1,3.")

    def wanted(self, there: Collection[int], broken: Collection[int] = ()) -> list[int]:
        """Return the versions to serve, the newest first.

        Args:
            there: versions that are whole.
            broken: those of them that could not be loaded: an older one stays in the place of each.
        """
        good = sorted(set(there) - set(broken), reverse=True)
        chosen = set(good if self.newest is None else good[: self.newest])
        chosen |= set(self.named) & set(good)
        if self.default in good and self.default is not None:
            chosen.add(self.default)
        return sorted(chosen, reverse=True)

    def missing(self, there: Collection[int]) -> list[int]:
        """Return the versions that were asked for by number and are not there."""
        asked = {*self.named, *([] if self.default is None else [self.default])}
        return sorted(asked - set(there))

    def answering(self, loaded: Sequence[int]) -> int | None:
        """Return the version for a request that names none, or None where there is none."""
        if self.default is not None:
            return self.default if self.default in loaded else None
        return max(loaded, default=None)


def bounds(flag: str, text: str) -> tuple[int, int]:
    """Return the fewest and the most of N or MIN:MAX, as a flag has them.

    Raises:
        ConfigError: it is none of these.
    """
    low, colon, high = text.partition(":")
    fewest, most = number_of(low), number_of(high if colon else low)
    if not fewest or not most or fewest > most:
        raise ConfigError(f"{flag} {text}: expected a number such as 2, or the fewest and the most such as 1:4.")
    return fewest, most
