"""Text sampled from the teacher itself: training without data."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import Cache
from transformers.cache_utils import StaticLayer

from linearize.data.rows import Rows
from linearize.data.sources import RowSource
from linearize.errors import UserError

CPU_BATCH = 16
LARGEST_BATCH = 1024  # beyond it, decoding gains nothing
MEMORY_SHARE = 0.5  # of the device's memory, for the cache and the logits; the rest is for weights and the allocator
# The cache is read up to the next multiple of this, not to its end; each such length is a graph of its own on a GPU.
READ_STEP = 128
# Steps between looks at the device, for progress and for logits that are not finite: each look waits for it.
LOOK_EVERY = 16


def self_text(model, tokenizer, tokens: int, context: int, **options) -> Rows:
    """The rows of `sample_text` (which has the same arguments) in memory: ids and positions [N, context] int64."""
    batches = list(sample_text(model, tokenizer, tokens, context, **options).batches)
    ids, positions = ([getattr(rows, name) for rows in batches] for name in ("ids", "positions"))
    return Rows(torch.cat(ids), torch.cat(positions), requested=tokens)


def sample_text(
    model,
    tokenizer,
    tokens: int,
    context: int,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    device: str | torch.device = "cpu",
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
    cache_path: Path | None = None,
    graphs: bool | None = None,
    rank: int = 0,
    world: int = 1,
) -> RowSource:
    """Sample rows of text from a causal language model `model` (transformers, already on `device`), data-free.

    Every document starts with the tokenizer's BOS, where it adds one, and a token drawn uniformly from the vocabulary
    without special tokens; then the model is sampled at `temperature` until it ends the document (EOS) and the next
    one starts in the same row. A document never attends to the one before it, so all rows are full and positions
    restart exactly as in `pack_rows`.

    `tokens` is rounded up to whole rows. Batch b has its own generator, seeded from (`seed`, b): rows do not depend on
    how many were asked for, and with `cache_path` (a folder) finished batches are kept and read from there, so that a
    run that was killed goes on with the same rows. Without it they stay in memory. The same seed and batch size give
    the same bytes on a CPU. batch_size: rows sampled at once; None is that of the batches already kept, else what the
    device's memory holds (16 on a CPU). graphs: whether decoding steps are replayed as CUDA graphs; None is yes on a
    GPU. `progress` is called with the number of tokens just made, every few steps.

    Process `rank` of `world` that share `cache_path` samples the batches rank::world; when all have returned, each of
    them can read all batches.

    Raises UserError for a temperature that is not positive and when the model's logits are not finite.
    """
    if temperature <= 0:
        raise UserError("the sampling temperature must be positive", value=temperature, fix="use 1.0")
    if tokens < 1 or context < 2 or (batch_size is not None and batch_size < 1):
        asked = f"{tokens} tokens, context {context}, batch {batch_size}"
        raise UserError("nothing to sample", value=asked, fix="ask for at least 1 token, context 2, batch 1")
    if world > 1 and cache_path is None:
        raise UserError("processes share sampled text through a folder", value=f"{world} processes", fix="name one")
    device, wanted = torch.device(device), -(-tokens // context)
    prompt = _Prompt(model, tokenizer, device)
    key = _key(model, prompt, seed, context, temperature)
    batch_size = batch_size or _kept_size(cache_path, key) or _fitting(model, context, device)
    folder = None if cache_path is None else _cache_folder(Path(cache_path) / f"{key}-{batch_size}")
    batches = SampledBatches(folder, batch_size, context, wanted)
    report = progress or (lambda _: None)
    sampler = None
    for index in range(rank, len(batches), world):
        used = batches.size(index)
        if batches.load(index) is None:
            if sampler is None:
                graphs = device.type == "cuda" if graphs is None else graphs
                sampler = _Sampler(model, prompt, context, batch_size, temperature, graphs)
            batches.save(index, sampler.sample(seed, index, lambda steps, used=used: report(steps * used)))
        else:
            report(used * context)
    if sampler is not None and device.type == "cuda":
        del sampler  # the cache and the graphs hold much of the device's memory, and what comes next needs it
        torch.cuda.empty_cache()
    return RowSource(batches, f"{key}-{batch_size} {wanted}")


# ---- decoding -------------------------------------------------------------------------------------------------------


class _Prompt:
    """What begins and ends a document: BOS or None, the tokens that may come first, EOS tokens."""

    def __init__(self, model, tokenizer, device: torch.device):
        probe = tokenizer("a", add_special_tokens=True)["input_ids"]
        bos = tokenizer.bos_token_id
        self.bos = bos if bos is not None and probe[:1] == [bos] else None
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
        special = set(tokenizer.all_special_ids)
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # The embedding is often padded beyond the vocabulary; only ids the tokenizer knows may start a document.
        size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
        self.starts = torch.tensor([i for i in range(size) if i not in special], device=device)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self.first_free = 0 if self.bos is None else 1  # position of a document's random token


class _Slots(StaticLayer):
    """Keys and values of one layer, [batch, heads, context, dim]: all layers write at `slot` and read up to `length`.

    Sliding-window layers keep everything too: the mask hides what is out of the window, and which operations a step
    has does not depend on how far it is.
    """

    def __init__(self, context: int, slot: torch.Tensor):
        super().__init__(context)
        self.slot, self.length = slot, context

    def lazy_initialization(self, key_states, value_states) -> None:
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.max_cache_len, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> torch.Tensor:
        return self.slot[0]


class _Sampler:
    """Samples a batch of rows, one token of each a step.

    All that changes from step to step is in tensors that stay where they are, and no step looks at a value on the
    host: a step can be captured once for each length of the cache and replayed.
    """

    def __init__(self, model, prompt: _Prompt, context: int, batch: int, temperature: float, graphs: bool):
        self.model, self.prompt, self.context, self.temperature = model, prompt, context, temperature
        device = prompt.starts.device
        self.ids = torch.zeros(batch, context, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.visible = torch.zeros(batch, context, dtype=torch.bool, device=device)  # the row's present document
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(batch, _vocabulary(model), device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.generator = torch.Generator(device)
        self.cache = Cache(layers=[_Slots(context, self.slot) for _ in range(model.config.num_hidden_layers)])
        self.steps: dict[int, Callable[[], None]] = {}
        if graphs:
            self._capture()

    @torch.inference_mode()
    def sample(self, seed: int, index: int, look: Callable[[int], None]) -> dict[str, torch.Tensor]:
        """ids and positions [batch, context] int32 on the CPU; `look` is called with how many steps were made."""
        self._reset()
        mixed = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
        self.generator.manual_seed(int.from_bytes(mixed, "big"))
        for t in range(self.context):
            length = self._length(t)
            self.steps.get(length, lambda length=length: self._step(length))()
            done = t + 1
            if done % LOOK_EVERY == 0 or done == self.context:
                if not self.finite.item():
                    raise UserError(
                        "the teacher's logits are not finite",
                        value=f"by token {t} of batch {index}",
                        fix="use --dtype float32",
                    )
                look(LOOK_EVERY if done % LOOK_EVERY == 0 else done % LOOK_EVERY)
        return {"ids": self.ids.int().cpu(), "positions": self.positions.int().cpu()}

    def _length(self, t: int) -> int:
        return min(self.context, (t // READ_STEP + 1) * READ_STEP)

    def _reset(self) -> None:
        for tensor in (self.ids, self.positions, self.visible, self.position, self.slot, self.logits):
            tensor.zero_()
        self.finite.fill_(True)

    def _step(self, length: int) -> None:
        prompt, position = self.prompt, self.position
        for layer in self.cache.layers:
            layer.length = length
        # Every draw is made for every row, needed or not: the stream of random numbers never depends on the text.
        pick = torch.randint(len(prompt.starts), position.shape, generator=self.generator, device=position.device)
        # One draw from the softmax by the exponential race: argmax of p/E with E ~ Exp(1). multinomial would wait.
        # Clamped, for a 0 would win it whatever its p. As few passes over [batch, vocabulary] as there can be.
        race = torch.empty_like(self.logits).exponential_(generator=self.generator).clamp_(min=2**-24).log_()
        scaled = self.logits if self.temperature == 1 else self.logits / self.temperature
        drawn = torch.sub(scaled, race, out=race).argmax(dim=-1)
        token = torch.where(position > prompt.first_free, drawn, prompt.starts[pick])
        if prompt.bos is not None:
            token = token.masked_fill(position == 0, prompt.bos)
        self.ids.index_copy_(1, self.slot, token[:, None])
        self.positions.index_copy_(1, self.slot, position[:, None])
        self.visible.logical_and_((position != 0)[:, None]).index_fill_(1, self.slot, True)
        logits = self.model(
            input_ids=token[:, None],
            attention_mask=self.visible[:, :length],
            position_ids=position[:, None],
            cache=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.logits.copy_(logits)
        # What is not finite leaves no sum finite: one pass rather than the five of isfinite.
        self.finite.logical_and_(torch.isfinite(logits.sum(-1, dtype=torch.float32)).all())
        ended = (token[:, None] == prompt.ends).any(dim=-1) & (position > prompt.first_free)
        position.add_(1).masked_fill_(ended, 0)
        self.slot.add_(1)

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture a step for every length of the cache, if the model's code can be captured at all."""
        lengths = sorted({self._length(t) for t in range(self.context)})
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for length in lengths:
                self._reset()
                self._step(length)  # libraries and the cache set themselves up outside of the graph
        torch.cuda.current_stream().wait_stream(side)
        pool = None
        try:
            for length in lengths:
                graph = torch.cuda.CUDAGraph()
                graph.register_generator_state(self.generator)
                with torch.cuda.graph(graph, pool=pool):
                    self._step(length)
                # One memory for all of them: they never run at the same time.
                pool = pool or graph.pool()
                self.steps[length] = graph.replay
        except RuntimeError as error:
            self.steps.clear()
            warnings.warn(f"decoding without CUDA graphs, which is slower: {error}", stacklevel=2)


def _vocabulary(model) -> int:
    return model.get_output_embeddings().weight.shape[0]


def _fitting(model, context: int, device: torch.device) -> int:
    """Rows whose cache and logits fit into the device's memory, a power of two; the same on every machine of a kind."""
    if device.type != "cuda":
        return CPU_BATCH
    config, size = model.config, next(model.parameters()).element_size()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_row = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * context * size
    per_row += _vocabulary(model) * 4 * 6  # logits, their quotient, the race and temporaries in float32
    room = torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE
    room -= sum(weight.nbytes for weight in model.parameters())
    rows = min(LARGEST_BATCH, int(room // per_row))
    if rows < 1:
        raise UserError(
            "not even one row fits into the device's memory", value=f"{per_row:,} bytes a row", fix="a shorter context"
        )
    return 1 << (rows.bit_length() - 1)


# ---- on disk --------------------------------------------------------------------------------------------------------


class SampledBatches(Sequence[Rows]):
    """`rows` sampled rows in batches of `batch_size`, each read from `folder` when it is asked for (None: memory)."""

    def __init__(self, folder: Path | None, batch_size: int, context: int, rows: int):
        self.folder, self.batch_size, self.context, self.rows = folder, batch_size, context, rows
        self.memory: dict[int, dict[str, torch.Tensor]] = {}

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __getitem__(self, index: int) -> Rows:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.load(index)
        if batch is None:
            raise UserError("a part of the sampled text is gone", value=self._path(index), fix="run again to sample it")
        size = self.size(index)
        return Rows(batch["ids"][:size].long(), batch["positions"][:size].long())

    def __iter__(self) -> Iterator[Rows]:
        return (self[index] for index in range(len(self)))

    def size(self, index: int) -> int:
        """Rows of a batch that are used: all but in the last one."""
        return min(self.batch_size, self.rows - index * self.batch_size)

    def _path(self, index: int) -> Path:
        return self.folder / f"batch-{index:05d}.safetensors"

    def load(self, index: int) -> dict[str, torch.Tensor] | None:
        """ids and positions [batch_size, context] int32, or None when they are not there whole."""
        if self.folder is None:
            return self.memory.get(index)
        try:
            batch = load_tensors(self._path(index).read_bytes())
        except FileNotFoundError:
            return None
        except Exception:  # a damaged file is sampled again: the result is the same by construction
            return None
        shape = (self.batch_size, self.context)
        good = set(batch) == {"ids", "positions"} and all(tuple(tensor.shape) == shape for tensor in batch.values())
        return batch if good else None

    def save(self, index: int, batch: dict[str, torch.Tensor]) -> None:
        if self.folder is None:
            self.memory[index] = batch
            return
        name = self._path(index)
        partial = name.with_suffix(f".{os.getpid()}.tmp")
        try:
            partial.write_bytes(save_tensors(batch))
            os.replace(partial, name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                "the sampled text cannot be kept", value=name, fix=f"check it ({error.strerror})"
            ) from error


def _key(model, prompt: _Prompt, seed: int, context: int, temperature: float) -> str:
    """Name of the cache folder: changes with anything that changes the text, weights included (by a sample)."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(repr(("race", seed, context, temperature, prompt.bos, prompt.ends.tolist())).encode())
    digest.update(repr(prompt.starts.shape).encode())
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample)
    return digest.hexdigest()


def _kept_size(cache_path: Path | None, key: str) -> int | None:
    """The batch size of the batches that are already on disk."""
    kept = [] if cache_path is None else sorted(Path(cache_path).glob(f"{key}-*/batch-*.safetensors"))
    return int(kept[0].parent.name.rpartition("-")[2]) if kept else None


def _cache_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("the sampled text cannot be kept", value=folder, fix=f"check it ({error.strerror})") from error
    return folder
