import pickle

import pytest

from linearize.errors import UsageError, UserError


@pytest.mark.parametrize(
    "error, line",
    [
        (UserError("no such file"), "no such file"),
        (UserError("no such file", value="a b"), "no such file (got 'a b')"),
        (UserError("unknown key", value="mixr", fix="use mixer"), "unknown key (got 'mixr'): use mixer"),
        (UserError("must be positive", value=-3), "must be positive (got -3)"),
        (UserError("must not be empty", value=""), "must not be empty (got '')"),
        (UserError("full", fix="free\n  space"), "full: free space"),
        (UserError("zero counts as a value", value=0), "zero counts as a value (got 0)"),
    ],
)
def test_message_is_one_line(error, line):
    assert str(error) == line


def test_newlines_never_reach_the_terminal():
    text = str(UserError("a\nb", value="c\nd", fix="e\r\nf"))
    assert len(text.splitlines()) == 1
    assert text == r"a b (got 'c\nd'): e f"


def test_exit_codes():
    assert UserError("x").exit_code == 1
    assert UsageError("x").exit_code == 2
    assert issubclass(UsageError, UserError)


def test_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(UsageError("bad", value="v", fix="do this")))
    assert type(error) is UsageError
    assert (error.what, error.value, error.fix) == ("bad", "v", "do this")
    assert str(error) == "bad (got 'v'): do this"
