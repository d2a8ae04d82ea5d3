"""The command: one thin function a verb. Nothing heavy is imported until a verb runs."""

import errno
import functools
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from linearize import __version__
from linearize.console import Console
from linearize.errors import UsageError, UserError, memory_needed_by
from linearize.recipe import GROUPS, OPTIONS, Option, Recipe, find_recipe, parse_size, recipe_names, recipes_dir

# typer keeps its exception classes private; the public BadParameter is a UsageError, which is a ClickException.
ParserError = typer.BadParameter.__mro__[2]

HELP = {"help_option_names": ["-h", "--help"]}


class Verb(TyperCommand):
    """A command whose help lists its flags group by group, in plain text: a long flag moves its text to the next
    line. Boxes would cut it at 80 columns."""

    def collect_usage_pieces(self, ctx) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx, formatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            names, text = param.get_help_record(ctx)
            # The parser's "[default: (x); x>=1]" in the words of the recipe keys.
            text, _, notes = text.partition("  [")
            default = re.match(r"default: \(?(.+?)\)?(; [^;]*)?\]$", notes)
            if default:
                text += f" Default: {default[1]}."
            if param.param_type_name == "argument":
                groups.setdefault("Arguments", []).append((param.metavar, text))
            else:
                text += " Required." if param.required else ""
                groups.setdefault(param.rich_help_panel or "Options", []).append((names, text))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Verbs(typer.Typer):
    """A Typer without boxes, whose commands are Verbs."""

    def __init__(self, **settings) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings):
        return super().command(name, cls=Verb, **settings)


app = Verbs(
    help="Turn softmax attention layers of a language model into linear-time mixers.",
    epilog="Example: linearize convert HuggingFaceTB/SmolLM2-135M-Instruct out/smollm2 --keep-softmax 25%",
    context_settings=HELP,
    pretty_exceptions_enable=False,
)
recipes_app = Verbs(help="List, show or copy the recipes that ship with linearize.")
app.add_typer(recipes_app, name="recipes", epilog="Example: linearize recipes show smollm2-135m-cpu-demo")
bench_app = Verbs(help="Measure speed and memory on this machine.")
app.add_typer(bench_app, name="bench", epilog="Example: linearize bench decode out/smollm2 --teacher")

ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file or a Hub id.", show_default=False)
]
OutArg = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the converted model.", show_default=False)]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", metavar="NAME|PATH", help="Recipe to start from (linearize recipes ls).", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set a recipe key, e.g. -s align.lr=3e-4; may be repeated."),
]
HOW = "Execution"
OWN = "Own measures"
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="TEXT", help="auto, cpu, cuda or cuda:N.", rich_help_panel=HOW)
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--dtype", metavar="TEXT", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=HOW
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Seed of everything random.", rich_help_panel=HOW)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=HOW)
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No bars, no remarks: one line a stage, results, warnings.", rich_help_panel=HOW
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more; show the traceback of an error.", rich_help_panel=HOW)
]
METAVARS = {"text": "TEXT", "int": "N", "float": "X", "count": "N", "bytes": "SIZE"}


def _flag(option: Option) -> Any:
    """The command-line side of a recipe key. Values stay text: Recipe.resolve types them, with one set of messages."""
    negative = f"/--no-{option.flag[2:]}" if option.kind == "bool" and option.in_file else ""
    default = "" if option.kind == "bool" or option.default is None else f" Default: {option.shown}."
    settings = typer.Option(
        option.flag + negative,
        *([option.short] if option.short else []),
        help=option.help + default,
        metavar="|".join(option.choices) or METAVARS.get(option.kind),
        rich_help_panel=GROUPS[option.group].__doc__,
        show_default=False,
    )
    return Annotated[bool | None if option.kind == "bool" else str | None, settings]


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a verb -r, -s and one flag for every recipe key; the verb itself receives the resolved `recipe`."""
    kept = [p for p in inspect.signature(command).parameters.values() if p.name != "recipe"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter("recipe", keyword, default=None, annotation=RecipeOption),
        inspect.Parameter("sets", keyword, default=None, annotation=SetOption),
        *(inspect.Parameter(o.param, keyword, default=None, annotation=_flag(o)) for o in OPTIONS.values()),
    ]

    @functools.wraps(command)
    def verb(**given: Any) -> None:
        flags = {option.name: given.pop(option.param) for option in OPTIONS.values()}
        recipe = Recipe.resolve(given.pop("recipe"), given.pop("sets") or (), flags)
        command(**given, recipe=recipe)

    verb.__signature__ = inspect.Signature(kept + added)
    verb.__annotations__ = {p.name: p.annotation for p in kept + added}
    return verb


def takes_console(command: Callable[..., None]) -> Callable[..., None]:
    """Give a verb --json, -q and -v; the verb itself receives the `console` that they make."""
    kept = [p for p in inspect.signature(command).parameters.values() if p.name != "console"]
    switches = {"json": JsonOption, "quiet": QuietOption, "verbose": VerboseOption}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in switches.items()
    ]

    @functools.wraps(command)
    def verb(**given: Any) -> None:
        console = Console(**{name: given.pop(name) for name in switches})
        command(**given, console=console)

    verb.__signature__ = inspect.Signature(kept + added)
    verb.__annotations__ = {p.name: p.annotation for p in kept + added}
    return verb


def _console(recipe: Recipe) -> Console:
    return Console(quiet=recipe.run.quiet, json=recipe.run.json, verbose=recipe.run.verbose)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"linearize {__version__}")
        raise typer.Exit


@app.command(epilog="Example: linearize plan HuggingFaceTB/SmolLM2-135M-Instruct --keep-softmax every:4")
@takes_recipe
def plan(
    model: ModelArg,
    recipe: Recipe,
    context: Annotated[
        str, typer.Option("--context", metavar="N,N", help="Tokens in the caches that are compared.")
    ] = "1024,8192,32768",
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,N", help="Sequences in these caches.")
    ] = "1",
) -> None:
    """Say what convert would do, without doing it.

    Every layer, the caches, memory, disk and time, from the config and the headers of the weights alone.
    """
    from linearize.plan import plan_model

    plan_model(model, recipe, _sizes(context, "--context"), _sizes(batch, "--batch")).show(_console(recipe))


@app.command(
    epilog="Example: linearize convert HuggingFaceTB/SmolLM2-135M-Instruct out/smollm2 --align-tokens 300k. "
    "The same command again goes on where it was stopped."
)
@takes_recipe
def convert(model: ModelArg, out: OutArg, recipe: Recipe) -> None:
    """Convert MODEL and write the result to OUT."""
    from linearize.convert import convert as run

    try:
        run(model, out, recipe, _console(recipe))
    except KeyboardInterrupt:
        print("\nstopped: state kept; run the same command to go on", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command(
    "inspect",
    epilog="Example: linearize inspect HuggingFaceTB/SmolLM2-135M-Instruct --tokens 4k --layers 0-9 --out look. "
    "The star marks the constant-state mixer with the lowest start error, or one with a smaller state if its error is "
    "at most 2 % higher; keep ranks the layers by the start error of that mixer. Both are hints from one layer at a "
    "time: convert --keep-softmax auto:N measures instead.",
)
@takes_console
def inspect_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|DIR", help="A model, or a converted folder: its teacher is looked at.")
    ],
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Tokens of text.")] = "8k",
    context: Annotated[str, typer.Option("--context", metavar="N", help="Tokens in a row of text.")] = "512",
    data: Annotated[
        str, typer.Option("--data", metavar="TEXT", help="Text: bundled, files, folders, globs or hub:NAME.")
    ] = "bundled",
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="TEXT", help="Layers, such as 0-3,8.", show_default="all")
    ] = None,
    mixers: Annotated[
        str | None, typer.Option("--mixers", metavar="TEXT", help="Mixers to start, by comma.", show_default="all")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Write inspect.json and PNG figures there.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="TEXT", help="Branch, tag or commit on the Hub.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own tokenizer code.")
    ] = False,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    *,
    console: Console,
) -> None:
    """Show each layer's attention and every mixer's start.

    What the attention of a layer does and how well every mixer stands in for it before any training.
    """
    from linearize.inspect import inspect as run

    flags = {
        "calibrate.tokens": tokens,
        "calibrate.context": context,
        "data.source": data,
        "model.revision": revision,
        "model.trust_remote_code": trust_remote_code,
        "run.device": device,
        "run.seed": seed,
    }
    run(model, Recipe.resolve(flags=flags), console, layers=layers, mixers=mixers, out=out)


def _sizes(text: str, flag: str) -> tuple[int, ...]:
    """Sizes separated by commas, each at least 1: `1k,8k`."""
    try:
        sizes = tuple(parse_size(part) for part in text.split(","))
    except UserError as error:
        raise UsageError(f"{flag}: {error.what}", value=error.value, fix=error.fix) from error
    if min(sizes) < 1:
        raise UsageError(f"{flag} is too small", value=text, fix="at least 1")
    return sizes


@app.command(
    "eval",
    epilog="Example: linearize eval out/smollm2 --tasks piqa,arc_easy,perplexity,recall. "
    "Own measures: perplexity, parity, recall, needle, repetition; other names are lm-eval's (lm_eval ls tasks). "
    "Above chance is (student - chance) / (teacher - chance), chance being 1 / number of choices.",
)
@takes_console
def evaluate(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the converted model.", show_default=False)],
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAMES", help="Tasks, groups, tags, globs, task files, own measures.")
    ],
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="Compare with this.", show_default="DIR's teacher")
    ] = None,
    no_teacher: Annotated[bool, typer.Option("--no-teacher", help="Measure DIR alone.")] = False,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="FOLDER", help="More task files.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Documents of a task and of perplexity, to try it out.",
            show_default="all",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", metavar="N", min=0, help="Examples in the prompt.", show_default="the task's"),
    ] = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="auto|N", help="Requests at once; auto is 1 on a CPU.")
    ] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Put the tasks' prompts into the chat template.")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="TEXT",
            rich_help_panel=OWN,
            help="Text of perplexity, parity, needle, repetition: .txt/.jsonl files, folders, globs.",
            show_default="bundled held-out text",
        ),
    ] = None,
    context: Annotated[
        str, typer.Option("--context", metavar="N", help="Tokens in a window of perplexity.", rich_help_panel=OWN)
    ] = "1024",
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", metavar="N,N", help="Tokens in the prompts of recall and needle.", rich_help_panel=OWN
        ),
    ] = "128,512,2048,8192",
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts",
            metavar="N",
            min=1,
            help="Prompts of recall and needle, at each length (and depth), and of repetition.",
            show_default="4, 8 and 16",
            rich_help_panel=OWN,
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the teacher again, whatever is kept.")] = False,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    *,
    console: Console,
) -> None:
    """Score a converted model beside its teacher.

    On lm-eval tasks and on measures of our own: perplexity, recall, needle, repetition, parity.
    """
    if teacher is not None and no_teacher:
        raise UsageError("--teacher and --no-teacher exclude each other", fix="leave one out")
    if batch_size != "auto" and not re.fullmatch(r"[1-9]\d*", batch_size):
        raise UsageError("--batch-size is auto or a number", value=batch_size, fix="for example --batch-size 8")
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise UsageError("--tasks names nothing", value=tasks, fix="for example --tasks piqa,arc_easy,perplexity")
    windows = _sizes(context, "--context")
    if len(windows) > 1:
        raise UsageError("--context is one number", value=context, fix="for example --context 2k")
    lengths_asked = _sizes(lengths, "--lengths")
    from linearize.evaluate import Options
    from linearize.evaluate import evaluate as run

    options = Options(
        tasks=names,
        teacher=teacher,
        no_teacher=no_teacher,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        apply_chat_template=chat,
        data=data,
        context=windows[0],
        lengths=lengths_asked,
        prompts=prompts,
        seed=seed,
        device=device,
        dtype=dtype,
        refresh=refresh,
    )
    run(folder, options, console)


@app.command(epilog='Example: linearize generate out/smollm2 "Why is the sky blue?" --teacher')
@takes_console
def generate(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A converted folder, or any MODEL.", show_default=False)],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; - reads it from stdin.", show_default=False)
    ],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Tokens to make, at most.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 takes the likeliest token; above, tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="X", help="Draw from the likeliest tokens up to this share.", show_default="all"
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="The prompt is a user's message.", show_default="where there is a chat template"
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.", show_default=False)
    ] = None,
    teacher: Annotated[bool, typer.Option("--teacher", help="The teacher's answer beside it.")] = False,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    *,
    console: Console,
) -> None:
    """Let the model go on from a prompt."""
    from linearize.generate import Options
    from linearize.generate import generate as run

    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        chat=chat,
        system=system,
        teacher=teacher,
        device=device,
        dtype=dtype,
    )
    _, stopped = run(model, prompt, options, console)
    if stopped:
        raise typer.Exit(130)


@bench_app.command(
    "decode", epilog="Example: linearize bench decode out/smollm2 --teacher --context 1k,8k --batch 1,16"
)
@takes_console
def bench_decode(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A converted folder, or any MODEL.", show_default=False)],
    teacher: Annotated[bool, typer.Option("--teacher", help="The teacher beside it.")] = False,
    context: Annotated[str, typer.Option("--context", metavar="N,N", help="Tokens in the cache.")] = "1024,8192",
    batch: Annotated[str, typer.Option("--batch", metavar="N,N", help="Rows that are decoded at once.")] = "1",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps that are timed.")] = 32,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    *,
    console: Console,
) -> None:
    """Time decoding and prefill, and weigh the cache."""
    sizes = {"context": _sizes(context, "--context"), "batch": _sizes(batch, "--batch")}
    from linearize.bench import Options, decode

    options = Options(**sizes, steps=steps, teacher=teacher, seed=seed, device=device, dtype=dtype)
    decode(model, options, console)


@bench_app.command(
    "kernels",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: linearize bench kernels --out kernels.json --quick",
)
def bench_kernels(context: typer.Context) -> None:
    """Check and time the kernels on this GPU.

    In a checkout only; arguments go to kernels/benchmarks/gpu_check.py.
    """
    from linearize.bench import kernels

    raise typer.Exit(kernels(context.args))


@app.command(epilog="Example: linearize export out/qwen3-hybrid out/native --check")
@takes_console
def export(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A converted model, or a model that was not converted.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the native model.", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="qwen3_5", help="The architecture.")] = "qwen3_5",
    allow_head_padding: Annotated[
        bool,
        typer.Option(
            "--allow-head-padding", help="Add constant dimensions to softmax heads without QK-norm (Llama and others)."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Reload OUT in a fresh process and compare; exit 1 if it differs.")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="auto|bfloat16|float32", help="Of the weights; auto as they are.")
    ] = "auto",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of a weight file at most.")
    ] = "5GB",
    *,
    console: Console,
) -> None:
    """Write DIR to OUT as a native Qwen3.5-family model.

    That is an architecture which transformers, vLLM and SGLang know. Refused where it would not be exact.
    """
    from linearize.export import export as run

    flags = {"run.dtype": dtype, "run.max_shard_size": max_shard_size}
    options = Recipe.resolve(flags=flags).run
    run(
        model,
        out,
        console,
        to=to,
        allow_head_padding=allow_head_padding,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        check=check,
    )


@app.command(epilog="Example: linearize report out/smollm2")
@takes_console
def report(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A converted folder.", show_default=False)],
    *,
    console: Console,
) -> None:
    """Write DIR/report.html and the model card.

    One page with every figure and table that DIR holds.
    """
    from linearize.report import report as run

    run(out, console)


@recipes_app.command("ls", epilog="Example: linearize recipes ls")
def recipes_ls(
    json: JsonOption = False,
) -> None:
    """List the recipes."""
    console = Console(json=json)
    # The first comment line of a recipe says what it makes.
    rows = [(name, _first_comment(recipes_dir() / name / "recipe.yaml")) for name in recipe_names()]
    console.table("recipes", ("name", "what it makes"), rows)
    console.result({"recipes": dict(rows)})


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


@recipes_app.command("show", epilog="Example: linearize recipes show default")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe, or default for every key with its default.")],
    json: JsonOption = False,
) -> None:
    """Print a recipe."""
    if json:
        made = Recipe() if name == "default" else Recipe.resolve(name)
        Console(json=True).result({"recipe": made.values()})
    elif name == "default":
        print(Recipe().to_yaml("Every key with its default."), end="")
    else:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")


@recipes_app.command("cp", epilog="Example: linearize recipes cp smollm2-135m-cpu-demo my.yaml")
def recipes_cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The recipe to copy.")],
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Where to; NAME.yaml in this folder.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace PATH if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Copy a recipe, to change it."""
    source = find_recipe(name)
    target = path or Path(f"{source.parent.name}.yaml")
    if target.is_dir():
        target /= f"{source.parent.name}.yaml"
    if target.exists() and not overwrite:
        raise UsageError("the file exists", value=str(target), fix="name another, or pass --overwrite")
    shutil.copyfile(source, target)
    if json:
        Console(json=True).result({"path": str(target)})
    else:
        print(f"wrote {target}: run it with linearize convert MODEL OUT -r {target}")


def _explain(error: Exception) -> UserError:
    """What is said of whatever ended a command: one line and an exit code."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ParserError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "linearize"
        return UsageError(error.format_message().rstrip("."), fix=f"see {command} --help")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        need = memory_needed_by(error)
        what = f"out of memory ({need})" if need else "out of memory"
        return UserError(what, fix="lower --align-batch-tokens, --align-context or --calibrate-tokens")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return UserError(
            "no space left on the disk", value=error.filename, fix="free some (linearize plan says how much)"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(error.strerror or type(error).__name__, value=error.filename)
    return UserError(f"{type(error).__name__}: {error}", fix="not expected; -v shows where it comes from")


def run(argv: Sequence[str]) -> int:
    """Run a command line without leaving the process; returns the exit code."""
    try:
        code = app(args=list(argv), prog_name="linearize", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); stop without a word, also in the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return 2
        told = _explain(error)
        if told is not error:
            told.__cause__ = error
        verbose = any(re.fullmatch(r"--verbose|-[qv]*v[qv]*", word) for word in argv)
        # What a user can mend; when one process ends, the others fail by losing it.
        mendable = told is error and not isinstance(error, UsageError)
        Console(verbose=verbose).error(told, everywhere=mendable)
        return told.exit_code


def main() -> None:
    """Entry point of the `linearize` command."""
    # Before torch starts its threads: where other programs keep the cores busy, threads that spin while they wait for
    # each other stall every parallel region.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(run(sys.argv[1:]))
