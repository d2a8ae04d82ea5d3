"""Turns softmax attention layers of a pretrained language model into linear-time mixers.

`import linearize` makes transformers know the converted models: `AutoModelForCausalLM.from_pretrained(OUT)` then works.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"


def _started_as_command() -> bool:
    """Whether this import is the first step of the `linearize` command: its console script or `python -m linearize`.

    Registering costs seconds (torch and transformers), which `linearize --help` must not pay. A command that opens a
    converted model imports linearize.student, which registers, when it runs. While `-m` looks its module up,
    sys.argv[0] is "-m" and the module's name stands before the arguments in sys.orig_argv.
    """
    if sys.argv[:1] == ["-m"]:
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
    return bool(sys.argv) and Path(sys.argv[0]).name.removesuffix(".exe") == __name__


if not _started_as_command():
    from linearize import student as student  # registers as it is imported
