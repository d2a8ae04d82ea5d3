"""Checkpoints on disk: a lazy reader, a sharded atomic writer, and the state of a run that can be resumed.

What a crash, a kill or a full disk may leave in OUT is one of two things: a folder without config.json, which no
library loads and which the same command resumes; or a whole checkpoint. Three rules make it so. Every file is written
under a temporary name, forced to the disk and renamed. config.json is the last file to appear and the first to go. And
the folder OUT/.linearize, which marks a folder as ours, exists before anything else is touched.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linearize.errors import UserError, one_line
from linearize.families import STUDENT_PREFIX

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
STATE = ".linearize"
PARTIAL = ".partial"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# The limit of the safetensors library; a larger number in the first eight bytes means that the file is something else.
MAX_HEADER = 100_000_000
COPY_AGAIN = "download or copy the file again"


def format_bytes(n: float) -> str:
    """A size for reading, decimal units: 512 B, 1.3 MB, 4.92 GB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= 0.9995 * limit:  # which three figures would round up to the unit
            return f"{n / limit:.3g} {unit}"
    return f"{n:.0f} B"


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes [start, end) of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, from its header; no tensor data is read.

    Raises UserError when the file is missing, not a safetensors file, or not exactly as long as its header says.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= MAX_HEADER:
                raise UserError(f"{path} is not a safetensors file", fix=COPY_AGAIN)
            if size < 8 + length:
                raise UserError(
                    f"{path} is cut short: its header alone has {8 + length} bytes, the file {size}", fix=COPY_AGAIN
                )
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, spec, 8 + length) for name, spec in header.items()}
    except _Duplicate as error:
        raise UserError(f"{path} holds the tensor {error} twice", fix=COPY_AGAIN) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} has a damaged header", fix=COPY_AGAIN) from error
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.start != position or entry.end - entry.start != nbytes:
            raise UserError(f"{path} has a damaged header: the place of tensor {name!r} is wrong", fix=COPY_AGAIN)
        position = entry.end
    if position > size:
        raise UserError(f"{path} is cut short: it needs {position} bytes and has {size}", fix=COPY_AGAIN)
    if position < size:
        raise UserError(f"{path} is {size - position} bytes longer than its header says", fix=COPY_AGAIN)
    return entries


class _Duplicate(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Duplicate(next(name for name in names if names.count(name) > 1))
    return found


def _entry(path: Path, name: str, spec: dict, base: int) -> Entry:
    if spec["dtype"] not in DTYPES:
        raise UserError(f"{path}: tensor {name!r} has a dtype that cannot be read", value=spec["dtype"])
    shape = tuple(spec["shape"])
    start, end = spec["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)):
        raise ValueError(name)
    return Entry(path, DTYPES[spec["dtype"]], shape, base + start, base + end)


def read_tensor(entry: Entry) -> Tensor:
    """The tensor itself, on the CPU, in memory of its own (not a mapping, which would break if the file changed)."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    try:
        with open(entry.file, "rb") as file:
            file.seek(entry.start)
            got = file.readinto(_bytes_of(tensor))
    except OSError as error:
        raise UserError(f"cannot read {entry.file}: {error.strerror}") from error
    if got != entry.end - entry.start:
        raise UserError(f"{entry.file} became shorter while it was being read", fix=COPY_AGAIN)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class TensorIndex:
    """The tensors of a checkpoint folder by name. Opening reads headers only; `get` reads one tensor."""

    def __init__(self, folder: Path, entries: dict[str, Entry]) -> None:
        self.folder = folder
        self._entries = entries

    @classmethod
    def open(cls, folder: Path) -> TensorIndex:
        """Index model.safetensors, or else the shards named by model.safetensors.index.json.

        Raises UserError for: neither there, a missing, cut or damaged shard, a tensor in two shards, an index and
        shards that disagree, and an index naming anything but plain files of the folder.
        """
        folder = Path(folder)
        if (folder / SINGLE).exists():
            return cls(folder, read_header(folder / SINGLE))
        if not (folder / INDEX).exists():
            shards = sorted(path.name for path in folder.glob("*.safetensors"))
            if shards:
                raise UserError(
                    f"{folder} has safetensors files ({shards[0]}, ...) but neither {SINGLE} nor {INDEX}",
                    fix=f"copy {INDEX} as well",
                )
            raise UserError(f"{folder} has no safetensors weights", fix=f"it should hold {SINGLE} or {INDEX}")
        weight_map = read_weight_map(folder / INDEX)
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of the {len(files)} shards that {INDEX} names: {some(missing)}",
                fix="download or copy the missing files",
            )
        entries: dict[str, Entry] = {}
        for name in files:
            shard = read_header(folder / name)
            twice = entries.keys() & shard.keys()
            if twice:
                raise UserError(f"{folder} holds tensors twice, in two shards: {some(twice)}")
            entries.update(shard)
        wrong = [n for n, file in weight_map.items() if n not in entries or entries[n].file.name != file]
        if wrong:
            raise UserError(f"{folder / INDEX} names tensors that their shards do not hold: {some(wrong)}")
        extra = entries.keys() - weight_map.keys()
        if extra:
            raise UserError(f"{folder} has shards with tensors that {INDEX} does not name: {some(extra)}")
        return cls(folder, {name: entries[name] for name in weight_map})

    def without(self, names: Collection[str]) -> TensorIndex:
        """The same index less some tensors."""
        return TensorIndex(self.folder, {n: e for n, e in self._entries.items() if n not in names})

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def file(self, name: str) -> Path:
        """The file a tensor lies in."""
        return self._entries[name].file

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.end - entry.start for entry in self._entries.values())

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored. KeyError for a name that is not in the index."""
        return read_tensor(self._entries[name])


def read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)["weight_map"]
        pairs = list(weight_map.items())
    except _Duplicate as error:
        raise UserError(f"{path} names {error} twice") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a checkpoint index", fix=COPY_AGAIN) from error
    for _, file in pairs:
        # A plain name of the folder: an index must not be able to point at other files of the machine.
        if not isinstance(file, str) or re.fullmatch(r"[^/\\\0]+\.safetensors", file) is None:
            raise UserError(f"{path} names a shard that is not a plain .safetensors file name", value=file)
    return weight_map


def some(names: Collection[str], most: int = 5) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn a failure of the file system under `path` into a UserError. needed: bytes that were to be written."""
    try:
        yield
    except OSError as error:
        amount = "" if needed is None else f" for {format_bytes(needed)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left{amount} at {path}",
                fix="free some space or name an OUT on another disk; --dtype bfloat16 halves a float32 checkpoint",
            ) from error
        if error.errno == errno.EFBIG:
            raise UserError(
                f"the file system of {path} refuses a file of this size{amount}", fix="lower --max-shard-size"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"cannot write to {path}: {error.strerror}", fix="name an OUT folder that you may write to"
            ) from error
        raise UserError(f"cannot write to {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Force the names of a folder to the disk: a rename or an unlink is durable only after this."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_object(path: Path, fix: str) -> dict:
    """The object in a JSON file. UserError, with `fix`, when it cannot be read or holds something else."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("cannot be read", value=path, fix=f"{one_line(error)}; {fix}") from error
    if not isinstance(fields, dict):
        raise UserError("not a JSON object", value=path, fix=fix)
    return fields


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, durably: temporary name, fsync, rename. Raises UserError."""
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL)
    with writing(path, len(data)):
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """As `atomic_write_bytes`, in UTF-8."""
    atomic_write_bytes(path, text.encode())


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write CPU tensors, contiguous and not sharing memory, as one safetensors file forced to the disk.

    Returns the sha256 of the file, hexadecimal. The bytes are those of `safetensors.torch.save_file` with
    `metadata={"format": "pt"}`; writing here gives real OSErrors, fsync and the hash without reading back.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of eight
    digest = hashlib.sha256()
    with writing(path, 8 + len(text) + position):
        try:
            with open(path, "wb") as file:
                for piece in (len(text).to_bytes(8, "little"), text, *(_bytes_of(tensors[name]) for name in order)):
                    file.write(piece)
                    digest.update(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)  # gives the space back
            raise
    return digest.hexdigest()


def own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares memory with nothing."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


class ShardWriter:
    """Writes a checkpoint's tensors one by one, in shards of at most `max_shard_size` bytes (larger for one tensor
    that is larger). At most one shard is held in memory.

    Tied weights are the caller's business: give them once. Nothing carries its final name before `finish`. A folder
    with a config.json is refused: while it exists, somebody may be reading the checkpoint. Use RunState.writer.
    """

    def __init__(self, out: Path, max_shard_size: int) -> None:
        self.out, self.max_shard_size = Path(out), max_shard_size
        if (self.out / CONFIG).exists():
            raise RuntimeError(f"{self.out} holds a checkpoint; config.json goes first")
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            _remove_weights(self.out)
        self._buffer: dict[str, Tensor] = {}
        self._buffered = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()
        self.total_size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, from any device; it is copied. Raises UserError when the disk fails."""
        if name in self._names:
            raise ValueError(f"tensor {name!r} was written already")
        if self._buffer and self._buffered + tensor.nbytes > self.max_shard_size:
            self._flush()
        self._names.add(name)
        self._buffer[name] = own_copy(tensor)
        self._buffered += tensor.nbytes
        self.total_size += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give every shard its final name, and write the index if there are several."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        with writing(self.out):
            for number, (partial, names) in enumerate(self._shards, 1):
                file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
                os.replace(partial, self.out / file)
                weight_map.update(dict.fromkeys(names, file))
            sync_folder(self.out)
        if count > 1:
            index = {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(weight_map.items()))}
            atomic_write_text(self.out / INDEX, json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        if self._buffer:
            partial = self.out / f"model-{len(self._shards) + 1:05d}.safetensors{PARTIAL}"
            write_safetensors(partial, self._buffer)
            self._shards.append((partial, list(self._buffer)))
            self._buffer, self._buffered = {}, 0


def _remove_weights(folder: Path) -> None:
    for pattern in (INDEX, "model*.safetensors", f"*{PARTIAL}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


# ---- a run and its folder -------------------------------------------------------------------------------------------


def output_status(out: Path) -> str:
    """What OUT is: "absent" (or empty), "unfinished" (a run of ours), "finished" (a checkpoint of ours), "foreign"."""
    out = Path(out)
    if not out.exists():
        return "absent"
    if not out.is_dir():
        return "foreign"
    if (out / CONFIG).exists():
        try:
            model_type = json.loads((out / CONFIG).read_bytes())["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            return "foreign"
        return "finished" if isinstance(model_type, str) and model_type.startswith(STUDENT_PREFIX) else "foreign"
    if (out / STATE).is_dir():
        return "unfinished"
    return "foreign" if any(out.iterdir()) else "absent"


class RunState:
    """One run and its output folder OUT: lock, recipe, finished layers, and the order in which a checkpoint appears.

        with RunState(out, recipe, overwrite=...) as run:
            if run.finished: ...                        # a checkpoint is there already; nothing was touched
            if (saved := run.load_layer(i)) is None:    # redo the layer
                run.save_layer(i, tensors, info)
            writer = run.writer(max_shard_size); writer.add(...); writer.finish()
            ...other files, by atomic_write_*...
            run.finish(config)                          # config.json last; then the state is removed

    recipe     everything that decides the result, as nested dicts of JSON values: a resumed run must have the same
    overwrite  start afresh: removes the old checkpoint (config.json first) and the old state
    needed     bytes the run will need in OUT, what it has saved there included; checked now, so as not to fail hours
               later
    say        receives lines for the user (a damaged layer file that is redone)

    Raises UserError: OUT is not ours, another process works in it, another recipe began it, not enough space.
    """

    def __init__(
        self,
        out: Path,
        recipe: dict,
        *,
        overwrite: bool = False,
        needed: int = 0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.out = Path(out)
        self.folder = self.out / STATE
        self._say = say or (lambda text: print(text, file=sys.stderr))
        self._lock: int | None = None
        self._joined = False
        _refuse_foreign(self.out)
        self.finished = output_status(self.out) == "finished" and not overwrite
        if self.finished and not self.folder.exists():
            return
        with writing(self.out):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.folder / "lock", self.out)
        try:
            # Again, now that nobody else can change it.
            self.finished = output_status(self.out) == "finished" and not overwrite
            if self.finished:
                self.clear()  # what a run killed right after its last file left behind
                return
            with writing(self.out):
                self._begin(overwrite)
                held = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            self._check_space(needed - held)
            self._check_recipe(json.loads(json.dumps(recipe)))
        except BaseException:
            self.close()
            raise

    @classmethod
    def join(cls, out: Path, say: Callable[[str], None] | None = None) -> RunState:
        """The run that another process of ours holds the lock of: loads and saves, and decides nothing."""
        run = cls.__new__(cls)
        run.out = Path(out)
        run.folder = run.out / STATE
        run.finished = output_status(run.out) == "finished"
        run._say = say or (lambda text: None)
        run._lock, run._joined = None, True
        return run

    def _begin(self, overwrite: bool) -> None:
        if overwrite:
            (self.out / CONFIG).unlink(missing_ok=True)
            sync_folder(self.out)
            for name in ("linearize.json", "metrics.jsonl"):
                (self.out / name).unlink(missing_ok=True)
            self._remove_state()
        _remove_weights(self.out)
        for path in self.folder.glob(f"*{PARTIAL}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise UserError(
                f"{self.out} has {format_bytes(free)} free and the run needs {format_bytes(needed)}",
                fix="free some space or name an OUT on another disk",
            )

    def _check_recipe(self, recipe: dict) -> None:
        path = self.folder / "recipe.json"
        if not path.exists():
            self._remove_state()  # layers without a recipe could belong to any
            atomic_write_text(path, json.dumps(recipe, indent=2))
            return
        try:
            old = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is damaged", fix="start afresh with --overwrite") from error
        difference = recipe_difference(old, recipe)
        # Of the run or of a part of it. Sampled text has no record: its name tells what made it.
        kept = [*self.folder.glob("*.safetensors"), *self.folder.glob("*/*.json")]
        if difference and kept:
            raise UserError(
                f"{self.out} was begun with another recipe: {difference}",
                fix="give the same recipe, another OUT, or --overwrite",
            )
        if difference:  # nothing was saved: the first try failed early, and its message may have asked for this
            atomic_write_text(path, json.dumps(recipe, indent=2))

    def save(self, name: str, tensors: dict[str, Tensor], info: dict | None = None) -> None:
        """Keep tensors and JSON values under a name ([a-z0-9-]), durably: a kill after this returns loses nothing."""
        data, record = self._files(name)
        partial = data.with_name(data.name + PARTIAL)
        with writing(self.out):
            # The record, which holds the hash, goes before its data changes and comes back after.
            record.unlink(missing_ok=True)
        digest = write_safetensors(partial, {n: own_copy(t) for n, t in tensors.items()})
        with writing(self.out):
            os.replace(partial, data)
            sync_folder(self.folder)
        atomic_write_text(record, json.dumps({"sha256": digest, "info": info or {}}))

    def load(self, name: str) -> tuple[dict[str, Tensor], dict] | None:
        """What `save` kept, or None: never saved, or damaged since (then a line says so and it counts as not saved)."""
        data, record = self._files(name)
        if not record.exists():
            return None
        try:
            kept = json.loads(record.read_bytes())
            with open(data, "rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == kept["sha256"]
            if whole:
                return {n: read_tensor(entry) for n, entry in read_header(data).items()}, kept["info"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._say(f"{data} is damaged: {name} is done again")
        record.unlink(missing_ok=True)  # another process of ours may have found it too
        return None

    def new_folder(self, name: str, needed: int = 0) -> Path:
        """An empty folder to write `needed` bytes of state into; `keep_folder` makes it count."""
        path = self.folder / (name + PARTIAL)
        self._check_space(needed)
        with writing(self.out):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        return path

    def keep_folder(self, name: str, kind: str, info: dict) -> None:
        """Make the folder that `new_folder` gave the one state of its kind, durably, in place of the one before it.

        Its files must have been forced to the disk. A kill leaves either the old state or the new one.
        """
        final = self.folder / name
        with writing(self.out):
            sync_folder(self.folder / (name + PARTIAL))
            shutil.rmtree(final, ignore_errors=True)  # a run that was killed before the record named it
            os.replace(self.folder / (name + PARTIAL), final)
            sync_folder(self.folder)
        atomic_write_text(self.folder / f"{kind}.json", json.dumps({"folder": name, "info": info}))
        for path in self.folder.glob(f"{kind}-*"):
            if path.is_dir() and path != final:
                shutil.rmtree(path)

    def kept_folder(self, kind: str) -> tuple[Path, dict] | None:
        """The folder and the JSON values that `keep_folder` kept, or None."""
        record = self.folder / f"{kind}.json"
        if not record.exists():
            return None
        kept = json.loads(record.read_bytes())
        return self.folder / kept["folder"], kept["info"]

    def drop_folder(self, kind: str) -> None:
        """Remove a kind of state that is not needed any more."""
        with writing(self.out):
            (self.folder / f"{kind}.json").unlink(missing_ok=True)
            for path in self.folder.glob(f"{kind}-*"):
                if path.is_dir():
                    shutil.rmtree(path)

    def part(self, name: str) -> RunState:
        """A part of this run with names of its own, in a folder of the state; it ends with the run."""
        part = RunState.join(self.out, self._say)
        part.folder = self.folder / name
        with writing(part.folder):
            part.folder.mkdir(exist_ok=True)
        return part

    def holds(self, name: str) -> bool:
        """Whether `save` kept something under this name; `load` checks it."""
        return self._files(name)[1].exists()

    def save_layer(self, i: int, tensors: dict[str, Tensor], info: dict) -> None:
        """`save` for a finished layer i."""
        self.save(f"layer-{i:05d}", tensors, info)

    def load_layer(self, i: int) -> tuple[dict[str, Tensor], dict] | None:
        """`load` for layer i: (tensors, info), or None when the layer is still to do."""
        return self.load(f"layer-{i:05d}")

    def finished_layers(self) -> list[int]:
        """The layers that were saved, ascending; `load_layer` checks them."""
        return sorted(int(path.stem.removeprefix("layer-")) for path in self.folder.glob("layer-*.json"))

    def writer(self, max_shard_size: int) -> ShardWriter:
        """A writer for the checkpoint in OUT."""
        return ShardWriter(self.out, max_shard_size)

    def finish(self, config: dict | str) -> None:
        """Write config.json, as the last file, and remove the state. config: its fields, or its text.

        The shards and their index must be there and whole; everything else in OUT must have been written before.
        """
        TensorIndex.open(self.out)
        text = config if isinstance(config, str) else json.dumps(config, indent=2) + "\n"
        atomic_write_text(self.out / CONFIG, text)
        self.finished = True
        self.clear()

    def clear(self) -> None:
        """Remove OUT/.linearize and give up the lock."""
        with writing(self.out):
            self._remove_state()
            (self.folder / "lock").unlink(missing_ok=True)
            with suppress(OSError):  # a process that is just being refused has put its lock file there
                self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Give up the lock and keep the state: what happens when the run stops early."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _files(self, name: str) -> tuple[Path, Path]:
        if self._lock is None and not self._joined:
            raise RuntimeError("the run is closed or was finished before")
        if re.fullmatch(r"[a-z0-9-]+", name) is None or name == "recipe":
            raise ValueError(f"not a name for saved state: {name!r}")
        return self.folder / f"{name}.safetensors", self.folder / f"{name}.json"

    def _remove_state(self) -> None:
        # The recipe last: layers without it are thrown away, while layers with a newer recipe would be believed.
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", "recipe.json"):
                path.unlink()
        sync_folder(self.folder)
        (self.folder / "recipe.json").unlink(missing_ok=True)


def _refuse_foreign(out: Path) -> None:
    if output_status(out) != "foreign":
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file", fix="name a folder for OUT")
    what = "a model that linearize did not write" if (out / CONFIG).exists() else "files that linearize did not write"
    raise UserError(f"{out} holds {what}", fix="name an empty or new folder for OUT")


def take_lock(path: Path, out: Path) -> int:
    """Lock `path` for this process and return its descriptor. The kernel drops the lock when the process ends."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # the folder went away in between: another run has just finished
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                return fd
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace") or "?"
            os.close(fd)
            raise UserError(
                f"another process ({owner}) is working in {out}", fix="wait for it, stop it, or name another OUT"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file we locked was removed by a run that has just finished


def recipe_difference(old: dict, new: dict, most: int = 5) -> str:
    """The keys in which two recipes differ, with both values, in words; "" when they are equal."""
    before, now = _flat(old), _flat(new)
    absent = "not set"
    parts = []
    for key in sorted(before.keys() | now.keys()):
        if key not in before or key not in now or before[key] != now[key]:
            was, is_ = (json.dumps(side[key]) if key in side else absent for side in (before, now))
            parts.append(f"{key} was {was} and is {is_}")
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + str(key)] = value
    return flat
