"""Text sampled from the teacher itself: training without data."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import DynamicCache

from linearize.data.rows import Rows
from linearize.errors import UserError


def self_text(
    model,
    tokenizer,
    tokens: int,
    context: int,
    *,
    seed: int = 0,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
    cache_path: Path | None = None,
) -> Rows:
    """Sample rows of text from a causal language model `model` (transformers, already on `device`), data-free.

    Every document starts with the tokenizer's BOS, where it adds one, and a token drawn uniformly from the vocabulary
    without special tokens; then the model is sampled at `temperature` until it ends the document (EOS) and the next
    one starts in the same row. A document never attends to the one before it, so all rows are full and positions
    restart exactly as in `pack_rows`.

    `tokens` is rounded up to whole rows. Batch b has its own generator, seeded from (`seed`, b): rows do not depend on
    how many were asked for, and with `cache_path` (a folder) finished batches are kept, so that a run that was killed
    goes on with the same rows. The same seed gives the same bytes on a CPU. `progress` is called with the number of
    tokens just sampled.

    Raises UserError for a temperature that is not positive and when the model's logits are not finite.
    """
    if temperature <= 0:
        raise UserError("the sampling temperature must be positive", value=temperature, fix="use 1.0")
    if tokens < 1 or context < 2 or batch_size < 1:
        asked = f"{tokens} tokens, context {context}, batch {batch_size}"
        raise UserError("nothing to sample", value=asked, fix="ask for at least 1 token, context 2, batch 1")
    wanted = -(-tokens // context)
    sampler = _Sampler(model, tokenizer, context, batch_size, torch.device(device), temperature)
    folder = None if cache_path is None else _cache_folder(Path(cache_path) / sampler.key(seed))
    report = progress or (lambda _: None)
    ids, positions = [], []
    for index in range(-(-wanted // batch_size)):
        used = min(batch_size, wanted - index * batch_size)
        batch = _load_batch(folder, index, (batch_size, context))
        if batch is None:
            batch = sampler.sample(seed, index, partial(report, used))
            _save_batch(folder, index, batch)
        else:
            report(used * context)
        ids.append(batch["ids"][:used].long())
        positions.append(batch["positions"][:used].long())
    return Rows(torch.cat(ids), torch.cat(positions), requested=tokens)


class _Sampler:
    def __init__(self, model, tokenizer, context: int, batch_size: int, device: torch.device, temperature: float):
        self.model, self.context, self.batch_size = model, context, batch_size
        self.device, self.temperature = device, temperature
        probe = tokenizer("a", add_special_tokens=True)["input_ids"]
        bos = tokenizer.bos_token_id
        self.bos = bos if bos is not None and probe[:1] == [bos] else None
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        self.ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
        special = set(tokenizer.all_special_ids)
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # The embedding is often padded beyond the vocabulary; only ids the tokenizer knows may start a document.
        size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
        self.starts = torch.tensor([i for i in range(size) if i not in special], device=device)

    def key(self, seed: int) -> str:
        """Name of the cache folder: changes with anything that changes the text, weights included (by a sample)."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(repr((seed, self.context, self.batch_size, self.temperature, self.bos, self.ends)).encode())
        digest.update(repr(self.starts.shape).encode())
        for name, weight in self.model.named_parameters():
            sample = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample)
        return digest.hexdigest()

    @torch.inference_mode()
    def sample(self, seed: int, index: int, step_done: Callable[[], None]) -> dict[str, torch.Tensor]:
        mixed = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(mixed, "big"))
        batch, device = self.batch_size, self.device
        ids = torch.zeros(batch, self.context, dtype=torch.int64, device=device)
        positions = torch.zeros_like(ids)
        visible = torch.zeros_like(ids)  # 1 where the row's present document is
        position = torch.zeros(batch, dtype=torch.int64, device=device)
        ends = torch.tensor(self.ends, dtype=torch.int64, device=device)
        first_free = 0 if self.bos is None else 1  # position of a document's random token
        cache, logits = DynamicCache(config=self.model.config), None
        for t in range(self.context):
            # Every draw is made for every row, needed or not: the stream of random numbers never depends on the text.
            pick = torch.randint(len(self.starts), (batch,), generator=generator, device=device)
            token = self.starts[pick]
            if logits is not None:
                chances = torch.softmax(logits.float() / self.temperature, dim=-1)
                drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
                token = torch.where(position > first_free, drawn, token)
            if self.bos is not None:
                token = torch.where(position == 0, self.bos, token)
            ids[:, t], positions[:, t] = token, position
            visible[:, t] = 1
            visible.masked_fill_((position == 0)[:, None] & (torch.arange(self.context, device=device) < t), 0)
            if t + 1 < self.context:
                out = self.model(
                    input_ids=token[:, None],
                    attention_mask=visible[:, : t + 1],
                    position_ids=position[:, None],
                    cache=cache,
                    use_cache=True,
                )
                logits = out.logits[:, -1]
                if not torch.isfinite(logits).all():
                    raise UserError(
                        "the teacher's logits are not finite",
                        value=f"token {t} of batch {index}",
                        fix="use --dtype float32",
                    )
            ended = torch.isin(token, ends) & (position > first_free)
            position = torch.where(ended, 0, position + 1)
            step_done()
        return {"ids": ids.int().cpu(), "positions": positions.int().cpu()}


def _cache_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("the sampled text cannot be kept", value=folder, fix=f"check it ({error.strerror})") from error
    return folder


def _load_batch(folder: Path | None, index: int, shape: tuple[int, int]) -> dict[str, torch.Tensor] | None:
    if folder is None:
        return None
    try:
        batch = load_tensors((folder / f"batch-{index:05d}.safetensors").read_bytes())
    except FileNotFoundError:
        return None
    except Exception:  # a damaged file is sampled again: the result is the same by construction
        return None
    good = set(batch) == {"ids", "positions"} and all(tuple(tensor.shape) == shape for tensor in batch.values())
    return batch if good else None


def _save_batch(folder: Path | None, index: int, batch: dict[str, torch.Tensor]) -> None:
    if folder is None:
        return
    name = folder / f"batch-{index:05d}.safetensors"
    partial = name.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_bytes(save_tensors(batch))
        os.replace(partial, name)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError("the sampled text cannot be kept", value=name, fix=f"check it ({error.strerror})") from error
