"""A diagnosis of every softmax layer, one block at a time: what its attention does, how well each mixer starts there.

Every layer is looked at on the teacher's own hidden states, as if it alone were to be converted. A quarter of the rows
is held out from every fit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from linearize import plots
from linearize.calibrate import Ladder, calibrate_layer
from linearize.checkpoint import CONFIG, atomic_write_bytes, atomic_write_text, read_object, writing
from linearize.console import Console, plain
from linearize.corpus import source_rows
from linearize.data import Rows, open_sources, parse_sources
from linearize.errors import UsageError, UserError
from linearize.families import STUDENT_PREFIX
from linearize.mixers import MIXERS, HeadShape, MixedAttention, Sample, Segments, build_mixer
from linearize.mixers.attended import document_starts
from linearize.observe import Observed, observe
from linearize.processes import pick_device
from linearize.recipe import MIXER_KINDS, Recipe
from linearize.student import packed_starts
from linearize.teacher import BlockRunner, Teacher, open_teacher

BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}  # tokens that go through a layer at once
SCORES = 2**24  # attention weights that exist at once: 64 MB in fp32, whatever the context
HELD_OUT = 4  # every fourth row
LADDER = "gdn"  # the mixer whose start has all rungs of derivation.md §6
LENGTHS = (0, 2**20)  # a state that is larger after so many tokens is a cache
MARGIN = 0.02
RULE = (
    f"the constant-state mixer with the lowest start error, or one with a smaller state if its error is at most "
    f"{100 * MARGIN:.0f} % higher"
)


@dataclass
class Attention:
    """What the attention of one layer does, summed over tokens in fp64; see :func:`add_attention`.

    entropy, sink, distance: [H]. tokens: how many there were, followers: how many had another before them.
    power, match, keys: [2, H], of the tokens to fit on and of those held out: sums of q.q, of q.m and of m.m, where
    m = sum a_i k_i is what the attention would read if the keys were its values.
    """

    entropy: Tensor
    sink: Tensor
    distance: Tensor
    power: Tensor
    match: Tensor
    keys: Tensor
    tokens: int = 0
    followers: int = 0

    @classmethod
    def empty(cls, heads: int, device: torch.device) -> Attention:
        one, two = (torch.zeros(*shape, heads, dtype=torch.float64, device=device) for shape in ((), (2,)))
        return cls(*(one.clone() for _ in range(3)), *(two.clone() for _ in range(3)))

    def heads(self) -> dict[str, Tensor]:
        """Per head: entropy (nats), sink (a share), distance (tokens), lambda_q and its held-out key_r2."""
        slope = self.match[0] / self.power[0].clamp(min=1e-30)
        return {
            "entropy": self.entropy / self.tokens,
            "sink": self.sink / max(1, self.followers),
            "distance": self.distance / self.tokens,
            "lambda_q": slope,
            "key_r2": 1 - self._residual(slope) / self.keys[1].clamp(min=1e-30),
        }

    def layer(self) -> dict[str, float]:
        """The same for the layer: means over its heads, and for key_r2 the share of all its heads together."""
        heads = self.heads()
        means = {name: float(values.mean()) for name, values in heads.items()}
        residual = self._residual(heads["lambda_q"]).sum() / self.keys[1].sum().clamp(min=1e-30)
        return means | {"key_r2": 1 - float(residual)}

    def _residual(self, slope: Tensor) -> Tensor:
        """Held-out sum of squares of m - slope q, [H]."""
        return self.keys[1] - 2 * slope * self.match[1] + slope.square() * self.power[1]


# ---- what one layer's attention does --------------------------------------------------------------------------------


@torch.no_grad()
def add_attention(
    to: Attention,
    seen: Observed,
    mask: Tensor | None,
    starts: Tensor | None,
    held_out: bool,
    softcap: float | None = None,
) -> None:
    """Add one batch's attention, a chunk of queries at a time, so that no [H, T, T] tensor is made.

    seen: q [B, T, Hq, K], k [B, T, Hk, K]. mask: as the layer was given it, [B or 1, 1, T, T], True or 0 where a query
    sees a key; None is plain causal attention. starts: [B, T] bool, first tokens of packed documents, None when each
    row is one. The sink is a document's first token, and what that token itself looks at does not count for it.
    """
    batch, length, heads, _ = seen.q.shape
    kv_heads, device = seen.k.shape[2], seen.q.device
    half, f64 = int(held_out), torch.float64
    at = torch.arange(length, device=device)
    size = max(1, SCORES // (heads * length))
    firsts = document_starts(starts)
    for b in range(batch):
        first = torch.zeros_like(at) if firsts is None else firsts[b]
        keys = seen.k[b].float()
        for t in range(0, length, size):
            now = at[t : t + size]
            query = seen.q[b, now].float().unflatten(1, (kv_heads, -1))
            scores = seen.scale * torch.einsum("cngk,tnk->ngct", query, keys).flatten(0, 1)  # [H, C, T]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if mask is None:
                scores = scores.masked_fill(at > now[:, None], -math.inf)
            else:
                part = mask[b % len(mask), 0, now]
                scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
            weights = scores.softmax(-1)
            to.entropy += torch.special.entr(weights).sum((1, 2), dtype=f64)
            past = (now[:, None] - at).clamp(min=0).to(weights.dtype)
            to.distance += (weights * past).sum((1, 2), dtype=f64)
            onto = weights.gather(2, first[now].expand(heads, -1)[..., None])[..., 0]
            follows = first[now] < now
            to.sink += onto[:, follows].sum(1, dtype=f64)
            read = torch.einsum("ngct,tnk->ngck", weights.unflatten(0, (kv_heads, -1)), keys).flatten(0, 1)
            query = query.flatten(1, 2).transpose(0, 1)
            to.power[half] += query.square().sum((1, 2), dtype=f64)
            to.match[half] += (query * read).sum((1, 2), dtype=f64)
            to.keys[half] += read.square().sum((1, 2), dtype=f64)
            to.tokens += len(now)
            to.followers += int(follows.sum())


# ---- how a mixer starts there ---------------------------------------------------------------------------------------


@dataclass
class Start:
    """How well one mixer starts at one layer. error: held-out relative RMS error of the attention output after the
    closed-form start and the refit of the output projection, as convert makes them. heads: the same of every head's
    own output, None for a mixer with projections of its own, whose heads are not the teacher's. ladder: calibrate's.
    """

    error: float
    heads: list[float] | None
    ladder: Ladder | None


@torch.no_grad()
def measure_start(mixed: MixedAttention, fit: list[Sample], held_out: list[Sample], scale: float, select: int) -> Start:
    """Start a mixer from ``fit`` and measure it on ``held_out``; changes ``mixed``."""
    ladder = calibrate_layer(mixed, fit, scale, select) if mixed.mixer.calibrated else None
    wrong = power = head_wrong = head_power = 0.0
    for at in held_out:
        o, _ = mixed.mixer(at.x, at.q, at.k, at.v, scale, segments=at.segments)
        wrong = wrong + (mixed.attn.o_proj(o.flatten(2)) - at.output).square().sum(dtype=torch.float64)
        power = power + at.output.square().sum(dtype=torch.float64)
        if not mixed.mixer.own_projections:
            head_wrong = head_wrong + (o - at.heads).square().sum((0, 1, 3), dtype=torch.float64)
            head_power = head_power + at.heads.square().sum((0, 1, 3), dtype=torch.float64)
    heads = None
    if not mixed.mixer.own_projections:
        heads = (head_wrong / head_power.clamp(min=1e-30)).sqrt().tolist()
    return Start(float((wrong / power.clamp(min=1e-30)).sqrt()), heads, ladder)


def suggest(errors: Mapping[str, float], sizes: Mapping[str, tuple[int, int]]) -> str | None:
    """The mixer that RULE names, or None when no kind has a constant state.

    errors: start error by kind. sizes: bytes of state by kind, after no token and after very many.
    """
    constant = {kind: e for kind, e in errors.items() if sizes[kind][0] == sizes[kind][1] and math.isfinite(e)}
    if not constant:
        return None
    near = [kind for kind, e in constant.items() if e <= min(constant.values()) * (1 + MARGIN)]
    return min(near, key=lambda kind: (sizes[kind][0], constant[kind]))


# ---- the whole model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What is inspected: the teacher, and when a converted folder was named, that folder's record."""

    teacher: Teacher
    folder: Path | None = None
    record: dict | None = None


def open_subject(model: str, recipe: Recipe, console: Console) -> Subject:
    """Open MODEL, or the teacher of a converted folder. Raises UserError as open_teacher does, and for a folder that
    convert has not finished."""
    folder = Path(model).expanduser()
    record, revision = None, recipe.model.revision
    if (folder / ".linearize").is_dir() and not (folder / CONFIG).exists():
        raise UserError("a conversion that has not finished", value=model, fix="run its convert command again first")
    source = _teacher_of(folder)
    if source is not None:
        if revision is not None:
            raise UsageError("a revision belongs to a Hub id, and this is a converted folder", value=model)
        record = read_object(folder / "linearize.json", "convert again")
        model, revision = source
        console.line(f"{folder} is converted: looking at its teacher, {model}")
    try:
        teacher = open_teacher(
            model, revision=revision, trust_remote_code=recipe.model.trust_remote_code, say=console.line
        )
    except UserError as error:
        if record is None:
            raise
        raise UserError(f"the teacher of {folder} cannot be opened: {error.what}", value=error.value) from error
    return Subject(teacher, folder if record else None, record)


def _teacher_of(folder: Path) -> tuple[str, str | None] | None:
    """Source and revision of the teacher that a converted folder's config.json names; None for any other model."""
    if not (folder / CONFIG).is_file():
        return None
    fields = read_object(folder / CONFIG, "convert again")
    if not str(fields.get("model_type", "")).startswith(STUDENT_PREFIX):
        return None
    teacher = (fields.get("linearize") or {}).get("teacher") or {}
    if not teacher.get("source"):
        raise UserError("this converted model does not name its teacher", value=str(folder), fix="name the teacher")
    return teacher["source"], teacher.get("revision")


def inspect(
    model: str,
    recipe: Recipe,
    console: Console,
    *,
    layers: str | None = None,
    mixers: str | None = None,
    out: Path | None = None,
) -> dict:
    """Diagnose MODEL by the recipe's calibration and data keys, print the tables and return the object of --json.

    layers: such as "0-3,8", None for all. mixers: kinds by comma, None for all. out: a folder for inspect.json and, if
    matplotlib is there, the figures. One block of the model is in memory at a time.
    """
    device = pick_device(recipe.run.device)
    kinds = _kinds(mixers)
    subject = open_subject(model, recipe, console)
    teacher = subject.teacher
    chosen = _layers(layers, teacher.config.num_hidden_layers)
    rows = _rows(teacher, recipe)
    if rows.shortfall:
        console.line(rows.shortfall)
    runner = teacher.runner(device, torch.float32)
    hidden = runner.embed(rows.ids)
    results = []
    with console.stage("inspect", len(chosen), unit="layers") as bar:
        for i in range(chosen[-1] + 1):
            with runner.block(i) as layer:
                wanted = i in chosen
                batches = _run_layer(runner, i, layer, hidden, rows, keep=wanted)
                if wanted:
                    results.append(_diagnose(teacher, i, layer, batches, kinds, recipe, bar))
    report = {
        "model": model,
        "teacher": {
            "source": teacher.source,
            "revision": teacher.revision,
            "model_type": teacher.family.model_type,
        },
        "tokens": rows.tokens,
        "context": rows.context,
        "mixers": list(kinds),
        "rule": RULE,
        "layers": results,
        "keep_first": _rank(results),
    }
    if subject.record is not None:
        _add_trained(results, subject.record)
    if out is not None:
        report["files"] = write(report, out, console)
    _show(report, console)
    return report


def _kinds(spec: str | None) -> tuple[str, ...]:
    if spec is None:
        return MIXER_KINDS
    kinds = tuple(part.strip() for part in spec.split(","))
    for kind in kinds:
        if kind not in MIXER_KINDS:
            raise UsageError("no such mixer", value=kind, fix=f"one or more of {','.join(MIXER_KINDS)}")
    return tuple(dict.fromkeys(kinds))


def _layers(spec: str | None, count: int) -> list[int]:
    """The layers that "0-3,8" names, ascending; all without a text."""
    if spec is None:
        return list(range(count))
    found = set()
    for part in spec.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError("--layers is not understood", value=spec, fix="write it like 0-3,8")
        if int(last or first) < int(first):
            raise UsageError("--layers has a range that runs backwards", value=part.strip(), fix="write it like 0-3")
        found |= set(range(int(first), int(last or first) + 1))
    if max(found) >= count:
        raise UsageError(f"--layers: no layer {max(found)}", value=spec, fix=f"the layers are 0 to {count - 1}")
    return sorted(found)


def _rows(teacher: Teacher, recipe: Recipe) -> Rows:
    """Rows of single documents where the text has enough of them, else packed ones; three at least."""
    source, options = recipe.data.source, recipe.calibrate
    if any(part.kind == "self" for part in parse_sources(source)):
        raise UsageError(
            "inspect holds one block at a time, and sampling text takes the whole model",
            value=source,
            fix="give text, or leave --data out for the bundled text",
        )
    rows = source_rows(open_sources(source), teacher.tokenizer, options.context, options.tokens, recipe.run.seed)
    if len(rows) < 3:
        raise UserError(
            "three rows of text are needed, two to start the mixers and one to measure them on",
            value=f"{len(rows)} of {rows.context} tokens",
            fix="raise --tokens, lower --context or give more text",
        )
    return rows


@dataclass
class Batch:
    """One batch at one layer: the observed attention, the layer's mask, document starts, and whether it is held out."""

    seen: Observed
    mask: Tensor | None
    starts: Tensor | None
    held_out: bool

    def sample(self) -> Sample:
        """For a mixer that sees what the teacher sees."""
        at = self.seen
        return Sample(at.x, at.q, at.k, at.v, at.heads, at.output, Segments(reset=self.starts))


def _run_layer(runner: BlockRunner, i: int, layer: nn.Module, hidden: Tensor, rows: Rows, *, keep: bool) -> list[Batch]:
    """Move the hidden states [N, T, d] through layer i, in place; returns its batches if they are to be kept."""
    number = torch.arange(len(rows))
    apart = number % HELD_OUT == HELD_OUT - 1 if len(rows) >= HELD_OUT else number == len(rows) - 1
    most = max(1, BATCH_TOKENS[hidden.device.type] // rows.context)
    batches = []
    for held_out in (False, True):
        mine = number[apart == held_out]
        # A start takes two batches: one to fit, one to choose by.
        for part in mine.split(most if held_out else min(most, len(mine) // 2)):
            positions = rows.positions[part]
            part = part.to(hidden.device)
            starts = packed_starts(positions, len(part))
            kwargs = runner.layer_kwargs(i, hidden[part], None if starts is None else positions)
            after, seen = observe(layer, hidden[part], kwargs)
            hidden[part] = after
            if keep:
                starts = None if starts is None else starts.to(hidden.device)
                batches.append(Batch(seen, kwargs.get("attention_mask"), starts, held_out))
    return batches


def _diagnose(
    teacher: Teacher, i: int, layer: nn.Module, batches: Sequence[Batch], kinds: Sequence[str], recipe: Recipe, bar
) -> dict:
    """Everything about one layer, as the JSON object has it."""
    shape = replace(HeadShape.from_config(teacher.config), itemsize=teacher.dtype.itemsize)
    first = batches[0].seen
    attention = Attention.empty(shape.q_heads, first.q.device)
    softcap = getattr(teacher.config, "attn_logit_softcapping", None)
    for at in batches:
        add_attention(attention, at.seen, at.mask, at.starts, at.held_out, softcap)
    fit = [at.sample() for at in batches if not at.held_out]
    held_out = [at.sample() for at in batches if at.held_out]
    select = -(-recipe.calibrate.select_tokens // first.q.shape[:2].numel())
    starts, sizes = {}, {}
    tried = tuple(dict.fromkeys((*kinds, LADDER)))
    for kind in tried:
        spec = _spec(kind, recipe, teacher.config.num_hidden_layers, i)
        mixed = build_mixer(copy.deepcopy(layer.self_attn), spec, i, shape).to(first.q.device)
        starts[kind] = measure_start(mixed, fit, held_out, first.scale, select)
        options = {name: value for name, value in spec.items() if name != "kind"}
        sizes[kind] = tuple(MIXERS[kind].state_bytes(shape, tokens, **options) for tokens in LENGTHS)
        bar.advance(1 / len(tried), layer=i)
    errors = {kind: starts[kind].error for kind in kinds}
    suggested = suggest(errors, sizes)
    ladder = starts[LADDER].ladder
    heads = {name: values.tolist() for name, values in attention.heads().items()}
    return {
        "layer": i,
        **attention.layer(),
        "ladder": {name: error for name, error in ladder.pooled.items() if name in ladder.heads},
        "start": errors,
        "suggested": suggested,
        "heads": heads | {"ladder": ladder.heads, "start": {kind: starts[kind].heads for kind in kinds}},
    }


def _spec(kind: str, recipe: Recipe, count: int, i: int) -> dict:
    """What the recipe makes of layer i when every layer becomes ``kind``."""
    values = recipe.values() | {"convert.mixer": kind, "convert.keep_softmax": "none"}
    return Recipe.from_values(values).mixer_specs(count)[i]


def _rank(results: Sequence[dict]) -> list[int]:
    """Layers in the order in which softmax should stay there: the largest start error of the suggested mixer first."""
    known = [at for at in results if at["suggested"]]
    return [at["layer"] for at in sorted(known, key=lambda at: -at["start"][at["suggested"]])]


def _add_trained(results: Sequence[dict], record: dict) -> None:
    """Put next to each layer what the conversion left: the error of its attention output after calibration and after
    alignment, where the layer was converted."""
    converted = {at["layer"]: at for at in record.get("layers") or ()}
    for at in results:
        done = converted.get(at["layer"])
        at["converted"] = None
        if done is not None:
            at["converted"] = {
                "kind": done.get("kind"),
                "calibrated": (done.get("ladder") or {}).get("output"),
                "aligned": final_error(done.get("losses") or ()),
            }


def final_error(losses: Sequence[float]) -> float | None:
    """Relative RMS error from the relative squared errors of the last tenth of an alignment's steps; None of none."""
    last = losses[-max(1, len(losses) // 10) :]
    return math.sqrt(sum(last) / len(last)) if last else None


# ---- output ---------------------------------------------------------------------------------------------------------

NAMES = {"mean": "mean", "vala": "VaLA", "gdn": "GDN"}  # of the rungs, where a name is not a plain word


def _show(report: dict, console: Console) -> None:
    layers = report["layers"]
    rungs = [name for name in layers[0]["ladder"] if name != "full"]
    console.table(
        f"{report['model']}: {report['tokens']} tokens, context {report['context']}",
        ("layer", *(NAMES.get(name, name) for name in rungs), "entropy", "sink", "distance", "lambda_q", "R2"),
        [
            (
                at["layer"],
                *(f"{at['ladder'][name]:.3f}" for name in rungs),
                f"{at['entropy']:.2f}",
                f"{at['sink']:.3f}",
                f"{at['distance']:.1f}",
                f"{at['lambda_q']: .3f}",
                f"{at['key_r2']: .3f}",
            )
            for at in layers
        ],
    )
    kinds = report["mixers"]
    converted = "converted" in layers[0]
    rank = {layer: place for place, layer in enumerate(report["keep_first"], 1)}
    console.table(
        "error of the attention output with each mixer as it starts, held-out tokens; * suggested",
        ("layer", *kinds, "keep", *(("aligned",) if converted else ())),
        [
            (
                at["layer"],
                *(_number(at["start"][kind], kind == at["suggested"]) for kind in kinds),
                rank.get(at["layer"]),
                *((_number((at["converted"] or {}).get("aligned")),) if converted else ()),
            )
            for at in layers
        ],
    )
    console.line(
        "entropy in nats; sink: weight on the document's first token; distance in tokens; lambda_q, R2: how well a "
        "multiple of the query stands for the mean key attended to (held out)"
    )
    console.line(f"*: {report['rule']}")
    few = report["keep_first"][: max(1, round(len(layers) / 4))]
    if few:
        console.line(
            f"keep: softmax would stay first in {', '.join(map(str, few))}, where even the suggested mixer starts "
            "worst. A hint from one layer at a time: convert --keep-softmax auto:N measures instead"
        )
    console.result(report)


def _number(value: float | None, marked: bool = False) -> str | None:
    """Three decimals, so that columns line up; far beyond 1, the size alone. marked: with a star."""
    if value is None or not math.isfinite(value):
        return None
    return (f"{value:.3f}" if value < 1000 else f"{value:.0e}") + "*" * marked


def figures(report: dict) -> dict:
    """The figures of an inspection by file name, from the object of --json."""
    layers = report["layers"]
    at = [layer["layer"] for layer in layers]

    def panel(name: str) -> tuple[list, list]:
        return [layer[name] for layer in layers], [layer["heads"][name] for layer in layers]

    rungs = layers[0]["ladder"]
    ladder = {NAMES.get(name, name): [layer["ladder"][name] for layer in layers] for name in rungs}
    starts = {kind: [layer["start"][kind] for layer in layers] for kind in report["mixers"]}
    last = list(rungs)[-1]
    return {
        "ladder": plots.errors_by_layer(at, ladder, "Error ladder of the heads (gdn)"),
        "starts": plots.errors_by_layer(at, starts, "Attention output as each mixer starts"),
        "heads": plots.head_map(
            at,
            [layer["heads"]["ladder"][last] for layer in layers],
            "Start error of every head (gdn)",
            "relative error",
        ),
        "attention": plots.heads_by_layer(
            at,
            {
                "Attention entropy": ("nats", *panel("entropy")),
                "Weight on the first token": ("share", *panel("sink")),
                "Attention distance": ("tokens", *panel("distance")),
            },
        ),
        "key-readout": plots.heads_by_layer(
            at,
            {
                "How well λ q stands for the mean key attended to": ("held-out R²", *panel("key_r2")),
                "λ, fitted by head": ("λ", *panel("lambda_q")),
            },
        ),
    }


def write(report: dict, out: Path, console: Console) -> list[str]:
    """Write inspect.json and the figures as PNG to a folder; returns their paths. Warns when matplotlib is missing."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    files = [out / "inspect.json"]
    atomic_write_text(files[0], json.dumps(plain(report), indent=2) + "\n")
    if not plots.available():
        console.warn(f"no figures: matplotlib is missing, {plots.INSTALL}")
        return [str(path) for path in files]
    for name, figure in figures(report).items():
        files.append(out / f"{name}.png")
        atomic_write_bytes(files[-1], plots.png(figure))
    return [str(path) for path in files]
