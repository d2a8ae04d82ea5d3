"""Tasks of lm-eval, run through its Python API on loaded models: what `lm_eval --model hf` does, with its numbers."""

import contextlib
import difflib
import hashlib
import io
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearize.console import Console
from linearize.errors import UsageError, UserError, one_line
from linearize.models import hushed

INSTALL = "pip install 'linearize[eval]'"


@dataclass(frozen=True)
class Settings:
    """What lm-eval is told, the same for teacher and student. `limit`: documents a task, None for all of them."""

    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: str = "1"
    apply_chat_template: bool = False


@dataclass(frozen=True)
class Request:
    """One name of --tasks and what it stands for: tasks by name, groups by name, and the outermost of both."""

    name: str
    tasks: dict[str, Any]
    groups: dict[str, Any]
    roots: list[Any]

    @property
    def shown(self) -> list[str]:
        """The names with a line of their own: groups that have a score, else their tasks."""
        scored = [name for name, group in self.groups.items() if group.has_aggregation and group in self.roots]
        below = {task.task_name for name in scored for task in self.groups[name].get_all_tasks()}
        return [*scored, *(name for name in self.tasks if name not in below)]


def version() -> str:
    """lm-eval's version. Raises UserError when it is not installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise UserError("tasks need lm-eval, which is not installed", fix=INSTALL) from error
    return lm_eval.__version__


def load_tasks(
    names: list[str], include_path: Path | None, pretrained: str, *, others: Iterable[str] = (), console: Console
) -> list[Request]:
    """Load tasks, groups, tags, globs or task files by name, with their documents.

    include_path  a folder of task files, taken before lm-eval's own
    pretrained    what tasks that ask for the model's name are told
    others        further names that --tasks takes, for the error line

    Raises UserError for a name that is not known (with the nearest that are), a task whose data cannot be had or that
    runs code, and one task named twice.
    """
    version()
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise UsageError("--include-path is not a folder", value=str(include_path), fix="name a folder of task files")
    with quiet_harness(console.verbose):
        metadata = {"pretrained": pretrained}
        # The index of lm-eval's own 15,000 tasks takes many seconds, and own tasks do not need it.
        manager = TaskManager(include_path=include_path, include_defaults=False, metadata=metadata)
        if not all(manager.match_tasks([name]) for name in names):
            manager = TaskManager(include_path=include_path, metadata=metadata)
        known = manager.all_tasks
        found: dict[str, Request] = {}
        for name in names:
            if name in known:
                matches = [name]
            else:
                matches = manager.match_tasks([name]) if any(c in name for c in "*?[") else []
                if not matches and Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
                    matches = [name]
            if not matches:
                near = difflib.get_close_matches(name, [*others, *known], 3, 0.6)
                fix = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks lists them"
                raise UsageError("no such task", value=name, fix=fix)
            for match in matches:
                found[match] = _load(manager, match)
    owner: dict[str, str] = {}
    for request in found.values():
        for task in request.tasks:
            if task in owner:
                fix = f"leave out one of {owner[task]} and {request.name}"
                raise UsageError("a task is asked for twice", value=task, fix=fix)
            owner[task] = request.name
    return list(found.values())


def _load(manager, name: str) -> Request:
    try:
        loaded = manager.load([name])
    except UserError:
        raise
    except Exception as error:  # data sets come through many libraries, each with errors of its own
        raise UserError(
            f"cannot load the task {name}: {type(error).__name__}: {one_line(error)[:200]}",
            fix="its data may need the network (unset HF_HUB_OFFLINE) or another package",
        ) from error
    tasks, groups = loaded["tasks"], loaded.get("groups", {})
    unsafe = [task for task, item in tasks.items() if getattr(item, "UNSAFE_CODE", False)]
    if unsafe:
        raise UserError("this task runs code that the model writes", value=unsafe[0], fix="use lm_eval itself for it")
    inner = {child for group in groups.values() for child in group.child_names}
    roots = [item for other, item in (groups | tasks).items() if other not in inner]
    return Request(name, tasks, groups, roots)


def task_key(request: Request, limit: int | None) -> dict:
    """What identifies a request's questions: per task its version, and hashes of its configuration and documents."""
    key = {}
    for name, task in request.tasks.items():
        config = {k: v for k, v in task.dump_config().items() if k not in ("metadata", "num_fewshot")}
        documents = hashlib.sha256()
        for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1):
            documents.update(json.dumps(doc, sort_keys=True, default=str).encode())
        key[name] = {
            "version": str(task.VERSION),
            "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
            "documents": documents.hexdigest()[:16],
        }
    return key


@torch.no_grad()
def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: list[Request],
    settings: Settings,
    *,
    who: str,
    pretrained: str,
    dtype: str,
    console: Console,
) -> dict:
    """lm-eval's results of one model, as ``simple_evaluate`` returns them. who: the model's name in progress lines."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    chat = settings.apply_chat_template
    shown = sys.stderr
    roots = [item for request in requests for item in request.roots]
    with quiet_harness(console.verbose):
        lm = _scorer(model, tokenizer, settings.batch_size, who, console, shown)
        try:
            # The repository that the command was started in says nothing of the results, and git complains on stderr
            # where there is none.
            evaluator.get_git_commit_hash = lambda: None
            results = evaluator.simple_evaluate(
                model=lm,
                model_args={"pretrained": pretrained, "dtype": dtype},
                tasks=roots,
                # The tasks are loaded; without this, lm-eval would read the index of its own again.
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=settings.num_fewshot,
                batch_size=settings.batch_size,
                device=str(model.device),
                limit=settings.limit,
                log_samples=False,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # tasks are code of many authors
            what = f"lm-eval stopped on {who}: {type(error).__name__}: {one_line(error)[:300]}"
            raise UserError(what, fix="-v shows where") from error
    # As lm-eval's own command names it; the tasks were loaded for the student.
    for config in results["configs"].values():
        if "pretrained" in (config.get("metadata") or {}):
            config["metadata"] = {**config["metadata"], "pretrained": pretrained}
    return json.loads(json.dumps(results, default=_serialise))


def _serialise(value: object) -> object:
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


def _scorer(model, tokenizer, batch_size: str, who: str, console: Console, shown: TextIO):
    """lm-eval's HFLM around a loaded model, with the console's bars, on the stream `shown`, in place of its own."""
    from lm_eval.models.huggingface import HFLM

    class Counter:
        """What lm-eval calls after every answer, to store it."""

        def __init__(self, bar):
            self.bar = bar

        def add_partial(self, kind, request, answer):
            self.bar.advance()

    class Scorer(HFLM):
        def _counted(self, label: str, method, requests):
            with contextlib.redirect_stderr(shown), console.stage(f"{who}: {label}", len(requests), "requests") as bar:
                self.cache_hook = Counter(bar)
                with contextlib.nullcontext() if console.verbose else contextlib.redirect_stderr(io.StringIO()):
                    return method(requests, disable_tqdm=True)

        def loglikelihood(self, requests, disable_tqdm=False):
            return self._counted("choices scored", super().loglikelihood, requests)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return self._counted("documents scored", super().loglikelihood_rolling, requests)

        def generate_until(self, requests, disable_tqdm=False):
            return self._counted("answers generated", super().generate_until, requests)

    return Scorer(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


@contextlib.contextmanager
def quiet_harness(verbose: bool) -> Iterator[None]:
    """Without what lm-eval prints, logs and draws: stdout is for results. With verbose all of it goes to stderr."""
    if verbose:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    sink = io.StringIO()
    try:
        with hushed(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- results --------------------------------------------------------------------------------------------------------

BY_NAME = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
# The metrics that count as a task's accuracy, the first that it has.
ACCURACY = ("acc_norm", "acc", "exact_match")


def part_of(results: dict, request: Request) -> dict:
    """The results of one request, in lm-eval's layout, with the description of the run."""
    names = request.tasks.keys() | request.groups.keys()
    part = {key: value for key, value in results.items() if key not in BY_NAME}
    return part | {
        key: {name: value for name, value in results[key].items() if name in names} for key in BY_NAME if key in results
    }


def merged(parts: list[dict]) -> dict:
    """Several requests' results as one run's; what describes the run is the first one's."""
    whole = dict(parts[0])
    for key in BY_NAME:
        found = {name: value for part in parts for name, value in part.get(key, {}).items()}
        if found or key in whole:
            whole[key] = found
    return whole


def chance_levels(request: Request, limit: int | None) -> dict[str, float | None]:
    """What blind choice would score, by task and group.

    Multiple choice: the mean over the documents of 1 / number of choices. Tasks whose answer is free text: 0. Groups:
    aggregated as their scores are. None where it is not known.
    """
    levels: dict[str, float | None] = {}
    sizes = {}
    for name, task in request.tasks.items():
        documents = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1)]
        sizes[name] = len(documents)
        levels[name] = None if task.OUTPUT_TYPE == "loglikelihood_rolling" else 0.0
        if task.OUTPUT_TYPE == "multiple_choice":
            try:
                levels[name] = sum(1 / len(task.doc_to_choice(doc)) for doc in documents) / len(documents)
            except (TypeError, ZeroDivisionError, KeyError, AttributeError):
                levels[name] = None  # a task of its own kind, without a list of choices
    for name, group in request.groups.items():
        below = [task.task_name for task in group.get_all_tasks()]
        levels[name] = None
        if group.has_aggregation and all(levels[task] is not None for task in below):
            metric = group.aggregate_metric_list[0].metric
            filters = group.aggregate_metric_list[0].filter_list or ["none"]
            key = f"{metric},{filters[0]}"
            fake = {task: {key: levels[task], "sample_len": sizes[task]} for task in below}
            levels[name] = group.aggregate(fake).get(key)
    return levels


def compare(request: Request, results: dict[str, dict], limit: int | None) -> dict[str, dict[str, dict]]:
    """Every metric of every task and group of a request: ``{name: {metric: {...}}}``.

    results: by side ("teacher", "student"), in lm-eval's layout. A metric other than through the filter "none" keeps
    lm-eval's spelling "metric,filter". The fields are those of :func:`compared`, and "documents".
    """
    levels = chance_levels(request, limit)
    rows: dict[str, dict[str, dict]] = {}
    for name in [*request.groups, *request.tasks]:
        scores = {side: found["results"].get(name, {}) for side, found in results.items()}
        better = next(iter(results.values()))["higher_is_better"].get(name, {})
        for key, value in scores["student"].items():
            metric, _, through = key.partition(",")
            if metric.endswith("_stderr") or not through or not isinstance(value, int | float):
                continue
            values = {side: found.get(key) for side, found in scores.items()}
            errors = {side: _number(found.get(f"{metric}_stderr,{through}")) for side, found in scores.items()}
            chance = levels[name] if metric.startswith("acc") or metric == "exact_match" else None
            row = compared(values.get("teacher"), values["student"], better.get(metric), chance, errors.get("teacher"))
            row |= {
                "teacher_stderr": errors.get("teacher"),
                "student_stderr": errors["student"],
                "documents": scores["student"].get("sample_len"),
            }
            rows.setdefault(name, {})[metric if through == "none" else key] = row
    return rows


def compared(
    teacher: float | None, student: float, higher_is_better: bool | None, chance: float | None, noise: float | None
) -> dict:
    """One metric of both, and what the student kept of it.

    retained_percent       100 student / teacher, where higher is better
    above_chance_percent   100 (student - chance) / (teacher - chance); None where the teacher is not above chance by
                           more than `noise`, its standard error
    ratio                  student / teacher, where lower is better (perplexities)
    """
    row = {
        "teacher": teacher,
        "student": student,
        "higher_is_better": higher_is_better,
        "chance": chance,
        "retained_percent": None,
        "above_chance_percent": None,
        "ratio": None,
    }
    if teacher is None:
        return row
    if higher_is_better and teacher > 0:
        row["retained_percent"] = 100 * student / teacher
        if chance is not None and teacher - chance > (noise or 0):
            row["above_chance_percent"] = 100 * (student - chance) / (teacher - chance)
    if higher_is_better is False and teacher > 0:
        row["ratio"] = student / teacher
    return row


def main_metric(row: dict[str, dict]) -> str | None:
    """The metric by which a task counts in the mean: the first of ACCURACY that it has, through any filter."""
    for metric in ACCURACY:
        for name in row:
            if name.partition(",")[0] == metric:
                return name
    return None


def mean_accuracy(tasks: dict[str, dict[str, dict]], units: dict[str, str]) -> dict | None:
    """The mean over tasks of their main metrics, with its standard error: root of the summed squares over the number.

    units: metric by task or group. None when there is none; what some task lacks is None.
    """
    rows = [tasks[name][metric] for name, metric in units.items()]
    if not rows:
        return None

    def mean(field: str) -> float | None:
        values = [row[field] for row in rows]
        return None if None in values else sum(values) / len(values)

    def error(field: str) -> float | None:
        values = [row[field] for row in rows]
        return None if None in values else sum(v * v for v in values) ** 0.5 / len(values)

    noise = error("teacher_stderr")
    row = compared(mean("teacher"), mean("student"), True, mean("chance"), noise)
    del row["higher_is_better"], row["ratio"]
    return {**row, "teacher_stderr": noise, "student_stderr": error("student_stderr"), "tasks": dict(units)}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def write_results(out: Path, results: dict, pretrained: str) -> Path:
    """Write out/NAME/results_TIME.json, as `lm_eval --output_path out` names and lays it out; returns its path."""
    from lm_eval.loggers import EvaluationTracker

    with quiet_harness(False):
        tracker = EvaluationTracker(output_path=str(out))
        tracker.general_config_tracker.log_experiment_args(
            model_source="hf",
            model_args={"pretrained": pretrained},
            system_instruction=None,
            chat_template=None,
            fewshot_as_multiturn=False,
        )
        before = set(out.rglob("results_*.json"))
        tracker.save_results_aggregated(dict(results))
        written = set(out.rglob("results_*.json")) - before
    if not written:  # the tracker only logs what went wrong
        raise UserError("lm-eval could not write its results", value=str(out), fix="free space, or check permissions")
    return written.pop()
