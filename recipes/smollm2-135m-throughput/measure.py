"""Tokens a second of every stage, and where the time of a distillation step goes.

    python recipes/smollm2-135m-throughput/measure.py MODEL --out results.json --device cuda

Converts MODEL with a short alignment and a short distillation on --data and takes tokens/s from what they record; then
times the parts of one distillation step (teacher, student forward, student forward and backward with the loss, mixers,
optimizer) on one process's rows, and samples `self` text. Times are medians after a warm-up, with the device drained.
--set changes keys of the recipe, distill.compile=true for one. Results are added to the file under the name --arm.
"""

import argparse
import functools
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from linearize.causal import attention, whole_rows
from linearize.console import Console
from linearize.convert import convert
from linearize.data import self_text
from linearize.kl import FullTarget, Head, chunked_kl
from linearize.metrics import median_speed, read_lines
from linearize.mixers import MixedAttention
from linearize.processes import device_name, half_precision
from linearize.recipe import Recipe
from linearize.replay import Replay
from linearize.student import packed_documents
from linearize.teacher import open_teacher


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mixer", default="gdn")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=12, help="of distillation")
    parser.add_argument("--align-tokens", type=int, default=2**20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--arm", default="plain")
    parser.add_argument("--sample-tokens", type=int, default=2_000_000, help="0 samples none")
    parser.add_argument("--sample-batch", type=int, default=1024)
    parser.add_argument("--only-sample", action="store_true", help="convert nothing, time no step")
    return parser.parse_args(argv)


def command_of(args: argparse.Namespace) -> str:
    """The command with all that decides a figure, defaults too."""
    given = {name: value for name, value in vars(args).items() if name not in ("model", "out", "data", "arm", "set")}
    switch = given.pop("only_sample")
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items()]
    words += ["--only-sample"] * switch
    words += [f"--set {shlex.quote(setting)}" for setting in args.set]
    return " ".join(["measure.py MODEL --data ...", *words])


def main() -> None:
    args = arguments()
    gpu = args.device.startswith("cuda")
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results[args.arm] = arm = {
        "command": command_of(args),
        "device": device_name(torch.device(args.device)),
        "torch": torch.__version__,
    }

    def keep(name: str, value: dict) -> None:
        arm[name] = value
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)

    teacher = open_teacher(args.model)
    load = functools.partial(teacher.family.causal_lm_class().from_pretrained, teacher.folder)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        recipe = recipe_of(args)
        if not args.only_sample:
            keep("stages", stages(args, recipe, out))
        model = load(dtype=torch.bfloat16 if gpu else torch.float32).to(args.device).eval().requires_grad_(False)
        if args.sample_tokens:
            keep("self", sampling(args, teacher, model))
        if not args.only_sample:
            student = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(args.device)
            for either in (student, model):  # as the trainer has them
                either.config._attn_implementation = attention(teacher.family.softmax)
            keep("step_milliseconds", parts(args, recipe, student, model))


def sampling(args: argparse.Namespace, teacher, model) -> dict:
    began, told = time.monotonic(), []
    rows = self_text(
        model,
        teacher.tokenizer,
        args.sample_tokens,
        args.context,
        batch_size=args.sample_batch,
        device=args.device,
        progress=lambda tokens: told.append(time.monotonic()),
    )
    made = rows.tokens
    drain(args.device)
    seconds = time.monotonic() - began
    return {
        "tokens": made,
        "rows_at_once": args.sample_batch,
        "seconds": round(seconds, 2),
        "seconds_to_the_first": round(told[0] - began, 2),  # of them: caches and graphs are made once
        "tokens_per_second": round(made / seconds),
    }


def recipe_of(args: argparse.Namespace) -> Recipe:
    flags = {
        "convert.mixer": args.mixer,
        "align.tokens": args.align_tokens,
        "align.context": args.context,
        "distill.tokens": args.steps * args.batch_tokens,
        "distill.context": args.context,
        "distill.batch_tokens": args.batch_tokens,
        "distill.micro_tokens": args.micro_tokens,
        "data.source": args.data,
        "data.heldout_tokens": 0,
        "run.device": args.device,
    }
    return Recipe.resolve(None, args.set, flags)


def stages(args: argparse.Namespace, recipe: Recipe, out: Path) -> dict:
    """Tokens a second of alignment, a layer, and of distillation, whole steps."""
    record = convert(args.model, out, recipe, Console(quiet=True))
    layers = record["layers"]
    seconds = sum(layer["align_seconds"] for layer in layers)
    return {
        "align_layer_tokens_per_second": round(
            sum(len(layer["losses"]) * layer["tokens_per_step"] for layer in layers) / seconds
        ),
        "calibrate_seconds": round(sum(layer["calibrate_seconds"] for layer in layers), 2),
        "distill_tokens_per_second": median_speed(read_lines(out / "metrics.jsonl", "distill")),
    }


def parts(args: argparse.Namespace, recipe: Recipe, student, teacher) -> dict:
    """Milliseconds of the parts of a step on `micro_tokens` tokens, run as the trainer runs packed text.

    Rows hold two documents each. `mixers` is one converted attention layer, projections included, forwards and
    backwards, times their number.
    """
    rows = max(1, args.micro_tokens // args.context)
    ids = torch.randint(student.config.vocab_size, (rows, args.context), device=args.device)
    student.train().requires_grad_(True)
    if recipe.distill.checkpointing:
        student.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if recipe.distill.compile:
        for layer in (*student.model.layers, *teacher.model.layers):
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.0, fused=args.device.startswith("cuda"))
    compute = functools.partial(half_precision, torch.device(args.device))
    head, teachers = Head(student), Head(teacher)
    mixed = [module for module in student.modules() if isinstance(module, MixedAttention)]
    half = args.context // 2
    positions = torch.cat([torch.arange(half), torch.arange(args.context - half)]).expand(rows, -1)
    reset, documents = packed_documents(positions, rows)
    positions = positions.to(ids.device)
    packed = {"mixer_reset": reset.to(ids.device), "mixer_documents": documents}
    angles = student.model.rotary_emb(student.model.embed_tokens(ids), positions)

    @torch.no_grad()
    def of_teacher(ids):
        return teacher.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def hidden_of(ids):
        model = student.model(input_ids=ids, position_ids=positions, use_cache=False, **packed)
        return model.last_hidden_state

    @torch.no_grad()
    def forward(ids):
        with compute():
            return hidden_of(ids)

    target = FullTarget(of_teacher(ids).flatten(0, 1), teachers)
    states = forward(ids).flatten(0, 1)
    inputs = torch.randn(rows, args.context, student.config.hidden_size, device=ids.device)

    def loss(states):
        with compute():
            value = chunked_kl(head, states.detach().requires_grad_(), target, weight=1.0 / ids.numel())
        value.backward()

    def whole(ids):
        with compute():
            value = chunked_kl(head, hidden_of(ids).flatten(0, 1), target, weight=1.0 / ids.numel())
        value.backward()

    def converted(inputs):
        with compute():
            out, _ = mixed[0](inputs.detach().requires_grad_(), position_embeddings=angles, **packed)
        out.float().square().mean().backward()

    def times(run, *given) -> float:
        with whole_rows(False):
            return median_milliseconds(functools.partial(Replay(run), *given), args.device)

    found = {
        "teacher_forward": times(of_teacher, ids),
        "student_forward": times(forward, ids),
        "student_forward_backward_loss": times(whole, ids),
        "loss_and_head": times(loss, states),
        "mixers": len(mixed) * times(converted, inputs),
        "optimizer": median_milliseconds(optimizer.step, args.device),
    }
    step = found["teacher_forward"] + found["student_forward_backward_loss"]
    shares = {name: round(found[name] / step, 3) for name in ("teacher_forward", "loss_and_head", "mixers")}
    return {"tokens": ids.numel(), "mixer_layers": len(mixed), "shares": shares} | {
        name: round(value, 2) for name, value in found.items()
    }


def median_milliseconds(run: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(3 + repeats):
        drain(device)
        began = time.perf_counter()
        run()
        drain(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[3:])


def drain(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
