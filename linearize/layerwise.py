"""Stages 0 and 1: every layer is calibrated and aligned on its own, one decoder block in memory at a time.

Hidden states of the text stream up the layers. In the interleaved order a layer is calibrated on what the aligned
layers below it give; alone, a process does that. In the order "calibrate-first" the first process calibrates all
layers. Then the processes share the rows of the text, each moving its own up the teacher's layers, and the layers to
align: what enters a layer is gathered by the process that owns it, and as many layers are trained at the same time as
there are processes. Every finished layer is on disk before its process begins another.
"""

import copy
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.align import Step, align_layer, learning_rate
from linearize.calibrate import calibrate_layer
from linearize.checkpoint import RunState
from linearize.console import Console
from linearize.corpus import Text
from linearize.data import Rows, content_hash
from linearize.errors import UserError
from linearize.evaluate import perplexity
from linearize.hidden import HiddenStates, states_budget
from linearize.metrics import Metrics
from linearize.mixers import HeadShape, MixedAttention, Sample, Segments, build_mixer
from linearize.observe import observe
from linearize.processes import Processes, half_precision
from linearize.recipe import Align, Recipe
from linearize.replay import Aside, Replay
from linearize.student import packed_documents
from linearize.teacher import Teacher

BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}  # tokens of calibration text that go through a layer at once
MOVED_TOKENS = {"cpu": 1024, "cuda": 32768}  # the same of text that is only trained on
PIECE_BYTES = 2**25  # of hidden states that every process sends at once


@dataclass
class Stream:
    """The hidden states of some rows as they move up the layers, of the teacher and, where needed, the student."""

    rows: Rows
    teacher: HiddenStates
    student: HiddenStates | None = None


@dataclass
class Layerwise:
    """What stages 0 and 1 work with. written: the number format of the checkpoint, to which layers are rounded."""

    teacher: Teacher
    specs: dict[int, dict]
    recipe: Recipe
    text: Text
    here: Processes
    run: RunState
    metrics: Metrics
    console: Console
    written: torch.dtype

    def __post_init__(self) -> None:
        self.runner = self.teacher.runner(self.here.device, torch.float32)
        self.batch = BATCH_TOKENS[self.here.device.type]
        self.moved = MOVED_TOKENS[self.here.device.type]
        self.shape = HeadShape.from_config(self.teacher.config)
        self.kept = getattr(torch, self.recipe.align.cache_dtype)  # format of the hidden states
        self.budget = states_budget(self.recipe.align.cache_bytes, self.here.device)  # bytes of them in memory

    # -- the two orders

    def convert(self) -> tuple[list[dict], dict | None]:
        """Calibrate and align every layer of ``specs``, and measure teacher and student on the held-out rows.

        Returns one record per converted layer and, in the first process, the held-out comparison.
        """
        missing, first = [], False
        if self.here.first:
            missing = [i for i in self.specs if self.run.load_layer(i) is None]
            first = self._order() == "calibrate-first"
            done = [self.run.load_layer(i)[1] for i in self.specs if i not in missing]
            self.metrics.keep([line for record in done for line in aligned_lines(record, self.recipe.align)])
        # All go by what the first one found on the disk: they must move the same states at the same time.
        missing, first = self.here.agree((missing, first))
        if first:
            if self.here.first and missing:
                self._calibrate_all()
            self.here.wait()
            self._align_all(missing)
            self.here.wait()
            if self.here.first:
                self._tell(missing)
        if not self.here.first:
            self.here.wait()
            return [], None
        saved = None if missing else self.run.load("compared")
        # A stopped run may go on with other held-out text, which decides no weight.
        text = content_hash(self.text.heldout) if self.text.heldout is not None else None
        if saved and saved[1]["text"] == text:
            heldout = saved[1]["heldout"]
        else:
            heldout = self._measured(interleaved=not first)
        self.run.save("compared", {}, {"text": text, "heldout": heldout})
        self.here.wait()
        return [self.run.load_layer(i)[1] for i in self.specs], heldout

    def _order(self) -> str:
        """The order in which the run was begun, whatever the number of processes that go on with it."""
        if any(self.run.folder.glob("start-*.json")):
            order = "calibrate-first"
        elif self.run.finished_layers():
            order = "interleaved"
        elif self.recipe.align.order == "auto":
            order = "interleaved" if self.here.world == 1 else "calibrate-first"
        else:
            order = self.recipe.align.order
        return order

    def _measured(self, interleaved: bool) -> dict | None:
        """One pass up the layers with the student behind its own lower layers; converts what is missing if asked to."""
        heldout = self._stream(self.text.heldout, True)
        calibration = alignment = None
        if interleaved:
            calibration = self._stream(self.text.calibration, True)
            alignment = self._stream(self.text.alignment, False)
        last = max(self.specs)
        end = self.runner.num_layers if heldout is not None else last + 1 if interleaved else 0
        for i in range(end):
            with self.runner.block(i) as layer:
                mixed = None
                if i in self.specs:
                    mixed = self._mixed(i, layer)
                    saved = self.run.load_layer(i)
                    if saved is None:
                        record = self._calibrate(i, layer, mixed, calibration)
                        self._align(i, layer, mixed, alignment, record)
                        self._tell([i])
                    else:
                        mixed.load_state_dict(saved[0], strict=True)
                    mixed.eval().requires_grad_(False)
                for stream in (calibration, alignment) if i < last else ():
                    self._advance(i, layer, mixed, stream)
                self._advance(i, layer, mixed, heldout)
            del layer, mixed
            _give_back_memory()
        return None if heldout is None else self._compare(heldout)

    def _calibrate_all(self) -> None:
        stream, last = self._stream(self.text.calibration, True), max(self.specs)
        for i in range(last + 1):
            with self.runner.block(i) as layer:
                mixed = None
                if i in self.specs:
                    mixed = self._mixed(i, layer)
                    saved = self.run.load(f"start-{i:05d}")
                    if saved is None:
                        record = self._calibrate(i, layer, mixed, stream)
                        self.run.save(f"start-{i:05d}", mixed.state_dict(), record)
                    else:
                        mixed.load_state_dict(saved[0], strict=True)
                    mixed.eval().requires_grad_(False)
                self._advance(i, layer, mixed, stream)
            del layer, mixed
            _give_back_memory()

    def _align_all(self, missing: list[int]) -> None:
        """Align these layers, given in order, from their saved starts: one in each process at a time."""
        here, own = self.here, None
        stream = self._own_rows(self.text.alignment) if missing else None
        for i in range(max(missing, default=-1) + 1):
            due = False
            with self.runner.block(i) as layer:
                if i in missing:
                    owner = missing.index(i) % here.world
                    whole = self._gathered(stream, owner)
                    if owner == here.rank:
                        own = i, layer, whole
                    del whole
                    due = owner == here.world - 1 or i == missing[-1]
                if due and here.world == 1:  # before its states move: the layer is trained on the stream itself
                    self._align_saved(*own)
                    due, own = False, None
                if i != missing[-1]:
                    self._advance(i, layer, None, stream)
            del layer
            if due and own:
                self._align_saved(*own)
                own = None
            _give_back_memory()

    def _align_saved(self, i: int, layer: nn.Module, stream: Stream | None) -> None:
        saved = self.run.load(f"start-{i:05d}")
        if saved is None:
            raise UserError(f"the start of layer {i} is damaged", fix="run the same command again")
        mixed = self._mixed(i, layer)
        mixed.load_state_dict(saved[0], strict=True)
        self._align(i, layer, mixed, stream, saved[1])

    # -- one layer

    def _mixed(self, i: int, layer: nn.Module) -> MixedAttention:
        mixed = build_mixer(copy.deepcopy(layer.self_attn), self.specs[i], i, self.shape)
        return mixed.to(self.here.device)

    def _label(self, verb: str, i: int) -> str:
        return f"{verb} ({sum(j < i for j in self.specs) + 1}/{len(self.specs)})"

    def _calibrate(self, i: int, layer: nn.Module, mixed: MixedAttention, stream: Stream) -> dict:
        """Set the layer's start values; returns its record."""
        record = {"layer": i, "kind": mixed.mixer.kind}
        began = time.monotonic()
        if mixed.mixer.calibrated:
            select = self.recipe.calibrate.select_tokens
            with self.console.stage(self._label("calibrate", i), stream.rows.tokens) as bar:
                # Half of what chooses is held out, so that it takes two batches at least.
                samples = self._samples(i, layer, stream, min(self.batch, select // 2))
                per_batch = samples[0].q.shape[0] * samples[0].q.shape[1]
                ladder = calibrate_layer(mixed, samples, layer.self_attn.scaling, -(-select // per_batch))
                bar.advance(stream.rows.tokens, error=ladder.pooled["output"])
            record["ladder"] = {name: round(error, 4) for name, error in ladder.pooled.items()}
            record["heads"] = {name: [round(e, 4) for e in errors] for name, errors in ladder.heads.items()}
        record["calibrate_seconds"] = round(time.monotonic() - began, 2)
        return record

    def _align(self, i: int, layer: nn.Module, mixed: MixedAttention, stream: Stream | None, record: dict) -> None:
        """Train the layer from its start, where there is text for it, and save it."""
        if stream is not None:
            began, options = time.monotonic(), self.recipe.align
            rows = max(1, options.batch_tokens // stream.rows.context)
            tokens = rows * stream.rows.context
            count = max(1, options.tokens // tokens)
            with self.console.stage(self._label("align", i), count * tokens) as bar:
                record["losses"] = align_layer(
                    mixed,
                    self._steps(i, layer, stream, rows),
                    count,
                    options,
                    name=f"layer {i}",
                    progress=lambda tokens, loss: bar.advance(tokens, loss=loss),
                )
            record["tokens_per_step"] = tokens
            record["align_seconds"] = round(time.monotonic() - began, 2)
        # Rounded as it will be written: what is measured is what will be loaded.
        mixed.attn.to(self.written).float()
        self.run.save_layer(i, mixed.state_dict(), record)

    def _tell(self, layers: list[int]) -> None:
        for i in layers:
            self.metrics.add(aligned_lines(self.run.load_layer(i)[1], self.recipe.align))

    # -- hidden states

    def _states(self, rows: Rows, budget: int) -> HiddenStates:
        shape = (*rows.ids.shape, self.runner.config.hidden_size)
        return HiddenStates(shape, self.kept, self.here.device, budget, self.run.folder)

    def _stream(self, rows: Rows | None, student: bool, budget: int | None = None) -> Stream | None:
        if rows is None:
            return None
        budget = self.budget if budget is None else budget
        stream = Stream(rows, *(self._states(rows, budget) for _ in range(1 + student)))
        for part in self._batches(stream, self.batch):
            states = self.runner.embed(rows.ids[part])
            stream.teacher[part] = states
            if student:
                stream.student[part] = states
        return stream

    def _own_rows(self, rows: Rows | None) -> Stream | None:
        """The stream of this process's share of the rows, cut so that they move in the batches of a single process."""
        if rows is None or self.here.world == 1:
            return self._stream(rows, False)
        text = content_hash(rows)
        if text != self.here.agree(text):
            raise UserError(
                "this process has other text for the alignment than the first one",
                fix="give all processes the same files",
            )
        own = self.here.shares(len(rows), self._batch_rows(rows, self.moved))[self.here.rank]
        budget, needed = self.budget, rows.tokens * self._token_bytes()
        # The copy of all rows, which is read in random order, has the first claim to memory that it fits into.
        budget -= needed if needed <= budget else 0
        return self._stream(Rows(rows.ids[own], rows.positions[own]), False, budget)

    def _gathered(self, stream: Stream | None, owner: int) -> Stream | None:
        """All rows of the alignment text, where they are now, in the process `owner`; None in the others.

        stream: this process's share. Alone, a process gets the stream itself. Every process must call it.
        """
        if stream is None or self.here.world == 1:
            return stream
        rows, whole = self.text.alignment, None
        if self.here.rank == owner:
            whole = self._states(rows, self.budget - stream.teacher.in_memory)
        shares = self.here.shares(len(rows), self._batch_rows(rows, self.moved))
        longest = max(share.stop - share.start for share in shares)
        step = max(1, PIECE_BYTES // (rows.context * self._token_bytes()))
        for start in range(0, longest, step):
            piece = stream.teacher[start : min(start + step, longest)].to(self.kept)
            piece = F.pad(piece, (0, 0, 0, 0, 0, min(step, longest - start) - len(piece)))  # all send as much
            for share, found in zip(shares, self.here.gather(piece, owner), strict=False):
                begin, end = share.start + start, min(share.start + start + step, share.stop)
                if begin < end:
                    whole[begin:end] = found[: end - begin]
        return None if whole is None else Stream(rows, whole)

    def _token_bytes(self) -> int:
        return self.kept.itemsize * self.runner.config.hidden_size

    @staticmethod
    def _batch_rows(rows: Rows, tokens: int) -> int:
        return max(1, tokens // rows.context)

    def _batches(self, stream: Stream, tokens: int) -> Iterator[slice]:
        rows = self._batch_rows(stream.rows, tokens)
        for start in range(0, len(stream.rows), rows):
            yield slice(start, start + rows)

    def _given(
        self, i: int, stream: Stream, part: slice | Tensor, always: bool = False
    ) -> tuple[Tensor, dict, dict]:
        """The teacher's states of some rows, what the base model would hand layer i, and what a mixer needs too."""
        hidden, positions = stream.teacher[part], stream.rows.positions[part]
        reset, documents = packed_documents(positions, len(hidden), always=always)
        told = reset is not None or bool(positions[:, 0].any())
        kwargs = self.runner.layer_kwargs(i, hidden, positions if told else None)
        reset = None if reset is None else reset.to(hidden.device)
        return hidden, kwargs, {"mixer_reset": reset, "mixer_documents": documents}

    def _samples(self, i: int, layer: nn.Module, stream: Stream, batch: int) -> list[Sample]:
        if len(stream.rows) < 2:
            raise UserError(
                "calibration needs two rows of text, one to fit and one to choose by",
                value=f"1 row of {stream.rows.context} tokens",
                fix="raise --calibrate-tokens, lower --calibrate-context or give more text",
            )
        samples = []
        for part in self._batches(stream, min(batch, stream.rows.tokens // 2)):
            hidden, kwargs, packed = self._given(i, stream, part)
            _, theirs = observe(layer, hidden, kwargs, attention_only=True)
            _, own = observe(layer, stream.student[part], kwargs, attention_only=True)
            segments = Segments(reset=packed["mixer_reset"], documents=packed["mixer_documents"])
            samples.append(Sample(own.x, own.q, own.k, own.v, theirs.heads, theirs.output, segments))
        return samples

    def _steps(self, i: int, layer: nn.Module, stream: Stream, rows: int) -> Iterator[Step]:
        """Endless batches of ``rows`` rows; every pass over the text has an order of its own, by seed and layer."""
        generator = torch.Generator().manual_seed(self.recipe.run.seed * 100_003 + i)
        order, aside = torch.empty(0, dtype=torch.long), Aside(self.here.device)
        replayed = self.here.device.type == "cuda"

        @Replay
        def look(hidden: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
            with half_precision(self.here.device):
                _, seen = observe(layer, hidden, kwargs, attention_only=True)
            return seen.x, seen.output

        while True:
            while len(order) < rows:
                order = torch.cat([order, torch.randperm(len(stream.rows), generator=generator)])
            pick, order = order[:rows], order[rows:]
            # Rows that come from the host, or are picked by it, and masks of packed rows wait for the device.
            hidden, kwargs, packed = aside(self._given, i, stream, pick, replayed)
            x, target = look(hidden, kwargs)
            kwargs.pop("attention_mask", None)
            yield Step(x, target, kwargs | packed)

    @torch.no_grad()
    def _advance(self, i: int, layer: nn.Module, mixed: MixedAttention | None, stream: Stream | None) -> None:
        """Move a stream through layer i: the teacher's states through the layer, the student's through its own."""
        if stream is None:
            return
        if stream.student is None:
            self._move(i, layer, stream)
            return
        softmax = layer.self_attn
        for part in self._batches(stream, self.batch):
            hidden, kwargs, packed = self._given(i, stream, part)
            stream.teacher[part] = layer(hidden, **kwargs)
            if mixed is not None:
                layer.self_attn, kwargs = mixed, kwargs | packed
            stream.student[part] = layer(stream.student[part], **kwargs)
            layer.self_attn = softmax

    def _move(self, i: int, layer: nn.Module, stream: Stream) -> None:
        """Move text that is only trained on; what is measured or fitted stays in fp32, and this does not."""
        aside, replayed = Aside(self.here.device), self.here.device.type == "cuda"

        @Replay
        def through(hidden: Tensor, kwargs: dict) -> Tensor:
            with half_precision(self.here.device):
                return layer(hidden, **kwargs)

        for part in self._batches(stream, self.moved):
            hidden, kwargs, _ = aside(self._given, i, stream, part, replayed)
            stream.teacher[part] = through(hidden, kwargs)

    def _compare(self, heldout: Stream) -> dict:
        teacher, tokens = perplexity(self.runner, heldout.teacher, heldout.rows)
        student, _ = perplexity(self.runner, heldout.student, heldout.rows)
        return {
            "tokens": tokens,
            "context": heldout.rows.context,
            "teacher_perplexity": teacher,
            "student_perplexity": student,
            "ratio": student / teacher,
            "retained_percent": 100 * teacher / student,
        }


def aligned_lines(record: dict, options: Align) -> list[dict]:
    """The lines of metrics.jsonl for one aligned layer, from its record."""
    losses = record.get("losses", ())
    tokens, seconds = record.get("tokens_per_step", 0), record.get("align_seconds", 0)
    return [
        {
            "stage": "align",
            "layer": record["layer"],
            "step": step + 1,
            "loss": loss,
            "lr": learning_rate(step, len(losses), options),
            "tokens": (step + 1) * tokens,
            "tokens_per_second": round(len(losses) * tokens / max(seconds, 0.01), 1),
        }
        for step, loss in enumerate(losses)
    ]


def _give_back_memory() -> None:
    """Return what the C heap keeps of freed weights to the system: glibc would hold on to a model's worth of them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
