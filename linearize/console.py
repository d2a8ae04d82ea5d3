"""What the user sees: progress and log lines on stderr, results on stdout.

stdout carries tables for people, or with `json=True` exactly one JSON object and nothing else. stderr carries
everything that is not a result. Bars and colours appear only on a terminal; elsewhere, and with `quiet=True`, every
stage leaves one plain line. Only rank 0 of a distributed run speaks. rich is imported when something is first drawn,
so that importing this module costs nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from linearize.errors import one_line


def format_count(n: float) -> str:
    """Three significant figures with a decimal unit: 950, 1.2k, 34.5M, 2.07B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit:
            return f"{n / limit:.3g}{unit}" if abs(n) < 999.5 * limit else f"{n / limit:.0f}{unit}"
    return f"{n:.3g}" if abs(n) < 999.5 else f"{n:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration for reading: 0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_field(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else one_line(value)


class Bar:
    """Progress of one stage. `advance(n, loss=...)` counts n units and shows the fields, the latest value of each."""

    def __init__(self, label: str, total: float | None, unit: str, progress=None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.fields: dict[str, object] = {}
        self._start = time.monotonic()
        self._progress = progress
        self._task = None if progress is None else progress.add_task(label, total=total, note="")

    def advance(self, n: float = 1, **fields: object) -> None:
        """Count n more units (in the unit of the stage) and show or replace the named fields."""
        self.done += n
        self.fields.update(fields)
        if self._progress is not None:
            self._progress.update(self._task, completed=self.done, note=self._note())

    def _note(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        shown = [f"{name} {format_field(value)}" for name, value in self.fields.items()]
        return ", ".join([*shown, f"{format_count(self.done / seconds)} {self.unit}/s"])

    def summary(self) -> str:
        """The line the stage leaves behind."""
        seconds = time.monotonic() - self._start
        counted = [f"{format_count(self.done)} {self.unit}"] if self.done else []
        note = [self._note()] if self.done else [f"{k} {format_field(v)}" for k, v in self.fields.items()]
        return f"{self.label}: " + ", ".join([*note, *counted, format_seconds(seconds)])

    def close(self) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._task)


class Console:
    """The one sink of a command.

    quiet    no bars and no log lines; the one line per stage and warnings stay
    json     `result` prints one object on stdout; tables are not printed
    verbose  `error` adds the traceback
    """

    def __init__(self, quiet: bool = False, json: bool = False, verbose: bool = False) -> None:
        self.quiet, self.json, self.verbose = quiet, json, verbose
        self._silent = os.environ.get("RANK", "0") != "0"
        self._warned: set[str] = set()
        self._answered = False
        self._progress = None
        self._open_stages = 0
        self._tables = 0

    @contextmanager
    def stage(self, label: str, total: float | None, unit: str = "tok") -> Iterator[Bar]:
        """A labelled stage, such as `align (3/32)`, of `total` units (None: not known). Yields its Bar.

        On a terminal: a live bar with fields, rate and time left. Everywhere: one line when the stage has ended; none
        when it ended by an exception.
        """
        live = not (self.quiet or self._silent) and sys.stderr.isatty()
        if live and self._progress is None:
            self._progress = _progress()
            self._progress.start()
        self._open_stages += 1
        bar = Bar(label, total, unit, self._progress if live else None)
        try:
            yield bar
        finally:
            bar.close()
            self._open_stages -= 1
            if self._open_stages == 0 and self._progress is not None:
                self._progress.stop()
                self._progress = None
        self._write(bar.summary())

    def line(self, text: str) -> None:
        """One log line on stderr; not with quiet."""
        if not self.quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """A warning on stderr, said once for each text, also with quiet."""
        if text not in self._warned:
            self._warned.add(text)
            self._write(f"warning: {one_line(text)}", style="yellow")

    def error(self, error: BaseException, everywhere: bool = False) -> None:
        """`error: ...`, one line in red on stderr; with verbose the traceback goes before it.

        everywhere: also in a process that is otherwise silent, which then says its rank.
        """
        if everywhere and self._silent:
            print(f"process {os.environ['RANK']}: error: {one_line(error)}", file=sys.stderr, flush=True)
        if self.verbose and not self._silent:
            traceback.print_exception(error, file=sys.stderr)
        self._write(f"error: {one_line(error) or type(error).__name__}", style="bold red")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table on stdout; not with json. Floats show four significant figures, None a dash.

        Columns of numbers, also with a unit, go to the right. A blank line separates a table from the one before.
        """
        if self.json or self._silent:
            return
        from rich.table import Table
        from rich.text import Text

        on_terminal = sys.stdout.isatty()
        if self._tables:
            print()
        self._tables += 1
        table = Table(
            title=Text(title, style="bold cyan", no_wrap=True, overflow="ignore"),
            title_justify="left",
            show_header=any(columns),
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for position, name in enumerate(columns):
            cells = [row[position] for row in rows]
            numeric = any(_is_quantity(c) for c in cells) and all(_is_quantity(c) or c in (None, "-") for c in cells)
            table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=not on_terminal)
        for row in rows:
            table.add_row(*(Text(_cell(cell)) for cell in row))
        # Away from a terminal nothing may be wrapped or cut: the reader is a file or another program.
        _rich(sys.stdout, width=None if on_terminal else 10_000).print(table)

    def result(self, obj: object) -> None:
        """With json: the result, as the one JSON object of the command, on stdout. Without: nothing.

        Infinities and NaN, which JSON does not have, become null; paths become text; 0-d tensors and numpy scalars
        become numbers. A second call is a mistake of the program.
        """
        if not self.json or self._silent:
            return
        if self._answered:
            raise RuntimeError("a command prints one JSON object; this is the second")
        self._answered = True
        print(json.dumps(plain(obj), indent=2, allow_nan=False, ensure_ascii=False), file=sys.stdout, flush=True)

    def _write(self, text: str, style: str | None = None) -> None:
        if self._silent:
            return
        if self._progress is not None:
            # Through the live display, which moves the bars out of the way.
            self._progress.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        elif style is not None and sys.stderr.isatty():
            _rich(sys.stderr).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _is_quantity(value: object) -> bool:
    """A number, or one as text with a unit: 16.8 MB, 27.9 %, 1.2k."""
    if isinstance(value, str):
        return re.fullmatch(r"[\d.]+ ?([kKMGTP]?B|[kMGB]|%)", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    """A cell's text; blanks that indent it stay."""
    if value is None:
        return "-"
    indent = len(value) - len(value.lstrip(" ")) if isinstance(value, str) else 0
    return " " * indent + format_field(value)


def plain(value: object) -> object:
    """The same value with nothing in it that JSON lacks: paths as text, null for infinities and NaN."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rich(file, width: int | None = None):
    from rich.console import Console as RichConsole

    terminal = file.isatty()
    # Said outright, because rich would also colour a pipe when FORCE_COLOR is set.
    return RichConsole(file=file, width=width, force_terminal=terminal, color_system="auto" if terminal else None)


def _progress():
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=_rich(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
