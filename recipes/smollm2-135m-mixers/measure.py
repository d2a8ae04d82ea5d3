"""Every mixer from the same text: how it starts, what alignment makes of it, what it holds and how fast it decodes.

    python recipes/smollm2-135m-mixers/measure.py MODEL --data web.jsonl.gz,... --out results.json --device cuda \\
        --students students
    python recipes/smollm2-135m-mixers/measure.py --times --out results.json --device cuda --students students

MODEL: SmolLM2-135M-Instruct as a Hub id, folder or .gguf file. --data: training text (`linearize convert --data`);
about a twentieth of its documents, chosen by hash, is held out. --wikitext: WikiText-2 articles as .jsonl with the
field `page`, measured on and nothing else. Each mixer is converted twice, without alignment and with --align-tokens a
layer, with the layers of --keep left as softmax. The file is written after every arm, and an arm that is in it is not
run again; --budget-seconds begins no arm once it is used up. Several processes share the arms through --mixers and
--keep, each with a file of its own; --merge FILES puts these together.

--times, on a machine that does nothing else, adds how long the aligned students in --students take for a token. At the
end, and with --table FILE alone, what was found is printed as a table.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from linearize.bench import measure as decode
from linearize.checkpoint import atomic_write_text
from linearize.console import Console
from linearize.convert import convert
from linearize.mixers import MIXERS
from linearize.models import open_model
from linearize.probes import document_losses, perplexities
from linearize.processes import device_name
from linearize.recipe import Recipe

ORDER = ("gdn", "gdn-standard", "mesanet", "deltanet", "vala", "ttt", "gdn-native", "k-cache")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--data")
    parser.add_argument("--wikitext", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="run.dtype: float32 or bfloat16")
    parser.add_argument("--mixers", default=",".join(ORDER), help="in this order")
    parser.add_argument("--keep", default="25%,none", help="--keep-softmax of each block of arms")
    parser.add_argument("--calibrate-tokens", default="32k")
    parser.add_argument("--align-tokens", default="5M")
    parser.add_argument("--align-batch", default="16k", help="tokens in a step of alignment")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--students", type=Path, metavar="FOLDER", help="where aligned students are kept for --times")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="into --out")
    parser.add_argument("--decode-context", type=int, default=8192)
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    args = parser.parse_args(argv)
    if args.table:
        return print(table(json.loads(args.table.read_text())))
    if args.merge and args.out:
        return write(args.out, merged([json.loads(file.read_text()) for file in args.merge]))
    if args.times and args.out and args.students:
        return times(args)
    if not (args.model and args.data and args.out):
        parser.error("MODEL, --data and --out; --table FILE; --merge and --out; or --times, --out and --students")
    mixers = args.mixers.split(",")
    if unknown := set(mixers) - set(MIXERS):
        parser.error(f"no such mixer: {', '.join(sorted(unknown))}")

    began = time.monotonic()
    results = {
        "command": f"measure.py MODEL --data ... --calibrate-tokens {args.calibrate_tokens} "
        f"--align-tokens {args.align_tokens} --align-batch {args.align_batch} --context {args.context} "
        f"--device {args.device} --dtype {args.dtype}",
        "device": device_name(torch.device(args.device)),
        "torch": torch.__version__,
        "arms": [],
    }
    if args.out.exists():
        command, results = results["command"], json.loads(args.out.read_text())
        if results["command"] != command:
            parser.error(f"{args.out} was measured by another command, {results['command']}: give another file")
    if args.wikitext and "teacher" not in results:
        results["teacher"] = wikitext(args.model, args)
    done = {(arm["mixer"], arm["keep"]) for arm in results["arms"]}
    for keep in args.keep.split(","):
        for mixer in mixers:
            if (mixer, keep) in done or time.monotonic() - began > args.budget_seconds:
                continue
            results["arms"].append(json.loads(json.dumps(measure(mixer, keep, args))))
            write(args.out, results)
    print(table(results))


def write(file: Path, results: dict) -> None:
    atomic_write_text(file, json.dumps(results, indent=1) + "\n")


def merged(parts: list[dict]) -> dict:
    """The arms of all parts, in the parts' order of softmax kept and in ORDER of mixers."""
    common = parts[0]
    for part in parts:
        if other := [name for name in ("command", "device", "torch") if part[name] != common[name]]:
            raise SystemExit(f"the files differ in {', '.join(other)}")
        common = part | common  # what only some of them measured: the teacher
    arms = {(arm["keep"], arm["mixer"]): arm for part in parts for arm in part["arms"]}
    keeps = list(dict.fromkeys(keep for keep, _ in arms))
    order = sorted(arms, key=lambda key: (keeps.index(key[0]), ORDER.index(key[1])))
    return common | {"arms": [arms[key] for key in order]}


def times(args: argparse.Namespace) -> None:
    """Add the time of a decoded token, in bfloat16, to every arm whose student was kept."""
    results = json.loads(args.out.read_text())
    for arm in results["arms"]:
        folder = kept(args.students, arm["mixer"], arm["keep"])
        if "decode" in arm["aligned"] or not (folder / "config.json").is_file():
            continue
        student = open_model(str(folder)).load(torch.device(args.device), "bfloat16")
        decode(student, 16, 1, 1)  # what runs for the first time also compiles and allocates
        arm["aligned"]["decode"] = {"dtype": "bfloat16", **decode(student, args.decode_context, 1, 16)}
        del student
        write(args.out, results)
        print(arm["keep"], arm["mixer"], arm["aligned"]["decode"], flush=True)
    print(table(results))


def kept(students: Path, mixer: str, keep: str) -> Path:
    return students / f"{mixer}-{keep.rstrip('%')}"


def table(results: dict) -> str:
    """The arms as Markdown: perplexities over the teacher's, bytes of cache at 8k tokens, time of a decoded token.

    That is of one row after --decode-context tokens, in bfloat16, all kernels of a step launched as one CUDA graph.
    """
    theirs = results.get("teacher", {}).get("token_perplexity")
    lines = [
        "| mixer | softmax kept | held-out, start | held-out, aligned | WikiText-2, start | WikiText-2, aligned "
        "| cache at 8k | a token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in results["arms"]:
        start, aligned = arm["start"], arm["aligned"]
        token = ""
        if "decode" in aligned:
            token = aligned["decode"].get("graph_step_ms")
            token = f"{token:.2f} ms" if token else f"{aligned['decode']['step_ms']['median']:.1f} ms, no graph"
        wiki = [
            f"{at['wikitext2']['token_perplexity'] / theirs:.3f}" if theirs and "wikitext2" in at else ""
            for at in (start, aligned)
        ]
        lines.append(
            f"| {arm['mixer']} | {arm['keep']} | {start['heldout']['ratio']:.3f} | {aligned['heldout']['ratio']:.3f} "
            f"| {wiki[0]} | {wiki[1]} | {arm['cache_bytes']['8192'] / 1e6:.0f} MB | {token} |"
        )
    return "\n".join(lines)


def measure(mixer: str, keep: str, args: argparse.Namespace) -> dict:
    """One mixer with one choice of layers, before and after alignment."""
    arm = {"mixer": mixer, "keep": keep}
    for stage, tokens in (("start", 0), ("aligned", args.align_tokens)):
        values = {
            "convert.mixer": mixer,
            "convert.keep_softmax": keep,
            "calibrate.tokens": args.calibrate_tokens,
            "calibrate.context": args.context,
            "align.tokens": tokens,
            "align.context": args.context,
            "align.batch_tokens": args.align_batch,
            "data.source": args.data,
            "data.heldout_tokens": "32k",
            "run.device": args.device,
            "run.dtype": args.dtype,
        }
        with tempfile.TemporaryDirectory() as folder:
            out, began = Path(folder) / "out", time.monotonic()
            if args.students and stage == "aligned":
                out = kept(args.students, mixer, keep)
            recipe = Recipe.resolve(flags=values)
            record = convert(args.model, out, recipe, Console(quiet=True))
            # A finished folder stays as it is, whatever made it.
            if any(record["recipe"].get(name, value) != value for name, value in recipe.fingerprint().items()):
                raise SystemExit(f"{out} was made with other settings: name another folder in --students")
            seconds = time.monotonic() - began
            layers = record["layers"]
            found = {"heldout": record["heldout"], "seconds": round(seconds, 1)}
            found["calibrate_seconds"] = round(sum(layer["calibrate_seconds"] for layer in layers), 1)
            found["errors"] = [layer.get("ladder", {}).get("output") for layer in layers]
            if stage == "aligned":
                found["losses"] = [layer["losses"][-1] for layer in layers]
            if args.wikitext:
                found["wikitext2"] = wikitext(str(out), args)
        arm[stage] = found
        ppl, ratio = found["heldout"]["student_perplexity"], found["heldout"]["ratio"]
        print(f"{keep:5} {mixer:13} {stage:8} {ppl:10.2f} ({ratio:.3f}x) {seconds:.0f} s", flush=True)
    cache = {at["tokens"]: at["student"] for at in record["cache"]}
    return arm | {"cache_bytes": cache}


def wikitext(model: str, args: argparse.Namespace) -> dict:
    """Perplexities of a model on the articles of --wikitext."""
    opened = open_model(model)
    lines = args.wikitext.read_text(encoding="utf-8").splitlines()
    pages = [json.loads(line)["page"] for line in lines]
    loaded = opened.load(torch.device(args.device), "float32")
    return perplexities(document_losses(loaded, opened.tokenizer, pages, 2 * args.context))


if __name__ == "__main__":
    main()
