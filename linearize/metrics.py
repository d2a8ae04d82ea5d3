"""metrics.jsonl: one JSON object for each step of training, and where else these numbers can go."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from linearize.checkpoint import atomic_write_text, writing
from linearize.errors import UserError


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("run.log_to=tensorboard needs its package", fix="pip install tensorboard") from None
        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, name: str) -> None:
        try:
            import trackio
        except ImportError:
            raise UserError("run.log_to=trackio needs its package", fix="pip install trackio") from None
        self._trackio = trackio
        trackio.init(project="linearize", name=name)

    def log(self, values: dict[str, float], step: int) -> None:
        self._trackio.log({**values, "step": step})

    def close(self) -> None:
        self._trackio.finish()


class Metrics:
    """OUT/metrics.jsonl, appended to while a run trains, and a tracker beside it.

    A line says {"stage", "step", "loss", "lr", "tokens", ...}; lines of stage "align" have a "layer". After a stop or
    a roll-back `keep` drops the lines of the work that is done again.
    """

    def __init__(self, out: Path, log_to: str = "none", *, writes: bool = True) -> None:
        self.path = out / "metrics.jsonl"
        self._writes = writes
        self._tracker: Tracker | None = None
        if writes and log_to == "tensorboard":
            self._tracker = _TensorBoard(out / "tensorboard")
        elif writes and log_to == "trackio":
            self._tracker = _Trackio(out.name)

    def keep(self, lines: list[dict[str, Any]], distilled: float = math.inf) -> None:
        """Begin again with these lines, and with those of the first `distilled` steps of distillation in the file."""
        if not self._writes:
            return
        kept = [line for line in self._read() if line.get("stage") == "distill" and line["step"] <= distilled]
        atomic_write_text(self.path, "".join(json.dumps(line) + "\n" for line in [*lines, *kept]))

    def _read(self) -> list[dict[str, Any]]:
        lines = []
        if self.path.exists():
            for text in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(text))
                except ValueError:
                    break  # the process was killed in the middle of a line
        return lines

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Append lines, and send their numbers to the tracker."""
        if not self._writes:
            return
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        if self._tracker is not None:
            for line in lines:
                prefix = "/".join(str(line[name]) for name in ("stage", "layer") if name in line)
                numbers = {f"{prefix}/{n}": v for n, v in line.items() if n not in ("stage", "layer", "step")}
                self._tracker.log(numbers, line["step"])

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tracker is not None:
            self._tracker.close()


def read_lines(path: Path, stage: str) -> list[dict]:
    """The lines of a metrics.jsonl that are of one stage, in their order."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["stage"] == stage]


def median_speed(lines: Sequence[dict]) -> int:
    """Tokens a second of the median step, without the first third, in which things compile and allocate."""
    return round(statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 3 :]))
