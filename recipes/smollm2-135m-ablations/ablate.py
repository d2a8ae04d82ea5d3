"""What each choice of a conversion is worth: arms that differ in it alone, on one budget, in one process.

    python recipes/smollm2-135m-ablations/ablate.py MODEL --data 'text/*.jsonl.gz,train/*.jsonl.zst' \
        --out results.json --arms control,start

MODEL: a Hub id, folder or .gguf file. --data: training text (`linearize convert --data`). An arm is a name of ARMS or
SHARES, with @N for another seed than 0; --arms takes these and the names of GROUPS, in the order in which they are to
run. --align-tokens a layer and --distill-tokens are the budget of all arms but the shares: those divide the seconds
that training took in the arm gdn, which therefore comes first, between alignment and distillation. All arms are
compared with the teacher on the same held-out rows, before and after distillation.

The file is written after every arm, and an arm that is in it is not run again; --budget-seconds begins no arm once it
is used up. Arms that differ only in distillation share calibration and alignment, which lie in --work.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

from linearize import recipe as recipes
from linearize.assemble import assemble, fill
from linearize.checkpoint import RunState, atomic_write_text, read_object
from linearize.console import Console, plain
from linearize.convert import convert_layers, select_layers, written_dtype
from linearize.corpus import prepare_text, source_rows, training_streams
from linearize.data import Rows, open_sources
from linearize.distill import Trainer
from linearize.errors import UserError
from linearize.metrics import Metrics
from linearize.mixers import MIXERS, fit, gdn
from linearize.mixers.gdn import GDN
from linearize.models import free_memory
from linearize.processes import Processes, device_name, pick_device
from linearize.recipe import Recipe
from linearize.teacher import Teacher, open_teacher

RECIPE = "smollm2-135m-gdn"
BASE = {
    "convert.keep_softmax": "25%",  # evenly spaced: nothing is measured first
    "align.context": "1024",
    "align.batch_tokens": "8192",
    "align.warmup": "10",
    "distill.context": "1024",
    "distill.batch_tokens": "16384",
    "distill.warmup": "20",
    "distill.compile": "false",  # a short arm would mostly compile
    "data.heldout_tokens": "0",  # measured here, the same for every arm
}
ARMS: dict[str, dict[str, str]] = {
    # the base, and other starts of the same recurrence
    "gdn": {},
    "gdn-standard": {"convert.mixer": "gdn-standard"},
    "vala": {"convert.mixer": "vala"},
    # one choice of the start or of the gates taken back
    "gates-tied": {"convert.mixer": "gdn-tied"},
    "tilt-0": {"convert.mixer": "gdn-untilted"},
    "forgetting-0": {"convert.mixer": "gdn-unforgetting"},
    "rope-dropped": {"convert.mixer": "gdn-unrotated"},
    # learning rates, around the base's 2e-4 and 1e-3
    "lr-5e-5": {"distill.lr": "5e-5"},
    "lr-8e-4": {"distill.lr": "8e-4"},
    "lr-mixer-2.5e-4": {"distill.lr_mixer": "2.5e-4"},
    "lr-mixer-4e-3": {"distill.lr_mixer": "4e-3"},
    # tokens in a row of both stages, and in a step of distillation
    "context-512": {"align.context": "512", "distill.context": "512"},
    "context-2048": {"align.context": "2048", "distill.context": "2048"},
    "batch-8k": {"distill.batch_tokens": "8192"},
    "batch-32k": {"distill.batch_tokens": "32768"},
    "batch-64k": {"distill.batch_tokens": "65536"},
    # text that the teacher makes itself
    "self": {"data.source": "self"},
    # what trains end to end
    "train-attention": {"distill.train": "attention"},
    "train-mixers": {"distill.train": "mixers"},
    # terms of the readout that calibration fits
    "taps-1": {"calibrate.taps": "1"},
    "time-scales-0": {"calibrate.time_scales": "0"},
    "taps-1-time-scales-0": {"calibrate.taps": "1", "calibrate.time_scales": "0"},
    "sink-0": {"convert.mixer": "gdn-sinkless"},
    "mean-0": {"convert.mixer": "gdn-meanless"},
    "memory-0": {"convert.mixer": "gdn-memoryless"},
    # one state for all query heads of a KV head
    "state-kv": {"convert.mixer": "gdn-shared"},
    # every layer calibrated before any is aligned, on teacher's states rather than aligned layers'
    "calibrate-first": {"align.order": "calibrate-first"},
    # which layers keep their softmax: the base's are evenly spaced
    "keep-once": {"convert.keep_softmax": "auto:8", "select.method": "once"},
    "keep-greedy": {"convert.keep_softmax": "auto:8", "select.method": "greedy"},
}
SHARES = {f"share-{percent}": percent / 100 for percent in (0, 25, 50, 75)}  # of the seconds, for alignment
GROUPS: dict[str, list[str]] = {
    "control": [f"{arm}@{seed}" for seed in (0, 1, 2) for arm in ("gdn", "gdn-standard")],
    "start": ["gdn", "gdn-standard", "vala"],
    "derivation": ["gdn", "gates-tied", "tilt-0", "forgetting-0", "rope-dropped"],
    "rates": ["gdn", "lr-5e-5", "lr-8e-4", "lr-mixer-2.5e-4", "lr-mixer-4e-3"],
    "shares": ["gdn", *SHARES],
    "context": ["gdn", "context-512", "context-2048"],
    "batch": ["gdn", "batch-8k", "batch-32k", "batch-64k"],
    "train": ["gdn", "train-attention", "train-mixers"],
    "readout": ["gdn", "taps-1", "time-scales-0", "taps-1-time-scales-0", "sink-0", "mean-0", "memory-0"],
    "state": ["gdn", "state-kv"],
    "order": ["gdn", "calibrate-first"],
    "text": ["gdn", "self"],
    "keep": ["gdn", "keep-once", "keep-greedy"],
    "all": [*ARMS, *SHARES],
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--arms", default="control,all")
    parser.add_argument("--recipe", default=RECIPE, help="what the arms have in common, but for the settings above")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all arms")
    parser.add_argument("--align-tokens", default="300k")
    parser.add_argument("--distill-tokens", default="2M")
    parser.add_argument("--heldout-tokens", type=int, default=65536)
    parser.add_argument("--heldout-context", type=int, default=2048)
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument(
        "--work", type=Path, help="folder for calibrated and aligned layers; a temporary one if left out"
    )
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder, own_mixers():
            Ablation(args, args.work or Path(folder)).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


# ---- mixers that only arms have -------------------------------------------------------------------------------------


class Tied(GDN):
    """Decay and erase as the expansion has them, alpha_t = 1 - b_t: only write and forgetting depend on the data."""

    kind = "gdn-tied"

    def arguments(self, gap, k, v, writes, gates, scale):
        return super().arguments(gap, k, v, writes, [torch.zeros_like(gate) for gate in gates], scale)


class Untilted(GDN):
    """Started at r = 0, in all running means; r trains as it does otherwise."""

    kind = "gdn-untilted"

    def start(self, samples, scale, select):
        with patch.multiple(fit, TILTS=(0.0,), FIRST_ORDER_TILTS=(0.0,)):
            return super().start(samples, scale, select)


class Unforgetting(GDN):
    """Started at the largest lambda in the memory and its means; the other time scales choose theirs."""

    kind = "gdn-unforgetting"

    def start(self, samples, scale, select):
        with patch.multiple(fit, FIRST_ORDER_DECAYS=fit.DECAYS[:1]):
            return super().start(samples, scale, select)


class Unrotated(GDN):
    """Queries and keys without RoPE."""

    kind = "gdn-unrotated"

    def adopt(self, attn):
        attn.register_forward_pre_hook(unrotated, with_kwargs=True)
        self.__dict__["attn"] = attn  # not a submodule: its weights are the layer's

    def start(self, samples, scale, select):
        # In place, for the output projection is fitted on these samples next.
        samples[:] = [self.again(sample) for sample in samples]
        return super().start(samples, scale, select)

    def again(self, sample):
        """The sample with the queries and keys that the attention gives without RoPE."""
        seen = {}

        def core(q, k, v, scale):
            seen.update(q=q, k=k)
            return q

        angles = sample.x.new_zeros(2, 1, sample.x.shape[1], self.shape.key_dim).unbind()
        kwargs = {"attention_mask": None, "cache": None, "position_ids": None, "mixer_core": core}
        self.attn(sample.x, position_embeddings=angles, **kwargs)
        return dataclasses.replace(sample, **seen)


def unrotated(attn, args, kwargs):
    """A hook before an attention module: every angle is 0."""
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


@contextlib.contextmanager
def standing_in(mixer: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the mixer computes with these in place of its parameters of those names."""
    with contextlib.ExitStack() as stack:
        for name, tensor in tensors.items():
            owner, _, last = name.rpartition(".")
            stack.enter_context(patch.dict(mixer.get_submodule(owner)._parameters, {last: tensor}))
        yield


class Without(fit.Moments):
    """Fits every readout without the term in one place of it, to which it gives 0."""

    def __init__(self, place: int):
        super().__init__()
        self.place = place

    def fit(self, index, *, both=False):
        left = torch.arange(index.shape[-1], device=index.device) != self.place
        found = index.new_zeros(index.shape, dtype=torch.float64)
        found[..., left] = super().fit(index[..., left], both=both)
        return found


class Lacking(GDN):
    """Without one term of the readout: all is chosen and fitted without it, and training does not bring it back."""

    term: ClassVar[str]  # its parameter

    def start(self, samples, scale, select):
        place = {"readout.mean": 0, "read_state": 1, "readout.sink": 2 + self.taps}[self.term]
        with patch.object(fit, "Moments", partial(Without, place)):
            return super().start(samples, scale, select)

    def forward(self, *args, **kwargs):
        # Times 0, as training wants a gradient of every parameter.
        with standing_in(self, {self.term: 0 * self.get_parameter(self.term)}):
            return super().forward(*args, **kwargs)


class Sinkless(Lacking):
    """No value of the first token."""

    kind = "gdn-sinkless"
    term = "readout.sink"


class Meanless(Lacking):
    """No running mean at the memory's own tilt and forgetting; the time scales choose among the others, as always."""

    kind = "gdn-meanless"
    term = "readout.mean"


class Memoryless(Lacking):
    """Nothing is read from the memory: means and values are all there is."""

    kind = "gdn-memoryless"
    term = "read_state"


class Grouped(fit.Moments):
    """Gives every head the error of its group, so that the heads of a group choose the same."""

    def __init__(self, group: int):
        super().__init__()
        self.group = group

    def error(self, index, coefficients):
        error = super().error(index, coefficients).unflatten(-1, (-1, self.group))
        return error.sum(-1, keepdim=True).expand_as(error).flatten(-2)

    def relative(self, index, coefficients):
        # What is reported stays each head's own.
        return (super().error(index, coefficients) / self.power[1].clamp(min=1e-30)).sqrt()


class Shared(GDN):
    """One state per KV head: its query heads differ only in what they ask and in their readout scalars.

    Of all that writes and forgets, time scales included, the first head's parameters serve the whole group. Memory and
    means then come out the same for all its heads: one copy would do, but the kernels keep one a head.
    """

    kind = "gdn-shared"
    shared = (
        "gates.weight",
        "gates.bias",
        "reference",
        "log_balance",
        "readout.scale_reference",
        "readout.scale_forget",
    )

    def start(self, samples, scale, select):
        group, mean_queries, terms = self.shape.group, fit.mean_queries, gdn.erased_terms

        def queries(samples):
            return mean_queries(samples).unflatten(0, (-1, group)).mean(1).repeat_interleave(group, 0)

        def memory(scale, sample, points, erases, log_balance):
            if log_balance is None:
                # c_h^2 is E|s (q - r)| of all queries of a group over E|k - kbar|, which they have in common.
                _, own = terms(scale, sample, points, erases[:1], None)
                reach = (2 * own).exp().unflatten(0, (-1, group)).mean(1)
                log_balance = 0.5 * reach.log().repeat_interleave(group, 0)
            return terms(scale, sample, points, erases, log_balance)

        with patch.multiple(fit, Moments=partial(Grouped, group), mean_queries=queries):
            with patch.object(gdn, "erased_terms", memory):
                return super().start(samples, scale, select)

    def forward(self, *args, **kwargs):
        # Heads are rows, a group's next to each other, in every one of them.
        group = self.shape.group
        rows = {name: self.get_parameter(name)[::group].repeat_interleave(group, 0) for name in self.shared}
        with standing_in(self, rows):
            return super().forward(*args, **kwargs)


@contextlib.contextmanager
def own_mixers() -> Iterator[None]:
    """Inside, recipes and students know these mixers too."""
    known = (Tied, Untilted, Unforgetting, Unrotated, Sinkless, Meanless, Memoryless, Shared)
    own = {cls.kind: cls for cls in known}
    options = dict.fromkeys(own, recipes.READOUT)
    with patch.dict(MIXERS, own), patch.dict(recipes.MIXER_OPTIONS, options):
        with patch.object(recipes, "MIXER_KINDS", tuple(recipes.MIXER_OPTIONS)):
            yield


# ---- arms -----------------------------------------------------------------------------------------------------------


def chosen(names: str) -> list[tuple[str, int]]:
    """(arm, seed) of every arm that --arms names, each once. Raises UserError for a name that is none."""
    found: dict[tuple[str, int], None] = {}
    for text in (text.strip() for text in names.split(",")):
        for name in GROUPS.get(text, [text]):
            arm, _, seed = name.partition("@")
            if arm not in ARMS | SHARES or not (seed or "0").isdecimal():
                known = ", ".join([*GROUPS, *ARMS, *SHARES])
                raise UserError("no such arm", value=name, fix=f"one of {known}; with @N for another seed")
            found[arm, int(seed or 0)] = None
    return list(found)


class Ablation:
    """The arms of one command: they have the teacher, the held-out rows and a folder of layers in common."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.arms = chosen(args.arms)
        self.console = Console(quiet=True)
        base = self.recipe({})
        self.here = Processes(pick_device(base.run.device))
        self.teacher: Teacher = open_teacher(args.model, say=self.console.line)
        self.heldout: Rows = source_rows(
            open_sources(args.data, heldout=True, column=base.data.column),
            self.teacher.tokenizer,
            args.heldout_context,
            args.heldout_tokens,
            seed=0,
        )
        common = {key: value for key, value in base.values().items() if key not in ("data.source", "run.device")}
        self.results = {
            "command": f"ablate.py MODEL --data ... --align-tokens {args.align_tokens} "
            f"--distill-tokens {args.distill_tokens} {shlex.join(f'--set={text}' for text in args.set)}".strip(),
            "device": device_name(self.here.device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "heldout": {"tokens": self.heldout.tokens, "context": self.heldout.context},
            "recipe": plain(common),
            "arms": [],
        }
        if args.out.is_file():
            before = read_object(args.out, "remove it to run all arms again")
            for name in ("recipe", "heldout"):
                if before[name] != self.results[name]:
                    raise UserError(f"the arms in {args.out.name} had another {name}", fix="name another --out")
            self.results["arms"] = before["arms"]

    def recipe(self, changes: dict[str, str], seed: int = 0) -> Recipe:
        args = self.args
        budget = {"align.tokens": args.align_tokens, "distill.tokens": args.distill_tokens, "data.source": args.data}
        given = [f"{key}={value}" for key, value in (BASE | budget).items()]
        return Recipe.resolve(args.recipe, [*given, *args.set], {**changes, "run.seed": seed})

    def found(self, arm: str, seed: int = 0) -> dict | None:
        return next((at for at in self.results["arms"] if (at["arm"], at["seed"]) == (arm, seed)), None)

    def run(self) -> None:
        """Every arm that is not in the file yet, while there is time."""
        began = time.monotonic()
        for arm, seed in self.arms:
            if self.found(arm, seed) is not None:
                continue
            if time.monotonic() - began > self.args.budget_seconds:
                print(f"no time for {arm}@{seed}", flush=True)
                continue
            started = time.monotonic()
            changes = ARMS[arm] if arm in ARMS else self.shared(SHARES[arm], seed)
            result = {"arm": arm, "seed": seed, "set": changes}
            try:
                result |= measured(self.teacher, self.recipe(changes, seed), self.heldout, self.here, self.work)
            except (UserError, torch.OutOfMemoryError) as error:  # such as a rate at which training diverges
                result["error"] = str(error).splitlines()[0]
            free_memory(self.here.device)
            result["wall_seconds"] = round(time.monotonic() - started, 1)
            self.results["arms"].append(result)
            atomic_write_text(self.args.out, json.dumps(plain(self.results), indent=1) + "\n")
            print(told(result), flush=True)

    def shared(self, share: float, seed: int) -> dict[str, str]:
        """Budgets that take the seconds of the arm gdn, `share` of them for alignment, at the speeds measured there."""
        base = self.found("gdn", seed)
        if base is None or "error" in base:
            raise UserError("shares divide the time of the arm gdn", value=self.args.arms, fix="run --arms gdn first")
        seconds = base["seconds"]["align"] + base["seconds"]["distill"]
        recipe = self.recipe({}, seed)
        align = share * seconds * base["align_tokens_per_second"] / base["layers"]
        distill = (1 - share) * seconds * base["distill_tokens_per_second"]
        # Whole steps, and one at least of distillation.
        align = int(align) // recipe.align.batch_tokens * recipe.align.batch_tokens
        steps = max(1, int(distill) // recipe.distill.batch_tokens)
        return {"align.tokens": str(align), "distill.tokens": str(steps * recipe.distill.batch_tokens)}


def told(result: dict) -> str:
    """One line of what an arm gave."""
    head = f"{result['arm']}@{result['seed']:<3}"
    if "error" in result:
        return f"{head} {result['error']}"
    parts = [f"{when}: x {result[when]['ratio']:.3f}, KL {result[when]['kl']:.4f}" for when in ("aligned", "distilled")]
    return f"{head} {'; '.join(parts)}; {result['wall_seconds']:.0f} s"


# ---- one arm --------------------------------------------------------------------------------------------------------


def measured(teacher: Teacher, recipe: Recipe, heldout: Rows, here: Processes, work: Path) -> dict:
    """Calibrate, align and distil by the recipe; held-out figures before and after distillation, losses, seconds.

    Nothing is written but the aligned layers, under a name that says what decides them.
    """
    console = Console(quiet=True)
    with layers_of(teacher, recipe, work) as run, Metrics(run.out, writes=False) as metrics:
        selection = select_layers(teacher, recipe, here, run, console)
        specs = recipe.mixer_specs(teacher.config.num_hidden_layers, selection and selection["kept"])
        text = prepare_text(teacher, recipe, here, run, console)
        layers, _ = convert_layers(teacher, specs, recipe, text, here, run, metrics, console)
        student, model = assemble(teacher, specs, here)
        trainer = Trainer(
            student,
            model,
            recipe.distill,
            training_streams(teacher, recipe, here, run, console),
            here,
            seed=recipe.run.seed,
            fill=lambda: fill(student, model, teacher, specs, run),
        )
        student.eval()
        aligned = trainer.measure(heldout)
        student.train()
        clock = [time.monotonic()]
        trainer.train(None, advance=lambda tokens, **fields: clock.append(time.monotonic()))
        trainer.finish(written_dtype(teacher, recipe))
        distilled = trainer.measure(heldout)
    tokens = trainer.tokens // trainer.steps
    # The first steps compile and allocate.
    steps = [after - before for before, after in zip(clock, clock[1:], strict=False)][len(clock) // 3 :]
    seconds = {
        "calibrate": sum(layer["calibrate_seconds"] for layer in layers),
        "align": sum(layer.get("align_seconds", 0.0) for layer in layers),
        "distill": clock[-1] - clock[0],
    }
    trained = sum(len(layer.get("losses", ())) * layer.get("tokens_per_step", 0) for layer in layers)
    return {
        "layers": len(specs),
        "kept": selection and {"layers": selection["kept"], "damage": selection["damage"]},
        "aligned": aligned,
        "distilled": distilled,
        "align_losses": {
            str(layer["layer"]): [round(layer["losses"][at], 4) for at in (0, -1)]
            for layer in layers
            if layer.get("losses")
        },
        "losses": [float(f"{loss:.5g}") for loss in trainer.progress.losses],
        "tokens_per_step": tokens,
        "skipped_batches": trainer.progress.skipped,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "align_tokens_per_second": round(trained / seconds["align"]) if trained else None,
        "distill_tokens_per_second": round(tokens / statistics.median(steps)),
    }


def layers_of(teacher: Teacher, recipe: Recipe, work: Path) -> RunState:
    """The run that holds the aligned layers of a recipe, the same for every arm that only distils them otherwise."""
    decides = {key: value for key, value in recipe.fingerprint().items() if not key.startswith("distill.")}
    identity = {"teacher": teacher.source, "recipe": decides}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return RunState(work / name, identity, say=lambda line: None)


if __name__ == "__main__":
    sys.exit(main())
