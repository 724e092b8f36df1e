"""Draws the images of the documentation as SVG: `python docs/generate_images.py`, or `make images`.

The architecture is drawn from the tables below. The trace and the report are drawn from a real capture of four ranks on
four H200 (tests/data/h200/ddp4) with the public functions of kineto_trace. The same code and data give the same bytes,
and a test compares them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import kineto_trace as kt

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/images"
JOB = ROOT / "tests/data/h200/ddp4"
STEP = "ProfilerStep#262"  # one whole iteration, which the trace of rank 0 has

WIDTH = 1080
MARGIN = 24
CHAR_PX = 6.3  # of the font below, on average
PALETTE = {
    "text": "#1d2430",
    "soft": "#667085",
    "edge": "#d5dae3",
    "card": "#f6f7f9",
    "blue": "#2f6fed",
    "teal": "#12a594",
    "violet": "#7c5cdb",
    "red": "#e5484d",
    "amber": "#e79d13",
    "grey": "#8792a5",
}
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    "text.b{font-weight:600}text.h{font-size:15px;font-weight:600}"
)


# ---------------------------------------------------------------- SVG


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, fill: str, *, edge: str = "", radius: float = 0) -> str:
    """A rectangle; colours are keys of PALETTE or CSS colours."""
    size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    corner = f' rx="{number(radius)}"' if radius else ""
    stroke = f' stroke="{PALETTE.get(edge, edge)}"' if edge else ""
    return f'<rect {size}{corner} fill="{PALETTE.get(fill, fill)}"{stroke}/>'


def text(x: float, y: float, content: str, *, fill: str = "text", anchor: str = "", style: str = "") -> str:
    """One line of text; style is a class of STYLE."""
    extra = (f' text-anchor="{anchor}"' if anchor else "") + (f' class="{style}"' if style else "")
    return f'<text x="{number(x)}" y="{number(y)}" fill="{PALETTE.get(fill, fill)}"{extra}>{escape(content)}</text>'


def fitted(content: str, width: float) -> str:
    """The text cut to a width in pixels, or nothing if that leaves too little to be read."""
    room = int((width - 6) / CHAR_PX)
    if len(content) <= room:
        return content
    return f"{content[: room - 1]}…" if room >= 6 else ""


def document(height: float, title: str, parts: Iterable[str]) -> str:
    """The whole image on a white card, which is readable on a dark page, too."""
    box = f'viewBox="0 0 {WIDTH} {number(height)}" width="{WIDTH}" height="{number(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title>'
    card = rect(0.5, 0.5, WIDTH - 1, height - 1, "#ffffff", edge="edge", radius=8)
    return "\n".join([head, f"<style>{STYLE}</style>", card, *parts, "</svg>", ""])


# ---------------------------------------------------------------- architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of kinetod. lines: below its name."""

    x: float
    y: float
    width: float
    height: float
    name: str
    lines: tuple[str, ...]
    color: str

    def drawn(self) -> Iterator[str]:
        """The box and its texts."""
        yield rect(self.x, self.y, self.width, self.height, "#ffffff", edge=self.color, radius=6)
        yield rect(self.x, self.y, 5, self.height, self.color, radius=2)
        yield text(self.x + 16, self.y + 22, self.name, style="b", fill=self.color)
        for row, line in enumerate(self.lines):
            yield text(self.x + 16, self.y + 41 + 17 * row, line)


FRAMES = (  # x, y, width, height, name
    (226, 20, 834, 364, "one host"),
    (660, 46, 384, 318, "each traced process"),
)
BOXES = (
    Box(x=24, y=110, width=150, height=100, name="kinetoctl", color="blue",
        lines=("asks, shows, verifies", "the file; or your own", "Python program")),
    Box(x=250, y=80, width=328, height=112, name="kinetod", color="violet",
        lines=("knows the processes and who may trace them", "runs captures by a state machine",
               "watches deadlines and limits", "gives each process its verdict")),
    Box(x=250, y=262, width=162, height=96, name="decode worker", color="violet",
        lines=("confined; turns", "records into columns", "and a Chrome trace")),
    Box(x=424, y=262, width=154, height=96, name="attach helper", color="amber",
        lines=("brings the agent", "into a process that", "nobody prepared")),
    Box(x=684, y=80, width=336, height=112, name="agent", color="teal",
        lines=("one thread, standard library only", "switches the sources on and off",
               "blocks on a socket between captures", "leaves after the last capture")),
    Box(x=684, y=262, width=336, height=84, name="sources, in C", color="teal",
        lines=("CUPTI: kernels, copies and CUDA calls", "PyTorch operators · Python stacks · CUDA memory")),
)  # fmt: skip
ARROWS = (  # from, to, label, where the label begins
    ((174, 136), (250, 136), "gRPC", (184, 128)),
    ((250, 176), (174, 176), "trace", (184, 168)),
    ((578, 112), (684, 112), "request", (594, 104)),
    ((684, 152), (578, 152), "states", (594, 144)),
    ((852, 192), (852, 262), "start, stop", (860, 232)),
    ((684, 276), (578, 182), "", (0, 0)),
    ((331, 192), (331, 262), "raw records", (339, 232)),
    ((501, 192), (501, 262), "attach", (509, 232)),
    ((578, 338), (660, 338), "agent", (594, 354)),
)


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A line with a head at its end."""
    (x1, y1), (x2, y2) = start, end
    place = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {place} stroke="{PALETTE["soft"]}" stroke-width="1.5" marker-end="url(#head)"/>'


def architecture() -> str:
    """The parts of kinetod and what goes between them."""
    head = '<path d="M0 0L8 4L0 8z" fill="{}"/>'.format(PALETTE["soft"])
    marker = '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    parts = [f"<defs>{marker}{head}</marker></defs>"]
    for x, y, width, height, name in FRAMES:
        parts += [rect(x, y, width, height, "card", edge="edge", radius=8), text(x + 14, y + 22, name, fill="soft")]
    parts += [arrow(start, end) for start, end, _, _ in ARROWS]
    parts += [text(*place, label, fill="soft") for _, _, label, place in ARROWS if label]
    parts += [text(586, 248 + 15 * row, line, fill="soft") for row, line in enumerate(("shared", "memory"))]
    for box in BOXES:
        parts += box.drawn()
    return document(404, "The parts of kinetod and what goes between them", parts)


# ---------------------------------------------------------------- trace


@dataclass(frozen=True, slots=True)
class Slice:
    """One activity: times in ns, from the beginning of the iteration."""

    start: int
    end: int
    name: str
    color: str


LANE = 17
LABEL_PX = 128
LEGEND = (
    ("amber", "annotations"), ("blue", "PyTorch operators"), ("teal", "CUDA calls"), ("violet", "matrix products"),
    ("grey", "other kernels, copies and sets"), ("red", "NCCL"),
)  # fmt: skip


def slices(trace: Any, table: str, color: str, window: tuple[int, int], **only: int) -> list[Slice]:
    """The rows of a table that lie in the window and have these values in these columns."""
    rows = trace.table(table)
    columns = [rows[name].tolist() for name in ("start", "duration", "name", *only)]
    first, last = window
    return [
        Slice(start - first, min(start + duration, last) - first, trace.strings[name], color)
        for start, duration, name, *values in zip(*columns, strict=True)
        if start >= first and start < last and values == list(only.values())
    ]


def nested(found: Sequence[Slice]) -> list[list[Slice]]:
    """Lanes by depth: what lies inside another slice is drawn below it."""
    lanes: list[list[Slice]] = []
    open_ends: list[int] = []
    for each in sorted(found, key=lambda each: (each.start, -each.end)):
        while open_ends and open_ends[-1] <= each.start:
            open_ends.pop()
        if len(lanes) == len(open_ends):
            lanes.append([])
        lanes[len(open_ends)].append(each)
        open_ends.append(each.end)
    return lanes


def lane(y: float, found: Sequence[Slice], px_per_ns: float) -> Iterator[str]:
    """One row of the time line. What is too thin to be seen is drawn together with its neighbours."""
    left = 0.0
    for each in sorted(found, key=lambda each: each.start):
        start, end = each.start * px_per_ns, each.end * px_per_ns
        if end - left < 0.5:
            continue
        start = max(start, left)
        left = max(end, start + 0.5)
        yield rect(LABEL_PX + start, y, max(left - start - 0.2, 0.3), LANE - 2, each.color)
        if label := fitted(each.name, left - start):
            yield text(LABEL_PX + start + 4, y + 11.5, label, fill="#ffffff")


def kernel_color(name: str) -> str:
    """What kind of kernel it is, by its name."""
    if "nccl" in name.lower():
        return "red"
    return "violet" if any(word in name for word in ("gemm", "cutlass", "nvjet")) else "grey"


def iteration(trace: Any, name: str) -> tuple[int, int]:
    """Begin and end of an iteration, Unix ns."""
    rows = trace.table("user_annotation")
    place = [trace.strings[each] for each in rows["name"].tolist()].index(name)
    start, duration = int(rows["start"][place]), int(rows["duration"][place])
    return start, start + duration


def tracks(trace: Any, window: tuple[int, int]) -> list[tuple[str, list[list[Slice]]]]:
    """What is drawn from top to bottom: the threads of the process, then the streams of its GPU."""
    found = []
    for thread, title in ((1231, "main thread"), (1291, "autograd thread")):
        operators = slices(trace, "user_annotation", "amber", window, thread=thread)
        operators += slices(trace, "cpu_op", "blue", window, thread=thread)
        calls = slices(trace, "cuda_runtime", "teal", window, thread=thread)
        found += [(title, nested(operators)), ("CUDA calls", [calls])]
    for stream, title in ((7, "GPU, compute"), (19, "GPU, NCCL")):
        work = [
            Slice(each.start, each.end, each.name.removeprefix("void "), kernel_color(each.name))
            for kind in ("kernel", "gpu_memcpy", "gpu_memset")
            for each in slices(trace, kind, "grey", window, stream=stream)
        ]
        found.append((title, [work]))
    return found


def trace_image() -> str:
    """One iteration of rank 0: operators, CUDA calls and kernels on one time line."""
    trace = kt.open_trace(JOB / "rank0.json.gz")
    window = iteration(trace, STEP)
    px_per_ns = (WIDTH - LABEL_PX - MARGIN) / (window[1] - window[0])
    y, parts = 58.0, [text(MARGIN, 32, f"{STEP} of rank 0, four H200, DistributedDataParallel", style="h")]
    for title, lanes in tracks(trace, window):
        parts.append(text(MARGIN, y + 12, title, fill="soft"))
        for found in lanes:
            parts += lane(y, found, px_per_ns)
            y += LANE
        y += 7
    for ms in range(0, 20, 5):
        x = LABEL_PX + ms * 1_000_000 * px_per_ns
        line = f'x1="{number(x)}" y1="52" x2="{number(x)}" y2="{number(y)}" stroke="{PALETTE["edge"]}"'
        parts.insert(1, f"<line {line}/>")
        parts.append(text(x + 3, y + 12, f"{ms} ms", fill="soft"))
    x = float(LABEL_PX)
    for color, name in LEGEND:
        parts += [rect(x, y + 25, 11, 11, color, radius=2), text(x + 17, y + 35, name)]
        x += 36 + len(name) * CHAR_PX
    return document(y + 52, "One iteration of a training job as kinetod recorded it", parts)


# ---------------------------------------------------------------- report


def bars(x: float, y: float, width: float, rows: Sequence[tuple[str, float, str]], color: str) -> Iterator[str]:
    """Horizontal bars to a common scale: label, value, and what is written behind the bar."""
    longest = max(value for _, value, _ in rows)
    for place, (label, value, shown) in enumerate(rows):
        top = y + 26 * place
        yield text(x, top + 14, label)
        yield rect(x + 66, top, (width - 190) * value / longest, 20, color, radius=3)
        yield text(x + 72 + (width - 190) * value / longest, top + 14, shown, fill="soft")


def report_image() -> str:
    """What `kinetoctl report` says about the four ranks, in the order of its page."""
    names = ("overview", "findings", "ranks", "collective_summary")
    overview, findings, ranks, collectives = (r.rows() for r in kt.run_views(names, sorted(JOB.glob("rank*.json.gz"))))
    (collective,) = collectives
    parts = [
        text(MARGIN, 34, "kinetoctl report job/", style="h"),
        text(WIDTH - MARGIN - 12, 34, "4 ranks, 4 iterations each", fill="soft", anchor="end"),
    ]
    figures = (
        ("step, mean of rank 0", f"{overview[0]['step_us'] / 1000:.1f} ms"),
        ("GPU utilization", f"{overview[0]['utilization_pct']:.1f} %"),
        ("kernel time on tensor cores", f"{overview[0]['tensor_core_pct']:.0f} %"),
        (f"{collective['collective']}, {collective['calls']} calls", f"{collective['busbw_gb_s']:.0f} GB/s bus"),
        ("came last most often", f"rank {collective['last_rank']}"),
    )
    step = (WIDTH - 2 * MARGIN) / len(figures)
    for place, (label, value) in enumerate(figures):
        x = MARGIN + place * step
        parts += [rect(x, 50, step - 12, 54, "card", edge="edge", radius=6), text(x + 12, 71, label, fill="soft")]
        parts.append(text(x + 12, 93, value, style="h"))
    parts.append(text(MARGIN, 136, "What to change first", style="b"))
    y = 150.0
    for row in [row for row in findings if row["rank"] == 0][:3]:
        saving = f"up to {row['saving_us'] / 1000:.1f} ms in {overview[0]['steps']} steps ({row['saving_pct']:.1f} %)"
        parts += [
            text(MARGIN + 12, y + 18, row["title"], style="b"),
            text(WIDTH - MARGIN - 12, y + 18, saving, anchor="end"),
        ]
        parts += [rect(MARGIN + 12, y + 26, WIDTH - 2 * MARGIN - 24, 5, "edge", radius=2)]
        parts += [rect(MARGIN + 12, y + 26, (WIDTH - 2 * MARGIN - 24) * row["saving_pct"] / 100, 5, "blue", radius=2)]
        parts += [text(MARGIN + 12, y + 48, fitted(row["evidence"], WIDTH - 80), fill="soft")]
        y += 62
    by_rank = sorted(ranks, key=lambda row: row["rank"])
    half = (WIDTH - 2 * MARGIN) / 2
    for x, title, column, color in (
        (MARGIN, "The others wait for a rank, per step", "waited_for_us", "amber"),
        (MARGIN + half, "A rank waits for the others, per step", "waiting_us", "teal"),
    ):
        rows = [(f"rank {row['rank']}", row[column], f"{row[column]:.0f} µs") for row in by_rank]
        parts += [text(x, y + 22, title, style="b"), *bars(x, y + 36, half, rows, color)]
    return document(y + 156, "What kinetoctl report says about a job of four ranks", parts)


IMAGES = {"architecture.svg": architecture, "trace.svg": trace_image, "report.svg": report_image}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, draw in IMAGES.items():
        (FOLDER / file_name).write_text(draw())
