"""Alignment and distillation on one GPU and on several: seconds, tokens a second and how they scale.

    python recipes/smollm2-135m-throughput/scaling.py MODEL --processes 1,2 --out scaling.json

Runs `linearize convert MODEL` under torchrun with each number of processes: calibration alone, alignment as well, and
distillation with weights split over the processes (FSDP2) and repeated in each. A short run comes first, so that
compiled kernels are on disk. The alignment's seconds are those of the second conversion less those of the first; the
distillation's rate is that of the median step of metrics.jsonl without the first third. What --out
holds already is not run again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from linearize.metrics import median_speed, read_lines
from linearize.processes import device_name, pick_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--align-tokens", type=int, default=2**20)
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=12, help="of distillation")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no run after this long")
    args = parser.parse_args()
    began = time.monotonic()
    device = device_name(pick_device("auto"))
    results = {"model": args.model, "device": device, "torch": torch.__version__, "runs": []}
    if args.out.exists():
        results = json.loads(args.out.read_text())
    done = {(run["stage"], run["processes"]) for run in results["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        if not done:
            short = ["align.tokens=40k", "align.context=1024", "align.batch_tokens=8k"]
            measured(args, Path(folder) / "warm", 1, short)
        for count in map(int, args.processes.split(",")):
            for name, flags in arms(args).items():
                if (name, count) in done or time.monotonic() - began > args.budget_seconds:
                    continue
                run = {"stage": name, "processes": count} | measured(
                    args, Path(folder) / f"{name}-{count}", count, flags
                )
                if name == "align" and "error" not in run:
                    before = next(r for r in results["runs"] if r["stage"] == "start" and r["processes"] == count)
                    run["align_seconds"] = round(run["convert_seconds"] - before["convert_seconds"], 1)
                results["runs"].append(run)
                args.out.write_text(json.dumps(results, indent=1) + "\n")
                print(json.dumps(run), flush=True)


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """What is run, in order: settings by name."""
    distill = [
        "align.tokens=0",
        f"distill.tokens={args.steps * args.batch_tokens}",
        f"distill.context={args.context}",
        f"distill.batch_tokens={args.batch_tokens}",
        f"distill.micro_tokens={args.micro_tokens}",
    ]
    align = [f"align.context={args.context}", "align.order=calibrate-first"]
    return {
        "start": [*align, "align.tokens=0"],
        "align": [*align, f"align.tokens={args.align_tokens}"],
        "distill-full": [*distill, "distill.shard=full"],
        "distill-none": [*distill, "distill.shard=none"],
    }


def measured(args: argparse.Namespace, out: Path, count: int, settings: list[str]) -> dict:
    """Run one arm; its times, or the last line of what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command += ["-m", "linearize", "convert", args.model, str(out), "-q"]
    common = [f"data.source={args.data}", "data.heldout_tokens=0", f"run.device={args.device}", "calibrate.tokens=16k"]
    for setting in [*common, *settings]:
        command += ["-s", setting]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict = {"seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        return found | {"error": done.stderr.strip().splitlines()[-20:]}
    # Without the start of the processes and the loading of the teacher.
    found["convert_seconds"] = json.loads((out / "linearize.json").read_text())["seconds"]
    lines = read_lines(out / "metrics.jsonl", "distill")
    if lines:
        found["tokens_per_second"] = median_speed(lines)
        found["loss"] = lines[-1]["loss"]
    return found


if __name__ == "__main__":
    main()
