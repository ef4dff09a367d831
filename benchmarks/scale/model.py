"""Models what a step, a checkpoint and a failure cost on machines that are not available: formulas, not measurements.

    python -m benchmarks.scale.model                                     print the tables
    python -m benchmarks.scale.model --write docs/evidence/scaling.md    put them into the page, between its marks

docs/evidence/scaling.md explains the formulas and says where each constant is from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks import performance

#: Part of a link's rate that a collective reaches. An assumption.
EFFICIENCY = 0.8
#: Bytes a second that one process copies in memory, and that one connection to S3 carries.
COPY_RATE, S3_CONNECTION_RATE = 10e9, 87.5e6
#: Connections with which a rank writes its share; and bytes a second that a node's connections to S3 carry at most.
S3_CONNECTIONS, S3_NODE_RATE = 4, 100e9 / 8
#: Seconds of a small request to S3, and how many of those rank 0 has under way to make a manifest.
S3_SECONDS, MANIFEST_READS = 0.1, 16
#: Seconds from the loss of a node to the next new step: raytf's goal, and Ray Train's default as once seen.
RESTART_SECONDS, STOCK_RESTART_SECONDS = 10.0, 86.0
#: Seconds until a node counts as lost whose connections nobody closes (tests/stress/cut.py; a process that dies is
#: missed at once), and in which the others meet and go on (P99 of tests/stress/repair.py), after a loss and a join.
SILENT_SECONDS, MEET_SECONDS = 6.0, 1.5
#: Logical shards of a worker; loss and metrics in a row.
SHARDS_PER_WORKER, COLUMNS = 1, 5
#: Share of the time that copies in memory may take: `raytf.checkpoint.slot_ledger.SNAPSHOT_SHARE`.
SNAPSHOT_SHARE = 0.008


@dataclass(frozen=True)
class Machine:
    """A kind of node.

    Attributes:
        name: for people.
        gpus: of a node.
        inside: bytes a second in one direction between a GPU and its neighbours.
        network: bytes a second in one direction of a node.
        inside_seconds, network_seconds: of one hop of a ring.
        host: bytes a second from a GPU to the host's memory.
    """

    name: str
    gpus: int
    inside: float
    network: float
    inside_seconds: float
    network_seconds: float
    host: float


#: NVLink's published rates count both directions.
MACHINES = (
    Machine("8 H100, NVLink, 3,200 Gb/s EFA (p5.48xlarge)", 8, 450e9, 3200e9 / 8, 3e-6, 15e-6, 64e9),
    Machine("8 A100, NVLink, 400 Gb/s EFA (p4d.24xlarge)", 8, 300e9, 400e9 / 8, 3e-6, 15e-6, 32e9),
    Machine("8 A10G, PCIe, 100 Gb/s (g5.48xlarge)", 8, 32e9, 100e9 / 8, 5e-6, 40e-6, 32e9),
    Machine("1 A10G, 10 Gb/s (g5.xlarge)", 1, 32e9, 10e9 / 8, 5e-6, 40e-6, 32e9),
    Machine("1 T4, 25 Gb/s (g4dn.xlarge)", 1, 16e9, 25e9 / 8, 5e-6, 40e-6, 16e9),
)


@dataclass(frozen=True)
class Model:
    """A model that is trained.

    Attributes:
        weights: trainable numbers, of 4 bytes; the largest tensor has `largest` of them.
        tensors: that travel: weights and layers' states.
    """

    name: str
    weights: float
    tensors: int
    largest: float

    @property
    def gradient(self) -> float:
        return 4 * self.weights

    @property
    def state(self) -> float:
        """Bytes of the weights and of Adam's two moments."""
        return 3 * self.gradient


MODELS = (
    Model("ResNet-50", 25.6e6, 320, 2.4e6),
    Model("BERT-large", 335e6, 391, 31.3e6),
    Model("GPT-2 XL", 1.56e9, 580, 80.4e6),
)
NODES = (1, 8, 64, 512)


@dataclass(frozen=True)
class Spot:
    """How often a node fails: its mean time between failures, in hours."""

    name: str
    hours: float


#: A part p of the nodes that goes within t hours is a mean of t / -ln(1 - p) hours.
SPOTS = (
    Spot("on demand: 419 failures of 16,384 H100 in 54 days", 54 * 24 * 16384 / 8 / 419),
    Spot("spot, 5 % of the nodes a month", 720 / -math.log(1 - 0.05)),
    Spot("spot, 20 % a month", 720 / -math.log(1 - 0.20)),
    Spot("spot, 5 % a day", 24 / -math.log(1 - 0.05)),
    Spot("spot, 10 % an hour", 1 / -math.log(1 - 0.10)),
)


# -- a step ------------------------------------------------------------------------------------------------------------


def ring(members: int, size: float, rate: float, hop: float) -> float:
    """Return the seconds of an all-reduce over a ring: each of n sends 2(n-1)/n of the bytes, in 2(n-1) hops."""
    return 2 * (members - 1) / members * size / rate + 2 * (members - 1) * hop


def tree(members: int, size: float, rate: float, hop: float) -> float:
    """Return the seconds over a double binary tree: all bytes up and down, in 2 log2(n) hops."""
    return 2 * size / rate + 2 * math.log2(members) * hop if members > 1 else 0.0


def all_reduce(machine: Machine, nodes: int, size: float) -> float:
    """Return the seconds over all GPUs of some nodes: reduce-scatter in each node, all-reduce of the parts between
    nodes, whose
    bytes share the node's network, all-gather in each node."""
    inside = ring(machine.gpus, size, EFFICIENCY * machine.inside, machine.inside_seconds)
    outside = EFFICIENCY * machine.network, machine.network_seconds
    return inside + min(ring(nodes, size, *outside), tree(nodes, size, *outside))


def beside(model: Model, workers: int) -> float:
    """Return the bytes sent with a gradient in fixed point: a row for each logical shard, with a number for each
    tensor."""
    return 4.0 * SHARDS_PER_WORKER * workers * (COLUMNS + model.tensors)


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def share(model: Model, parts: int) -> float:
    """Return the bytes of the largest share: tensors are not cut."""
    return max(model.state / parts, 4 * model.largest)


def copy_seconds(machine: Machine, model: Model) -> float:
    """Stall of a copy into a node's memory, of which each rank of the node makes its share."""
    return share(model, machine.gpus) * (1 / machine.host + 1 / COPY_RATE)


def save_seconds(machine: Machine, model: Model, nodes: int) -> float:
    """From the copy to the manifest on S3: the ranks' shares, the small files that say what they are, the manifest."""
    workers = nodes * machine.gpus
    node = min(EFFICIENCY * machine.network, S3_NODE_RATE)
    rate = min(S3_CONNECTIONS * S3_CONNECTION_RATE, node / machine.gpus)
    writers = min(workers, 3 * model.tensors)
    return share(model, workers) / rate + S3_SECONDS * (3 + math.ceil(writers / MANIFEST_READS))


# -- failures ----------------------------------------------------------------------------------------------------------


def young(cost: float, mean: float) -> float:
    """Return the best seconds between two saves, to the first order (Young, 1974)."""
    return math.sqrt(2 * cost * mean)


def daly(cost: float, mean: float) -> float:
    """Return the same to a higher order (Daly, 2006), of new steps between two saves."""
    if cost >= 2 * mean:
        return mean
    part = math.sqrt(cost / (2 * mean))
    return young(cost, mean) * (1 + part / 3 + part * part / 9) - cost


def goodput(interval: float, cost: float, restart: float, mean: float) -> float:
    """Part of the time that goes into new steps, with failures at random (Daly, 2006): an interval with its save has to
    come to its end without one, and so has a restart."""
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + cost) / mean))


@dataclass(frozen=True)
class Plan:
    """The way in which a run saves.

    Attributes:
        every: seconds of new steps between two saves.
        goodput: part of the time in new steps.
    """

    every: float
    goodput: float


def in_memory(machine: Machine, model: Model, nodes: int, spot: Spot) -> Plan:
    """Return the plan with copies in memory, as often as `SNAPSHOT_SHARE` allows; they survive a lost node on the
    others."""
    cost, mean = copy_seconds(machine, model), 3600 * spot.hours / nodes
    every = cost / SNAPSHOT_SHARE
    return Plan(every, goodput(every, cost, RESTART_SECONDS, mean))


def on_storage(machine: Machine, model: Model, nodes: int, spot: Spot) -> Plan:
    """Return the plan with saves for which training waits, at the best interval, and restarts of all processes."""
    cost, mean = save_seconds(machine, model, nodes), 3600 * spot.hours / nodes
    every = daly(cost, mean)
    return Plan(every, goodput(every, cost, STOCK_RESTART_SECONDS, mean))


def in_place(machine: Machine, model: Model, nodes: int, spot: Spot) -> float:
    """Part of the time in new steps where the others finish the step, and a newcomer gets the state from one of them.

    Nothing is done again, so what a failure takes are two pauses, each of which has to come to its end without another
    failure: R seconds with failures at random, of mean M, take M (e^(R/M) - 1).
    """
    mean = 3600 * spot.hours / nodes
    pauses = SILENT_SECONDS + 2 * MEET_SECONDS + model.state / (EFFICIENCY * machine.network)
    return (1 - SNAPSHOT_SHARE) * math.exp(-pauses / mean)


# -- tables ------------------------------------------------------------------------------------------------------------


def machines() -> list[list[str]]:
    """Return the table of nodes."""
    head = ["node", "GPUs", "between GPUs, GB/s", "network, GB/s", "hop inside, us", "hop outside, us", "to host, GB/s"]
    return [
        head,
        *(
            [
                m.name,
                str(m.gpus),
                *(f"{rate / 1e9:g}" for rate in (m.inside, m.network)),
                *(f"{seconds * 1e6:g}" for seconds in (m.inside_seconds, m.network_seconds)),
                f"{m.host / 1e9:g}",
            ]
            for m in MACHINES
        ),
    ]


def steps() -> list[list[str]]:
    """Return the table of milliseconds of a step's all-reduce."""
    head = ["gradient", "node", *(f"{nodes} node{'s' if nodes > 1 else ''}" for nodes in NODES)]
    rows = [
        [
            f"{model.name}, {model.gradient / 1e6:,.0f} MB",
            machine.name,
            *(_number(1e3 * _step(machine, nodes, model)) for nodes in NODES),
        ]
        for model in MODELS
        for machine in MACHINES
    ]
    return [head, *rows]


def _step(machine: Machine, nodes: int, model: Model) -> float:
    return all_reduce(machine, nodes, model.gradient + beside(model, nodes * machine.gpus))


def rows() -> list[list[str]]:
    """Return the table of the bytes that are sent with a gradient."""
    workers = (8, 64, 512, 4096)
    head = ["model", *(f"{w:,} workers" for w in workers)]
    cells = [[model.name, *(f"{beside(model, w) / model.gradient:.2%}" for w in workers)] for model in MODELS]
    return [head, *cells]


def checkpoints() -> list[list[str]]:
    """Stall of a copy in memory, and seconds to a checkpoint on S3."""
    head = [
        "state",
        "node",
        "copy in memory, ms",
        "of 1 s steps, every",
        *(f"S3, {n} node{'s' if n > 1 else ''}, s" for n in NODES),
    ]
    out = [head]
    for model in MODELS:
        for machine in MACHINES:
            copy = copy_seconds(machine, model)
            saves = [_number(save_seconds(machine, model, nodes)) for nodes in NODES]
            every = max(1, math.ceil(copy / SNAPSHOT_SHARE))
            out.append(
                [f"{model.name}, {model.state / 1e9:.2f} GB", machine.name, _number(1e3 * copy), str(every), *saves]
            )
    return out


def failures() -> list[list[str]]:
    """Goodput of GPT-2 XL on nodes with 8 A100."""
    return _failures(MACHINES[1], MODELS[2])


def failures_of_one_gpu() -> list[list[str]]:
    """Goodput of BERT-large on nodes with one A10G."""
    return _failures(MACHINES[3], MODELS[1])


def _failures(machine: Machine, model: Model) -> list[list[str]]:
    head = ["failures", "nodes", "mean time between", "waits for S3 every", "goodput", "copies every", "goodput"]
    out = [[*head, "in place, goodput"]]
    for spot in SPOTS:
        for nodes in NODES[1:]:
            stored, copied = on_storage(machine, model, nodes, spot), in_memory(machine, model, nodes, spot)
            cells = [_time(3600 * spot.hours / nodes), _time(stored.every), f"{stored.goodput:.1%}"]
            cells += [_time(copied.every), f"{copied.goodput:.1%}", f"{in_place(machine, model, nodes, spot):.1%}"]
            out.append([spot.name, str(nodes), *cells])
    return out


#: By the mark in the page.
TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "machines": machines,
    "steps": steps,
    "rows": rows,
    "checkpoints": checkpoints,
    "failures": failures,
    "failures_of_one_gpu": failures_of_one_gpu,
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def markdown(name: str) -> str:
    """Return a table of Markdown.

    Raises:
        KeyError: there is no such table.
    """
    head, *rows = TABLES[name]()
    return performance.table(head, rows)


@dataclass(frozen=True)
class Arguments:
    """The model of docs/evidence/scaling.md."""

    write: Path | None = None
    """Put the tables into this page."""


def main(arguments: Arguments) -> int:
    """Print the tables, or write them."""
    if arguments.write is not None:
        arguments.write.write_text(performance.filled(arguments.write.read_text(), markdown))
        return 0
    print("Modelled, not measured.")
    for name in TABLES:
        print(f"\n{name}\n\n{markdown(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
