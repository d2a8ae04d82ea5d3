"""The recipe: these dataclasses are the only source of YAML keys, command flags, help and defaults.

A key is GROUP.FIELD. Its flag is the field's name for what a user sets often (`--mixer`), GROUP-FIELD otherwise
(`--align-lr`). Later wins: defaults, the recipe file, `-s key=value`, flags. This module imports neither torch nor
transformers: `linearize --help` needs it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from linearize.errors import UsageError

# Counts of tokens and sizes of files. Both are plain integers; they differ in the suffixes that they accept.
Count = Annotated[int, "count"]
Bytes = Annotated[int, "bytes"]

SUFFIXES = {
    "count": {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9},
    "bytes": {"": 1, "b": 1}
    | {f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)}
    | {f"{p}ib": 2 ** (10 * i) for i, p in enumerate("kmgt", 1)},
}
# The mixers of linearize.mixers, known here without importing them, and the keys under calibrate that each one takes.
READOUT = ("taps", "time_scales")
MIXER_OPTIONS = {
    "gdn": READOUT,
    "deltanet": READOUT,
    "mesanet": READOUT,
    "vala": READOUT,
    "ttt": (*READOUT, "ttt_width", "ttt_momentum"),
    "k-cache": READOUT,
    "gdn-standard": (),
    "gdn-native": (),
}
MIXER_KINDS = tuple(MIXER_OPTIONS)

KEEP_FORMS = "3,7,11 or 0-3,8 (layers), 25%, uniform:8, auto:8 (measured), every:4, first:2, last:2, none"


def key(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    short: str | None = None,
    least: float | None = None,
    weights: bool = True,
    in_file: bool = True,
) -> Any:
    """One option. flag: its name when it is not GROUP-FIELD. least: the smallest value allowed.

    weights: whether it can change the weights that come out, so that a half-finished run must not go on with another
    value. in_file: whether a recipe file may set it; switches that say how to run, such as --overwrite, may not.
    """
    meta = {"help": help, "flag": flag, "short": short, "least": least, "weights": weights, "in_file": in_file}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True)
class Model:
    """Model"""

    revision: str | None = key(None, "Branch, tag or commit on the Hub.", flag="revision")
    trust_remote_code: bool = key(
        False, "Run Python code that comes with the model.", flag="trust-remote-code", weights=False
    )


@dataclass(frozen=True)
class Convert:
    """What to convert"""

    mixer: str = key(
        "gdn",
        f"Mixer: {', '.join(MIXER_KINDS)}; by layer: 0-9=vala,rest=gdn.",
        flag="mixer",
    )
    keep_softmax: str = key("25%", f"Layers that stay softmax: {KEEP_FORMS}.", flag="keep-softmax")


@dataclass(frozen=True)
class Calibrate:
    """Calibration"""

    tokens: Count = key(16_384, "Tokens for the closed-form start values of every mixer.", least=1)
    select_tokens: Count = key(
        4_096, "How many of them choose each head's terms and fit their weights; all of them fit the output.", least=32
    )
    context: Count = key(512, "Tokens in a row of calibration text.", least=16)
    taps: int = key(4, "Recent values that each head reads directly.", least=1)
    time_scales: int = key(3, "Running means over other time spans that each head reads.", least=0)
    ttt_width: int = key(32, "Hidden units per head of ttt's inner model, beside its linear part.", least=0)
    ttt_momentum: bool = key(False, "Train ttt's inner model with momentum as well, at twice its state.")


@dataclass(frozen=True)
class Select:
    """Choosing layers, with --keep-softmax auto:N"""

    tokens: Count = key(16_384, "Tokens of training text on which hybrids are compared.", least=16)
    context: Count = key(512, "Tokens in a row of it.", least=16)
    questions: int = key(16, "Prompts of key-value questions that are asked as well.", least=0)
    question_tokens: Count = key(512, "Tokens in such a prompt.", least=32)
    answers_weight: float = key(1.0, "Weight of the answers' divergence beside the text's.", least=0)
    align_tokens: Count = key(
        100_000, "Tokens that each layer trains on before layers are compared; 0 compares calibrated starts.", least=0
    )
    method: Literal["greedy", "once"] = key(
        "greedy", "greedy measures all layers again after each choice, once ranks them by one measurement each."
    )


@dataclass(frozen=True)
class Align:
    """Training, one layer at a time"""

    tokens: Count = key(1_000_000, "Tokens that each layer trains on; 0 leaves the calibrated start.", least=0)
    context: Count = key(512, "Tokens in a row of training text.", least=16)
    batch_tokens: Count = key(8_192, "Tokens in a step.", least=16)
    lr: float = key(1e-3, "Learning rate after the warm-up.", least=0)
    lr_min: float = key(1e-5, "Learning rate at the end of the cosine.", least=0)
    warmup: int = key(50, "Steps over which the learning rate rises.", least=0)
    order: Literal["auto", "interleaved", "calibrate-first"] = key(
        "auto",
        "calibrate-first lets processes share the layers; auto: that for several, interleaved for one.",
    )
    cache_bytes: Bytes | None = key(
        None,
        "Memory for hidden states of the text, beyond which they go into a file; "
        "none: half of a GPU's free memory, else 8GB.",
        least=0,
        weights=False,
    )
    cache_dtype: Literal["float32", "bfloat16"] = key("float32", "Number format of these hidden states.")


@dataclass(frozen=True)
class Distill:
    """Training, end to end"""

    tokens: Count = key(0, "Tokens on which the whole student learns the teacher's logits; 0 leaves it out.", least=0)
    context: Count = key(2_048, "Tokens in a row of training text.", least=16)
    batch_tokens: Count = key(65_536, "Tokens in a step, of all processes together.", least=16)
    micro_tokens: Count = key(
        8_192, "Tokens, in whole rows, that one process takes through the model at once.", least=16, weights=False
    )
    lr: float = key(3e-5, "Learning rate of everything that the teacher had.", least=0)
    lr_mixer: float = key(2e-4, "Learning rate of the mixers' own weights.", least=0)
    lr_end: float = key(0.1, "Share of the learning rates that is left at the end of the cosine.", least=0)
    warmup: int = key(50, "Steps over which the learning rates rise.", least=0)
    train: Literal["all", "attention", "mixers"] = key(
        "all", "What trains: all weights, the converted attention layers, or the mixers' own weights."
    )
    temperature: float = key(1.0, "Temperature of both distributions in the loss.", least=0.01)
    ema: float = key(0.0, "Decay of a running mean of the weights, which then is the result; 0 keeps none.", least=0)
    checkpointing: bool = key(
        True, "Compute each layer again in the backward pass rather than keep its activations.", weights=False
    )
    compile: bool = key(
        False, "Compile all layers with torch.compile first: minutes at the start, then faster steps.", weights=False
    )
    top_k: int = key(
        0, "Compare the teacher's k likeliest tokens and one bucket for all others; 0 compares every token.", least=0
    )
    cache: str | None = key(
        None, "Folder that keeps the teacher's top_k for the next run on the same text.", weights=False
    )
    shard: Literal["auto", "full", "none"] = key(
        "auto",
        "Split weights over processes (full) or repeat them in each (none); auto asks accelerate's configuration.",
        weights=False,
    )
    save_minutes: float = key(10.0, "Minutes between states that a stopped run goes on from.", least=0, weights=False)
    save_steps: int = key(0, "Steps between such states as well; 0 counts minutes only.", least=0, weights=False)
    long_tokens: Count = key(0, "Tokens of a second pass over longer rows; 0 leaves it out.", least=0)
    long_context: Count = key(16_384, "Tokens in a row of the second pass.", least=16)
    long_lr: float = key(1e-5, "Learning rate of everything in the second pass.", least=0)


@dataclass(frozen=True)
class Data:
    """Data"""

    source: str = key(
        "bundled",
        "Text: bundled, self (the teacher's own), files, folders, globs, hub:NAME[:CONFIG][@SPLIT]; "
        "mixed: 0.7:hub:X,0.3:PATH.",
        flag="data",
    )
    column: str = key("text", "Key or column that holds the text in .jsonl, .parquet and Hub data.")
    self_temperature: float = key(1.0, "Temperature at which the teacher makes the text of self.", least=0.01)
    self_batch: int = key(
        0, "Rows of that text made at once; 0 is what the memory holds. Other rows come of another number.", least=0
    )
    positions: Count = key(
        8192,
        "Half of the training documents begin at random positions below this, as late in a text; 0: all at 0.",
        least=0,
    )
    heldout_tokens: Count = key(
        16_384,
        "Tokens of held-out text on which teacher and student are compared.",
        flag="heldout-tokens",
        least=0,
        weights=False,
    )
    sample: str | None = key(
        None, "A prompt that teacher and student answer at the end, both loaded whole.", flag="sample", weights=False
    )


@dataclass(frozen=True)
class Run:
    """Execution"""

    device: str = key("auto", "auto, cpu, cuda or cuda:N.", flag="device", weights=False)
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Number format of the checkpoint; auto is the teacher's.", flag="dtype"
    )
    seed: int = key(0, "Seed of everything random.", flag="seed", least=0)
    log_to: Literal["none", "tensorboard", "trackio"] = key(
        "none", "Where else metrics.jsonl goes while the run trains.", flag="log-to", weights=False
    )
    max_shard_size: Bytes = key(5 * 10**9, "Largest checkpoint file.", flag="max-shard-size", least=1, weights=False)
    overwrite: bool = key(
        False, "Start afresh in an output folder that is in use.", flag="overwrite", weights=False, in_file=False
    )
    json: bool = key(False, "Print one JSON object and nothing else.", flag="json", weights=False, in_file=False)
    quiet: bool = key(
        False,
        "No bars, no remarks: one line a stage, results, warnings.",
        flag="quiet",
        short="q",
        weights=False,
        in_file=False,
    )
    verbose: bool = key(
        False, "Say more; show the traceback of an error.", flag="verbose", short="v", weights=False, in_file=False
    )


@dataclass(frozen=True)
class Option:
    """One key with what its dataclass says about it."""

    name: str
    kind: str  # text, choice, int, float, bool, count, bytes
    optional: bool
    choices: tuple[str, ...]
    default: Any
    group: str
    flag: str
    short: str | None
    help: str
    least: float | None
    weights: bool
    in_file: bool

    @property
    def param(self) -> str:
        return self.name.replace(".", "_")

    def parse(self, value: Any) -> Any:
        """Turn a YAML, `-s` or flag value into the key's type; UsageError when it does not fit."""
        if isinstance(value, (list, tuple)):
            value = ",".join(str(item) for item in value)
        text = str(value).strip()
        if self.optional and text.lower() in ("", "null", "~"):
            return None
        if not text:
            raise UsageError(f"{self.name} has no value", fix=f"give one, or leave the key out for {self.shown}")
        parsed = _PARSERS[self.kind](self, text)
        if self.least is not None and parsed < self.least:
            raise UsageError(f"{self.name} is too small", value=text, fix=f"at least {self.least:g}")
        return parsed

    @property
    def shown(self) -> str:
        """The default as help and comments show it."""
        return "none" if self.default is None else self.write(self.default)

    def write(self, value: Any) -> str:
        """The text that `parse` turns back into the value."""
        if value is None:
            return "null"
        if self.kind in ("count", "bytes"):
            for suffix, unit in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
                if value and value % unit == 0 and suffix.lower() + "b" * (self.kind == "bytes") in SUFFIXES[self.kind]:
                    return f"{value // unit}{suffix}{'B' * (self.kind == 'bytes')}"
        return str(value).lower() if self.kind == "bool" else str(value)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what `linearize convert MODEL OUT` does, but for MODEL and OUT."""

    model: Model = Model()
    convert: Convert = Convert()
    calibrate: Calibrate = Calibrate()
    select: Select = Select()
    align: Align = Align()
    distill: Distill = Distill()
    data: Data = Data()
    run: Run = Run()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def resolve(
        cls, recipe: str | None = None, sets: Sequence[str] = (), flags: Mapping[str, Any] | None = None
    ) -> Recipe:
        """Defaults, then a recipe (name or path), then `key=value` texts, then flags by key; later wins.

        Raises UsageError for an unknown recipe or key (with the nearest valid one) and for a value that does not fit.
        """
        values: dict[str, Any] = {}
        if recipe is not None:
            values |= read_recipe(find_recipe(recipe))
        for text in sets:
            name, equals, value = text.partition("=")
            if not equals:
                raise UsageError("-s needs key=value", value=text, fix="for example -s align.tokens=300k")
            name = name.strip()
            values[name] = _option(name).parse(value)
        for name, value in (flags or {}).items():
            if value is not None:
                values[name] = _option(name).parse(value)
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Recipe:
        """Build from typed values by key ("align.tokens"); what is missing keeps its default."""
        groups: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(cls)}
        for name, value in values.items():
            _option(name)
            group, field = name.split(".")
            groups[group][field] = value
        return cls(**{name: GROUPS[name](**fields) for name, fields in groups.items()})

    @classmethod
    def from_yaml(cls, text: str, where: str = "recipe") -> Recipe:
        """Read a recipe's text; `where` names it in errors."""
        return cls.from_values(parse_yaml(text, where))

    def replace(self, values: Mapping[str, Any]) -> Recipe:
        """The same recipe with other typed values by key."""
        return Recipe.from_values(self.values() | dict(values))

    def values(self) -> dict[str, Any]:
        """Every key with its value, in order."""
        return {name: getattr(getattr(self, name.split(".")[0]), name.split(".")[1]) for name in OPTIONS}

    def measured_count(self) -> int | None:
        """How many layers keep their softmax by measurement (``auto:N``); None when the recipe says which."""
        form, count = _parse_keep(self.convert.keep_softmax)
        return count if form == "auto" else None

    def mixer_specs(self, n_layers: int, kept: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """What each converted layer of `n_layers` becomes: {"kind": ..., **mixer options} by layer, ascending.

        The layers left out stay softmax: those of `kept`, or those that the recipe says; for ``auto:N``, which says how
        many, an even spacing stands in. Raises UsageError as resolve_keep and resolve_mixers do.
        """
        if kept is None:
            kept = resolve_keep(self.convert.keep_softmax, n_layers)
        kinds = resolve_mixers(self.convert.mixer, n_layers, kept)
        return {
            layer: {"kind": kind} | {name: getattr(self.calibrate, name) for name in MIXER_OPTIONS[kind]}
            for layer, kind in kinds.items()
        }

    def fingerprint(self) -> dict[str, Any]:
        """The keys that decide the weights: a half-finished run goes on only if they are what they were."""
        return {name: value for name, value in self.values().items() if OPTIONS[name].weights}

    def to_yaml(self, header: str = "") -> str:
        """The recipe as a file, every key with its help as a comment, after `header` as comment lines."""
        lines = [f"# {line}".rstrip() for line in header.splitlines()]
        values = self.values()
        for name, group in GROUPS.items():
            lines += [""] * bool(lines) + [f"# {group.__doc__}", f"{name}:"]
            for option in OPTIONS.values():
                if option.group == name and option.in_file:
                    text = option.write(values[option.name])
                    lines.append(f"  # {option.help} Default: {option.shown}.")
                    lines.append(f"  {option.name.split('.')[1]}: {_scalar(text, values[option.name] is None)}")
        return "\n".join(lines) + "\n"


GROUPS: dict[str, type] = {
    "model": Model,
    "convert": Convert,
    "calibrate": Calibrate,
    "select": Select,
    "align": Align,
    "distill": Distill,
    "data": Data,
    "run": Run,
}


def _options() -> dict[str, Option]:
    found = {}
    for group, cls in GROUPS.items():
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            hint, meta = hints[field.name], field.metadata
            optional = type(None) in typing.get_args(hint)
            if optional:
                [hint] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
            choices: tuple[str, ...] = ()
            if typing.get_origin(hint) is Literal:
                kind, choices = "choice", typing.get_args(hint)
            elif typing.get_origin(hint) is Annotated:
                kind = hint.__metadata__[0]
            else:
                kind = {str: "text", int: "int", float: "float", bool: "bool"}[hint]
            found[f"{group}.{field.name}"] = Option(
                name=f"{group}.{field.name}",
                kind=kind,
                optional=optional,
                choices=choices,
                default=field.default,
                group=group,
                flag="--" + (meta["flag"] or f"{group}-{field.name.replace('_', '-')}"),
                short=meta["short"] and f"-{meta['short']}",
                help=meta["help"],
                least=meta["least"],
                weights=meta["weights"],
                in_file=meta["in_file"],
            )
    return found


# ---- values ---------------------------------------------------------------------------------------------------------


def parse_size(text: str, kind: str = "count") -> int:
    """Read a whole number with a suffix: `16k`, `300M`, `1.5B` (kind "count"), `5GB`, `512MiB` (kind "bytes")."""
    match = re.fullmatch(r"(\d+(?:_\d+)*|\d*\.\d+)\s*([a-z]*)", text.strip().lower())
    units = SUFFIXES[kind]
    if not match or match[2] not in units:
        shown = "16384, 16k, 300M or 1.5B" if kind == "count" else "5GB, 500MB or 2GiB"
        raise UsageError("not a size", value=text, fix=f"write it like {shown}")
    value = Fraction(match[1].replace("_", "")) * units[match[2]]
    if value.denominator != 1:
        raise UsageError("not a whole number", value=text, fix="use a finer unit")
    return int(value)


def _parse_sized(option: Option, text: str) -> int:
    try:
        return parse_size(text, option.kind)
    except UsageError as error:
        raise UsageError(f"{option.name}: {error.what}", value=text, fix=error.fix) from None


def _parse_int(option: Option, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{option.name} must be a whole number", value=text, fix=f"for example {option.shown}"
        ) from None


def _parse_float(option: Option, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{option.name} must be a number", value=text, fix=f"for example {option.shown}")
    return value


def _parse_bool(option: Option, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise UsageError(f"{option.name} is a switch", value=text, fix="true or false")


def _parse_choice(option: Option, text: str) -> str:
    if text not in option.choices:
        raise UsageError(f"{option.name} has no such choice", value=text, fix=f"one of {', '.join(option.choices)}")
    return text


_PARSERS = {
    "text": lambda option, text: text,
    "choice": _parse_choice,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "count": _parse_sized,
    "bytes": _parse_sized,
}

OPTIONS: dict[str, Option] = _options()


def _nearest(word: str, valid: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(valid), 1, 0.6)), None)


def _option(name: str, where: str = "") -> Option:
    if name in OPTIONS:
        return OPTIONS[name]
    group, _, field = name.partition(".")
    near = _nearest(name, OPTIONS)
    if near is None:  # The right field under no group or the wrong one, or the flag's name.
        spelled = {opt.name.split(".")[1]: opt.name for opt in OPTIONS.values()}
        spelled |= {opt.flag[2:].replace("-", "_"): opt.name for opt in OPTIONS.values()}
        near = spelled.get(_nearest((field or group).replace("-", "_"), spelled) or "")
    fix = f"did you mean {near}?" if near else f"keys start with {', '.join(GROUPS)}"
    raise UsageError(f"{where}unknown key", value=name, fix=f"{fix} (linearize recipes show default lists them)")


def _check(recipe: Recipe) -> None:
    """What single keys cannot know: values that must agree with each other or with a form."""
    align, calibrate = recipe.align, recipe.calibrate
    if align.tokens and align.lr_min > align.lr:
        raise UsageError("align.lr_min is above align.lr", value=align.lr_min, fix=f"at most {align.lr:g}")
    if align.tokens and align.batch_tokens < align.context:
        raise UsageError(
            "align.batch_tokens is less than one row", value=align.batch_tokens, fix=f"at least {align.context}"
        )
    distill = recipe.distill
    if distill.tokens:
        passes = [("context", distill.context)] + [("long_context", distill.long_context)] * bool(distill.long_tokens)
        for name, context in passes:
            if distill.batch_tokens < context:
                raise UsageError(
                    "distill.batch_tokens is less than one row",
                    value=distill.batch_tokens,
                    fix=f"at least distill.{name}, {context}",
                )
        if distill.lr_end > 1:
            raise UsageError("distill.lr_end is above the learning rates", value=distill.lr_end, fix="at most 1")
        if distill.ema >= 1:
            raise UsageError("distill.ema would never change", value=distill.ema, fix="below 1, such as 0.999")
        if distill.cache and not distill.top_k:
            raise UsageError("distill.cache keeps distill.top_k probabilities", value=0, fix="set distill.top_k=64")
    elif distill.long_tokens:
        raise UsageError("distill.long_tokens follows distill.tokens", value=0, fix="set --distill-tokens as well")
    for name, group in (("align", align), ("calibrate", calibrate), ("distill", distill)):
        if 0 < group.tokens < group.context:
            raise UsageError(
                f"{name}.tokens is less than one row",
                value=group.tokens,
                fix=f"at least {name}.context, {group.context}",
            )
    select = recipe.select
    if recipe.measured_count() is not None:
        for name, tokens, of, context in (
            ("tokens", select.tokens, "select", select.context),
            ("align_tokens", select.align_tokens, "align", align.context),
        ):
            if 0 < tokens < context:
                raise UsageError(
                    f"select.{name} is less than one row", value=tokens, fix=f"at least {of}.context, {context}"
                )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", recipe.run.device):
        raise UsageError("run.device is unknown", value=recipe.run.device, fix="auto, cpu, cuda or cuda:N")
    _parse_keep(recipe.convert.keep_softmax)
    _parse_mixers(recipe.convert.mixer)


# ---- layers ---------------------------------------------------------------------------------------------------------


def uniform_layers(count: int, n_layers: int) -> tuple[int, ...]:
    """`count` of `n_layers` layers evenly spaced, the last of every group (distillation.md)."""
    return tuple((j + 1) * n_layers // count - 1 for j in range(count))


def _parse_keep(spec: str) -> tuple[str, Any]:
    """Split a keep_softmax text into (form, argument) without knowing the model; UsageError when it has no form."""
    text = spec.strip().lower()
    if text == "none":
        return "none", None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        share = Fraction(match[1]) / 100
        if share > 1:
            raise UsageError("convert.keep_softmax is over 100%", value=spec, fix="a share of the layers such as 25%")
        return "share", share
    if match := re.fullmatch(r"(uniform|auto|every|first|last):(\d+)", text):
        if int(match[2]) < 1:
            raise UsageError("convert.keep_softmax needs a count of 1 or more", value=spec, fix=KEEP_FORMS)
        return match[1], int(match[2])
    try:
        return "layers", [layer for part in text.split(",") for layer in _layer_range(part)]
    except ValueError:
        raise UsageError("convert.keep_softmax is not understood", value=spec, fix=f"use {KEEP_FORMS}") from None


def _layer_range(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ValueError(text)
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def resolve_keep(spec: str, n_layers: int) -> tuple[int, ...]:
    """The layers that stay softmax, ascending, for a model of `n_layers`.

    A share rounds half up (25% of 30 layers is 8). Raises UsageError for a layer the model does not have, a layer named
    twice, a share that rounds to no layer, and a choice that leaves nothing to convert. ``auto:N`` gives N evenly
    spaced ones: how many is known before which.
    """
    form, arg = _parse_keep(spec)
    count = {"share": lambda: math.floor(arg * n_layers + Fraction(1, 2)), "layers": lambda: 0, "none": lambda: 0}.get(
        form, lambda: arg
    )()
    if form in ("uniform", "auto", "first", "last", "every") and arg > n_layers:
        raise UsageError(f"convert.keep_softmax: the model has {n_layers} layers", value=spec, fix=KEEP_FORMS)
    if form == "share" and arg and not count:
        raise UsageError(
            f"convert.keep_softmax keeps no layer of {n_layers}",
            value=spec,
            fix="a larger share, or none to convert all",
        )
    if form == "none":
        kept: Sequence[int] = ()
    elif form in ("share", "uniform", "auto"):
        kept = uniform_layers(count, n_layers)
    elif form == "every":
        kept = range(arg - 1, n_layers, arg)
    elif form == "first":
        kept = range(arg)
    elif form == "last":
        kept = range(n_layers - arg, n_layers)
    else:
        kept = sorted(arg)
        twice = sorted({layer for layer in kept if arg.count(layer) > 1})
        if twice:
            raise UsageError(f"convert.keep_softmax names layer {twice[0]} twice", value=spec, fix="name it once")
        if kept[-1] >= n_layers:
            raise UsageError(
                f"convert.keep_softmax: no layer {kept[-1]}",
                value=spec,
                fix=f"the model's layers are 0 to {n_layers - 1}",
            )
    if len(kept) == n_layers:
        raise UsageError(
            f"convert.keep_softmax keeps all {n_layers} layers: nothing to convert",
            value=spec,
            fix="keep fewer, e.g. 25%",
        )
    return tuple(kept)


def _parse_mixers(spec: str) -> list[tuple[range | None, str]]:
    """Split a mixer text into (layers, kind) pairs; layers is None for the rest. UsageError when it is malformed."""
    pairs: list[tuple[range | None, str]] = []
    for part in spec.split(","):
        where, equals, kind = (piece.strip() for piece in part.rpartition("="))
        if kind not in MIXER_KINDS:
            near = _nearest(kind, MIXER_KINDS)
            hint = f"did you mean {near}?" if near else f"one of {', '.join(MIXER_KINDS)}"
            raise UsageError("convert.mixer: no such mixer", value=kind, fix=hint)
        try:
            pairs.append((None if not equals or where == "rest" else _layer_range(where), kind))
        except ValueError:
            raise UsageError(
                "convert.mixer is not understood",
                value=part.strip(),
                fix="write it like 0-9=gdn,12=gdn,rest=gdn-standard",
            ) from None
    if [layers for layers, _ in pairs].count(None) > 1:
        raise UsageError(
            "convert.mixer names the rest twice", value=spec, fix="write it like 0-9=gdn,rest=gdn-standard"
        )
    return pairs


def resolve_mixers(spec: str, n_layers: int, kept: Sequence[int]) -> dict[int, str]:
    """The mixer kind of every converted layer, by layer; a kept layer stays softmax whatever the text says of it.

    Raises UsageError for an unknown kind, a layer the model does not have or that is given twice, and layers left out.
    """
    chosen: dict[int, str] = {}
    rest = None
    for layers, kind in _parse_mixers(spec):
        if layers is None:
            rest = kind
            continue
        for layer in layers:
            if layer >= n_layers:
                raise UsageError(
                    f"convert.mixer: no layer {layer}", value=spec, fix=f"the model's layers are 0 to {n_layers - 1}"
                )
            if layer in chosen:
                raise UsageError(f"convert.mixer names layer {layer} twice", value=spec, fix="name it once")
            chosen[layer] = kind
    converted = [layer for layer in range(n_layers) if layer not in kept]
    missing = [layer for layer in converted if layer not in chosen]
    if missing and rest is None:
        raise UsageError(
            f"convert.mixer says nothing of layer {missing[0]}", value=spec, fix=f"add rest={MIXER_KINDS[0]}"
        )
    return {layer: chosen.get(layer, rest) for layer in converted}


# ---- files ----------------------------------------------------------------------------------------------------------


def _scalar(text: str, null: bool) -> str:
    return text if null else yaml.safe_dump(text, width=10**6).splitlines()[0] if _needs_quotes(text) else text


def _needs_quotes(text: str) -> bool:
    """Whether plain YAML would not give the text back, read as a string."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader) != text or text.lower() in ("null", "~")
    except yaml.YAMLError:
        return True


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Read a recipe's text into typed values by key. `where` (a path) starts every error, with the line."""
    try:
        # Nodes rather than values: plain YAML would make numbers of revisions and strings of 1e-3, and keep only the
        # last of two equal keys. The dataclass knows the types.
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not YAML", fix=str(error)) from None
    values: dict[str, Any] = {}
    for group, line, node in _entries(root, where):
        if group not in GROUPS:
            near = _nearest(group, GROUPS)
            fix = f"did you mean {near}?" if near else f"one of {', '.join(GROUPS)}"
            raise UsageError(f"{where}:{line}: unknown group of keys", value=group, fix=fix)
        for field, line, leaf in _entries(node, f"{where}: {group}"):
            name = f"{group}.{field}"
            option = _option(name, f"{where}:{line}: ")
            if not option.in_file:
                raise UsageError(
                    f"{where}:{line}: {name} is not for files", fix=f"give {option.flag} on the command line"
                )
            if isinstance(leaf, yaml.SequenceNode) and all(isinstance(n, yaml.ScalarNode) for n in leaf.value):
                value: Any = [item.value for item in leaf.value]
            elif isinstance(leaf, yaml.ScalarNode):
                value = leaf.value
            else:
                raise UsageError(
                    f"{where}:{line}: {name} must be one value", fix=f"for example {field}: {option.shown}"
                )
            try:
                values[name] = option.parse(value)
            except UsageError as error:
                raise UsageError(f"{where}:{line}: {error.what}", value=error.value, fix=error.fix) from None
    return values


def _entries(node: yaml.Node | None, where: str) -> list[tuple[str, int, yaml.Node]]:
    """(key, line, value) of a YAML mapping, none for an empty one; UsageError for another shape or a repeated key."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~")):
        return []
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{where} must hold keys and values", fix="for example align:, then tokens: 300k below it")
    entries, seen = [], set()
    for name, value in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode):
            raise UsageError(f"{where}: line {line}: a key must be one word", fix="for example tokens: 300k")
        if name.value in seen:
            raise UsageError(f"{where}: key given twice", value=name.value, fix=f"remove one (line {line})")
        seen.add(name.value)
        entries.append((name.value, line, value))
    return entries


def recipes_dir() -> Path:
    """Where the shipped recipes are: recipes/ of the checkout that holds this package, else inside the package.

    The checkout comes first because an editable install leaves a copy behind that grows stale; pyproject.toml beside it
    tells a checkout from a site-packages folder that holds something else called recipes.
    """
    package = Path(__file__).parent
    if (package.parent / "recipes").is_dir() and (package.parent / "pyproject.toml").is_file():
        return package.parent / "recipes"
    return package / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.parent.name for path in recipes_dir().glob("*/recipe.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path to a file, a folder that holds recipe.yaml, or a shipped recipe's name."""
    path = Path(name).expanduser()
    for candidate in (path, path / "recipe.yaml", recipes_dir() / name / "recipe.yaml"):
        if name and candidate.is_file():
            return candidate
    near = _nearest(name, recipe_names())
    fix = f"did you mean {near}?" if near else f"a file, or one of {', '.join(recipe_names()) or 'none shipped'}"
    raise UsageError("no such recipe", value=name, fix=fix)


def read_recipe(path: Path) -> dict[str, Any]:
    """Typed values by key from a recipe file; UsageError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the recipe", value=str(path), fix=str(error)) from None
    return parse_yaml(text, str(path))
