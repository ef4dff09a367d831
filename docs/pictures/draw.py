"""The explanatory pictures of the documentation, as SVG for light and dark pages.

    python docs/pictures/draw.py            writes the pictures beside this file
    python docs/pictures/draw.py --check    exits with 1 where one of them is not what would be written

Nobody edits an SVG by hand: what a picture says is here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH, MARGIN = 960, 30
#: Records of a global batch, and its logical shards.
RECORDS, SHARDS = 32, 8

#: Class -> fill and stroke on a light page, fill and stroke on a dark one. Colours are told apart by the colour-blind
#: (after Okabe and Ito, Color Universal Design, 2008), and whatever has one also has words.
SHAPES = {
    "panel": ("#f7f9fb", "#d3dae1", "#12171d", "#323c47"),
    "card": ("#ffffff", "#b6c0ca", "#1b232c", "#4a5663"),
    "hollow": ("none", "#8a96a3", "none", "#7d8a98"),
    "mark": ("#4b5763", "none", "#b3bfca", "none"),
    "beam": ("#4b576322", "none", "#b3bfca28", "none"),
    "blue": ("#d2e6f6", "#0072b2", "#123a5a", "#56b4e9"),
    "orange": ("#fce9bd", "#b97a00", "#4d3908", "#e69f00"),
    "green": ("#cbeee1", "#008560", "#0b4434", "#2cc59b"),
    "purple": ("#f4ddeb", "#a9487f", "#4d2642", "#df95c3"),
    "line": ("none", "#4b5763", "none", "#b3bfca"),
    "loss": ("none", "#c23b00", "none", "#ff8f4d"),
}
#: Class -> the colour of text on a light page and on a dark one.
TEXTS = {"ink": ("#1d2731", "#e8eef4"), "soft": ("#535f6b", "#a7b3bf"), "paper": ("#ffffff", "#12171d")}
#: The colours of workers, in the order in which they came.
WORKERS = ("blue", "orange", "green", "purple")


def colours(page: int) -> str:
    """The rules of colours on a light page, 0, or a dark one, 1."""
    shapes = [f".{name}{{fill:{found[2 * page]};stroke:{found[2 * page + 1]}}}" for name, found in SHAPES.items()]
    return "\n".join([*shapes, *(f"text.{name}{{fill:{found[page]}}}" for name, found in TEXTS.items())])


STYLE = f"""\
text{{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;font-size:19px}}
text{{stroke:none}}
.title{{font-size:26px}}
.small{{font-size:17px}}
.title,.strong{{font-weight:600}}
rect,path,circle{{stroke-width:1.5}}
.line,.loss{{stroke-width:2.5;stroke-linecap:round}}
.dashed{{stroke-dasharray:5 5}}
{colours(0)}
@media (prefers-color-scheme:dark){{
{colours(1)}
}}"""


class Picture:
    """A picture that grows by what is drawn; a later thing lies above an earlier one.

    Args:
        title: what it shows, in its first line and for those who cannot see it.
        about: the same in a few sentences, for those alone.
        height: in pixels.
    """

    def __init__(self, title: str, about: str, height: int):
        self._title, self._about, self._height = title, about, height
        self._parts: list[str] = []
        self.box(1, 1, WIDTH - 2, height - 2, "panel", radius=14)
        self.text(MARGIN, 48, title, "title")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words on a line at height y, which begin, lie in the middle or end at x."""
        kinds = kind if set(kind.split()) & set(TEXTS) else f"ink {kind}".strip()
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kinds}"{at}>{escape(words)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], kind: str = "small") -> None:
        """Lines below each other."""
        for place, words in enumerate(lines):
            self.text(x, y + 22 * place, words, kind)

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "", radius: int = 5) -> None:
        """A rectangle, with words in its middle."""
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
        self._parts.append(f'<rect {shape} class="{kind}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 6, words, "small", "middle")

    def path(self, points: Sequence[tuple[float, float]], kind: str = "line", closed: bool = False) -> None:
        """Straight lines from point to point."""
        way = "M" + " L".join(f"{x:g} {y:g}" for x, y in points) + (" Z" if closed else "")
        self._parts.append(f'<path d="{way}" class="{kind}"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A straight line with a head at its end."""
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        sides = [(end[0] - 9 * math.cos(angle + a), end[1] - 9 * math.sin(angle + a)) for a in (0.5, -0.5)]
        self.path([start, end])
        self.path([sides[0], end, sides[1]])

    def number(self, x: float, y: float, number: int) -> None:
        """A number in a disc around a point, to which a note refers."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="13" class="mark"/>')
        self.text(x, y + 6, str(number), "paper small strong", "middle")

    def svg(self) -> str:
        """The picture as a file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'width="{WIDTH}" height="{self._height}" role="img" aria-labelledby="title about">',
                "<!-- Written by docs/pictures/draw.py -->",
                f'<title id="title">{escape(self._title)}</title>',
                f'<desc id="about">{escape(self._about)}</desc>',
                f"<style>\n{STYLE}\n</style>",
                *self._parts,
                "</svg>\n",
            ]
        )


def assign(workers: int) -> list[range]:
    """The shards of each rank: `raytf.data.plan.assign`."""
    return [range(a, b) for a, b in itertools.pairwise([SHARDS * r // workers for r in range(workers + 1)])]


# -- one batch, any number of workers ----------------------------------------------------------------------------------

#: Where the first shard's column begins, and how wide each is.
FIRST, COLUMN = 166, 80
#: One number of each shard's gradient, in fixed point.
VALUES = (412, -87, 233, 91, -310, 178, 54, 129)


def whole(value: int) -> str:
    """A whole number with a real minus sign."""
    return str(value).replace("-", "\N{MINUS SIGN}")


def batch_cut() -> Picture:
    """How a global batch becomes shards, and that their sum is the same for 1, 2 and 3 workers."""
    picture = Picture(
        "One step, 8 shards, any number of workers",
        "The records of an epoch are shuffled and lie in 8 ranges, one for each logical shard. A step takes the next 4 "
        "records of each range: 32 records in 8 shards. One worker computes shards 0 to 7; of two workers rank 0 "
        "computes shards 0 to 3 and rank 1 shards 4 to 7; of three workers rank 0 computes shards 0 and 1, rank 1 "
        "shards 2 to 4 and rank 2 shards 5 to 7. Each shard's gradient is rounded to integers (fixed point), so the "
        "sum is the same.",
        560,
    )
    draw_records(picture)
    for place, workers in enumerate((1, 2, 3)):
        draw_workers(picture, 334 + 58 * place, workers)
    picture.text(MARGIN, 532, "Same records, same sum, same update: integers add up alike in any order.")
    return picture


def draw_records(picture: Picture) -> None:
    """The epoch, the step's records in their shards, and a gradient of each."""
    picture.lines(MARGIN, 98, ["an epoch,", "shuffled"])
    picture.lines(MARGIN, 198, ["one step:", f"{RECORDS} records"])
    picture.lines(MARGIN, 282, ["a gradient in", "fixed point"])
    picture.text(892, 316, "sum", "small", "middle")
    for shard, value in enumerate(VALUES):
        x = FIRST + COLUMN * shard
        picture.box(x, 84, COLUMN - 6, 32, "card", radius=3)
        picture.path([(x + 30, 116), (x + 44, 116), (x + COLUMN - 6, 176), (x, 176)], "beam", closed=True)
        picture.box(x + 30, 84, 14, 32, "mark", radius=0)
        picture.box(x, 176, COLUMN - 6, 62, "card")
        picture.text(x + 37, 197, f"shard {shard}", "small", "middle")
        for record in range(RECORDS // SHARDS):
            picture.box(x + 8 + 15 * record, 210, 12, 16, "mark", radius=2)
        picture.arrow((x + 37, 242), (x + 37, 268))
        picture.text(x + 37, 294, whole(value), "", "middle")


def draw_workers(picture: Picture, y: float, workers: int) -> None:
    """Which ranks compute which shards, what each of them adds up, and the sum."""
    picture.text(MARGIN, y + 27, f"{workers} worker{'s' if workers > 1 else ''}", "strong")
    for rank, shards in enumerate(assign(workers)):
        found = whole(sum(VALUES[shard] for shard in shards))
        x, width = FIRST + COLUMN * shards.start, COLUMN * len(shards) - 6
        picture.box(x, y, width, 42, WORKERS[rank], f"rank {rank}: {found}")
    picture.text(826, y + 27, "=", "strong", "middle")
    picture.box(852, y, 80, 42, "card", whole(sum(VALUES)))


# -- a worker dies -----------------------------------------------------------------------------------------------------

#: A shard's square, how far lanes are apart, and where the first one's squares begin.
SQUARE, LANE, TOP = 31, 66, 190
#: Where steps begin: before the death, the same step after it, and after another worker has joined.
BEFORE, BROKEN, AGAIN, NEXT, JOINED = 124, 232, 380, 518, 764


def a_worker_dies() -> Picture:
    """How a step is finished without the worker that died in it, and how another one joins."""
    picture = Picture(
        "A worker dies: the others finish its step",
        "Three workers train on 8 shards. In step 120 worker B, rank 1, dies; the sum over the ranks breaks, and "
        "no weight has changed. Workers A and C keep process, graph and weights, become ranks 0 and 1 of two, divide "
        "the 8 shards anew (0 to 3 and 4 to 7) and compute step 120, then step 121 and those after it. Meanwhile "
        "worker D starts. At the end of a step it gets the state from A and is rank 2 of three. Where nobody is left "
        "who has the state, or where sums go through TensorFlow's collectives or are made in floats, all start again "
        "from a checkpoint instead.",
        606,
    )
    picture.text(MARGIN, 78, "No step is lost, and nothing is read from a checkpoint.", "soft")
    draw_groups(picture)
    draw_lanes(picture)
    draw_sums(picture)
    draw_newcomer(picture)
    draw_notes(picture)
    return picture


def draw_groups(picture: Picture) -> None:
    """The three groups of workers, above the steps that they make."""
    spans = ((BEFORE, 3, BROKEN + 3 * SQUARE), (AGAIN, 2, 710), (JOINED, 3, 930))
    for start, workers, stop in spans:
        picture.path([(start, 124), (start, 116), (stop, 116), (stop, 124)])
        picture.text((start + stop) / 2, 108, f"{workers} workers", "small strong", "middle")
    names = {BEFORE: (3, "step 119"), BROKEN: (3, "step 120"), AGAIN: (4, "step 120"), NEXT: (4, "step 121")}
    for start, (squares, name) in {**names, JOINED: (3, "step 164")}.items():
        picture.text(start + SQUARE * squares / 2 + 16 * (start == AGAIN), 150, name, "small", "middle")


def draw_step(picture: Picture, start: float, lane: int, rank: int, shards: Sequence[int], shown: bool = True) -> None:
    """A rank's shards of a step, one after another; those that worker B had where it is gone have its colour."""
    for place, shard in enumerate(shards):
        taken = start in (AGAIN, NEXT) and shard in assign(3)[1]
        kind = WORKERS[1] if taken else WORKERS[lane]
        picture.box(start + SQUARE * place, TOP + LANE * lane, SQUARE - 3, SQUARE - 3, kind, str(shard), radius=4)
    if shown:
        picture.text(start, TOP + LANE * lane - 7, f"rank {rank}", "small soft")


def draw_lanes(picture: Picture) -> None:
    """All steps of all workers."""
    for lane, name in enumerate("ABCD"):
        picture.text(MARGIN, TOP + LANE * lane + 20, f"worker {name}", "small strong")
    three, two = assign(3), assign(2)
    for rank, shards in enumerate(three):
        draw_step(picture, BEFORE, rank, rank, shards)
        draw_step(picture, BROKEN, rank, rank, shards[:1] if rank == 1 else shards, shown=False)
    for start in (AGAIN, NEXT):
        for rank, lane in enumerate((0, 2)):
            draw_step(picture, start, lane, rank, two[rank], shown=start == AGAIN)
    for rank, lane in enumerate((0, 2, 3)):
        draw_step(picture, JOINED, lane, rank, three[rank])
    for x, lanes in ((684, (0, 2)), (900, (0, 2, 3))):
        for lane in lanes:
            picture.text(x, TOP + LANE * lane + 19, "\N{MIDLINE HORIZONTAL ELLIPSIS}", "soft", "middle")


def draw_sums(picture: Picture) -> None:
    """The sums that end the steps, and the death in one of them."""
    for end, lanes in ((BEFORE + 97, 3), (AGAIN + 128, 3), (NEXT + 128, 3), (JOINED + 97, 4)):
        picture.path([(end, TOP - 8), (end, TOP + LANE * (lanes - 1) + SQUARE + 3)])
    picture.path([(BROKEN + 97, TOP - 8), (BROKEN + 97, TOP + 2 * LANE + SQUARE + 3)], "loss dashed")
    x, y = BROKEN + SQUARE + 14, TOP + LANE + 14
    for slope in (9, -9):
        picture.path([(x - 9, y - slope), (x + 9, y + slope)], "loss")
    picture.lines(AGAIN, TOP + LANE + 10, ("its shards", "go to A and C"), "small soft")


def draw_newcomer(picture: Picture) -> None:
    """What worker D does before it joins, and who gives it the state."""
    y = TOP + 3 * LANE
    picture.box(AGAIN + 16, y - 2, 314, SQUARE + 1, "hollow dashed", "starts, builds the model, traces")
    picture.arrow((738, TOP + 14), (738, y + 10))
    picture.text(730, TOP + LANE + 20, "state", "small", "end")


def draw_notes(picture: Picture) -> None:
    """The numbers and what they stand for."""
    for number, x in enumerate((BROKEN + 120, AGAIN + 13, 738), 1):
        picture.number(x, 144 if number == 2 else 116, number)
    notes = (
        ("B dies, so the sum breaks.", "No weight has changed: that", "needs the whole sum."),
        ("A and C keep process, graph", "and weights, divide shards", "anew and finish the step."),
        ("D joins at the end of a step,", "with the state of A. No other", "worker starts again."),
    )
    for number, lines in enumerate(notes, 1):
        x = MARGIN + 302 * (number - 1)
        picture.number(x + 13, 476, number)
        picture.lines(x + 36, 482, lines)
    picture.path([(MARGIN + 13, 556), (MARGIN + 13, 580)])
    picture.text(MARGIN + 36, 574, "sum over all ranks, then the same update on each of them", "small soft")


# -- two tiers of checkpoints ------------------------------------------------------------------------------------------


def two_tiers() -> Picture:
    """Where checkpoints go while a run trains, and which of them a restart takes."""
    picture = Picture(
        "Two tiers of checkpoints",
        "Memory: every few steps, at the same step everywhere, the ranks of each node copy the whole state into memory "
        "of the node's keeper, a process that outlives the workers. Two copies take turns. Durable: every 30 seconds "
        "by default each rank writes its share to S3, GCS, Azure or a folder in the background; rank 0 writes the "
        "manifest last, and only then is it a checkpoint. A restart takes the newest complete copy of either tier that "
        "every rank can read and verify, else the one before it.",
        698,
    )
    draw_memory(picture)
    draw_storage(picture)
    draw_restart(picture)
    return picture


def draw_memory(picture: Picture) -> None:
    """The nodes with their workers and keepers."""
    picture.text(MARGIN, 92, "Memory: every few steps", "strong")
    picture.text(WIDTH - MARGIN, 92, "every node holds the whole state of the same step", "small soft", "end")
    for node in (0, 1):
        x = MARGIN + 460 * node
        picture.box(x, 106, 440, 154, "card", radius=8)
        picture.text(x + 16, 132, f"node {node + 1}", "small soft")
        picture.box(x + 146, 118, 282, 130, "hollow", radius=8)
        picture.text(x + 160, 143, "keeper, outlives the workers", "small")
        for slot, step in enumerate((420, 410)):
            picture.text(x + 222 + 130 * slot, 230, f"step {step}", "small", "middle")
        for place, rank in enumerate((2 * node, 2 * node + 1)):
            picture.box(x + 16, 146 + 52 * place, 88, 40, WORKERS[rank], f"rank {rank}")
            picture.arrow((x + 108, 166 + 52 * place), (x + 141, 166 + 52 * place))
            for slot in (0, 1):
                picture.box(x + 160 + 130 * slot + 62 * place, 158, 62, 44, WORKERS[rank], f"rank {rank}", radius=0)


def draw_storage(picture: Picture) -> None:
    """The folders of checkpoints, of which one is being written."""
    picture.text(MARGIN + 60, 307, "Durable: every 30 s by default", "strong")
    picture.text(WIDTH - MARGIN, 307, "written in the background", "small soft", "end")
    for x in (60, 520):
        picture.arrow((x, 268), (x, 322))
    picture.box(MARGIN, 330, 900, 178, "card", radius=8)
    how = "S3, GCS, Azure or a folder: each rank writes its share, rank 0 the manifest last"
    picture.text(MARGIN + 16, 356, how, "small")
    for row, step in enumerate((420, 400, 360)):
        y = 370 + 44 * row
        picture.text(MARGIN + 16, y + 23, f"step {step}", "small")
        for rank in range(4):
            kind = "hollow dashed" if row == 0 and rank > 1 else WORKERS[rank]
            picture.box(132 + 104 * rank, y, 96, 34, kind, f"share {rank}")
        picture.box(556, y, 122, 34, "hollow dashed" if row == 0 else "mark")
        picture.text(617, y + 23, "manifest", "small soft" if row == 0 else "paper small strong", "middle")
        picture.text(694, y + 23, "not a checkpoint yet" if row == 0 else "complete", "small")


def draw_restart(picture: Picture) -> None:
    """In which order a restart tries what there is."""
    picture.text(MARGIN, 554, "A restart takes the newest complete copy of either tier", "strong")
    for place, (step, tier) in enumerate(((420, "memory"), (410, "memory"), (400, "storage"), (360, "storage"))):
        x = MARGIN + 238 * place
        picture.box(x, 572, 186, 46, "card" if place else "mark", radius=8)
        kind = "small" if place else "paper small"
        picture.text(x + 93, 601, f"step {step}, {tier}", kind, "middle")
        if place:
            picture.text(x - 26, 591, "else", "small soft", "middle")
            picture.arrow((x - 44, 602), (x - 8, 602))
    rule = (
        "Every rank must read and verify it; a damaged one is reported, and the one before it is tried.",
        "Memory counts on any node that is left. If all are gone at once, storage has the newest.",
    )
    picture.lines(MARGIN, 650, rule)


PICTURES = {"batch-cut.svg": batch_cut, "a-worker-dies.svg": a_worker_dies, "two-tiers.svg": two_tiers}


def main() -> int:
    """Write the pictures, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a picture differs")
    is_check, folder, differing = parser.parse_args().check, Path(__file__).parent, []
    for name, draw in PICTURES.items():
        path, text = folder / name, draw().svg()
        if not is_check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
    if differing:
        print(f"{', '.join(differing)}: not what is written by python docs/pictures/draw.py", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
