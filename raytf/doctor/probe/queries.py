"""Runs questions to a place at once, each with its own errors, within one limit of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, warning
from raytf.doctor.node_types import NodeType, node_types
from raytf.errors import one_line

#: Ports of Ray, and what listens there.
RAY_PORTS = {8265: "the dashboard and the job server", 6379: "the head's tables", 10001: "Ray Client"}
#: All questions about one file together.
LIMIT_SECONDS = 20.0


@dataclass
class ProbeResults:
    """The answers of a place.

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
    """Ask all at once and wait for the answers; report a question that has no answer by then.

    Args:
        queries: the questions.
        explain: turns an exception of one of them into a finding.
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
    """Return the first choice of each node type, and its fallbacks as types of the same name."""
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
    """Return the finding that nobody answered in time."""
    fix = "Look at the network and the endpoint and try again, or give --offline."
    return _unseen_warning("no-answer", f"{what}: not looked at, {one_line(problem, 200)}", fix)


def no_right(what: str, rights: str) -> ConfigFinding:
    """Return the finding that the credentials are good but lack the right to read."""
    fix = f"Ask for {rights}, which only reads, or give --offline."
    return _unseen_warning("no-right-to-look", f"{what}: not looked at, since these credentials lack {rights}", fix)


def no_credentials(place: str, unseen: str, fix: str) -> ConfigFinding:
    """Return the finding that there are no credentials."""
    fix = f"{fix}; or give --offline, if you know."
    return _unseen_warning("no-credentials", f"{place} was not asked: {unseen} were not looked at", fix)


def _unseen_warning(code: str, what: str, fix: str) -> ConfigFinding:
    return warning(code, (), what, "What is wrong there shows when money is spent already.", fix)


def refused(place: str, problem: object, fix: str) -> ConfigFinding:
    """Return the finding that the credentials are there but are refused."""
    return error(
        "credentials-refused",
        (),
        f"{place} refuses these credentials: {one_line(problem, 200)}",
        "`ray up` asks with the same ones and ends.",
        fix,
    )
