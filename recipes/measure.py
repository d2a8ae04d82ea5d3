"""Convert by a recipe and measure what came out beside its teacher: from a teacher to one results.json.

    python recipes/measure.py smollm2-135m-gdn MODEL --data 'text/*.jsonl.gz,train/*.jsonl.zst' \
        --tasks lm_eval_tasks --out out/gdn

NAME: a recipe's name or file. MODEL: a Hub id, folder or .gguf file. --data: training text, as `linearize convert
--data` takes it; about a twentieth of its documents, chosen by hash, is held out, and the longest of those are what
perplexity at several contexts and repetition are measured on. --tasks: a folder with the lm-eval tasks named in
CHOICES, LAMBADA and WIKITEXT below; without it no task is run. --set changes keys of the recipe.

Beside these: a needle in a text, questions with written answers (--qa, the task in tasks/qa.yaml; by default SciQ where
--tasks has it beside it), the samples of prompts.txt (also OUT/samples.md) and decoding at several contexts and batches
(also OUT/decode.png, where there is matplotlib).

OUT/results.json is written after every stage; --skip leaves stages out, by their names in STAGES. The same command
again goes on where it was stopped: the conversion by itself, the measurements with those that are not in the file.
Once the conversion is done, several processes that skip different stages may measure at the same time.
--teacher-results names a file that keeps what the teacher gave, for other recipes and other machines with the same
weights and library versions: it is read when it is there, and written. Paths are left out of what is written.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import heapq
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from linearize import bench, generate, harness, plots
from linearize import evaluate as evaluation
from linearize.card import short_name
from linearize.checkpoint import atomic_write_bytes, atomic_write_text, read_object
from linearize.console import Console, format_seconds, plain
from linearize.convert import convert
from linearize.data import documents, open_sources
from linearize.errors import UserError
from linearize.metrics import median_speed, read_lines
from linearize.models import open_model
from linearize.processes import device_name, pick_device
from linearize.recipe import Recipe
from linearize.report import decode_figure

STAGES = ("wikitext2", "tasks", "recall", "perplexity", "needle", "qa", "samples", "decode")
HERE = Path(__file__).parent
CHOICES = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "openbookqa", "boolq", "sciq", "copa")
CHOICES = tuple(f"local_{name}" for name in CHOICES)
LAMBADA, WIKITEXT = "local_lambada", "local_wikitext2"
# Requests at once on a GPU: of short questions, and of documents in windows as long as the model's positions.
BATCH = {"tasks": "256", "wikitext2": "8"}
SCIQ = Path("data") / "eval" / "sciq_validation.jsonl"  # beside the folder of tasks
SAMPLE_TOKENS = 128
# Contexts, batches and steps of decoding: on a GPU, and on a CPU, where the largest would take hours.
DECODE = {"cuda": ("1024,4096,16384,65536", "1,64", 16), "cpu": ("512,2048", "1", 8)}
RESAMPLES = 1000  # of a bootstrap; lm-eval's 100,000 take longer than LAMBADA itself
POINTS = 200  # of a loss curve
LAYER_POINTS = 20  # of a layer's


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--teacher-results", type=Path, metavar="FILE")
    parser.add_argument("--no-eval", action="store_true")
    parser.add_argument("--limit", type=int, help="documents of a task, to try it out")
    parser.add_argument("--documents", type=int, default=48, help="long held-out ones, for perplexity by context")
    parser.add_argument("--contexts", default="512,1024,2048,4096,8192", help="of perplexity")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="of the prompts of recall and needle")
    parser.add_argument(
        "--prompts", type=int, default=16, help="of recall at each length, needle at each and depth, and of repetition"
    )
    parser.add_argument("--qa", type=Path, metavar="FILE", help="questions with written answers (tasks/qa.yaml)")
    parser.add_argument("--decode-contexts", metavar="N,N", help="of decoding")
    parser.add_argument("--decode-batches", metavar="N,N", help="of decoding")
    parser.add_argument("--skip", default="", metavar="NAMES", help=f"of {', '.join(STAGES)}")
    args = parser.parse_args(argv)
    try:
        run(args, "python recipes/measure.py " + shlex.join(argv if argv is not None else sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace, command: str) -> None:
    """Every stage that is not in the results yet."""
    recipe = Recipe.resolve(args.name, args.set, {"data.source": args.data, "run.seed": args.seed})
    device, console = pick_device(recipe.run.device), Console()
    results = Results(args.out, command, recipe, device)
    model = args.out / "model"
    todo = {} if args.no_eval else measurements(args, recipe, device, model, console)
    todo = {name: measurement for name, measurement in todo.items() if not results.has(name, measurement.asked)}
    if "record" not in results.found or (todo and not (model / "config.json").is_file()):
        with results.stage("convert"):
            record = convert(args.model, model, recipe, console)
        results.found["record"] = trimmed(record)
        results.found["curve"] = curve(model / "metrics.jsonl")
        results.write()
    failed = []
    if todo:
        lean()
        texts = args.out / "heldout.jsonl"
        if not texts.is_file():
            with results.stage("long documents"):
                atomic_write_text(texts, long_documents(recipe, args.documents))
        with kept_teacher(args.model, recipe, args.teacher_results, console):
            for name, measurement in todo.items():
                try:
                    with results.stage(name):
                        results.keep(name, measurement.asked, measurement.run())
                except UserError as error:  # the other stages go on without it
                    print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                    failed.append(name)
    results.summarise(console)
    if failed:
        raise UserError("not measured", value=", ".join(failed), fix="the same command tries these again")


# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What is asked, which decides whether it has been measured, and what measures it: a report."""

    asked: dict
    run: Callable[[], dict]


def measurements(
    args: argparse.Namespace, recipe: Recipe, device: torch.device, model: Path, console: Console
) -> dict[str, Measurement]:
    """By the names under which the results keep them, in the order in which they are made."""
    skipped = set(filter(None, args.skip.split(",")))
    if unknown := sorted(skipped - set(STAGES)):
        raise UserError("--skip names no stage", value=", ".join(unknown), fix=f"of {', '.join(STAGES)}")
    text = str(args.out / "heldout.jsonl")
    dtype = recipe.run.dtype if device.type == "cuda" else "float32"
    where = {"device": recipe.run.device, "dtype": dtype}
    batch = BATCH if device.type == "cuda" else dict.fromkeys(BATCH, "auto")
    found = {}

    def asks(stage: str, name: str | None = None, **options) -> None:
        if stage not in skipped:
            made = evaluation.Options(**where, **options)
            found[name or stage] = Measurement(asked_of(made), lambda: evaluation.evaluate(str(model), made, console))

    if args.tasks is not None:
        task = {"include_path": args.tasks, "limit": args.limit}
        # Last what the folder's own eval/tasks.json is to hold: another batch size replaces it.
        asks("wikitext2", tasks=(WIKITEXT,), batch_size=batch["wikitext2"], **task)
        asks("tasks", tasks=(*CHOICES, LAMBADA), batch_size=batch["tasks"], **task)
    lengths = numbers(args.lengths)
    asks("recall", tasks=("recall", "repetition"), lengths=lengths, prompts=args.prompts, data=text)
    for context in numbers(args.contexts):
        name = f"perplexity-{context}"
        asks("perplexity", name, tasks=("perplexity",), context=context, data=text, limit=args.documents)
    asks("needle", tasks=("needle",), lengths=lengths, prompts=args.prompts, data=text)
    if "qa" not in skipped and (questions := questions_file(args)) is not None:
        os.environ["LINEARIZE_QA"] = str(questions)  # where the task looks
        # With the batch size of the other tasks it joins them in the folder's own eval/tasks.json.
        task = {"include_path": HERE / "tasks", "limit": args.limit, "batch_size": batch["tasks"]}
        asks("qa", tasks=("qa_exact",), **task)
        found["qa"].asked["questions"] = hashlib.sha256(questions.read_bytes()).hexdigest()[:16]
    if "samples" not in skipped:
        prompts = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
        answers = generate.Options(max_new_tokens=SAMPLE_TOKENS, teacher=True, **where)
        asked = {**asked_of(answers), "prompts": prompts}
        found["samples"] = Measurement(
            asked, lambda: {"samples": generate.samples(str(model), prompts, answers, console)}
        )
    if "decode" not in skipped:
        contexts, batches, steps = DECODE[device.type]
        grid = {"context": args.decode_contexts or contexts, "batch": args.decode_batches or batches}
        grid = {name: numbers(value) for name, value in grid.items()}
        speed = bench.Options(**grid, steps=steps, teacher=True, **where)
        found["decode"] = Measurement(asked_of(speed), lambda: {"decode": bench.decode(str(model), speed, console)})
    return found


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise UserError("not whole numbers separated by commas", value=text, fix="for example 1024,8192") from error


def questions_file(args: argparse.Namespace) -> Path | None:
    """The questions with written answers; None, with a line that says so, where there are none."""
    if args.qa is not None:
        if not args.qa.is_file():
            raise UserError("--qa is no file", value=str(args.qa), fix="a .json or .jsonl file, or leave it out")
        return args.qa
    if args.tasks is not None and (beside := args.tasks.resolve().parent / SCIQ).is_file():
        return beside
    print("== qa: left out, no questions: --qa FILE names some (recipes/tasks/qa.yaml says of what form)", flush=True)
    return None


def long_documents(recipe: Recipe, count: int) -> str:
    """The longest held-out documents of the recipe's text, as lines of .jsonl."""
    heldout = open_sources(recipe.data.source, heldout=True, column=recipe.data.column)
    texts = heapq.nlargest(count, documents(heldout), key=len)
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def lean() -> None:
    """Spare what takes long and changes no score: lm-eval's description of the machine, most of its resampling."""
    try:
        from lm_eval import evaluator
    except ImportError:
        return  # `evaluate` says so where a task needs it
    os.environ["DISABLE_MULTIPROC"] = "1"  # so few resamples need no processes
    evaluator.add_env_info = lambda results: None
    if not isinstance(evaluator.simple_evaluate, functools.partial):
        evaluator.simple_evaluate = functools.partial(evaluator.simple_evaluate, bootstrap_iters=RESAMPLES)


@contextlib.contextmanager
def kept_teacher(model: str, recipe: Recipe, file: Path | None, console: Console) -> Iterator[None]:
    """Inside, the cache of teachers' results holds what `file` kept of this teacher; afterwards `file` holds all.

    The cache knows weights by their files' times, which are others on every machine; the file knows them by content.
    """
    if file is None:
        yield
        return
    teacher = open_model(model, revision=recipe.model.revision)
    identity = {name: value for name, value in teacher.identity().items() if name != "source"}
    digest = hashlib.sha256()
    for path in sorted(teacher.folder.glob("*.safetensors")):
        with open(path, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if file.is_file():
        kept = read_object(file, "remove it: the teacher is then measured again")
        if kept.get("weights") != digest.hexdigest():
            raise UserError("these results are of another teacher", value=str(file), fix="name another file")
        for entry in kept["entries"]:
            evaluation._keep_result({**entry["key"], "model": identity}, entry["result"], console)
    try:
        yield
    finally:
        entries = []
        for path in sorted(evaluation.cache_folder().glob("*.json")):
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(path.read_bytes())
                if entry["key"]["model"] == identity:
                    entries.append({"key": {**entry["key"], "model": None}, "result": public(entry["result"])})
        atomic_write_text(file, json.dumps({"weights": digest.hexdigest(), "entries": entries}) + "\n")


# ---- results --------------------------------------------------------------------------------------------------------


class Results:
    """OUT/results.json: what is known so far. `found` is its content, `own` the stages that this process measured."""

    def __init__(self, out: Path, command: str, recipe: Recipe, device: torch.device) -> None:
        self.path = out / "results.json"
        out.mkdir(parents=True, exist_ok=True)
        asked = public(recipe.fingerprint())
        self.found: dict = {}
        self.own: set[str] = set()
        if self.path.is_file():
            self.found = read_object(self.path, "remove it to measure again")
            if self.found["asked"] != asked:
                other = sorted(key for key, value in asked.items() if self.found["asked"].get(key) != value)
                raise UserError(
                    f"{self.path} is of another recipe", value=", ".join(other), fix="name another --out folder"
                )
        # --skip says who measured what, not what is in the file.
        self.found |= {"asked": asked, "command": public(re.sub(r" --(out|skip)[ =]\S+", "", command))}
        self.found |= {"device": device_name(device), "versions": versions()}
        self.found.setdefault("seconds", {})
        self.found.setdefault("evaluation", {})

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say and add up the seconds of a stage, also of one that is stopped."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.found["seconds"][name] = round(self.found["seconds"].get(name, 0) + seconds, 1)
            self.own.add(name)
            print(f"== {name}: {format_seconds(seconds)}", flush=True)
            self.write()

    def write(self) -> None:
        """Put the file in place, with what other processes have written into it meanwhile."""
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.is_file():
                there = read_object(self.path, "remove it to measure again")
                for part in ("seconds", "evaluation"):
                    own = {name: value for name, value in self.found[part].items() if name in self.own}
                    self.found[part] = there[part] | own
            atomic_write_text(self.path, json.dumps(plain(self.found), indent=1) + "\n")

    def has(self, name: str, asked: dict) -> bool:
        return self.found["evaluation"].get(name, {}).get("options") == asked

    def keep(self, name: str, asked: dict, report: dict) -> None:
        dropped = ("linearize", "model", "teacher", "settings")
        measured = {key: value for key, value in report.items() if key not in dropped}
        # What a model wrote stays as it is.
        measured = {key: value if key == "samples" else public(value) for key, value in measured.items()}
        self.found["evaluation"][name] = {"options": asked, **measured}
        self.own.add(name)
        self.write()

    def summarise(self, console: Console) -> None:
        """What the student keeps, in few numbers, into the file and as a table; samples.md and decode.png."""
        measured, out = self.found["evaluation"], self.path.parent
        if "samples" in measured:
            name = f"{short_name(self.found['record']['teacher']['source'])}, linearized"
            atomic_write_text(out / "samples.md", generate.samples_page(measured["samples"]["samples"], name))
        if "decode" in measured and plots.available():
            figure = decode_figure(measured["decode"]["decode"])
            if figure is not None:
                atomic_write_bytes(out / "decode.png", plots.png(figure))
        self.found["summary"] = summary(self.found)
        self.write()
        console.table(str(self.path), ("", "value"), list(flat(self.found["summary"])))


def asked_of(options: evaluation.Options) -> dict:
    return public(plain(vars(options)))


def public(value):
    """The same without the folders of absolute paths, which say nothing elsewhere."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?:(?<![\w.:/~])|(?<=[\d.]:))~?/(?:[^/,\s'\"]+/)+", "", value)
    return value


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("linearize", "torch", "triton", "transformers", "safetensors", "lm_eval"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"torch": torch.__version__}


def trimmed(record: dict) -> dict:
    """convert's record without what is in the curves: every loss of every step."""
    layers = []
    for layer in record["layers"]:
        kept = {key: value for key, value in layer.items() if key not in ("losses", "heads")}
        if layer.get("losses"):
            tokens = [(step + 1) * layer["tokens_per_step"] for step in range(len(layer["losses"]))]
            kept["curve"] = thinned(tokens, layer["losses"], LAYER_POINTS)
        layers.append(kept)
    distilled = record["distill"] and {key: value for key, value in record["distill"].items() if key != "losses"}
    return public(plain({**record, "layers": layers, "distill": distilled}))


def curve(path: Path) -> dict | None:
    """Tokens and loss of distillation, and its median speed without the first third; None where there was none."""
    lines = read_lines(path, "distill")
    if not lines:
        return None
    found = thinned([line["tokens"] for line in lines], [line["loss"] for line in lines], POINTS)
    return {**found, "first_loss": lines[0]["loss"], "tokens_per_second": median_speed(lines)}


def thinned(tokens: list[int], losses: list[float], points: int) -> dict[str, list]:
    """A curve of at most so many points: means of blocks of steps, at the tokens that end each block."""
    step = -(-len(losses) // points)
    blocks = [losses[i : i + step] for i in range(0, len(losses), step)]
    ends = [tokens[min(i + step, len(tokens)) - 1] for i in range(0, len(tokens), step)]
    return {"tokens": ends, "loss": [float(f"{sum(block) / len(block):.5g}") for block in blocks]}


def summary(found: dict) -> dict:
    """The ratios of student to teacher by what they are of; only of what has been measured."""
    record, measured = found["record"], found["evaluation"]
    aligned, heldout = record["aligned"], record["heldout"]
    lines: dict = {}
    lines["seconds"] = {
        "convert": found["seconds"].get("convert"),
        "calibrate": round(sum(layer["calibrate_seconds"] for layer in record["layers"]), 1),
        "align": round(sum(layer.get("align_seconds", 0) for layer in record["layers"]), 1),
        "distill": record["distill"] and record["distill"]["seconds"],
        "evaluate": round(sum(found["seconds"].get(name, 0) for name in measured), 1),
    }
    if heldout:
        lines["perplexity ratio, held-out text"] = {"aligned": aligned["ratio"]}
        lines["perplexity ratio, held-out text"] |= {"distilled": heldout["ratio"]} if record["distill"] else {}
    if "wikitext2" in measured:
        row = measured["wikitext2"]["tasks"][WIKITEXT]["word_perplexity"]
        lines["WikiText-2 word perplexity"] = {key: row[key] for key in ("teacher", "student", "ratio")}
    if "tasks" in measured:
        tasks = measured["tasks"]["tasks"]
        row = tasks[LAMBADA]["acc"]
        lines["LAMBADA accuracy"] = {key: row[key] for key in ("teacher", "student", "student_stderr")}
        lines["LAMBADA accuracy"]["retained_percent"] = row["retained_percent"]
        lines["LAMBADA perplexity ratio"] = tasks[LAMBADA]["perplexity"]["ratio"]
        fields = ("teacher", "student", "student_stderr", "chance", "retained_percent", "above_chance_percent")
        metrics = {name: harness.main_metric(tasks[name]) for name in CHOICES}
        for name, units in (("", metrics), (", LAMBADA among them", metrics | {LAMBADA: "acc"})):
            mean = harness.mean_accuracy(tasks, units)
            lines[f"mean accuracy of {len(units)} tasks{name}"] = {key: mean[key] for key in fields}
    contexts = {name: report["perplexity"] for name, report in measured.items() if name.startswith("perplexity-")}
    if contexts:
        lines["perplexity ratio of long documents, by context"] = {
            str(report["context"]): report["ratio"]["token"] for report in contexts.values()
        }
    if "recall" in measured:
        rows = measured["recall"]["recall"]["lengths"]
        lines["recall, student / teacher, by length"] = {
            length: [row["student"], row["teacher"]] for length, row in rows.items()
        }
        row = measured["recall"]["repetition"]
        lines["repeated 4-grams"] = {key: row[key] for key in ("teacher", "student", "text")}
    if "needle" in measured:
        rows = {length: row["all"] for length, row in measured["needle"]["needle"]["lengths"].items()}
        for name, field in (("exact", ""), ("rank", "_rank")):
            lines[f"needle, {name}, student / teacher, by length"] = {
                length: [row[f"student{field}"], row[f"teacher{field}"]] for length, row in rows.items()
            }
    if "qa" in measured:
        row = measured["qa"]["tasks"]["qa_exact"]["exact_match"]
        fields = ("teacher", "teacher_stderr", "student", "student_stderr", "retained_percent")
        lines["written answers, exact match"] = {key: row[key] for key in fields}
    if "samples" in measured:
        lines["repeated 4-grams of the samples"] = {
            side: measured["samples"]["samples"][side] for side in ("teacher", "student")
        }
    if "decode" in measured:
        lines |= decode_summary(measured["decode"]["decode"]["cells"])
    return lines


def decode_summary(cells: list[dict]) -> dict:
    """Student / teacher of decoding speed (as CUDA graphs where there are any) and of the cache, by context x batch."""
    fields = {"decoding speed": "decode_tokens_per_second", "cache": "cache_bytes"}
    if any("graph_tokens_per_second" in cell for cell in cells):
        fields["decoding speed as a CUDA graph"] = "graph_tokens_per_second"
    found: dict[str, dict] = {f"{name}, student : teacher": {} for name in fields}
    by = {(cell["context"], cell["batch"], cell["model"]): cell for cell in cells}
    for context, batch in dict.fromkeys(key[:2] for key in by):
        for name, field in fields.items():
            student, teacher = (by.get((context, batch, side), {}).get(field) for side in ("student", "teacher"))
            ratio = student / teacher if student and teacher else None
            found[f"{name}, student : teacher"][f"{context} x {batch}"] = ratio
    return found


def flat(lines: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, value) of every number of a summary."""
    for name, value in lines.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}: ")
        else:
            values = value if isinstance(value, list) else [value]
            yield prefix + name, " / ".join("-" if v is None else f"{v:.4g}" for v in values)


if __name__ == "__main__":
    sys.exit(main())
