"""The control curve: KL over tokens of distillation, the derived start beside a standard Gated DeltaNet.

    python recipes/smollm2-135m-ablations/plot.py results.json curve.png

results.json: what ablate.py wrote with --arms control. A line is the mean over the seeds, the band their range; both
axes are logarithmic, and losses are means of steps over equal stretches of the axis. Prints with how many of the
control's tokens the derived start is at the control's last loss. Needs linearize[plots].
"""

import json
import math
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from linearize import plots
from linearize.checkpoint import atomic_write_bytes
from linearize.console import format_count

SHOWN = {"gdn": "derived start", "gdn-standard": "standard Gated DeltaNet"}
POINTS = 24  # on the axis of tokens, at most

Curve = tuple[list[float], list[float], list[float], list[float]]  # tokens, mean, lowest, highest


def main(argv: list[str] | None = None) -> int:
    source, target = argv if argv is not None else sys.argv[1:]
    results = json.loads(Path(source).read_text(encoding="utf-8"))
    found = {label: curve(seeds) for arm, label in SHOWN.items() if (seeds := runs(results, arm))}
    if len(found) < len(SHOWN):
        print(f"error: {source} has not both of {', '.join(SHOWN)}", file=sys.stderr)
        return 1
    atomic_write_bytes(Path(target), plots.png(draw(found)))
    share = reached(*found.values())
    print(
        f"the control's last loss with {share:.0%} of its tokens" if share else "the control's last loss is not reached"
    )
    return 0


def reached(ours: Curve, control: Curve) -> float | None:
    """Share of the control's tokens after which our mean loss is at most its last one; None if it never is."""
    tokens = next((at for at, loss in zip(*ours[:2], strict=True) if loss <= control[1][-1]), None)
    return None if tokens is None else tokens / control[0][-1]


def runs(results: dict, arm: str) -> list[dict]:
    """Every seed of an arm that was trained to the end."""
    return [at for at in results["arms"] if at["arm"] == arm and "error" not in at]


def curve(seeds: list[dict]) -> Curve:
    """Tokens at the end of each stretch, and the mean, lowest and highest of the seeds' mean losses in it."""
    steps = min(len(at["losses"]) for at in seeds)
    ends = sorted({round(math.exp(math.log(steps) * i / (POINTS - 1))) for i in range(POINTS)})
    rows = []
    for begin, end in zip([0, *ends], ends, strict=False):
        losses = [sum(at["losses"][begin:end]) / (end - begin) for at in seeds]
        rows.append((end * seeds[0]["tokens_per_step"], sum(losses) / len(losses), min(losses), max(losses)))
    return tuple(map(list, zip(*rows, strict=True)))


def draw(found: dict[str, Curve]):
    """The figure, in the look of linearize's own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, plots.HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        at = figure.subplots()
        for i, (label, (tokens, mean, lowest, highest)) in enumerate(found.items()):
            colour = plots.COLOURS[i]
            at.plot(tokens, mean, color=colour, marker=plots.MARKERS[i], label=label)
            at.fill_between(tokens, lowest, highest, color=colour, alpha=0.2, linewidth=0)
        at.set_xscale("log")
        at.set_yscale("log")
        for axis, text in ((at.xaxis, format_count), (at.yaxis, lambda v: f"{v:g}")):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda v, _, text=text: text(v)))
            axis.set_minor_locator(NullLocator())
        at.set_title("Distillation from two starts")
        at.set_xlabel("tokens")
        at.set_ylabel("KL (nats per token)")
        at.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
