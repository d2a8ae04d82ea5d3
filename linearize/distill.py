"""Stage 2: the whole student learns the teacher's next-token distributions, end to end.

Weights that train are fp32, with fp32 gradients and moments; on a GPU the student computes in bf16 autocast and the
frozen teacher in its own dtype. One step is one global batch: rows are split over processes and then into micro
batches, and the loss is the mean over the tokens of all of them.
"""

import hashlib
import json
import math
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map

from linearize.causal import whole_rows
from linearize.checkpoint import PARTIAL, RunState, format_bytes, write_safetensors, writing
from linearize.data import Rows, followed
from linearize.errors import UserError
from linearize.kl import FullTarget, Head, Target, TopTarget, chunked_kl, chunks, log_probabilities
from linearize.metrics import Metrics
from linearize.mixers import MixedAttention
from linearize.processes import Processes, half_precision, shard, sharded_by_launcher
from linearize.recipe import Distill
from linearize.replay import Replay
from linearize.student import packed_documents

BETAS = (0.9, 0.95)
CLIP = 1.0  # of the gradient's norm
# A step is bad when its loss or gradient is not finite, or its loss is SPIKE times the running mean of the losses.
SPIKE = 3.0
SMOOTHING = 0.95  # of that mean
SETTLED = 10  # good steps before the mean is believed
# A bad batch is skipped; after so many in a row the weights themselves are suspect, and the last saved state is loaded.
STREAK = 3
ROLL_BACKS = 5  # before the run gives up
STATE = "training"


@dataclass(frozen=True)
class Pass:
    """One pass over text of one length: `steps` steps from step `start` on, of `rows` rows in all processes."""

    context: int
    rows: int
    start: int
    steps: int
    lr: float
    lr_mixer: float

    def rate(self, step: int, options: Distill) -> float:
        """Share of the learning rates at a step: linear warm-up, then a cosine down to distill.lr_end."""
        at, warmup = step - self.start, min(options.warmup, self.steps // 2)
        if at < warmup:
            return (at + 1) / warmup
        progress = (at - warmup) / max(1, self.steps - warmup - 1)
        return options.lr_end + (1 - options.lr_end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def passes(options: Distill, here: Processes) -> list[Pass]:
    """The passes of a recipe. Raises UserError when a step's rows cannot be shared out among the processes."""
    found: list[Pass] = []
    for tokens, context, lr, lr_mixer in (
        (options.tokens, options.context, options.lr, options.lr_mixer),
        (options.long_tokens, options.long_context, options.long_lr, options.long_lr),
    ):
        if not tokens:
            continue
        rows = options.batch_tokens // context
        if rows % here.world:
            raise UserError(
                f"{rows} rows of {context} tokens in a step cannot be shared by {here.world} processes",
                value=f"distill.batch_tokens={options.batch_tokens}",
                fix=f"set distill.batch_tokens={-(-rows // here.world) * here.world * context}",
            )
        start = found[-1].start + found[-1].steps if found else 0
        found.append(Pass(context, rows, start, max(1, tokens // (rows * context)), lr, lr_mixer))
    return found


def splits_weights(options: Distill, here: Processes) -> bool:
    """Whether the processes share the weights among them rather than hold all of them each."""
    return here.world > 1 and (options.shard == "full" or (options.shard == "auto" and sharded_by_launcher()))


# ---- what trains ----------------------------------------------------------------------------------------------------


def choose_trained(student: nn.Module, train: str) -> None:
    """Let gradients flow to what distill.train names, and to nothing else."""
    student.requires_grad_(train == "all")
    for module in student.modules():
        if isinstance(module, MixedAttention) and train != "all":
            (module if train == "attention" else module.mixer).requires_grad_(True)


def parameter_groups(student: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Everything that trains, exactly once: the mixers' own groups as "mixer.NAME", and "rest"."""
    groups: dict[str, list[nn.Parameter]] = {}
    for module in student.modules():
        if isinstance(module, MixedAttention):
            for name, parameters in module.mixer.parameter_groups().items():
                groups.setdefault(f"mixer.{name}", []).extend(p for p in parameters if p.requires_grad and p.numel())
    own = {id(p) for parameters in groups.values() for p in parameters}
    groups["rest"] = [p for p in student.parameters() if p.requires_grad and p.numel() and id(p) not in own]
    return {name: parameters for name, parameters in groups.items() if parameters}


def drops(model: nn.Module) -> bool:
    """Whether the model draws random numbers while it trains."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or getattr(model.config, "attention_dropout", 0.0) > 0


class Comparison(nn.Module):
    """The student with its loss: what is split over processes, so that all weights are used inside its forward."""

    def __init__(self, student: nn.Module, temperature: float) -> None:
        super().__init__()
        self.student = student
        self.temperature = temperature
        self.__dict__["head"] = Head(student)  # not a submodule: its weights are the student's

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        target: Target,
        weight: float,
        measure: bool = False,
        packed: dict | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """ids, positions [B, T] -> weight * sum of the tokens' KL; with `measure` the sums that `measure` reports.

        packed: what :func:`linearize.student.packed_documents` says of the positions.
        """
        given = packed or {}
        hidden = self.student.model(input_ids=ids, position_ids=positions, use_cache=False, **given).last_hidden_state
        hidden = hidden.flatten(0, 1)
        if measure:
            return _sums(self.head, hidden, target, ids, positions)
        return chunked_kl(self.head, hidden, target, weight=weight, temperature=self.temperature)


def _sums(head: Head, hidden: Tensor, target: FullTarget, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Per token [N]: KL, whether both put the same token first, and both losses on the next token (0 without one)."""
    next_ids, follows = ids.roll(-1, 1).flatten(), followed(positions).flatten()
    parts: dict[str, list[Tensor]] = {"kl": [], "agree": [], "teacher": [], "student": []}
    for part in chunks(len(hidden), head.vocabulary):
        log_q, log_p = log_probabilities(head(hidden[part]), 1.0), target.log_p(part)
        parts["kl"].append((log_p.exp() * (log_p - log_q)).sum(-1))
        parts["agree"].append((log_p.argmax(-1) == log_q.argmax(-1)).float())
        for name, log in (("teacher", log_p), ("student", log_q)):
            parts[name].append(F.nll_loss(log, next_ids[part], reduction="none") * follows[part])
    return {name: torch.cat(values).view_as(ids).double().sum(1) for name, values in parts.items()} | {
        "follows": follows.view_as(ids).double().sum(1)
    }


# ---- the teacher's side ---------------------------------------------------------------------------------------------


class Targets:
    """The frozen teacher's distributions for a batch, whole or cut to the k likeliest, kept on disk if asked for."""

    def __init__(self, teacher: nn.Module, options: Distill, identity: dict) -> None:
        self.teacher, self.head, self.options = teacher, Head(teacher), options
        dtype = str(next(teacher.parameters()).dtype)
        self.identity = json.dumps([identity, dtype, options.top_k, options.temperature], sort_keys=True)
        self.folder = Path(options.cache).expanduser() if options.cache else None
        if self.folder is not None:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    @torch.no_grad()
    def full(self, ids: Tensor, positions: Tensor | None, temperature: float) -> FullTarget:
        hidden = self.teacher.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return FullTarget(hidden.flatten(0, 1), self.head, temperature)

    def __call__(self, ids: Tensor, positions: Tensor) -> Target:
        options = self.options
        if not options.top_k:
            return self.full(ids, positions, options.temperature)
        path = self._path(ids, positions)
        if path is not None and path.exists():
            kept = load_file(path, device=str(ids.device))
            return TopTarget(kept["ids"], kept["log_p"])
        target = TopTarget.of(self.full(ids, positions, options.temperature), options.top_k)
        if path is not None:
            partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
            write_safetensors(partial, {"ids": target.ids.cpu(), "log_p": target.log_p.cpu()})
            with writing(path):
                os.replace(partial, path)
        return target

    def _path(self, ids: Tensor, positions: Tensor) -> Path | None:
        """Named by everything that decides the content, so that any run on the same rows finds it."""
        if self.folder is None:
            return None
        digest = hashlib.blake2b(self.identity.encode() + str(tuple(ids.shape)).encode(), digest_size=16)
        for tensor in (ids, positions):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return self.folder / f"{digest.hexdigest()}.safetensors"


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Where training is: what a saved state holds beside tensors."""

    step: int = 0  # updates made
    skipped: int = 0  # bad batches
    roll_backs: int = 0
    good: int = 0  # good steps since the mean was begun
    mean: float = 0.0  # running mean of the losses
    losses: list[float] = field(default_factory=list)  # of every update
    loader: dict | None = None  # of the pass that `step` is in
    seconds: float = 0.0  # spent so far, over all runs


class Trainer:
    """Distils a student; its state can be saved, and loaded by another number of processes.

    student: fp32 weights, on the CPU or the device, the same in every process; it is moved, split or repeated here.
    teacher: frozen; the same. identity: JSON values that tell it from others that share distill.cache. fill: sets the
    weights of both, once they are where they stay. loaders: makes the endless loader of (context, rows), an iterator
    over batches with state_dict and load_state_dict. The order of work is fixed by the recipe and the seed, so that a
    stopped run goes on to the same weights, bit for bit on a CPU.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        options: Distill,
        loaders: Callable[[int, int], Iterator],
        here: Processes,
        *,
        seed: int = 0,
        identity: dict | None = None,
        fill: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.here, self.seed, self.loaders = options, here, seed, loaders
        self.passes = passes(options, here)
        self.steps = self.passes[-1].start + self.passes[-1].steps
        choose_trained(student, options.train)
        student.train()
        if options.checkpointing:
            # The state of a generator cannot be read while a graph is captured, and only dropout would need it.
            student.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": drops(student)})
        teacher.eval().requires_grad_(False)
        if options.compile:
            for layer in (*student.model.layers, *teacher.model.layers):
                layer.compile(dynamic=False)
        self.student = student
        module = Comparison(student, options.temperature)
        self.split = splits_weights(options, here)
        if self.split:
            shard(module, student.model.layers, here)
            # The head is used outside the base model's forward, so it stays whole.
            shard(teacher.model, teacher.model.layers, here, keep=set(teacher.lm_head.parameters()))
            teacher.lm_head.to(here.device)
        else:
            module.to(here.device)
            teacher.to(here.device)
        fill()
        self.weights = {n: p for n, p in student.named_parameters() if p.requires_grad and p.numel()}
        self.module = module
        self.targets = Targets(teacher, options, identity or {})
        self.optimizer = torch.optim.AdamW(
            [{"params": ps, "mixer": name != "rest"} for name, ps in parameter_groups(student).items()],
            lr=0.0,
            betas=BETAS,
            weight_decay=0.0,
            fused=here.device.type == "cuda",
        )
        # Of several processes each must tell rows of moved documents from parts of a sequence that is split over them.
        self.tells = here.device.type == "cuda" or here.world > 1
        # Weights that are split over processes, or targets that come from a disk, need the processor in between.
        self.replays = here.device.type == "cuda" and not self.split and not (options.top_k and options.cache)
        self.descend = Replay(self._descend, enabled=self.replays)
        self.ema = {n: p.detach().clone() for n, p in self.weights.items()} if options.ema else None
        self.progress = Progress()

    @property
    def tokens(self) -> int:
        """Tokens of all passes."""
        return self._tokens(self.steps)

    # -- one step

    def gradients(self, ids: Tensor, positions: Tensor, tokens: int) -> float:
        """Add up the gradients of this process's rows [rows, T]; returns their share of the mean loss.

        tokens: of the whole step, in all processes, over which the loss is a mean.
        """
        micro = max(1, self.options.micro_tokens // ids.shape[1])
        parts = list(zip(ids.split(micro), positions.split(micro), strict=True))
        total = torch.zeros((), dtype=torch.float64, device=self.here.device)
        # The loss is a mean over the tokens of all processes. FSDP2 averages gradients over them, `add_up` does not.
        averaged = self.here.world if self.split else 1
        for some_ids, some_positions in parts:
            packed = self._packed(some_positions)
            whole = self.replays and packed["mixer_reset"] is None
            total += self.descend(*tree_map(self._here, (some_ids, some_positions, averaged / tokens, packed, whole)))
        if not self.split:
            # Not by DistributedDataParallel, whose hooks need the processor in every backward pass.
            self.here.add_up([weight.grad for weight in self.weights.values() if weight.grad is not None])
        return float(total) / averaged

    def _packed(self, positions: Tensor) -> dict | None:
        """What :func:`packed_documents` says of these rows; without it every mixer looks at them, on a GPU a wait."""
        if not self.tells:
            return None
        reset, documents = packed_documents(positions, len(positions), always=self.options.compile)
        return {"mixer_reset": reset, "mixer_documents": documents}

    def _as_is(self):
        """Layers run as they are, compiled or not."""
        return torch.compiler.set_stance("force_eager") if self.options.compile else nullcontext()

    def _here(self, x):
        return x.to(self.here.device) if isinstance(x, Tensor) else x

    def _descend(
        self, ids: Tensor, positions: Tensor, weight: float, packed: dict | None = None, whole: bool = False
    ) -> Tensor:
        """Add the gradients of these rows, `whole` if each is one document; returns their loss."""
        # What is captured later is what runs plainly before.
        with whole_rows(whole if self.replays else None):
            target = self.targets(ids, positions)
            with half_precision(self.here.device):
                loss = self.module(ids, positions, target, weight, packed=packed)
        loss.backward()
        return loss.detach()

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def check_gradients(self) -> None:
        missing = [name for name, p in self.weights.items() if p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient reached {', '.join(missing)}")

    def update(self, at: Pass) -> float:
        rate = at.rate(self.progress.step, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (at.lr_mixer if group["mixer"] else at.lr)
        self.optimizer.step()
        if self.ema is not None:
            torch._foreach_lerp_(list(self.ema.values()), list(self.weights.values()), 1 - self.options.ema)
        return rate * at.lr

    # -- the loop

    def train(
        self,
        run: RunState | None,
        metrics: Metrics | None = None,
        *,
        aligned: list[dict] = (),
        advance: Callable[..., None] = lambda tokens, **fields: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Go on from the state that `run` holds to the last step, saving as often as the recipe says.

        aligned: the lines of metrics.jsonl before distillation. advance(tokens, loss=, ...) hears of every step.
        Raises UserError when training keeps diverging, and KeyboardInterrupt, with the state saved, after Ctrl-C.
        """
        self.restore(run)
        if metrics is not None:
            metrics.keep(aligned, self.progress.step)
        if self.progress.step:
            advance(self._tokens(self.progress.step))
        saved_at, began = time.monotonic(), time.monotonic() - self.progress.seconds
        streak, loader, loaded = 0, None, None
        progress = self.progress
        with _stopping() as stop:
            while progress.step < self.steps:
                at = next(p for p in self.passes if progress.step < p.start + p.steps)
                if at is not loaded:
                    loader = self._loader(at)
                    batches, loaded = iter(loader), at
                step_began = time.monotonic()
                # Whatever draws random numbers draws the same ones in a resumed run.
                torch.manual_seed((self.seed * 1_000_003 + progress.step) * 4096 + self.here.rank)
                batch = next(batches)
                tokens = at.rows * at.context
                mine = self.gradients(batch.ids, batch.positions, tokens)
                if progress.step == 0:
                    self.check_gradients()
                norm = self.clip()
                minutes_due = time.monotonic() - saved_at >= 60 * self.options.save_minutes
                asked = float(stop.asked)
                loss, asked, due = self.here.sum(mine, asked, float(minutes_due and self.here.first))
                spike = progress.good >= SETTLED and loss > SPIKE * progress.mean
                if not (math.isfinite(loss) and math.isfinite(norm)) or spike:
                    self.optimizer.zero_grad(set_to_none=False)
                    progress.skipped += 1
                    streak += 1
                    say(f"step {progress.step + 1}: loss {loss:.4g}, gradient {norm:.4g}: this batch is skipped")
                    if streak == STREAK:
                        streak = 0
                        self._roll_back(run, loss, loader, at, say)
                        progress = self.progress
                        if metrics is not None:
                            metrics.keep(aligned, progress.step)
                    continue
                streak = 0
                lr = self.update(at)
                self.optimizer.zero_grad(set_to_none=False)
                progress.step += 1
                progress.mean = SMOOTHING * progress.mean + (1 - SMOOTHING) * loss if progress.good else loss
                progress.good += 1
                if progress.step == at.start + at.steps:
                    progress.good = 0  # longer rows have another loss
                progress.loader = loader.state_dict() if progress.good else None
                progress.seconds = time.monotonic() - began
                seconds = max(time.monotonic() - step_began, 1e-9)
                progress.losses.append(loss)
                advance(tokens, loss=loss, memory=format_bytes(peak_memory(self.here.device)))
                if metrics is not None:
                    line = {"stage": "distill", "step": progress.step, "loss": loss, "lr": lr, "gradient": norm}
                    line |= {"tokens": self._tokens(progress.step), "tokens_per_second": round(tokens / seconds, 1)}
                    metrics.add([line])
                every = self.options.save_steps
                if run is not None and (
                    due or asked or progress.step == self.steps or (every and progress.step % every == 0)
                ):
                    self.save(run)
                    saved_at = time.monotonic()
                if asked:
                    raise KeyboardInterrupt

    def _tokens(self, step: int) -> int:
        return sum(max(0, min(step - p.start, p.steps)) * p.rows * p.context for p in self.passes)

    def _loader(self, at: Pass):
        loader = self.loaders(at.context, at.rows)
        if self.progress.loader is not None:
            loader.load_state_dict(self.progress.loader)
        return loader

    def _roll_back(self, run: RunState | None, loss: float, loader, at: Pass, say: Callable[[str], None]) -> None:
        """Load the last saved state, but go on behind the batches that were bad."""
        skipped, roll_backs = self.progress.skipped, self.progress.roll_backs + 1
        step, seen = self.progress.step, loader.state_dict()
        if roll_backs > ROLL_BACKS or run is None or not self.restore(run):
            raise UserError(
                f"distillation keeps diverging at step {step + 1}, also after {roll_backs - 1} roll-backs",
                value=f"loss {loss:.4g}",
                fix="lower distill.lr and distill.lr_mixer, or raise distill.batch_tokens",
            )
        self.progress.skipped, self.progress.roll_backs = skipped, roll_backs
        if self.progress.step >= at.start:
            self.progress.loader = seen
        say(f"rolled back from step {step + 1} to step {self.progress.step}")

    # -- state

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that a state holds, by name; tensors are the live ones, moments zero before the first update."""
        found: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            found[f"weight.{name}"] = weight.detach()
            kept = self.optimizer.state.get(weight)
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{moment}.{name}"] = kept[moment] if kept else torch.zeros_like(weight).detach()
            if self.ema is not None:
                found[f"ema.{name}"] = self.ema[name]
        return found

    def save(self, run: RunState) -> None:
        """Save weights, optimizer, mean weights and progress, durably, in place of the state before."""
        name, tensors = f"{STATE}-{self.progress.step:08d}", self._tensors()
        if self.here.first:
            run.new_folder(name, needed=sum(tensor.nbytes for tensor in tensors.values()))
        self.here.wait()
        with writing(run.out), _checkpointing():
            writer = dcp.FileSystemWriter(run.folder / (name + PARTIAL))
            dcp.save(tensors, storage_writer=writer, no_dist=self.here.world == 1)
        self.here.wait()
        if self.here.first:
            run.keep_folder(name, STATE, asdict(self.progress))
        self.here.wait()

    def restore(self, run: RunState | None) -> bool:
        """Load the state that `run` holds; False, and nothing is changed, when it holds none."""
        kept = None if run is None else run.kept_folder(STATE)
        if kept is None:
            return False
        folder, info = kept
        self.optimizer.zero_grad(set_to_none=False)
        tensors = self._tensors()
        try:
            with _checkpointing():
                dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=self.here.world == 1)
        except Exception as error:  # of several libraries, by what is damaged
            raise UserError(
                f"the training state in {folder} cannot be read",
                value=type(error).__name__,
                fix=f"remove {folder.parent / (STATE + '.json')}: distillation then starts again after the alignment",
            ) from error
        self.progress = Progress(**info)
        fused = self.here.device.type == "cuda"
        for name, weight in self.weights.items():
            count = torch.tensor(float(self.progress.step), device=self.here.device if fused else "cpu")
            self.optimizer.state[weight] = {
                "step": count,
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }
        return True

    # -- around training

    def trial(self) -> tuple[float, int]:
        """(seconds of a step, peak bytes) measured on random text, twice, so that compilation is not counted.

        Rows hold two documents, as packed text does: what compiles is what training needs.
        """
        at = max(self.passes, key=lambda p: p.context)
        rows = max(1, self.options.micro_tokens // at.context)
        rows = min(rows, at.rows // self.here.world)
        size = self.student.config.vocab_size
        ids = torch.randint(size, (rows, at.context), generator=torch.Generator().manual_seed(0))
        first = -(-at.context // 2)
        positions = torch.cat([torch.arange(first), torch.arange(at.context - first)]).expand(rows, -1)
        seconds = 0.0
        # Random text is nothing to keep, and the teacher's time is part of a step.
        folder, self.targets.folder = self.targets.folder, None
        for _ in range(2):
            began = time.monotonic()
            self.gradients(ids, positions, ids.numel())
            self.optimizer.zero_grad(set_to_none=True)
            seconds = time.monotonic() - began
        self.descend.forget()
        self.targets.folder = folder
        [seconds] = self.here.sum(seconds)
        share = at.rows / self.here.world / rows
        return seconds / self.here.world * share, peak_memory(self.here.device)

    @torch.no_grad()
    def finish(self, dtype: torch.dtype) -> None:
        """Make the student what will be written: the mean weights if there are any, rounded to the file's format."""
        for name, weight in self.weights.items():
            if self.ema is not None:
                weight.copy_(self.ema[name])
            if ".mixer." not in name:
                weight.copy_(weight.to(dtype).to(weight.dtype))
        self.student.eval()

    @torch.no_grad()
    def measure(self, rows: Rows) -> dict:
        """Teacher and student on held-out rows: perplexities, KL and top-1 agreement; the same in every process."""
        here, count = self.here, len(rows)
        size = max(1, self.options.micro_tokens // rows.context)
        names = ("kl", "agree", "teacher", "student", "follows")
        totals = dict.fromkeys(names, 0.0)
        mine = range(here.rank, -(-count // here.world) * here.world, here.world)
        for start in range(0, len(mine), size):
            # Past the end rows are repeated, so that every process makes as many calls, and not counted.
            picked = [*mine[start : start + size]]
            index = torch.tensor([row % count for row in picked])
            given = rows.ids[index], rows.positions[index], self._packed(rows.positions[index])
            ids, positions, packed = tree_map(self._here, given)
            target = self.targets.full(ids, positions, 1.0)
            # A handful of batches, for which nothing should compile anew.
            with half_precision(self.here.device), self._as_is():
                sums = self.module(ids, positions, target, 1.0, measure=True, packed=packed)
            counted = torch.tensor([row < count for row in picked], device=here.device)
            for name in names:
                totals[name] += float(sums[name][counted].sum())
        totals = dict(zip(names, here.sum(*totals.values()), strict=True))
        teacher, student = (math.exp(totals[who] / totals["follows"]) for who in ("teacher", "student"))
        return {
            "tokens": int(totals["follows"]),
            "context": rows.context,
            "teacher_perplexity": teacher,
            "student_perplexity": student,
            "ratio": student / teacher,
            "retained_percent": 100 * teacher / student,
            "kl": totals["kl"] / rows.tokens,
            "top1_agreement": totals["agree"] / rows.tokens,
        }


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Around torch.distributed.checkpoint: its wrapper of an error is no Exception, and its one warning no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class _Stop:
    asked = False


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Inside, the first SIGINT or SIGTERM asks for a stop after the step; the second stops at once."""
    stop = _Stop()

    def handle(number, frame):
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:
        pass  # not the main thread: whoever owns it decides
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the GPU, or by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_needed(student: nn.Module, teacher: nn.Module, options: Distill, here: Processes) -> int:
    """Bytes for weights, gradients, moments and the teacher in one process, before any activation."""
    choose_trained(student, options.train)
    bytes_each = 16 + (4 if options.ema else 0)
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in student.parameters() if not p.requires_grad)
    of_teacher = sum(p.nbytes for p in teacher.parameters())
    return (trained * bytes_each + 4 * frozen + of_teacher) // (here.world if splits_weights(options, here) else 1)
