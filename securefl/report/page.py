"""Self-contained HTML pages: the blocks a report is made of, the numbers in it, and its figures.

A page is one file without script, without any outside resource, and with a content policy that would stop
one. Every string is data: jinja2 escapes it, control and text-direction characters are made visible, and
what is too long is cut. Markup comes from two places only: the templates, and `draw`. This room knows
nothing of runs or attacks and writes no file but the one it is given.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing

from securefl.files import write_atomic

Tone = Literal["plain", "good", "caution", "bad"]

INK, MUTED, LINE, ACCENT = "#1b2430", "#55606e", "#d5dbe3", "#1f4e79"
GOOD, CAUTION, BAD = "#1d6b45", "#8a5a00", "#a61b1b"
# Okabe and Ito's colours, told apart by colour-blind readers, then lighter ones of the same family.
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8b000", "#7f7f7f")

_DIRECTION = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_LONGEST = 2000


def clean(text: str, limit: int = _LONGEST) -> str:
    """`text` on one line of at most `limit` characters, nothing in it able to move or hide what is beside it.

    Control characters, lone surrogates and text-direction controls become U+FFFD; runs of white space one
    space; a cut ends in an ellipsis.
    """
    text = " ".join(text[: 4 * limit].split())
    if len(text) > limit:
        text = text[: limit - 1].rstrip() + "…"
    return "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cs") or char in _DIRECTION else char
        for char in text
    )


def accuracy(value: float | None) -> str:
    """A share in [0, 1] with three decimals; an en dash for None."""
    return "–" if value is None else f"{value:.3f}"


def signed(value: float) -> str:
    """A difference with three decimals and a sign; a difference that rounds to zero has none."""
    text = f"{value:+.3f}"
    return "0.000" if text in ("+0.000", "-0.000") else text.replace("-", "−")


def interval(ends: tuple[float, float], show: Callable[[float], str] = accuracy) -> str:
    return f"{show(ends[0])} to {show(ends[1])}"


def size(count: float) -> str:
    """Bytes in decimal units (1 kB = 1000 B), three figures."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def epsilon(value: float) -> str:
    """Two decimals; never shown as zero."""
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}"


def delta(value: float) -> str:
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", f"{value:g}").replace("e+", "e")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listing(names: Sequence[str], most: int = 6) -> str:
    """`a, b and c`; beyond `most` the rest is counted."""
    shown = [clean(name, 48) for name in names[:most]]
    return joined([*shown, f"{len(names) - most} more"] if len(names) > most else shown)


def joined(shown: Sequence[str]) -> str:
    """`a, b and c`, the parts as they are."""
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


@dataclass(frozen=True)
class Badge:
    """A short verdict. Its words carry the meaning; the tone only colours it."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Cell:
    """A table cell: the value, a smaller line below it, badges. `full`: the whole of a value cut short."""

    text: str
    detail: str = ""
    badges: tuple[Badge, ...] = ()
    full: str = ""


def named(name: str, limit: int = 40) -> Cell:
    """A cell with a name of any length."""
    return Cell(clean(name, limit), full=name)


@dataclass(frozen=True)
class Paragraph:
    """Running text. `head`: a bold word or two in front; `lead`: set larger."""

    kind: ClassVar[str] = "paragraph"
    text: str
    head: str = ""
    lead: bool = False


@dataclass(frozen=True)
class Note:
    """A boxed remark."""

    kind: ClassVar[str] = "note"
    title: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Items:
    """A bulleted list, or with terms a list of (term, meaning)."""

    kind: ClassVar[str] = "items"
    items: tuple[str, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Tiles:
    """A row of key figures."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its header; equal headers that follow each other become one.

    numeric: indices of the columns set flush right; wrap: of those whose text may break over lines.
    note: stands below the table.
    """

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    numeric: frozenset[int] = frozenset()
    wrap: frozenset[int] = frozenset()
    note: str = ""

    def cells(self) -> list[tuple[int, list[Cell]]]:
        """Every row with the number of rows its header stands for, 0 where an earlier header covers it."""
        rows = [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        spans: list[int] = []
        for index, row in enumerate(rows):
            if index and row[0] == rows[index - 1][0]:
                first = max(i for i, rows_covered in enumerate(spans) if rows_covered)
                spans[first] += 1
                spans.append(0)
            else:
                spans.append(1)
        return list(zip(spans, rows, strict=True))


@dataclass(frozen=True)
class Picture:
    """A figure. `svg` is markup from `draw` or from a template; a plain string would be escaped."""

    kind: ClassVar[str] = "picture"
    svg: Markup
    alt: str
    caption: str


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens on a click (an HTML <details>, no script)."""

    kind: ClassVar[str] = "fold"
    summary: str
    blocks: tuple[Block, ...]


Block = Paragraph | Note | Items | Tiles | Table | Picture | Fold


@dataclass(frozen=True)
class Section:
    """One heading of a page. `summary`: sentences for the opening paragraph of the page."""

    title: str
    blocks: tuple[Block, ...]
    summary: str = ""


def _finalize(value: object) -> object:
    # Markup passes: it is ours. Everything else that a template prints is data.
    return value if isinstance(value, Markup) else clean(str(value))


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("securefl.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_template(name: str, **values: Any) -> Markup:
    """One of the package's templates as markup, its values escaped."""
    return Markup(_environment().get_template(name).render(**values))  # noqa: S704 (escaped by autoescape)


def render_page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> bytes:
    """The page as UTF-8. The same input gives the same bytes: there is no clock and no counter in it."""
    page = _environment().get_template("page.html.j2")
    text = page.render(title=title, subtitle=subtitle, sections=sections, footer=footer)
    return text.encode("utf-8")


def write_page(path: Path, title: str, subtitle: str, sections: Sequence[Section], footer: str) -> None:
    """Render a page and put it in place of `path` in one step. Raises OSError."""
    write_atomic(path, render_page(title, subtitle, sections, footer))


# matplotlib reads its settings from one process-wide dictionary, so only one figure is drawn at a time.
_LOCK = threading.Lock()
_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it is searchable, and any script the browser has fonts for
    "svg.hashsalt": "securefl",  # otherwise the identifiers differ from one run to the next
    "svg.id": None,
    "text.parse_math": False,  # a "$" in a label is a dollar sign
    "text.usetex": False,
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ecf1",
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def _inline(svg: str, name: str) -> str:
    """An SVG document as part of a page: no prologue, no namespaces, no style sheet, its own identifiers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)

    def own(tag: re.Match[str]) -> str:
        text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", tag[0])
        text = re.sub(r'\b(id|clip-path|(?:xlink:)?href)="(url\(#|#)?', rf'\1="\g<2>{name}-', text)
        text = text.replace("xlink:href", "href")
        return re.sub(r"font-family: [^;\"]*;? ?", "", text)

    # Text is escaped by matplotlib, so an angle bracket always begins or ends a tag.
    return re.sub(r"<[^<>]*>", own, svg).strip()


def draw(name: str, width: float, height: float, paint: Callable[[Drawing], None]) -> Markup:
    """Have `paint` draw on a new figure of `width` x `height` inches and return it as inline SVG.

    name: unique on its page, letters, digits and hyphens; it begins the identifiers inside the SVG.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"figure name {name!r} must be lower-case letters, digits and hyphens")
    # From matplotlib's own defaults: a user's matplotlibrc must not change a report.
    settings: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if "backend" not in key}
    settings.update(_STYLE)
    with _LOCK, matplotlib.rc_context(settings), warnings.catch_warnings():
        # Text stays text, so the reader's browser has the glyphs that the fonts here lack.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        drawing = Drawing(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(drawing)
        paint(drawing)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.savefig(buffer, format="svg", metadata=nothing)
    return Markup(_inline(buffer.getvalue(), name))  # noqa: S704 (matplotlib's output, text escaped by it)
