"""Flags, exit codes, error lines, and what starting the command may cost."""

import errno
import json
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

import linearize
from linearize import __version__, cli
from linearize.errors import UserError
from linearize.recipe import OPTIONS, Recipe, recipe_names

# The surface that people script against. A change here is a change for them: say so in the commit.
RECIPE_FLAGS = """
    --recipe -r --set -s --help -h
    --revision --trust-remote-code --no-trust-remote-code
    --mixer --keep-softmax
    --calibrate-tokens --calibrate-select-tokens --calibrate-context --calibrate-taps --calibrate-time-scales
    --calibrate-ttt-width --calibrate-ttt-momentum --no-calibrate-ttt-momentum
    --select-tokens --select-context --select-questions --select-question-tokens --select-answers-weight
    --select-align-tokens --select-method
    --align-tokens --align-context --align-batch-tokens --align-lr --align-lr-min --align-warmup
    --align-order --align-cache-bytes --align-cache-dtype
    --distill-tokens --distill-context --distill-batch-tokens --distill-micro-tokens --distill-lr --distill-lr-mixer
    --distill-lr-end --distill-warmup --distill-train --distill-temperature --distill-ema --distill-checkpointing
    --no-distill-checkpointing --distill-compile --no-distill-compile
    --distill-top-k --distill-cache --distill-shard --distill-save-minutes
    --distill-save-steps --distill-long-tokens --distill-long-context --distill-long-lr
    --data --data-column --data-self-temperature --data-self-batch --data-positions --heldout-tokens --sample
    --device --dtype --seed --log-to --max-shard-size --overwrite --json --quiet -q --verbose -v
"""
RUN_FLAGS = "--seed --device --dtype --json --quiet -q --verbose -v --help -h"
FLAGS = {
    "": "--version --install-completion --show-completion --help -h",
    "plan": f"{RECIPE_FLAGS} --context --batch",
    "convert": RECIPE_FLAGS,
    "inspect": """
        --tokens --context --data --layers --mixers --out --revision --trust-remote-code --device --seed
        --json --quiet -q --verbose -v --help -h
    """,
    "export": """
        --to --allow-head-padding --check --dtype --max-shard-size --json --quiet -q --verbose -v --help -h
    """,
    "report": "--json --quiet -q --verbose -v --help -h",
    "eval": f"""
        --tasks --teacher --no-teacher --include-path --limit --num-fewshot --batch-size --chat --refresh
        --data --context --lengths --prompts {RUN_FLAGS}
    """,
    "generate": f"--max-new-tokens --temperature --top-p --chat --no-chat --system --teacher {RUN_FLAGS}",
    "bench": "--help -h",
    "bench decode": f"--teacher --context --batch --steps {RUN_FLAGS}",
    "bench kernels": "--help -h",
    "recipes": "--help -h",
    "recipes ls": "--json --help -h",
    "recipes show": "--json --help -h",
    "recipes cp": "--overwrite --json --help -h",
}


def commands():
    """Every command by its words, as the parser has it."""
    found = {"": typer.main.get_command(cli.app)}
    for words in list(FLAGS):
        if words:
            parent, _, name = words.rpartition(" ")
            found[words] = found[parent].commands[name]
    return found


def flags_of(command):
    root = commands()[""].make_context("linearize", [], resilient_parsing=True)
    context = command.make_context("linearize", [], parent=root, resilient_parsing=True)
    return {flag for p in command.get_params(context) for flag in (*p.opts, *p.secondary_opts) if flag.startswith("-")}


def test_flag_list_is_frozen():
    for words, command in commands().items():
        assert flags_of(command) == set(FLAGS[words].split()), words
        assert set(getattr(command, "commands", ())) == {
            other.rpartition(" ")[2] for other in FLAGS if other and other.rpartition(" ")[0] == words
        }


def test_every_recipe_key_has_its_flag():
    flags = flags_of(commands()["convert"])
    assert {option.flag for option in OPTIONS.values()} <= flags
    assert len({option.flag for option in OPTIONS.values()}) == len(OPTIONS)


@pytest.mark.parametrize("words", FLAGS)
def test_help(words, capsys):
    assert cli.run([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: linearize" in out and "Example: linearize" in out


def test_help_has_groups_and_defaults(capsys):
    cli.run(["convert", "--help"])
    out = capsys.readouterr().out
    text = " ".join(out.split())
    for group in ("Model", "What to convert", "Calibration", "Training, one layer at a time", "Data", "Execution"):
        assert f"\n{group}:\n" in out
    assert "Default: 25%." in text and "Default: 5GB." in text


@pytest.mark.parametrize("words", FLAGS)
def test_help_cuts_nothing_in_a_narrow_window(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(flag in out.replace(",", " ").split() for flag in FLAGS[words].split())
    assert "…" not in out and "...\n" not in out.partition("\n")[2]


# ---- a convert that does as it is told ------------------------------------------------------------------------------


@pytest.fixture
def convert(monkeypatch):
    """Stand-in for the job itself: records its call and raises what `error` says."""
    module = types.ModuleType("linearize.convert")
    module.calls, module.error = [], None

    def run(model, out, recipe, console):
        module.calls.append((model, out, recipe, console))
        if module.error is not None:
            raise module.error

    module.convert = run
    monkeypatch.setitem(sys.modules, "linearize.convert", module)
    return module


def test_convert_receives_the_resolved_recipe(convert, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("align: {tokens: 3k, lr: 1e-2}\n")
    argv = f"convert some/model out -r {path} -s align.lr=2e-2 -s run.seed=4 --seed 5 --no-trust-remote-code -q --json"
    assert cli.run(argv.split()) == 0
    [(model, out, recipe, console)] = convert.calls
    assert (model, out) == ("some/model", Path("out"))
    assert recipe == Recipe.resolve(
        None, ["align.tokens=3k", "align.lr=0.02", "run.seed=5", "run.quiet=1", "run.json=1"]
    )
    assert console.quiet and console.json and not console.verbose


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("no such thing", value="x", fix="do y"), 1, "error: no such thing (got 'x'): do y"),
        (MemoryError(), 1, "error: out of memory: lower --align-batch-tokens"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/a"),
            1,
            "error: no space left on the disk (got 'out/a')",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out/a"), 1, "error: Permission denied (got 'out/a')"),
        (ValueError("two\nlines"), 1, "error: ValueError: two lines: not expected; -v"),
        (KeyboardInterrupt(), 130, "stopped: state kept; run the same command to go on"),
    ],
)
def test_exit_codes_and_one_line(convert, capsys, error, code, line):
    convert.error = error
    assert cli.run(["convert", "m", "out"]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1 and err.strip().startswith(line)


def test_out_of_memory_says_how_much(convert, capsys):
    import torch

    convert.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1 GiB")
    assert cli.run(["convert", "m", "out"]) == 1
    assert "out of memory (2.50 GiB more needed): lower" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-v", "--verbose", "-qv"])
def test_traceback_with_verbose(convert, capsys, flag):
    convert.error = ValueError("inner")
    assert cli.run(["convert", "m", "out", flag]) == 1
    err = capsys.readouterr().err
    assert (
        "Traceback" in err and "in run" in err and err.strip().splitlines()[-1].startswith("error: ValueError: inner")
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        ("convert m", ["Missing argument 'OUT'", "linearize convert --help"]),
        ("convert m out --algn-lr 3", ["--algn-lr", "--align-lr"]),
        ("convert m out --align-lr", ["--align-lr", "argument"]),
        ("convert m out --align-lr fast", ["align.lr", "'fast'"]),
        ("convert m out extra", ["extra"]),
        ("convert m out -r nowhere", ["no such recipe", "'nowhere'"]),
        ("convert m out -s algn.lr=3", ["did you mean align.lr"]),
        ("convert m out --keep-softmax auto:0", ["1 or more"]),
        ("transform m", ["transform"]),
        ("recipes show nowhere", ["no such recipe"]),
    ],
)
def test_usage_errors(convert, capsys, argv, words):
    assert cli.run(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and err.startswith("error: ")
    for word in words:
        assert word in err
    assert convert.calls == []


# ---- small verbs ----------------------------------------------------------------------------------------------------


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"linearize {__version__}\n"


def test_recipes_verbs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["recipes", "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert list(listed) == recipe_names() and all(listed.values())
    assert cli.run(["recipes", "ls"]) == 0
    assert "smollm2-135m-cpu-demo" in capsys.readouterr().out
    assert cli.run(["recipes", "show", "default"]) == 0
    assert Recipe.from_yaml(capsys.readouterr().out) == Recipe()
    assert cli.run(["recipes", "show", "smollm2-135m-cpu-demo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["recipe"]
    assert shown["align.tokens"] == 16384 and set(shown) == {option.name for option in OPTIONS.values()}
    assert cli.run(["recipes", "cp", "smollm2-135m-cpu-demo", str(tmp_path / "mine.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "mine.yaml")}
    assert cli.run(["recipes", "show", "smollm2-135m-cpu-demo"]) == 0
    shown = capsys.readouterr().out
    assert Recipe.from_yaml(shown) == Recipe.resolve("smollm2-135m-cpu-demo")

    assert cli.run(["recipes", "cp", "smollm2-135m-cpu-demo"]) == 0
    assert Path("smollm2-135m-cpu-demo.yaml").read_text() == shown
    capsys.readouterr()
    assert cli.run(["recipes", "cp", "smollm2-135m-cpu-demo"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.run(["recipes", "cp", "smollm2-135m-cpu-demo", ".", "--overwrite"]) == 0


# ---- start-up -------------------------------------------------------------------------------------------------------

SCRIPT = "import sys\nfrom linearize.cli import main\nsys.exit(main())\n"  # what an installer writes


def start(tmp_path, how, *args):
    """Run the command's help as its console script or as a module; returns its processor seconds and the process."""
    script = tmp_path / "linearize"
    script.write_text(SCRIPT)
    entry = [str(script)] if how == "script" else ["-m", "linearize"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *args, *entry, "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done


@pytest.mark.parametrize("how", ["script", "module"])
def test_help_is_light(tmp_path, how):
    _, done = start(tmp_path, how, "-X", "importtime")
    assert done.returncode == 0 and "Usage: linearize" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "linearize.cli" in imported
    assert not {
        name for name in imported if name.partition(".")[0] in ("torch", "transformers", "numpy", "safetensors")
    }


@pytest.mark.parametrize("how", ["script", "module"])
def test_help_takes_less_than_a_second(tmp_path, how):
    """Processor time, the best of three, so that other work on the machine does not count."""
    assert min(start(tmp_path, how)[0] for _ in range(3)) < 1.0


def test_plain_import_registers():
    """Any module of the package will do, also in a process without arguments."""
    code = "import sys; sys.argv = []; import linearize.errors; from transformers import AutoConfig; "
    code += "print(AutoConfig.for_model('linearize_llama').model_type)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "linearize_llama\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    "argv, orig_argv, is_command",
    [
        # -m puts "-m" first while it looks for the module; the module's name is in orig_argv alone
        (["-m", "--help"], ["python", "-X", "dev", "-m", "linearize", "--help"], True),
        (["-m"], ["python", "-Im", "linearize"], True),
        (["-m"], ["python", "-mlinearize"], True),
        (["-m", "linearize"], ["python", "-m", "other", "linearize"], False),
        (["-m"], ["python", "-m", "linearize.recipe"], False),
        (["/x/bin/linearize", "plan"], ["python", "/x/bin/linearize", "plan"], True),
        (["C:/x/linearize.exe"], ["C:/x/linearize.exe"], True),
        (["train.py", "linearize"], ["python", "train.py", "linearize"], False),
        (["linearize.py"], ["python", "linearize.py"], False),
        (["-c"], ["python", "-c", "import linearize"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_what_counts_as_the_command(monkeypatch, argv, orig_argv, is_command):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert linearize._started_as_command() is is_command


def test_pipe_closed_by_its_reader():
    """`linearize recipes show default | true` ends without a traceback."""
    command = f"{sys.executable} -m linearize recipes show default"
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    done = subprocess.run(command.split(), stdout=reader.stdin, stderr=subprocess.PIPE, text=True, timeout=60)
    reader.stdin.close()
    assert done.stderr == "" and done.returncode in (0, 1)
