"""Mistakes a person can mend, told in one line: what is wrong, the value received, the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


def one_line(text: object) -> str:
    """The text with every run of white space, newlines included, made one blank."""
    return " ".join(str(text).split())


def memory_needed_by(error: BaseException) -> str | None:
    """What an out-of-memory error says was asked for, such as "20.00 MiB more needed"; None if it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f"{found[1]} more needed" if found else None


class UserError(Exception):
    """Something the user can put right. `str()` is one line; the command prints it and exits with `exit_code`.

    what   what is wrong, in words ("no such file")
    value  what was received, shown with repr for text so that blanks and empty strings are seen; None shows nothing
    fix    what to do next: a command, a flag or a key
    """

    exit_code = 1

    def __init__(self, what: str, *, value: object = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.value, self.fix = what, value, fix

    def __str__(self) -> str:
        line = one_line(self.what)
        if self.value is not None:
            line += f" (got {one_line(repr(self.value) if isinstance(self.value, str) else self.value)})"
        return f"{line}: {one_line(self.fix)}" if self.fix else line

    def __reduce__(self):
        # Exception's own rule rebuilds the error from `what` alone: the rest would be lost on the way from a worker.
        return _rebuild, (type(self), self.what, self.value, self.fix)


class UsageError(UserError):
    """The command itself was wrong: an unknown flag, a value that does not parse, two flags that exclude each other."""

    exit_code = 2


@contextmanager
def memory_for(fix: str) -> Iterator[None]:
    """Turn running out of memory into a UserError with that fix, unless something inside has named a nearer one."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, MemoryError)
        if not ours and type(error).__name__ != "OutOfMemoryError":  # torch's, which is slow to import
            raise
        what = "out of memory" if ours else "out of GPU memory"
        raise UserError(what, value=memory_needed_by(error), fix=fix) from error


def _rebuild(kind: type[UserError], what: str, value: object, fix: str | None) -> UserError:
    return kind(what, value=value, fix=fix)
