"""The text of a conversion: rows for stages 0 and 1 and for the comparison, and the endless stream of stage 2."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from linearize.checkpoint import RunState
from linearize.console import Console
from linearize.data import (
    Loader,
    Rows,
    RowSource,
    Source,
    documents,
    moved,
    open_sources,
    pack_rows,
    parse_sources,
    sample_text,
)
from linearize.errors import UserError, memory_for
from linearize.models import hushed
from linearize.processes import Processes
from linearize.recipe import Recipe
from linearize.teacher import Teacher


@dataclass
class Text:
    """Rows of text by purpose; no held-out document is among the others."""

    calibration: Rows
    alignment: Rows | None
    heldout: Rows | None


def prepare_text(teacher: Teacher, recipe: Recipe, here: Processes, run: RunState, console: Console) -> Text:
    """Rows for calibration, alignment and measurement. Raises UserError when the text cannot fill one row."""
    calibrate, align, seed = recipe.calibrate, recipe.align, recipe.run.seed
    source, column, tokenizer = recipe.data.source, recipe.data.column, teacher.tokenizer
    weights = {part.kind: part.weight for part in parse_sources(source)}
    alignment = None
    if "self" in weights:
        context = max(calibrate.context, align.context)
        # Whole rows for each, so that the one does not eat the other's.
        wanted = -(-calibrate.tokens // context) * context + align.tokens
        share = weights["self"] / sum(part.weight for part in parse_sources(source))
        sampled = sample_rows(teacher, recipe, math.ceil(wanted * share), context, here, run.folder, console)
        loader = Loader(open_sources(source, column=column, sampled=sampled), tokenizer, context, 1, seed=seed)
        calibration = loader.take(calibrate.tokens)
        if align.tokens:
            alignment = loader.take(align.tokens)
    else:
        train = open_sources(source, column=column)
        calibration = source_rows(train, tokenizer, calibrate.context, calibrate.tokens, seed)
        if align.tokens:
            alignment = source_rows(train, tokenizer, align.context, align.tokens, seed + 1)
        for rows in (calibration, alignment):
            if rows is not None and rows.shortfall:
                console.line(
                    f"{rows.shortfall}; alignment goes over its rows again" if rows is alignment else rows.shortfall
                )
    measured = None
    if recipe.data.heldout_tokens:
        heldout = open_sources(source, column=column, heldout=True)
        try:
            measured = source_rows(heldout, tokenizer, calibrate.context, recipe.data.heldout_tokens, seed)
        except UserError as error:
            fix = "give more text, lower --calibrate-context, or --heldout-tokens 0 to compare on none"
            raise UserError(f"held-out text: {error.what}", value=error.value, fix=fix) from error
    return Text(_moved(calibration, teacher, recipe), _moved(alignment, teacher, recipe), measured)


def position_limit(teacher: Teacher, recipe: Recipe) -> int:
    """Below which positions documents that are trained on lie."""
    return min(recipe.data.positions, teacher.config.max_position_embeddings)


def _moved(rows: Rows | None, teacher: Teacher, recipe: Recipe) -> Rows | None:
    if rows is None:
        return None
    positions = moved(rows.ids, rows.positions, position_limit(teacher, recipe), recipe.run.seed)
    return replace(rows, positions=positions)


def sample_rows(
    teacher: Teacher, recipe: Recipe, tokens: int, context: int, here: Processes, folder: Path, console: Console
) -> RowSource:
    """Text that the teacher makes itself, kept in `folder`, a share of it made by every process.

    The whole model is on the device meanwhile.
    """
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    with hushed():
        model = teacher.family.causal_lm_class().from_pretrained(
            teacher.folder, dtype=dtype, attn_implementation=teacher.family.softmax
        )
    with memory_for("the teacher is needed whole to make text: give other text with --data"):
        model.to(here.device).eval()
    fix = "lower data.self_batch"
    if not recipe.data.self_batch:
        fix = "set data.self_batch: 0 chooses as many rows as fit where nothing else is in memory"
    with memory_for(fix), console.stage("sample text from the teacher", tokens / here.world) as bar:
        rows = sample_text(
            model,
            teacher.tokenizer,
            tokens,
            context,
            seed=recipe.run.seed,
            batch_size=recipe.data.self_batch or None,
            temperature=recipe.data.self_temperature,
            device=here.device,
            progress=bar.advance,
            cache_path=folder,
            rank=here.rank,
            world=here.world,
        )
    here.wait()
    return rows


def source_rows(sources: list[Source], tokenizer, context: int, tokens: int, seed: int) -> Rows:
    """Whole windows of single documents where the text has enough of them, else packed rows, full of short contexts."""
    try:
        text = documents(sources, seed)
        # Not the whole of a large source, lest a few long documents be looked for in it.
        rows = pack_rows(text, tokenizer, context, tokens, seed=seed, long_only=True, read_tokens=50 * tokens)
        if not rows.shortfall:
            return rows
    except UserError:
        pass  # no document fills a window: pack_rows decides below whether all of them together do
    return pack_rows(documents(sources, seed), tokenizer, context, tokens, seed=seed)


def training_streams(
    teacher: Teacher, recipe: Recipe, here: Processes, run: RunState, console: Console
) -> Callable[[int, int], Loader]:
    """What makes the endless training stream of (context, rows in all processes)."""
    data, options = recipe.data, recipe.distill

    def loader(context: int, rows: int) -> Loader:
        parts, sampled = parse_sources(data.source), None
        share = sum(part.weight for part in parts if part.kind == "self") / sum(part.weight for part in parts)
        if share:
            tokens = options.tokens if context == options.context else options.long_tokens
            sampled = sample_rows(teacher, recipe, math.ceil(share * tokens), context, here, run.folder, console)
        sources = open_sources(data.source, column=data.column, sampled=sampled)
        share = {"rank": here.rank, "world": here.world, "limit": position_limit(teacher, recipe)}
        return Loader(sources, teacher.tokenizer, context, rows, seed=recipe.run.seed + 2, **share)

    return loader
