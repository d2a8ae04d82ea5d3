"""Measures of a model: perplexity from hidden states, a sample of its text, and the comparison of `linearize eval`."""

import contextlib
import hashlib
import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from linearize import __version__, harness, probes
from linearize.checkpoint import atomic_write_text, writing
from linearize.console import Console, plain
from linearize.data import Rows, bundled_documents, followed, read_documents
from linearize.errors import UserError
from linearize.hidden import HiddenStates
from linearize.models import Model, check_same_vocabulary, free_memory, open_model, open_named_teacher
from linearize.processes import pick_device
from linearize.teacher import BlockRunner

PERPLEXITY_TOKENS = 65_536  # of --data, in whole documents
PROMPTS = 4  # of recall, at each length
NEEDLES = 8  # at each length and depth
SAMPLES = 16  # of repetition
PARITY = 2, 128  # rows and tokens
CACHE_FORMAT = 1


@torch.no_grad()
def perplexity(runner: BlockRunner, hidden: Tensor | HiddenStates, rows: Rows) -> tuple[float, int]:
    """Perplexity of every next token within its document, and how many there were.

    hidden: [N, T, d], what leaves the last layer for the tokens of ``rows``. One row of it is read at a time, and its
    logits are made in chunks.
    """
    follows = followed(rows.positions)
    target = rows.ids.roll(-1, 1)
    total = 0.0
    for row in range(len(rows)):
        for part, logits in runner.head_rows(hidden[row : row + 1]):
            loss = F.cross_entropy(logits.float(), target[row, part].to(logits.device), reduction="none")
            total += float(loss[follows[row, part].to(logits.device)].double().sum())
    count = int(follows.sum())
    return math.exp(total / count), count


@torch.no_grad()
def continue_text(model, tokenizer, prompt: str, tokens: int = 40) -> str:
    """Greedy continuation of a prompt, with the chat template where the tokenizer has one; the new text alone."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


# ---- teacher beside student -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What `linearize eval` measures and how; the fields are its flags.

    limit    documents of a task and of perplexity; None: every one of a task, PERPLEXITY_TOKENS of --data
    prompts  of recall at each length, of needle at each length and depth, and of repetition; None: PROMPTS, NEEDLES
             and SAMPLES
    data     text for perplexity, parity, needle and repetition; None: the bundled held-out text
    """

    tasks: tuple[str, ...]
    teacher: str | None = None
    no_teacher: bool = False
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: str = "auto"
    apply_chat_template: bool = False
    data: str | None = None
    context: int = 1024
    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    prompts: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    refresh: bool = False


def evaluate(source: str, options: Options, console: Console) -> dict:
    """Measure the model in the folder `source` beside its teacher; show, write and return the comparison.

    What the teacher gave is kept in a cache, under everything that decides it, and taken from there the next time.
    Writes source/eval/*.json when convert or export made the folder.
    """
    if not Path(source).expanduser().is_dir():
        raise UserError("no such folder", value=source, fix="linearize convert MODEL DIR makes one")
    student = open_model(source, say=console.line)
    teacher = _teacher(student, options, console)
    # The student first: its weights are what may not fit, and a teacher's hours of tasks would be lost.
    sides = {"student": student, "teacher": teacher} if teacher else {"student": student}
    for model in sides.values():
        model.tokenizer  # noqa: B018  refuses a folder without one before anything is measured
    device = pick_device(options.device)
    names = dict.fromkeys(options.tasks)
    jobs: dict[str, Job] = {name: PROBES[name](options, student) for name in names if name in PROBES}
    tasks = Tasks.load([name for name in names if name not in PROBES], options, device, source, console)
    measured = {side: _measure(side, model, tasks, jobs, options, device, console) for side, model in sides.items()}

    report = {
        "linearize": __version__,
        "model": source,
        "teacher": {"source": teacher.source, "revision": teacher.revision} if teacher else None,
        "settings": {"device": str(device), "dtype": options.dtype, "limit": options.limit, "seed": options.seed},
    }
    out = Path(source).expanduser() / "eval" if student.ours else None
    suffix = "" if teacher else "-alone"
    # What is measured on a few documents does not take the place of what was measured on all.
    limited = f"-limit-{options.limit}" if options.limit else ""
    if tasks is not None:
        found = {side: harness.merged([parts[r.name] for r in tasks.requests]) for side, parts in measured.items()}
        compared = tasks.compare(found)
        tasks.show(source, compared, console)
        report |= compared
        if out is not None:
            for side, model in sides.items():
                harness.write_results(out, found[side], model.source)
            identity = {side: model.identity() for side, model in sides.items()}
            _write_tasks(out / f"tasks{limited}{suffix}.json", {**report, "identity": identity})
    for name, job in jobs.items():
        head = {key: report[key] for key in ("linearize", "model", "teacher", "settings")}
        report[name] = job.compare({side: parts[name] for side, parts in measured.items()})
        job.show(source, report[name], console)
        if out is not None:
            _write(out / f"{name}{limited if job.limited else ''}{suffix}.json", {**head, **report[name]})
    if out is not None:
        console.line(f"results are in {out}")
    console.result(report)
    return report


def _teacher(student: Model, options: Options, console: Console) -> Model | None:
    if options.no_teacher and options.teacher is None:
        return None
    fix = "name the model to compare with by --teacher, or pass --no-teacher"
    if options.teacher is not None:
        teacher = open_model(options.teacher, say=console.line)
    elif not student.ours:
        raise UserError(f"{student.source} is not a converted model", fix=fix)
    else:
        teacher = open_named_teacher(student, say=console.line, fix=fix)
    check_same_vocabulary(teacher, student)
    return teacher


def _measure(
    side: str,
    model: Model,
    tasks: "Tasks | None",
    jobs: "dict[str, Job]",
    options: Options,
    device: torch.device,
    console: Console,
) -> dict[str, dict]:
    """Results of one model by request and probe; the teacher's from the cache where they are in it."""
    about = {
        "format": CACHE_FORMAT,
        "model": {name: value for name, value in model.identity().items() if name != "source"},
        "dtype": options.dtype,
        "device": device.type,
        "versions": [__version__, torch.__version__, transformers.__version__],
    }
    requests = tasks.requests if tasks is not None else []
    keys = {r.name: {**about, "task": tasks.key(r)} for r in requests}
    keys |= {name: {**about, "probe": name, **job.key} for name, job in jobs.items()}
    cached = side == "teacher"
    done = {}
    if cached and not options.refresh:
        done = {name: found for name, key in keys.items() if (found := _recall_result(key)) is not None}
        if done:
            console.line(f"teacher: {', '.join(done)} measured before (--refresh measures again)")
    if len(done) == len(keys):
        return done

    def keep(name: str, result: dict) -> None:
        done[name] = result
        if cached:
            _keep_result(keys[name], result, console)

    net = model.load(device, options.dtype)
    try:
        missing = [r for r in requests if r.name not in done]
        if missing:
            results = harness.run(
                net,
                model.tokenizer,
                missing,
                tasks.settings,
                who=side,
                pretrained=model.source,
                dtype=options.dtype,
                console=console,
            )
            for request in missing:
                keep(request.name, harness.part_of(results, request))
        for name, job in jobs.items():
            if name not in done:
                with console.stage(f"{side}: {name}", job.total, job.unit) as bar:
                    keep(name, job.measure(net, bar.advance))
    except (MemoryError, torch.OutOfMemoryError) as error:
        fix = "lower --batch-size, --context or --lengths, or use --device cpu"
        raise UserError(f"out of memory while measuring the {side}", fix=fix) from error
    del net
    free_memory(device)
    return done


# ---- what was measured before ---------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where teachers' results are kept: $XDG_CACHE_HOME/linearize/eval."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linearize" / "eval"


def _result_file(key: dict) -> Path:
    text = json.dumps(key, sort_keys=True)
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _recall_result(key: dict) -> dict | None:
    try:
        kept = json.loads(_result_file(key).read_bytes())
        return kept["result"] if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: it is measured again


def _keep_result(key: dict, result: dict, console: Console) -> None:
    path = _result_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps({"key": key, "result": result}) + "\n")
    except (OSError, UserError) as error:
        console.warn(f"the teacher's results cannot be kept for the next time: {error}")


# ---- tasks of lm-eval -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tasks:
    """The tasks asked for, with what both models are told about them."""

    requests: list[harness.Request]
    settings: harness.Settings

    @classmethod
    def load(
        cls, names: list[str], options: Options, device: torch.device, pretrained: str, console: Console
    ) -> "Tasks | None":
        if not names:
            return None
        batch_size = options.batch_size
        if batch_size == "auto" and device.type == "cpu":
            batch_size = "1"  # lm-eval's search for what fits makes sense on a GPU alone
        settings = harness.Settings(options.limit, options.num_fewshot, batch_size, options.apply_chat_template)
        requests = harness.load_tasks(names, options.include_path, pretrained, others=PROBES, console=console)
        return cls(requests, settings)

    def key(self, request: harness.Request) -> dict:
        settings = {**vars(self.settings), "lm_eval": harness.version()}
        return {"name": request.name, "questions": harness.task_key(request, self.settings.limit), **settings}

    def compare(self, results: dict[str, dict]) -> dict:
        """The part of the report about tasks. results: by side, of all requests, in lm-eval's layout."""
        tasks: dict[str, dict] = {}
        units = {}
        for request in self.requests:
            rows = harness.compare(request, results, self.settings.limit)
            tasks |= rows
            for name in request.shown:
                if metric := harness.main_metric(rows.get(name, {})):
                    units[name] = metric
        harness_settings = {name: value for name, value in vars(self.settings).items() if name != "limit"}
        return {
            "lm_eval": {"version": harness.version(), **harness_settings},
            "tasks": tasks,
            "retained": harness.mean_accuracy(tasks, units),
        }

    def show(self, source: str, compared: dict, console: Console) -> None:
        tasks, retained = compared["tasks"], compared["retained"]
        both = any(row["teacher"] is not None for metrics in tasks.values() for row in metrics.values())
        rows = []
        for name in itertools.chain.from_iterable(request.shown for request in self.requests):
            rows += [_line(name, metric, row, both) for metric, row in tasks.get(name, {}).items()]
        if retained and len(retained["tasks"]) > 1:
            rows.append(_line(f"mean of {len(retained['tasks'])}", "accuracy", retained, both))
        limit = self.settings.limit
        title = source if limit is None else f"{source}: --limit {limit}, a test only"
        columns = ("task", "metric", "teacher", "student", "retained", "above\nchance")
        if not both:
            columns = ("task", "metric", "score", "chance")
        console.table(title, columns, rows)


def _line(name: str, metric: str, row: dict, both: bool) -> tuple:
    student = _with_error(row["student"], row["student_stderr"])
    if not both:
        return name, metric, student, _rounded(row["chance"])
    kept = _percent(row["retained_percent"])
    if row.get("ratio") is not None:
        kept = f"x {row['ratio']:.3f}"
    teacher = _with_error(row["teacher"], row["teacher_stderr"])
    return name, metric, teacher, student, kept, _percent(row["above_chance_percent"])


def _rounded(value: float | None, digits: int | None = None) -> str | None:
    if value is None:
        return None
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3e}"


def _with_error(value: float | None, error: float | None, digits: int | None = None) -> str | None:
    if error is None or value is None:
        return _rounded(value, digits)
    return f"{_rounded(value, digits)} ±{_rounded(error, digits)}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} %"


def _write(path: Path, report: dict) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(plain(report), indent=2, ensure_ascii=False) + "\n")


def _write_tasks(path: Path, report: dict) -> None:
    """Write the report of tasks; those of an earlier run of the same models with the same settings stay in it."""
    same = ("identity", "settings", "lm_eval", "linearize")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(path.read_bytes())
        if all(before[name] == plain(report[name]) for name in same):
            tasks = {**before["tasks"], **report["tasks"]}
            units = {**(before["retained"] or {}).get("tasks", {}), **(report["retained"] or {}).get("tasks", {})}
            report = {**report, "tasks": tasks, "retained": harness.mean_accuracy(tasks, units)}
    _write(path, report)


# ---- measures of our own --------------------------------------------------------------------------------------------


class Job:
    """One measure by name: what decides its result (`key`), how it is made, compared and shown.

    `total` of `unit` is what `measure` reports as progress. `limited`: whether it is measured on --limit documents.
    """

    limited = False
    unit = "tok"
    total: float | None = None
    key: dict

    def __init__(self, options: Options, student: Model) -> None:
        self.options, self.tokenizer = options, student.tokenizer

    def documents(self, limit: int | None = None) -> list[str]:
        """The first `limit` documents; None: of --data as many as have PERPLEXITY_TOKENS, all of the bundled text."""
        if self.options.data is None:
            return bundled_documents("heldout")[:limit]
        taken, tokens = [], 0
        for text in itertools.islice(read_documents(self.options.data), limit):
            taken.append(text)
            tokens += len(probes.encoded(self.tokenizer, text))
            if limit is None and tokens >= PERPLEXITY_TOKENS:
                break
        return taken

    def measure(self, net: PreTrainedModel, progress: probes.Progress) -> dict:
        raise NotImplementedError

    def compare(self, measured: dict[str, dict]) -> dict:
        raise NotImplementedError

    def show(self, source: str, compared: dict, console: Console) -> None:
        raise NotImplementedError


class Perplexity(Job):
    """Perplexity of text, in windows of --context tokens."""

    limited = True

    def __init__(self, options: Options, student: Model) -> None:
        super().__init__(options, student)
        self.text = self.documents(options.limit)
        self.context = min(options.context, getattr(student.config, "max_position_embeddings", options.context))
        self.key = {"text": _text_hash(self.text), "context": self.context}
        self.total = sum(len(probes.encoded(self.tokenizer, text)) for text in self.text)

    def measure(self, net, progress):
        return {"losses": probes.document_losses(net, self.tokenizer, self.text, self.context, progress)}

    def compare(self, measured):
        """{side: {word_perplexity, token_perplexity, bits_per_byte}, ratio: {word, token}, nats_per_token...}"""
        losses = {side: found["losses"] for side, found in measured.items()}
        report = {side: probes.perplexities(found) for side, found in losses.items()}
        count = {unit: sum(loss[unit] for loss in losses["student"]) for unit in ("tokens", "words", "bytes")}
        report |= {"context": self.context, "documents": len(self.text), **count}
        report["text"] = {"source": self.options.data or "bundled", "hash": self.key["text"]}
        if "teacher" in losses:
            mean, error = probes.loss_difference(losses["teacher"], losses["student"])
            report["ratio"] = {
                unit: report["student"][f"{unit}_perplexity"] / report["teacher"][f"{unit}_perplexity"]
                for unit in ("word", "token")
            }
            report["loss_difference"] = {"nats_per_token": mean, "stderr": error}
        return report

    def show(self, source, compared, console):
        names = {"word_perplexity": "word perplexity", "token_perplexity": "token perplexity"}
        rows = []
        for name, shown in (names | {"bits_per_byte": "bits per byte"}).items():
            row = [shown, *(_rounded(compared[side][name]) for side in SIDES if side in compared)]
            if "ratio" in compared:
                ratio = compared["ratio"].get(name.partition("_")[0])
                row.append(None if ratio is None else f"x {ratio:.3f}")
            rows.append(row)
        title = f"perplexity: {compared['tokens']} tokens, {compared['text']['source']} text, context {self.context}"
        console.table(title, _columns("", compared, ("ratio",) if "ratio" in compared else ()), rows)


class Parity(Job):
    """One pass over a text against decoding it token by token and prefilling it in pieces."""

    def __init__(self, options: Options, student: Model) -> None:
        super().__init__(options, student)
        rows, tokens = PARITY
        ids = [token for text in self.documents() for token in probes.encoded(self.tokenizer, text)]
        tokens = min(tokens, getattr(student.config, "max_position_embeddings", tokens), len(ids) // rows)
        if tokens < 4:
            raise UserError("the text is too short for parity", value=f"{len(ids)} tokens", fix="name longer --data")
        self.rows = torch.tensor(ids[: rows * tokens]).view(rows, tokens)
        self.key = {"rows": self.rows.shape[0], "tokens": tokens, "text": _text_hash([str(ids[: rows * tokens])])}
        self.total = 2 * self.rows.numel()

    def measure(self, net, progress):
        return probes.parity(net, self.rows, progress)

    def compare(self, measured):
        """{side: {"decode" and "chunked": {max_relative_error, argmax_agreement_percent}, rows, tokens}}"""
        return measured

    def show(self, source, compared, console):
        rows = []
        for way, shown in (("decode", "token by token"), ("chunked", "prefill in pieces")):
            for name, unit in (("max_relative_error", "largest error"), ("argmax_agreement_percent", "same argmax")):
                values = [compared[side][way][name] for side in SIDES if side in compared]
                cells = [f"{v:.1f} %" if "percent" in name else f"{v:.1e}" for v in values]
                rows.append((shown, unit, *cells))
        title = f"parity with one pass: {self.rows.shape[0]} texts of {self.rows.shape[1]} tokens"
        console.table(title, ("", *_columns("", compared)), rows)


class Recall(Job):
    """Synthetic key-value recall against length."""

    def __init__(self, options: Options, student: Model) -> None:
        super().__init__(options, student)
        self.prompts = options.prompts or PROMPTS
        self.key = {"lengths": list(options.lengths), "prompts": self.prompts, "seed": options.seed}
        self.total = self.prompts * sum(options.lengths)
        probes.words_of(self.tokenizer)  # refuses a tokenizer without words before any weight is read

    def measure(self, net, progress):
        lengths, seed = self.options.lengths, self.options.seed
        return probes.recall(net, self.tokenizer, lengths, self.prompts, seed, progress)

    def compare(self, measured):
        """{"lengths": {length: {side, side_stderr, questions}}}; the errors are those of independent questions."""
        lengths = {}
        for length in measured["student"]:
            lengths[length] = row = {"questions": measured["student"][length]["asked"]}
            for side, found in measured.items():
                correct, asked = found[length]["correct"], found[length]["asked"]
                rate = correct / asked if asked else None
                row[side] = rate
                row[f"{side}_stderr"] = math.sqrt(rate * (1 - rate) / asked) if asked else None
        return {"lengths": lengths, "prompts": self.prompts, "seed": self.options.seed}

    def show(self, source, compared, console):
        rows = []
        for length, row in compared["lengths"].items():
            cells = [_with_error(row[side], row[f"{side}_stderr"]) for side in SIDES if side in row]
            rows.append((int(length), *cells, row["questions"]))
        sides = next(iter(compared["lengths"].values()))
        console.table("recall of key-value pairs", _columns("length", sides, ("questions",)), rows)
        if any(row["questions"] is None for row in compared["lengths"].values()):
            console.line(
                "recall: no figure where a prompt is longer than the model or has more lines than there are words"
            )


class Needle(Job):
    """One sentence in a text, asked for at its end, against length and depth."""

    def __init__(self, options: Options, student: Model) -> None:
        super().__init__(options, student)
        self.prompts = options.prompts or NEEDLES
        self.filler = [token for text in self.documents() for token in probes.encoded(self.tokenizer, f"{text}\n\n")]
        if not self.filler:
            raise UserError("the text is empty", fix="name other --data")
        self.key = {"lengths": list(options.lengths), "prompts": self.prompts, "seed": options.seed}
        self.key |= {"text": _text_hash([str(self.filler)]), "depths": list(probes.DEPTHS)}
        self.total = len(probes.DEPTHS) * self.prompts * sum(options.lengths)

    def measure(self, net, progress):
        lengths, seed = self.options.lengths, self.options.seed
        return probes.needle(net, self.tokenizer, self.filler, lengths, self.prompts, seed, progress)

    def compare(self, measured):
        """{"lengths": {length: {depth: {side, side_stderr, side_rank, side_rank_stderr, questions}}}}

        A side's number is its share of exact answers; the depth "all" has the prompts of every depth together.
        """
        lengths: dict[str, dict] = {}
        for length in measured["student"]:
            lengths[length] = {depth: {} for depth in (*map(str, probes.DEPTHS), "all")}
            for depth, row in lengths[length].items():
                for side, found in measured.items():
                    cells = found[length].values() if depth == "all" else [found[length][depth]]
                    exact, rank = ([x for cell in cells for x in cell[name]] for name in ("exact", "rank"))
                    row["questions"] = len(exact) or None
                    row[side], row[f"{side}_stderr"] = probes.mean_and_error(exact)
                    row[f"{side}_rank"], row[f"{side}_rank_stderr"] = probes.mean_and_error(rank)
        report = {"lengths": lengths, "prompts": self.prompts, "seed": self.options.seed}
        report |= {"candidates": len(probes.COLOURS), "text": {"source": self.options.data or "bundled"}}
        report["text"] |= {"hash": self.key["text"], "tokens": len(self.filler)}
        return report

    def show(self, source, compared, console):
        rows = []
        for length, depths in compared["lengths"].items():
            for depth, row in depths.items():
                names = [side + name for name in ("", "_rank") for side in SIDES if side in row]
                cells = [_with_error(row[name], row[f"{name}_stderr"], digits=2) for name in names]
                rows.append((int(length), depth if depth == "all" else f"{depth} %", *cells))
        sides = _columns("", next(iter(compared["lengths"].values()))["all"])[1:]
        columns = ("length", "depth", *(f"{side}\n{name}" for name in ("exact", "rank") for side in sides))
        console.table("needle in a text: exact answers; rank among 16 values, 0.5 by chance", columns, rows)
        if any(depths["all"]["questions"] is None for depths in compared["lengths"].values()):
            console.line("needle: no figure where a prompt is longer than the model, or too short for its question")


class Repetition(Job):
    """Repeated n-grams in greedy continuations of held-out text."""

    unit = "texts"

    def __init__(self, options: Options, student: Model) -> None:
        super().__init__(options, student)
        self.rows = probes.repetition_prompts(self.tokenizer, self.documents(), options.prompts or SAMPLES)
        self.key = {"text": _text_hash([str(self.rows.tolist())]), "n": probes.NGRAM}
        self.total = len(self.rows)

    def measure(self, net, progress):
        return {"rates": probes.repetition(net, self.tokenizer, self.rows, progress)}

    def compare(self, measured):
        """{side, side_stderr, "text": the rate of the text itself, ngram, prompts, tokens}"""
        rates = {side: [rate for rate in found["rates"] if rate is not None] for side, found in measured.items()}
        rates["text"] = [probes.repeated(row[probes.PROMPT :]) for row in self.rows.tolist()]
        report = {"ngram": probes.NGRAM, "prompts": len(self.rows), "tokens": probes.CONTINUATION}
        for side, values in rates.items():
            report[side], report[f"{side}_stderr"] = probes.mean_and_error(values)
        return report

    def show(self, source, compared, console):
        sides = [side for side in (*SIDES, "text") if side in compared]
        row = [f"repeated {probes.NGRAM}-grams", *(_with_error(compared[s], compared[f"{s}_stderr"]) for s in sides)]
        title = f"repetition: greedy, {compared['prompts']} prompts, {compared['tokens']} tokens each"
        console.table(title, ("", *sides), [row])


SIDES = ("teacher", "student")
PROBES: dict[str, type[Job]] = {
    "perplexity": Perplexity,
    "parity": Parity,
    "recall": Recall,
    "needle": Needle,
    "repetition": Repetition,
}


def _columns(first: str, report: dict, last: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (first, *(side for side in SIDES if side in report), *last)


def _text_hash(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
