"""Tokens a second of every stage, and where the time of a distillation step goes.

    python recipes/smollm2-135m-throughput/measure.py MODEL --out results.json --device cuda

Converts MODEL with a short alignment and a short distillation on --data and takes tokens/s from what they record; then
times the parts of one distillation step (teacher, student forward, student forward and backward with the loss,
optimizer) on one process's rows; then samples `self` text. Times are medians after a warm-up, with the device drained.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from linearize.console import Console
from linearize.convert import convert
from linearize.data import self_text
from linearize.kl import FullTarget, Head, chunked_kl
from linearize.recipe import Recipe
from linearize.teacher import open_teacher


def main() -> None:
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
    parser.add_argument("--sample-tokens", type=int, default=2_000_000)
    parser.add_argument("--sample-batch", type=int, default=1024)
    args = parser.parse_args()
    gpu = args.device.startswith("cuda")
    results = {
        "command": f"measure.py MODEL --device {args.device} --mixer {args.mixer} --context {args.context} "
        f"--batch-tokens {args.batch_tokens} --micro-tokens {args.micro_tokens}",
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
    }

    def keep(name: str, value: dict) -> None:
        results[name] = value
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)

    teacher = open_teacher(args.model)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        keep("stages", stages(args, out))
        student = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(args.device)
        dtype = torch.bfloat16 if gpu else torch.float32
        load = teacher.family.causal_lm_class().from_pretrained
        model = load(teacher.folder, dtype=dtype).to(args.device).eval().requires_grad_(False)
        keep("step_milliseconds", parts(args, student, model))
        del student
    began = time.monotonic()
    rows = self_text(
        model,
        teacher.tokenizer,
        args.sample_tokens,
        args.context,
        batch_size=args.sample_batch,
        device=args.device,
    )
    made = rows.tokens
    drain(args.device)
    seconds = time.monotonic() - began
    keep("self", {"tokens": made, "seconds": round(seconds, 2), "tokens_per_second": round(made / seconds)})


def stages(args: argparse.Namespace, out: Path) -> dict:
    """Tokens a second of alignment, a layer, and of distillation, whole steps."""
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
    record = convert(args.model, out, Recipe.resolve(flags=flags), Console(quiet=True))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if line["stage"] == "distill"]
    layers = record["layers"]
    seconds = sum(layer["align_seconds"] for layer in layers)
    return {
        "align_layer_tokens_per_second": round(
            sum(len(layer["losses"]) * layer["tokens_per_step"] for layer in layers) / seconds
        ),
        "calibrate_seconds": round(sum(layer["calibrate_seconds"] for layer in layers), 2),
        # The first steps compile and allocate.
        "distill_tokens_per_second": round(statistics.median(rates[len(rates) // 3 :])),
    }


def parts(args: argparse.Namespace, student, teacher) -> dict:
    """Milliseconds of the parts of a step on `micro_tokens` tokens, and the shares of forward, loss and optimizer."""
    rows = max(1, args.micro_tokens // args.context)
    ids = torch.randint(student.config.vocab_size, (rows, args.context), device=args.device)
    student.train().requires_grad_(True)
    student.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.0, fused=args.device.startswith("cuda"))
    compute = torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.device.startswith("cuda"))
    head, teachers = Head(student), Head(teacher)

    @torch.no_grad()
    def of_teacher():
        return teacher.model(input_ids=ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def forward():
        with compute:
            student.model(input_ids=ids, use_cache=False)

    target = FullTarget(of_teacher().flatten(0, 1), teachers)
    with torch.no_grad(), compute:
        hidden = student.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)

    def loss():
        with compute:
            value = chunked_kl(head, hidden.detach().requires_grad_(), target, weight=1.0 / ids.numel())
        value.backward()

    def whole():
        with compute:
            states = student.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            value = chunked_kl(head, states, target, weight=1.0 / ids.numel())
        value.backward()

    steps = {
        "teacher_forward": of_teacher,
        "student_forward": forward,
        "loss_and_head": loss,
        "student_forward_backward_loss": whole,
        "optimizer": optimizer.step,
    }
    found = {name: round(median_milliseconds(run, args.device), 2) for name, run in steps.items()}
    return {"tokens": ids.numel()} | found


def median_milliseconds(run: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(2 + repeats):
        drain(device)
        began = time.perf_counter()
        run()
        drain(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def drain(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
