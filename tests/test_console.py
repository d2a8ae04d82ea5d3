import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linearize.console import Console, format_count, format_seconds
from linearize.errors import UserError


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """To be called in the test, after pytest has set sys.stderr: makes it a terminal that keeps what was drawn."""

    def opened():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return opened


def test_import_is_cheap():
    # As the command does; a plain `import linearize` registers the converted models and needs transformers.
    code = (
        "import sys; sys.argv = ['linearize']; import linearize.console; "
        "print(sorted({'rich', 'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_stage_off_a_terminal_is_one_plain_line(capsys, quiet):
    with Console(quiet=quiet).stage("align (3/32)", 2000) as bar:
        bar.advance(1000, loss=0.5)
        bar.advance(1000, loss=0.25)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"align \(3/32\): loss 0\.25, \S+ tok/s, 2k tok, \d\.\d s\n", err)


def test_a_stage_that_fails_leaves_no_line(capsys):
    console = Console()
    with pytest.raises(UserError), console.stage("align (1/4)", 10) as bar:
        bar.advance(5)
        raise UserError("stop")
    assert capsys.readouterr().err == ""


def test_a_stage_on_a_terminal_draws_bar_fields_rate_and_time_left(open_terminal):
    terminal = open_terminal()
    console = Console()
    with console.stage("align (3/32)", 2000) as bar:
        for _ in range(2):
            time.sleep(0.01)  # the time left is an estimate from two readings of a clock
            bar.advance(500, loss=0.5)
        console._progress.refresh()
        console.line("note [not markup]")
    drawn = terminal.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert "\x1b[" in drawn
    assert re.search(r"align \(3/32\).*50%.*loss 0\.5, \S+ tok/s.*\d:\d\d:\d\d", plain)
    assert "note [not markup]" in plain
    assert re.search(r"align \(3/32\): loss 0\.5", plain)


def test_quiet_on_a_terminal_draws_nothing_live(open_terminal):
    terminal = open_terminal()
    console = Console(quiet=True)
    with console.stage("align (1/2)", 10, unit="rows") as bar:
        bar.advance(10)
        console.line("not shown")
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().startswith("align (1/2): ")
    assert "not shown" not in terminal.getvalue()


def test_nested_stages_share_the_display(open_terminal):
    terminal = open_terminal()
    console = Console()
    with console.stage("outer", 2, unit="layers") as outer:
        for i in range(2):
            with console.stage(f"inner ({i + 1}/2)", 10) as bar:
                bar.advance(10)
            outer.advance(1)
    assert console._progress is None
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert plain.index("inner (1/2): ") < plain.index("inner (2/2): ") < plain.index("outer: ")


def test_warnings_are_said_once_also_when_quiet(capsys):
    console = Console(quiet=True)
    for _ in range(3):
        console.warn("no GPU\nfound: slow")
    console.warn("another")
    assert capsys.readouterr().err == "warning: no GPU found: slow\nwarning: another\n"


def test_errors_are_one_line_and_a_traceback_only_when_verbose(capsys):
    try:
        raise UserError("no such file", value="x", fix="give another")
    except UserError as caught:
        error = caught
    Console().error(error)
    assert capsys.readouterr().err == "error: no such file (got 'x'): give another\n"
    Console(verbose=True).error(error)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: no such file (got 'x'): give another\n")


def test_error_is_red_on_a_terminal(open_terminal):
    terminal = open_terminal()
    Console().error(UserError("bad [brackets]"))
    assert "\x1b[1;31m" in terminal.getvalue()
    assert "bad [brackets]" in terminal.getvalue()


def test_table_goes_to_stdout_without_colour_or_wrapping(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    wide = "x" * 300
    Console().table("layers [0]", ["layer", "error"], [[0, 0.123456], [wide, None]])
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "layers [0]"
    assert lines[1].split() == ["layer", "error"]
    assert lines[2].split() == ["0", "0.1235"]
    assert lines[3].split() == [wide, "-"]


def test_table_keeps_indents_and_puts_sizes_to_the_right(capsys):
    console = Console()
    console.table("first", ["", "size"], [["disk", "16.8 MB"], ["  checkpoint", "584 kB"], ["  none", None]])
    console.table("second", ["share"], [["27.9 %"]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines[2:]] == [
        "disk          16.8 MB",
        "  checkpoint   584 kB",
        "  none              -",
        "",
        "second",
        " share",
        "27.9 %",
    ]


def test_json_prints_one_object_and_nothing_else(capsys):
    console = Console(json=True)
    console.table("t", ["a"], [[1]])
    console.result({"a": float("nan"), "b": [1.5, float("inf")], "c": Path("x/y"), "d": (1, 2), "e": "é"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": [1.5, None], "c": "x/y", "d": [1, 2], "e": "é"}
    with pytest.raises(RuntimeError):
        console.result({})


def test_scalars_of_tensor_libraries_become_numbers(capsys):
    torch = pytest.importorskip("torch")
    Console(json=True).result({"loss": torch.tensor(0.5), "bad": torch.tensor(float("nan"))})
    assert json.loads(capsys.readouterr().out) == {"loss": 0.5, "bad": None}


def test_result_without_json_prints_nothing(capsys):
    Console().result({"a": 1})
    assert capsys.readouterr().out == ""


def test_only_rank_zero_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console = Console(json=True)
    with console.stage("align", 1) as bar:
        bar.advance(1)
    console.line("a")
    console.warn("b")
    console.error(UserError("c"))
    console.table("d", ["e"], [[1]])
    console.result({})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "n, text",
    [(0, "0"), (950, "950"), (999.7, "1000"), (1200, "1.2k"), (34_560_000, "34.6M"), (2.07e9, "2.07B"), (0.51, "0.51")],
)
def test_format_count(n, text):
    assert format_count(n) == text


@pytest.mark.parametrize(
    "s, text",
    [(0.44, "0.4 s"), (12.4, "12 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_format_seconds(s, text):
    assert format_seconds(s) == text
