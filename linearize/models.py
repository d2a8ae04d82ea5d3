"""A whole model, ready to run: a folder that convert or export wrote, or anything that open_teacher takes."""

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from linearize import student as student  # registers the converted architectures
from linearize.checkpoint import CONFIG, TensorIndex
from linearize.errors import UserError, one_line
from linearize.families import STUDENT_PREFIX
from linearize.teacher import TOKENIZER_FILES, Teacher, open_teacher

RECORD = "linearize.json"  # what convert and export leave beside the weights
DTYPES = ("auto", "float32", "bfloat16", "float16")
EDGE = 2**20  # bytes at either end of a weight file that its identity is made of


@dataclass(frozen=True)
class Model:
    """A model whose config and weight headers have been checked; no weight has been read.

    source   as the user named it                      folder  where its files lie
    ours     whether convert or export wrote it        teacher (source, revision) that its config names, or None
    opened   the Teacher, when it was opened as one
    """

    source: str
    revision: str | None
    folder: Path
    config: PreTrainedConfig
    ours: bool
    teacher: tuple[str, str | None] | None
    opened: Teacher | None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises UserError when there is none, or none that can be read."""
        if self.opened is not None:
            return self.opened.tokenizer
        try:
            return transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # many libraries read the many formats, each with errors of its own
            found = [name for name in TOKENIZER_FILES if (self.folder / name).exists()]
            raise UserError(
                f"{self.source} has no tokenizer that can be read",
                value=f"{', '.join(found)}: {one_line(error)[:200]}" if found else "no tokenizer file",
                fix="copy its teacher's tokenizer files into it, or convert again",
            ) from error

    def load(self, device: torch.device, dtype: str = "auto") -> PreTrainedModel:
        """The model with its weights on `device`, in evaluation mode. dtype: one of DTYPES; auto is as stored.

        A converted model's mixers stay float32. Raises UserError for weights that do not fit or are not there.
        """
        if self.opened is not None:
            load = self.opened.family.causal_lm_class().from_pretrained
        else:
            load = transformers.AutoModelForCausalLM.from_pretrained
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            with hushed():
                model = load(self.folder, dtype=kind, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"cannot load {self.source}: {one_line(error)[:300]}") from error
        return model.to(device).eval().requires_grad_(False)

    def identity(self) -> dict:
        """What decides this model's results: the commit of a Hub id, and the files' :func:`content_digest`."""
        return {"source": self.source, "revision": self.revision, "files": content_digest(self.folder)}


def open_model(source: str, *, revision: str | None = None, say: Callable[[str], None] | None = None) -> Model:
    """Open a converted or exported folder, or a teacher: a folder, a .gguf file or a Hub id.

    Raises UserError as open_teacher does, and for a converted folder with damaged or missing files.
    """
    folder = Path(source).expanduser()
    if not (folder / CONFIG).is_file():
        teacher = open_teacher(source, revision=revision, say=say)
        return Model(source, teacher.revision, teacher.folder, teacher.config, False, None, teacher)
    try:
        fields = json.loads((folder / CONFIG).read_bytes())
        model_type = fields["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / CONFIG} is damaged: {one_line(error)}") from error
    if not str(model_type).startswith(STUDENT_PREFIX) and not (folder / RECORD).is_file():
        teacher = open_teacher(source, revision=revision, say=say)
        return Model(source, None, folder, teacher.config, False, None, teacher)
    try:
        with hushed():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes check their fields with errors of several libraries
        raise UserError(f"{folder / CONFIG} is damaged: {one_line(error)[:300]}") from error
    TensorIndex.open(folder)
    return Model(source, None, folder, config, True, _named_teacher(folder, config), None)


def _named_teacher(folder: Path, config: PreTrainedConfig) -> tuple[str, str | None] | None:
    """The teacher that the config names; of an exported model, the one in its record."""
    named = (getattr(config, "linearize", None) or {}).get("teacher")
    if not named:
        try:
            named = json.loads((folder / RECORD).read_bytes()).get("teacher")
        except (OSError, ValueError, AttributeError):
            return None
    if not isinstance(named, dict) or not named.get("source"):
        return None
    return named["source"], named.get("revision")


def open_named_teacher(model: Model, *, say: Callable[[str], None] | None = None, fix: str) -> Model:
    """The teacher that a converted model names. fix: what to do when there is none to be had."""
    if model.teacher is None:
        raise UserError(f"{model.source} names no teacher: it is not a converted model", fix=fix)
    source, revision = model.teacher
    try:
        return open_model(source, revision=revision, say=say)
    except UserError as error:
        raise UserError(f"cannot open the teacher that {model.source} names: {error}", fix=fix) from error


def check_same_vocabulary(teacher: Model, student: Model) -> None:
    """Raise UserError unless both tokenizers give the same ids to the same tokens."""
    theirs, ours = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    if theirs == ours:
        return
    differ = [token for token in sorted(theirs.keys() | ours.keys()) if theirs.get(token) != ours.get(token)]
    raise UserError(
        f"the vocabularies of {teacher.source} and {student.source} differ",
        value=f"{len(theirs)} and {len(ours)} tokens, {len(differ)} of them not the same, such as {differ[0]!r}",
        fix="compare with the model that it was converted from",
    )


def free_memory(device: torch.device) -> None:
    """Hand back what a model that is gone had on the GPU, so that the next one finds room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def hushed() -> Iterator[None]:
    """transformers without its bars and its warnings: what went wrong is raised, and the rest is noise here."""
    library = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


def content_digest(folder: Path) -> str:
    """Hash of what a model's results depend on.

    Small files count whole. Of a weight file its size, time and first and last megabyte: reading all of it would take
    longer than many an evaluation.
    """
    digest = hashlib.sha256()
    names = {CONFIG, "generation_config.json", *TOKENIZER_FILES}
    for path in sorted(path for path in folder.iterdir() if path.name in names or path.suffix == ".safetensors"):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size}\n".encode())
        with open(path, "rb") as file:
            if path.suffix == ".safetensors":
                digest.update(f"{status.st_mtime_ns}\n".encode())
                digest.update(file.read(EDGE))
                file.seek(max(status.st_size - EDGE, 0))
            digest.update(file.read())
    return digest.hexdigest()[:32]
