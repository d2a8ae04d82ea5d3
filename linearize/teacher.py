"""Open a teacher (a folder, a .gguf file, a Hub id) and run it one block at a time.

Support is decided from config.json alone, before any weight is read or downloaded, and by transformers' own classes for
the family: no model code of a repository runs, and no pickle is ever opened. `BlockRunner` holds the embeddings, the
final norm and the head; a decoder layer is read when it is asked for and freed after use.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import initialization

from linearize.checkpoint import (
    CONFIG,
    COPY_AGAIN,
    INDEX,
    PARTIAL,
    SINGLE,
    ShardWriter,
    TensorIndex,
    atomic_write_bytes,
    atomic_write_text,
    read_weight_map,
    some,
    take_lock,
    writing,
)
from linearize.errors import UsageError, UserError, one_line
from linearize.families import STUDENT_PREFIX, Family, family_of
from linearize.replay import used_here

# Everything of a model repository that is neither weights nor code.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
CARD = "README.md"  # downloaded for the licence that it names, and not copied: the result has a card of its own
SIDE_FILES = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
GGUF_CACHE_FORMAT = 1
# Small shards: while a .gguf file is dequantised, one of them is held beside the whole model.
GGUF_SHARD = 250_000_000
# Position masks of packed rows are kept up to this many bytes, so that all layers of one batch share them.
MASK_CACHE = 256_000_000
# Logits of one chunk of `head_rows`, as a number of values: 128 MB in float32.
LOGITS_CHUNK = 2**25


@dataclass(frozen=True)
class Teacher:
    """A teacher whose config, family and tensor names and shapes have been checked; no weight has been read.

    source    as the user named it          revision  the Hub commit, None for local files
    folder    where its files lie           config    the transformers config, unquantised
    tensors   its weights by name           family    the entry of linearize.families
    """

    source: str
    revision: str | None
    folder: Path
    config: transformers.PreTrainedConfig
    family: Family
    tensors: TensorIndex
    trust_remote_code: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most of the weights are stored, by elements."""
        count = Counter()
        for name in self.tensors.names():
            count[self.tensors.dtype(name)] += math.prod(self.tensors.shape(name))
        return count.most_common(1)[0][0]

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        try:
            return transformers.AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # many libraries read the many formats, each with errors of its own
            raise UserError(
                f"cannot load the tokenizer of {self.source}: {_first_line(error)}",
                fix=f"its files belong beside the weights, in {self.folder}",
            ) from error

    @cached_property
    def generation_config(self) -> transformers.GenerationConfig | None:
        """The teacher's generation_config.json, or None when it has none."""
        if not (self.folder / "generation_config.json").exists():
            return None
        try:
            return transformers.GenerationConfig.from_pretrained(self.folder)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self.folder / 'generation_config.json'} is damaged: {_first_line(error)}") from error

    def copy_side_files(self, out: Path) -> None:
        """Copy tokenizer, chat template, generation config and licence to `out`, byte for byte where they exist.

        A tokenizer_config.json without a tokenizer_class is completed by saving the loaded tokenizer, because a folder
        with a model_type that a library does not know cannot be loaded without it.
        """
        for pattern in SIDE_FILES:
            for path in sorted(self.folder.glob(pattern)):
                if path.is_file():
                    atomic_write_bytes(out / path.name, path.read_bytes())
        templates = self.folder / "additional_chat_templates"
        if templates.is_dir():
            with writing(out):
                shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)
        settings = out / "tokenizer_config.json"
        if not settings.exists() or not _read_json(settings).get("tokenizer_class"):
            with writing(out):
                self.tokenizer.save_pretrained(out)

    def runner(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> BlockRunner:
        """A BlockRunner on `device` in `dtype` (None: as stored); attn_implementation: None for the family's."""
        return BlockRunner(
            self, torch.device(device), dtype or self.dtype, attn_implementation or self.family.softmax
        )


def open_teacher(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Teacher:
    """Open MODEL: an existing folder or .gguf file, or else a Hub id.

    revision           branch, tag or commit of a Hub id
    trust_remote_code  let the repository's own tokenizer code run; its model code never runs
    cache_dir          where dequantised .gguf files are kept; default $XDG_CACHE_HOME/linearize/gguf
    say                receives lines about slow steps

    Raises UserError: not found here nor on the Hub, not supported, already converted, quantised, pickled, damaged.
    """
    say = say or (lambda text: print(text, file=sys.stderr))
    path = Path(model).expanduser()
    if path.exists() and revision is not None:
        raise UsageError("a revision belongs to a Hub id, and this is a local path", value=model, fix="drop --revision")
    if path.is_dir():
        return _open_folder(path, model, None, trust_remote_code)
    if path.is_file():
        folder = _open_gguf(path, cache_dir or _default_cache(), say)
        return _open_folder(folder, model, None, trust_remote_code)
    if path.exists():
        raise UserError("neither a folder nor a file", value=model, fix="give a folder, a .gguf file or a Hub id")
    folder = _download(model, path, revision)
    return _open_folder(folder, model, folder.name, trust_remote_code)


# ---- a folder -------------------------------------------------------------------------------------------------------


def _open_folder(folder: Path, source: str, revision: str | None, trust_remote_code: bool) -> Teacher:
    family = _family_of_folder(folder, source)
    try:
        config = family.config_class().from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes check their fields with errors of several libraries
        raise UserError(f"{folder / CONFIG} is damaged: {_first_line(error)}") from error
    family_of(config)  # again, now that fields left out of the file have their defaults
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt*"), *folder.glob("pytorch_model*")])
        if pickles:
            raise UserError(
                f"{source} has only pickled weights ({pickles[0].name}), which can run code and are not opened",
                fix="convert them to safetensors where you trust them, with save_pretrained",
            )
    tensors = _check_weights(TensorIndex.open(folder), family, config, source)
    return Teacher(source, revision, folder, config, family, tensors, trust_remote_code)


def _family_of_folder(folder: Path, source: str) -> Family:
    path = folder / CONFIG
    if not path.exists():
        files = sorted(folder.glob("*.gguf"))
        if files:
            raise UserError(f"{source} is a folder of .gguf files", fix=f"name one of them, such as {files[0]}")
        raise UserError(f"{source} is not a model: {folder} has no {CONFIG}")
    fields = _read_json(path)
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type.startswith(STUDENT_PREFIX):
        teacher = ((fields.get("linearize") or {}).get("teacher") or {}).get("source")
        raise UserError(
            f"{source} is already converted", fix=f"convert its teacher{f', {teacher}' if teacher else ' instead'}"
        )
    return family_of(fields)


def _read_json(path: Path) -> dict:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return fields


def _check_weights(tensors: TensorIndex, family: Family, config, source: str) -> TensorIndex:
    """Compare names, shapes and dtypes with the family's model on the meta device; UserError lists what differs.

    Returns the index less what transformers also ignores (the rotary buffers of old checkpoints).
    """
    model = empty_model(family, config, source, tensors.names())
    wanted = stored_shapes(model, family)
    partner = _tied_partners(model)
    ignored = [r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]
    unexpected = [name for name in tensors.names() if name not in wanted]
    dropped = {name for name in unexpected if any(re.search(pattern, name) for pattern in ignored)}
    problems = {
        "missing": [n for n in wanted if n not in tensors and partner.get(n) not in tensors],
        "unexpected": [n for n in unexpected if n not in dropped],
        "of another shape": [
            f"{n} {list(tensors.shape(n))} for {list(wanted[n])}"
            for n in wanted
            if n in tensors and tensors.shape(n) != wanted[n]
        ],
        "not floating point of 16 bits or more": [
            f"{n} {tensors.dtype(n)}"
            for n in wanted
            if n in tensors and not (tensors.dtype(n).is_floating_point and tensors.dtype(n).itemsize > 1)
        ],
    }
    found = [f"{len(names)} {what} ({some(names)})" for what, names in problems.items() if names]
    if found:
        raise UserError(f"the weights of {source} do not fit its config.json: {'; '.join(found)}")
    return tensors.without(dropped)


def empty_model(family: Family, config, source: str, names: Collection[str] | None = None) -> nn.Module:
    """The family's model on the meta device. UserError when config.json describes none, or not that of the tensors.

    names: of the tensors in the checkpoint, where they are known. Their layers are counted first: a model is built a
    layer at a time, and a damaged config.json can ask for any number.
    """
    before, after = family.layers_prefix.split("{i}")
    layer = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    if names is not None:
        stored = max((int(match[1]) + 1 for match in map(layer.match, names) if match), default=0)
        if config.num_hidden_layers > stored:
            raise UserError(
                f"the weights of {source} do not fit its config.json: it names {config.num_hidden_layers} layers, and "
                f"nothing of {family.layers_prefix.format(i=stored)}* is there"
            )
    try:
        with torch.device("meta"), initialization.no_init_weights():
            model = family.causal_lm_class()(copy.deepcopy(config))
            model.tie_weights()  # which no_init_weights leaves out
            return model
    except Exception as error:  # model classes meet values that make no sense with errors of every kind
        problem = f"{type(error).__name__}: {_first_line(error)}"
        raise UserError(f"{source} has a config.json from which no model can be built ({problem})") from error


def stored_shapes(model: nn.Module, family: Family) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a checkpoint of `model`, tied ones under each of their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shapes |= family.stored(name, tensor.shape)
    return shapes


def _tied_partners(model: nn.Module) -> dict[str, str]:
    """For every tied weight, in both directions, the name of the other."""
    tied = model.all_tied_weights_keys
    return {**{source: target for target, source in tied.items()}, **tied}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return one_line(text.splitlines()[0]) if text else type(error).__name__


# ---- the Hub --------------------------------------------------------------------------------------------------------


def _download(model: str, path: Path, revision: str | None) -> Path:
    """The snapshot folder of a Hub id: first config and tokenizer, and when the family is supported, the weights."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    looked = f"no file or folder {path.absolute()}"
    try:
        validate_repo_id(model)
    except HFValidationError:
        raise UserError(f"no such model: {looked}, and not a Hub id either", value=model) from None
    if model.endswith(".gguf") or model.startswith((".", "~", "/")):
        raise UserError(f"no such model: {looked}", value=model)
    folder = _snapshot(model, revision, [CONFIG, INDEX, CARD, *SIDE_FILES, "additional_chat_templates/*"], looked)
    if not (folder / CONFIG).exists():
        raise UserError(f"{model} has no {CONFIG} on the Hub or in its cache", value=model)
    _family_of_folder(folder, model)
    # The commit, so that a push between the two downloads cannot mix two versions.
    weights = sorted(set(read_weight_map(folder / INDEX).values())) if (folder / INDEX).exists() else [SINGLE]
    folder = _snapshot(model, folder.name, weights, looked)
    missing = [name for name in weights if not (folder / name).exists()]
    if missing == [SINGLE]:
        raise UserError(
            f"{model} has no safetensors weights on the Hub or in its cache; pickled ones are not read",
            fix="connect to the network if the cache is only partly filled, or take another copy of the model",
        )
    if missing:
        raise UserError(
            f"{len(missing)} of {len(weights)} weight files of {model} are not in the Hub's cache: {some(missing)}",
            fix="connect to the network and run again",
        )
    return folder


def _snapshot(model: str, revision: str | None, patterns: list[str], looked: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    page = f"{huggingface_hub.constants.ENDPOINT}/{model}"
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated on the Hub", fix=f"accept its terms at {page}, then run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model} has no such revision on the Hub", value=revision, fix=f"see {page}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"no such model: {looked}, and the Hub has no {model} that you may read",
            fix="check the spelling; for a private one run `hf auth login`",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"no such model: {looked}, and the Hub cannot be reached and its cache lacks {model}{at}",
            fix="connect to the network, unset HF_HUB_OFFLINE, or give a local folder",
        ) from error
    except Exception as error:  # transports and storage back ends raise errors of their own
        if isinstance(error, OSError) and error.errno is not None:
            with writing(Path(huggingface_hub.constants.HF_HUB_CACHE)):
                raise
        raise UserError(
            f"cannot download {model}{at} from the Hub: {_first_line(error)}", fix="run again; finished files are kept"
        ) from error


# ---- .gguf files ----------------------------------------------------------------------------------------------------


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linearize" / "gguf"


def _open_gguf(path: Path, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder with the dequantised float32 weights of a .gguf file; made once for each file and kept."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError("not a model", value=str(path), fix="give a folder, a .gguf file or a Hub id")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise UserError(
            f"{path} is one part of a split .gguf file", fix="join the parts with `llama-gguf-split --merge`"
        )
    final = cache_dir / f"{path.stem}-{_gguf_key(path)}"
    if _whole(final):
        return final
    with writing(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    lock = take_lock(cache_dir / f"{final.name}.lock", cache_dir)
    try:
        if not _whole(final):
            partial = final.with_name(final.name + PARTIAL)
            with writing(cache_dir):
                for old in (partial, final):
                    shutil.rmtree(old, ignore_errors=True)
                partial.mkdir()
            try:
                _dequantise(path, partial, say)
                with writing(cache_dir):
                    os.replace(partial, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)
    return final


def _whole(folder: Path) -> bool:
    if not (folder / CONFIG).exists():
        return False
    try:
        TensorIndex.open(folder)
    except UserError:
        return False
    return True


def _gguf_key(path: Path) -> str:
    """Names the file's content (size, time, first and last megabyte) and the library that does the arithmetic."""
    status = path.stat()
    digest = hashlib.sha256()
    digest.update(f"{GGUF_CACHE_FORMAT} {transformers.__version__} {status.st_size} {status.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(2**20))
        file.seek(max(status.st_size - 2**20, 0))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _dequantise(path: Path, out: Path, say: Callable[[str], None]) -> None:
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with _gguf_trouble(path):
        config = transformers.AutoConfig.from_pretrained(**where)
    family = family_of(config)
    say(f"dequantising {path.name} to float32, once; kept in {out.parent}")
    with _gguf_trouble(path):
        model = family.causal_lm_class().from_pretrained(**where, config=config, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # transformers marks the loaded model as quantised, and such a config can be neither saved nor cast.
    fields = model.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    fields.update(architectures=[family.causal_lm], dtype="float32")
    tied = model.all_tied_weights_keys
    writer = ShardWriter(out, GGUF_SHARD)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            writer.add(name, tensor)
    writer.finish()
    # The loader's cycles would keep a second copy of the weights alive until some later collection.
    del model, tensor
    gc.collect()
    tokenizer.model_max_length = config.max_position_embeddings
    with writing(out):
        tokenizer.save_pretrained(out)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        transformers.GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    atomic_write_text(out / CONFIG, json.dumps(fields, indent=2) + "\n")


@contextmanager
def _gguf_trouble(path: Path) -> Iterator[None]:
    try:
        # Off a terminal the bars of the loader would be pages of text.
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}", fix="pip install gguf accelerate") from error
    except Exception as error:  # the parser indexes into whatever bytes it finds
        raise UserError(
            f"cannot read {path}: {_first_line(error)}", fix="download it again, or give the original model"
        ) from error


# ---- a block at a time ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """What a stub keeps, apart from the module: setting attributes of a module takes long, at every step."""

    output: Tensor | None = None
    hidden: Tensor | None = None
    kwargs: dict | None = None


class _Stub(nn.Module):
    """Stands in for a decoder layer. Recording, it keeps what it was called with; replaying, it returns `output`."""

    def __init__(self) -> None:
        super().__init__()
        self.call = _Call()

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        call = self.call
        if call.output is not None:
            return call.output
        call.hidden, call.kwargs = hidden_states, kwargs
        return hidden_states[:1, :1]  # the layers after this one and the final norm have nothing to compute


class BlockRunner:
    """Runs a teacher one decoder layer at a time; only embeddings, final norm and head stay in memory.

        hidden = runner.embed(ids)
        for i in range(runner.num_layers):
            with runner.block(i) as layer:
                hidden = layer(hidden, **runner.layer_kwargs(i, ids, positions))
        logits = runner.head(hidden)

    gives the logits of the whole model, bit for bit. Everything around the layers is done by the family's own class: it
    is built with stubs for layers, and the stubs see what real layers would. Weights need no gradient; modules are in
    evaluation mode. Not for use from several threads.
    """

    def __init__(self, teacher: Teacher, device: torch.device, dtype: torch.dtype, attn_implementation: str) -> None:
        self.teacher, self.device, self.dtype = teacher, device, dtype
        self.config = copy.deepcopy(teacher.config)
        self.config.dtype = dtype
        self.config._attn_implementation = attn_implementation
        # Parameters on the meta device, buffers (rotary frequencies, embedding scales) computed for real.
        with init_empty_weights(include_buffers=False), initialization.no_init_weights():
            model = teacher.family.causal_lm_class()(self.config)
        model.eval().requires_grad_(False)
        self._layers = model.model.layers
        self._stubs = nn.ModuleList(_Stub() for _ in self._layers)
        model.model.layers = self._stubs
        self._load_around_layers(model)
        self.model = model
        self._kwargs: OrderedDict[tuple, list[dict]] = OrderedDict()
        self._kwargs_bytes = 0

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def _load_around_layers(self, model: nn.Module) -> None:
        tensors, partner = self.teacher.tensors, _tied_partners(model)
        state = {name: self._weight(name) for name in model.state_dict() if name in tensors}
        for name, other in partner.items():
            # Tied weights share memory. Both stored and different: like transformers, believe the weights.
            if other in state and (name not in state or torch.equal(state[name], state[other])):
                state[name] = state[other]
        model.load_state_dict(state, strict=True, assign=True)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)

    def _weight(self, name: str) -> Tensor:
        stored = self.teacher.tensors.get(name)
        tensor = stored.to(self.device, self.dtype)
        # A sum in double precision is finite if every element is, and needs no second tensor of this size.
        if not torch.isfinite(tensor.sum(dtype=torch.float64)) and not torch.isfinite(tensor).all():
            file = self.teacher.tensors.file(name)
            if torch.isfinite(stored).all():
                raise UserError(f"tensor {name} of {file} is too large for {self.dtype}", fix="use --dtype bfloat16")
            raise UserError(f"tensor {name} of {file} holds NaN or infinite values", fix=COPY_AGAIN)
        return tensor

    def _parameter(self, name: str, shape: torch.Size) -> Tensor:
        """A weight of a layer, put together where the checkpoint holds it in parts."""
        parts = self.teacher.family.stored(name, shape)
        if list(parts) == [name]:
            return self._weight(name)
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        rows, start = whole.view(-1, shape[-1]), 0
        for part, (count, _) in parts.items():
            rows[start : start + count] = self._weight(part)
            start += count
        return whole

    @contextmanager
    def block(self, i: int) -> Iterator[nn.Module]:
        """Decoder layer i with its weights, as the family's own module; `layer(hidden, **kwargs)` returns [N, T, d].

        Its self_attn may be replaced. The layer is freed on exit unless the caller keeps a part of it. Raises UserError
        for a weight with NaN or infinite values.
        """
        # The config is shared, not copied: attention modules of one model read the same one.
        layer = copy.deepcopy(self._layers[i], {id(self.config): self.config})
        prefix = self.teacher.family.layers_prefix.format(i=i)
        state = {name: self._parameter(prefix + name, tensor.shape) for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, strict=True, assign=True)
        del state
        yield layer

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] -> what enters layer 0, [N, T, d], in the runner's dtype; the family's scaling included.

        UserError for an id that the model has no embedding for.
        """
        if ids.numel() and int(ids.max()) >= self.config.vocab_size:
            raise UserError(
                f"the tokenizer of {self.teacher.source} has tokens that its model lacks",
                value=f"token {int(ids.max())}, and the model has {self.config.vocab_size}",
                fix="put the tokenizer that belongs to the model beside its weights",
            )
        flat = ids.to(self.device).reshape(-1, 1)  # a row for each token: no mask is built
        self._run(input_ids=flat)
        hidden = self._stubs[0].call.hidden
        self._forget()
        return hidden.reshape(*ids.shape, -1)

    @torch.no_grad()
    def layer_kwargs(self, i: int, rows: Tensor, positions: Tensor | None = None) -> dict:
        """The keyword arguments with which the model would call layer i: rotary tables, mask of its type, position ids.

        rows       any tensor that begins with [N, T]: token ids or hidden states; only these sizes matter
        positions  [N, T] position ids, restarting at each document of a packed row: the mask is then block-diagonal.
                   None: 0..T-1 in every row.

        A new dict each time, of shared tensors.
        """
        n, t = rows.shape[:2]
        key = (n, t, None if positions is None else positions.cpu().numpy().tobytes())
        if key in self._kwargs:
            self._kwargs.move_to_end(key)
            used_here(self._kwargs[key][i])
            return dict(self._kwargs[key][i])
        embeds = torch.zeros((), dtype=self.dtype, device=self.device).expand(n, t, self.config.hidden_size)
        self._run(inputs_embeds=embeds, position_ids=None if positions is None else positions.to(self.device))
        self._kwargs[key] = made = [stub.call.kwargs for stub in self._stubs]
        self._kwargs_bytes += _nbytes(made)
        self._forget()
        while len(self._kwargs) > 1 and self._kwargs_bytes > MASK_CACHE:
            self._kwargs_bytes -= _nbytes(self._kwargs.popitem(last=False)[1])
        return dict(self._kwargs[key][i])

    def head(self, hidden: Tensor) -> Tensor:
        """What leaves the last layer, [..., d] -> logits [..., vocabulary]: final norm, head, and the family's scaling.

        Gradients flow to `hidden` if it wants them.
        """
        rows = hidden.to(self.device).reshape(-1, 1, hidden.shape[-1])
        last = self._stubs[-1].call
        last.output = rows
        try:
            logits = self._run(inputs_embeds=rows.detach()).logits
        finally:
            self._forget()
        return logits.reshape(*hidden.shape[:-1], -1)

    def head_rows(self, hidden: Tensor, rows: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """`head` in bounded memory: yields (slice of the flattened rows, logits [rows, vocabulary]), in order.

        rows: tokens at a time; None takes as many as make 2^25 logits.
        """
        rows = rows or max(1, LOGITS_CHUNK // self.config.vocab_size)
        flat = hidden.reshape(-1, hidden.shape[-1])
        for start in range(0, len(flat), rows):
            part = slice(start, min(start + rows, len(flat)))
            yield part, self.head(flat[part])

    def _run(self, **inputs: Tensor | None):
        return self.model(**inputs, attention_mask=None, use_cache=False)

    def _forget(self) -> None:
        for stub in self._stubs:
            stub.call.output = stub.call.hidden = stub.call.kwargs = None


def _nbytes(layers: list[dict]) -> int:
    shared = {id(value): value for kwargs in layers for value in kwargs.values()}  # most layers are given the same
    tensors = {id(leaf): leaf for leaf in tree_leaves(list(shared.values())) if isinstance(leaf, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())
