"""Questions that are asked at once, each with its own trouble, all of them within one limit of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, warning
from raytf.doctor.node_types import NodeType, node_types
from raytf.errors import one_line

#: All questions about one file together.
LIMIT_SECONDS = 20.0


@dataclass
class ProbeResults:
    """What was seen of a place.

    Attributes:
        findings: what is wrong there.
        notes: what is good to know: whose credentials, which roles.
        spot: node type -> US dollars an hour that a spot node of it costs now.
    """

    findings: list[ConfigFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spot: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Query:
    """A question.

    Attributes:
        what: what it is about, for `WHAT was not looked at`.
        ask: gives findings; may raise whatever its library raises.
    """

    what: str
    ask: Callable[[], Iterable[ConfigFinding]]


def run(
    queries: Sequence[Query], explain: Callable[[Query, Exception], ConfigFinding], seconds: float = LIMIT_SECONDS
) -> list[ConfigFinding]:
    """Ask all at once and wait for the answers; what has none by then is said to have none.

    Args:
        queries: what to ask.
        explain: what an exception of one of them means.
        seconds: how long to wait for all of them.
    """
    answers: dict[int, list[ConfigFinding]] = {}

    def ask(i: int, query: Query) -> None:
        answer: list[ConfigFinding] = []
        try:
            answer.extend(query.ask())  # what was found before an exception is kept
        except Exception as problem:
            answer.append(explain(query, problem))
        answers[i] = answer

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(queries)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [
        finding
        for i, query in enumerate(queries)
        for finding in (answers[i] if i in answers else [no_answer(query.what, f"nothing came within {seconds:g} s")])
    ]


def all_nodes(document: Document) -> list[NodeType]:
    """All that nodes of a cluster may be: the first choice of each type; its fallbacks as types of the same name."""
    nodes: list[NodeType] = []
    for t in node_types(document):
        if not t.is_head and t.most <= 0:
            continue
        nodes.append(t)
        for other in t.others:
            most = t.most if other.at_most is None else min(t.most, other.at_most)
            nodes.append(replace(t, config=other.config, machine=other.machine, market=other.market, most=most))
    return nodes


def no_answer(what: str, problem: object) -> ConfigFinding:
    """Nobody there, or not in time."""
    return warning(
        "no-answer",
        (),
        f"{what}: not looked at, {one_line(problem, 200)}",
        "What is wrong there shows when money is spent already.",
        "Look at the network and the endpoint and try again, or give --offline.",
    )


def no_right(what: str, rights: str) -> ConfigFinding:
    """The credentials are good, and may not look."""
    return warning(
        "no-right-to-look",
        (),
        f"{what}: not looked at, since these credentials lack {rights}",
        "What is wrong there shows when money is spent already.",
        f"Ask for {rights}, which only reads, or give --offline.",
    )


def no_credentials(place: str, unseen: str, fix: str) -> ConfigFinding:
    """There is nothing to ask with."""
    return warning(
        "no-credentials",
        (),
        f"{place} was not asked: {unseen} were not looked at",
        "What is wrong there shows when money is spent already.",
        f"{fix}; or give --offline, if you know.",
    )


def refused(place: str, problem: object, fix: str) -> ConfigFinding:
    """The credentials are there, and are no good."""
    return error(
        "credentials-refused",
        (),
        f"{place} refuses these credentials: {one_line(problem, 200)}",
        "`ray up` asks with the same ones and ends.",
        fix,
    )
