"""The figures of `inspect` and `report`: one look for both, legible for the colour-blind, on paper and on a phone.

Every function takes plain numbers and returns a matplotlib figure about as wide as a phone; :func:`png` and :func:`svg`
turn it into bytes and text. Series differ in marker as well as in colour (Okabe and Ito's palette). None and
not-a-number leave a gap. matplotlib comes with the extra ``plots`` and is imported when the first figure is drawn.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from linearize.checkpoint import format_bytes
from linearize.console import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'linearize[plots]'"

INK, FAINT, BLUE = "#1f2328", "#d0d7de", "#0072b2"  # `svg` finds what follows the page's colours by these three
COLOURS = (BLUE, "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#7a7a7a")
MARKERS = "osD^vPX*"
TEACHER = {"color": INK, "linestyle": "--", "marker": "s", "markerfacecolor": "none"}
STUDENT = {"color": COLOURS[0], "linestyle": "-", "marker": "o"}
SEQUENTIAL = "cividis"  # even in lightness: it survives a grey printer

WIDTH, HEIGHT = 4.8, 2.9  # inches
WORST = 2.5  # relative errors beyond this are cut off, so that one bad layer does not flatten the others

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollar signs is a name
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.8,
    "svg.fonttype": "none",  # text stays text: searchable, and no glyphs in the file
    "svg.hashsalt": "linearize",  # the same numbers give the same bytes
}

Values = Sequence[float | None]


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _styled(draw: Callable) -> Callable:
    """Run under STYLE: what an artist looks like is decided when it is made."""

    @functools.wraps(draw)
    def styled(*args, **kwargs):
        from matplotlib import rc_context

        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


# ---- figures --------------------------------------------------------------------------------------------------------


@_styled
def errors_by_layer(layers: Sequence[int], series: Mapping[str, Values], title: str):
    """Relative errors of every series over the layers; 1 is the error of answering zero."""
    figure, [at] = _figure(1, HEIGHT + 0.4)
    for i, (name, values) in enumerate(series.items()):
        at.plot(layers, _gaps(values), label=name, **_look(i))
    every = [v for values in series.values() for v in _gaps(values) if math.isfinite(v)]
    at.set_ylim(0, max(1.05, 1.05 * min(max(every, default=1), WORST)))
    at.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    at.set_ylabel("relative error")
    at.set_title(title)
    _layer_axis(at, layers)
    _legend(at, 4 if len(series) > 4 else len(series))
    return figure


@_styled
def head_map(layers: Sequence[int], values: Sequence[Values], title: str, label: str):
    """A cell for every layer (across) and head (upwards). values: a row of heads for each layer."""
    figure, [at] = _figure(1, HEIGHT + 0.2)
    rows = [[math.nan if v is None else v for v in row] for row in zip(*values, strict=True)]
    image = at.imshow(
        rows,
        aspect="auto",
        origin="lower",
        cmap=SEQUENTIAL,
        vmin=0,
        vmax=max(0.5, min(WORST, max((v for row in rows for v in row if math.isfinite(v)), default=1))),
        interpolation="nearest",
    )
    at.grid(False)
    # Cells stand side by side whatever the layers' numbers are.
    step = max(1, math.ceil(len(layers) / 12))
    at.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    step = max(1, math.ceil(len(rows) / 12))
    at.set_yticks(range(0, len(rows), step))
    at.set_xlabel("layer")
    at.set_ylabel("head")
    at.set_title(title)
    bar = figure.colorbar(image, ax=at, label=label, pad=0.02)
    bar.outline.set_visible(False)
    return figure


@_styled
def heads_by_layer(layers: Sequence[int], panels: Mapping[str, tuple[str, Values, Sequence[Values]]]):
    """One panel above another: a line for the layer, a dot for each of its heads.

    panels: title -> (label of the y axis with its unit, value of each layer, values of each layer's heads).
    """
    figure, axes = _figure(len(panels), 1.7 * len(panels) + 0.5)
    for at, (title, (label, whole, heads)) in zip(axes, panels.items(), strict=True):
        dots = [(layer, v) for layer, row in zip(layers, heads, strict=True) for v in row if v is not None]
        at.plot(*zip(*dots, strict=True), ".", color=COLOURS[5], markersize=6, markeredgewidth=0, label="a head")
        at.plot(layers, _gaps(whole), **_look(0), label="the layer")
        at.set_title(title)
        at.set_ylabel(label)
        low, high = at.get_ylim()
        at.set_ylim(min(0.0, low), high)
    _layer_axis(axes[-1], layers)
    _legend(axes[0], 2)
    return figure


@_styled
def alignment(curves: Mapping[int, tuple[Sequence[int], Values]], title: str):
    """Loss of each layer over its tokens. curves: layer -> (tokens so far, loss)."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    figure, [at] = _figure()
    # Neither end of the map: its darkest is lost on a dark page and its lightest on a light one.
    shades = LinearSegmentedColormap.from_list("shades", colormaps[SEQUENTIAL]([0.25, 0.4, 0.55, 0.7, 0.85]))
    colours = ScalarMappable(Normalize(min(curves), max(max(curves), min(curves) + 1)), shades)
    for layer, (tokens, losses) in curves.items():
        at.plot(tokens, _gaps(losses), color=colours.to_rgba(layer), linewidth=1.0)
    _log_if_wide(at, [v for _, losses in curves.values() for v in _gaps(losses)])
    at.set_title(title)
    at.set_ylabel("relative squared error")
    _token_axis(at)
    figure.colorbar(colours, ax=at, label="layer", pad=0.02).outline.set_visible(False)
    return figure


@_styled
def training(tokens: Sequence[int], losses: Values, title: str, label: str):
    """One loss over tokens: every step faintly, and their running mean over a fiftieth of the run."""
    figure, [at] = _figure()
    values = _gaps(losses)
    at.plot(tokens, values, color=COLOURS[5], linewidth=0.8, alpha=0.7, label="a step")
    width = max(1, len(values) // 50)
    if width > 1:
        smooth = [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
        at.plot(tokens, smooth, color=COLOURS[0], label=f"mean of {width} steps")
        at.legend()
    _log_if_wide(at, values)
    at.set_title(title)
    at.set_ylabel(label)
    _token_axis(at)
    return figure


@_styled
def teacher_and_student(
    x: Sequence[float], teacher: Values, student: Values, title: str, xlabel: str, ylabel: str, *, kind: str = "plain"
):
    """Two curves over a number of tokens, which goes up by powers of two.

    kind: "share" for values from 0 to 1, "bytes" for a logarithmic axis of sizes, "plain" for an axis from 0.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, [at] = _figure()
    for name, values, look in (("teacher", teacher, TEACHER), ("student", student, STUDENT)):
        if any(v is not None for v in values):
            at.plot(x, _gaps(values), label=name, **look)
    if len(x) > 1:
        at.set_xscale("log", base=2)
    at.set_xticks(list(x))
    at.xaxis.set_minor_locator(NullLocator())
    at.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _tokens(v)))
    if kind == "bytes":
        _log_axis(at, lambda v: format_bytes(round(v)))
    elif kind == "share":
        at.set_ylim(-0.03, 1.03)
    else:
        at.set_ylim(bottom=0)
    at.set_title(title)
    at.set_xlabel(xlabel)
    at.set_ylabel(ylabel)
    at.legend()
    return figure


@_styled
def needle_map(lengths: Sequence[int], depths: Sequence[str], panels: Mapping[str, Sequence[Values]]):
    """A cell for every length (across) and depth (downwards), two panels in a row; values from 0 to 1.

    panels: title -> a row of lengths for each depth.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.5 * math.ceil(len(panels) / 2) + 0.2), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / 2), 2, sharex=True, sharey=True, squeeze=False)
    for at, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        values = [_gaps(row) for row in rows]
        at.imshow(values, aspect="auto", cmap=SEQUENTIAL, vmin=0, vmax=1, interpolation="nearest")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if math.isfinite(value):
                    # Not the page's ink: a cell is as light on a dark page.
                    at.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="wk"[value > 0.5])
        at.grid(False)
        at.set_title(title)
        at.set_xticks(range(len(lengths)), [_tokens(length) for length in lengths])
        at.set_yticks(range(len(depths)), depths)
    for at in axes[-1]:
        at.set_xlabel("prompt (tokens)")
    for at in axes[:, 0]:
        at.set_ylabel("depth")
    return figure


@_styled
def decoding(
    contexts: Sequence[int],
    speeds: Mapping[int, Mapping[str, Mapping[str, Values]]],
    cache: Mapping[str, Values],
    batch: int,
):
    """Tokens per second over the context, a panel for each batch, and under them the bytes of the cache.

    speeds: batch -> "plain" and, where there are CUDA graphs, "graph" -> "teacher" and "student" -> values; plain ones
    are faint beside graphs. cache: side -> bytes of `batch` rows.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = _figure(len(speeds) + 1, 1.7 * (len(speeds) + 1) + 0.6)
    looks = {"teacher": TEACHER, "student": STUDENT}
    for at, (size, kinds) in zip(axes, speeds.items(), strict=False):
        every = []
        for kind, sides in kinds.items():
            faint = kind == "plain" and len(kinds) > 1
            for side, values in sides.items():
                every += [v for v in values if v is not None]
                label = f"{side}, no graph" if faint else side
                at.plot(contexts, _gaps(values), label=label, alpha=0.35 if faint else 1, **looks[side])
        _log_if_wide(at, every)
        at.set_title(f"Decoding, batch {size}" + (", a step as one CUDA graph" if "graph" in kinds else ""))
        at.set_ylabel("tokens/s")
    for side, values in cache.items():
        axes[-1].plot(contexts, _gaps(values), **looks[side])
    _log_axis(axes[-1], lambda v: format_bytes(round(v)))
    axes[-1].set_title(f"Cache, batch {batch}")
    axes[-1].set_ylabel("size")
    axes[-1].set_xlabel("context (tokens)")
    if len(contexts) > 1:
        axes[-1].set_xscale("log", base=2)
    axes[-1].set_xticks(list(contexts))
    axes[-1].xaxis.set_minor_locator(NullLocator())
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda v, _: _tokens(v)))
    _legend(max(axes[:-1], key=lambda at: len(at.get_lines())), 2)
    return figure


@_styled
def retained(names: Sequence[str], percent: Values, errors: Values, title: str):
    """A bar for each task: the student's score in percent of the teacher's, with its standard error."""
    figure, [at] = _figure(1, 0.28 * len(names) + 0.9)
    rows = range(len(names), 0, -1)
    values = [0.0 if v is None else v for v in percent]
    spread = [0.0 if e is None else e for e in errors]
    at.barh(rows, values, 0.62, color=COLOURS[0], xerr=spread, error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2})
    for y, value, error in zip(rows, values, spread, strict=True):
        at.text(value + error + 1.5, y, f"{value:.1f}", va="center", fontsize=8)
    at.axvline(100, color=INK, linewidth=0.8, linestyle=":")
    at.set_xlim(0, 1.12 * max(100, *(v + e for v, e in zip(values, spread, strict=True))))
    at.set_yticks(rows, names)
    at.grid(False, axis="y")
    at.tick_params(axis="y", length=0)
    at.set_xlabel("% of the teacher's score")
    at.set_title(title)
    return figure


# ---- parts ----------------------------------------------------------------------------------------------------------


def _figure(rows: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure of ``height`` inches with axes one above another that share their x axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")  # no pyplot: nothing global is opened
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])


def _look(i: int) -> dict:
    """Colour and marker of series i."""
    n = len(COLOURS)
    return {"color": COLOURS[i % n], "marker": MARKERS[i % n], "linewidth": 1.2}


def _gaps(values: Values) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _legend(at: Axes, columns: int) -> None:
    """Under the axes, where it hides no data however many series there are."""
    handles, labels = at.get_legend_handles_labels()
    at.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _layer_axis(at: Axes, layers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    at.set_xlabel("layer")
    at.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    at.set_xlim(min(layers) - 0.5, max(layers) + 0.5)


def _token_axis(at: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    at.set_xlabel("tokens")
    at.xaxis.set_major_locator(MaxNLocator(5))
    at.xaxis.set_major_formatter(FuncFormatter(lambda v, _: format_count(v)))
    at.set_xlim(left=0)


def _log_if_wide(at: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis where the values span more than a factor of ten."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if positive and max(positive) > 10 * min(positive):
        _log_axis(at, lambda v: f"{v:g}")
    else:
        at.set_ylim(bottom=0)


def _log_axis(at: Axes, text: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    at.set_yscale("log")
    low, high = at.get_ylim()
    at.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
    at.yaxis.set_major_formatter(FuncFormatter(lambda v, _: text(v)))
    at.yaxis.set_minor_locator(NullLocator())


def _tokens(value: float) -> str:
    """A length in tokens: 512, 1k, 32k (of 1024)."""
    return f"{value / 1024:.3g}k" if value >= 1024 else f"{value:.3g}"


# ---- files ----------------------------------------------------------------------------------------------------------


def png(figure: Figure) -> bytes:
    """The figure on white, at 200 dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@_styled
def svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element for the inside of a page, without a background.

    Text, lines and the first colour take the page's ``--ink``, ``--faint`` and ``--blue``, so that they follow a dark
    page. name: of the figure, for those who hear the page, and to keep the element's ids apart from other figures'.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in ((INK, "--ink"), (FAINT, "--faint"), (BLUE, "--blue")):
        text = text.replace(colour, f"var({variable})")
    key = re.sub(r"\W+", "-", name)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{key}-", text)
    width, height = figure.get_size_inches() * 72
    head = f'<svg role="img" aria-label="{key}" viewBox="0 0 {width:g} {height:g}" '
    return head + re.sub(r'^<svg(?: [\w:]+="[^"]*")*', _keep_namespaces, text, count=1)


def _keep_namespaces(match: re.Match) -> str:
    return " ".join(re.findall(r'xmlns[\w:]*="[^"]*"', match[0]))
