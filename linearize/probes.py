"""Measures of a running model that need no task files: perplexity, parity of its modes, recall, needles, repetition.

Each one takes a model in evaluation mode and returns plain numbers, the same for the same seed and text.
"""

import math
import os.path
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from linearize.errors import UserError

# Of one forward pass, at most: logits (in float32 256 MB, and 2 GB) and tokens.
LOGITS = {"cpu": 2**26, "cuda": 2**29}
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
PAIRS_ASKED = 16  # questions at the end of one recall prompt
DEPTHS = (10, 50, 90)  # of a needle, in percent of the text
NEEDLE_TOKENS = {"cpu": 2**15, "cuda": 2**17}  # in the caches of all candidate values at once
NGRAM = 4
PROMPT, CONTINUATION = 64, 128  # tokens of a repetition sample
Progress = Callable[[float], None]


def _no_progress(n: float) -> None: ...


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a document without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def first_token(tokenizer: PreTrainedTokenizerBase, fallback: int = 0) -> int:
    """The token before a document: its beginning-of-text token, else its end-of-text token (lm-eval's rule)."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return fallback


# ---- perplexity -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def document_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    context: int,
    progress: Progress = _no_progress,
) -> list[dict]:
    """Negative log-likelihood of every document: ``{"nats", "tokens", "words", "bytes"}`` each.

    Every token is predicted once, after the beginning-of-text token and what precedes it within `context` tokens: in
    windows that do not overlap, but for the last of a document, which reads a full window and predicts what is left.
    These are lm-eval's rolling windows. Words are what white space separates.
    """
    rows: list[tuple[int, list[int], list[int]]] = []  # document, what is read, what is predicted
    losses = []
    for number, text in enumerate(documents):
        ids = encoded(tokenizer, text)
        losses.append({"nats": 0.0, "tokens": len(ids), "words": len(text.split()), "bytes": len(text.encode())})
        before = [first_token(tokenizer), *ids[:-1]]
        for begin in range(0, len(ids), context):
            end = min(begin + context, len(ids))
            rows.append((number, before[max(0, end - context) : end], ids[begin:end]))
    rows.sort(key=lambda row: -len(row[1]))
    tokens, logits = (limit.get(model.device.type, limit["cuda"]) for limit in (BATCH_TOKENS, LOGITS))
    if model.device.type == "cuda":  # in 16 bits, in float32 and their logarithms: 10 bytes each
        logits = min(logits, torch.cuda.mem_get_info(model.device)[0] // 16)
    at_once = min(tokens, logits // model.config.vocab_size)
    start = 0
    while start < len(rows):
        length = len(rows[start][1])
        batch = rows[start : start + max(1, at_once // length)]
        start += len(batch)
        # Padding to the right of a causal model changes nothing to its left.
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        target = torch.full((len(batch), length), -100)
        for row, (_, read, predicted) in enumerate(batch):
            ids[row, : len(read)] = torch.tensor(read)
            target[row, len(read) - len(predicted) : len(read)] = torch.tensor(predicted)
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits.float()
        target = target.to(model.device)
        nats = F.cross_entropy(logits.transpose(1, 2), target, reduction="none").double().sum(1).tolist()
        for (number, _, predicted), loss in zip(batch, nats, strict=True):
            losses[number]["nats"] += loss
            progress(len(predicted))
    return losses


def perplexities(losses: Sequence[dict]) -> dict:
    """Word and token perplexity and bits per byte of the documents together."""
    nats = sum(loss["nats"] for loss in losses)
    per = {unit: nats / max(1, sum(loss[unit] for loss in losses)) for unit in ("words", "tokens", "bytes")}
    return {
        "word_perplexity": _exp(per["words"]),
        "token_perplexity": _exp(per["tokens"]),
        "bits_per_byte": per["bytes"] / math.log(2),
    }


def loss_difference(teacher: Sequence[dict], student: Sequence[dict]) -> tuple[float, float | None]:
    """How many nats a token the student loses more than the teacher, and the standard error, over the documents.

    A ratio estimator: documents are drawn, and within one both models read the same tokens. The error of one document
    is not known: None.
    """
    gaps = [s["nats"] - t["nats"] for t, s in zip(teacher, student, strict=True)]
    sizes = [t["tokens"] for t in teacher]
    mean = sum(gaps) / sum(sizes)
    count = len(gaps)
    if count < 2:
        return mean, None
    spread = sum((gap - mean * size) ** 2 for gap, size in zip(gaps, sizes, strict=True))
    return mean, math.sqrt(spread * count / (count - 1)) / sum(sizes)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


# ---- parity ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def parity(model: PreTrainedModel, rows: Tensor, progress: Progress = _no_progress) -> dict:
    """How far decoding token by token, and prefilling in pieces, are from one pass over the whole text.

    rows: [N, T] token ids, T at least 4. Returns for "decode" and "chunked" the largest relative logit error (over all
    positions, the largest difference of a logit divided by the largest logit of that position) and the percentage of
    positions whose most likely token is the same.
    """
    rows = rows.to(model.device)
    length = rows.shape[1]
    pieces = {"decode": [1] * length, "chunked": [length // 2, 1, length // 4, length - length // 2 - 1 - length // 4]}
    result = {"rows": rows.shape[0], "tokens": length}
    worst = {name: 0.0 for name in pieces}
    same = {name: 0 for name in pieces}
    for row in rows.split(1):
        whole = model(input_ids=row, use_cache=False).logits[0].float()
        for name, sizes in pieces.items():
            cache, parts = DynamicCache(config=model.config), []
            for piece in row.split([size for size in sizes if size], dim=1):
                out = model(input_ids=piece, cache=cache, use_cache=True)
                parts.append(out.logits[0].float())
                progress(piece.shape[1])
            error = (torch.cat(parts) - whole).abs().amax(-1) / whole.abs().amax(-1)
            # amax would drop a NaN on some devices.
            worst[name] = max(worst[name], float("inf") if error.isnan().any() else float(error.amax()))
            same[name] += int((torch.cat(parts).argmax(-1) == whole.argmax(-1)).sum())
    for name in pieces:
        agreement = 100 * same[name] / rows.numel()
        result[name] = {"max_relative_error": worst[name], "argmax_agreement_percent": agreement}
    return result


# ---- recall ---------------------------------------------------------------------------------------------------------


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that are words of their own, in the order of their ids: lower-case letters after a blank.

    A tokenizer with fewer than 64 of them gives its tokens of lower-case letters, first the longer ones. Raises
    UserError when there are fewer than 16.
    """
    special = set(tokenizer.all_special_ids)
    spaced, long, short = [], [], []
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = token.lstrip("Ġ▁")
        if number in special or not (word.isascii() and word.isalpha() and word.islower()):
            continue
        short.append(number)
        if len(word) >= 3:
            long.append(number)
            if word != token:
                spaced.append(number)
    for pool in (spaced, long, short):
        if len(pool) >= 64:
            return pool
    if len(short) < 16:
        raise UserError(
            "recall needs 16 tokens that are words", value=f"{len(short)} in this tokenizer", fix="leave recall out"
        )
    return short


def recall_prompt(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[int], length: int, seed: int
) -> tuple[list[int], list[int], list[int]] | None:
    """Lines "key: value" of random words, all keys different, and then some of the keys again, each with its value.

    Returns at most `length` token ids, the positions whose next token is a value asked for again, and these values;
    None where the tokenizer has too few words for so many keys. The answers of earlier questions are in the text, so
    that one pass asks them all.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    colon, line = encoded(tokenizer, ":"), encoded(tokenizer, "\n")
    begin = [tokenizer.bos_token_id] if _begins(tokenizer) else []
    per_line = 2 + len(colon) + len(line)
    lines = (length - len(begin)) // per_line
    asked = min(PAIRS_ASKED, lines // 2)
    pairs = lines - asked
    if asked < 1 or pairs > len(words):
        return None
    keys = [words[i] for i in torch.randperm(len(words), generator=generator)[:pairs].tolist()]
    values = [words[i] for i in torch.randint(len(words), (pairs,), generator=generator).tolist()]
    ids, positions, answers = list(begin), [], []
    for key, value in zip(keys, values, strict=True):
        ids += [key, *colon, value, *line]
    for i in torch.randperm(pairs, generator=generator)[:asked].tolist():
        ids += [keys[i], *colon]
        positions.append(len(ids) - 1)
        answers.append(values[i])
        ids += [values[i], *line]
    return ids, positions, answers


def _begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer("a", verbose=False)["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


@torch.no_grad()
def recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    prompts: int,
    seed: int,
    progress: Progress = _no_progress,
) -> dict[str, dict]:
    """Accuracy of the values that follow repeated keys, against the length of the prompt in tokens.

    Returns by length ``{"correct", "asked"}``, both None where the model's positions or the tokenizer's words do not
    reach. An answer is right when the value is the most likely token of the whole vocabulary.
    """
    words = words_of(tokenizer)
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    found = {}
    for length in lengths:
        correct = asked = 0
        for number in range(prompts):
            made = recall_prompt(tokenizer, words, length, seed + number) if length <= longest else None
            if made is None:
                break
            ids, positions, answers = made
            at = torch.tensor(positions, device=model.device)
            given = torch.tensor([ids], device=model.device)
            logits = model(input_ids=given, use_cache=False, logits_to_keep=at).logits[0]
            correct += int((logits.argmax(-1).cpu() == torch.tensor(answers)).sum())
            asked += len(answers)
            progress(len(ids))
        found[str(length)] = {"correct": correct, "asked": asked} if asked else {"correct": None, "asked": None}
    return found


# ---- a needle in a text ---------------------------------------------------------------------------------------------

PLACES = tuple(
    "Lisbon Oslo Cairo Lima Nairobi Toronto Madrid Vienna Athens Dublin Warsaw Seoul Hanoi Delhi Havana Boston".split()
)
# A value is one of each; the 16 candidates of a question have no word in common.
COLOURS = tuple(
    "amber crimson silver golden violet emerald scarlet indigo copper ivory purple orange white black green red".split()
)
ANIMALS = tuple(
    "falcon tiger rabbit dolphin eagle spider horse turtle monkey wolf lion panda camel otter beaver salmon".split()
)


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase, filler: Sequence[int], length: int, depth: int, seed: int
) -> tuple[list[int], list[list[int]]] | None:
    """Text with one sentence that says a place's secret code, and this sentence's beginning again at the end.

    filler: token ids, of which a random stretch is the text; it starts again where it ends. depth: where the sentence
    stands, in percent of the text, moved to the nearest end of a sentence within 5 %. Returns exactly `length` token
    ids, and the ids of 16 values that may go on from there, of equal standing but for the first, which the text says;
    None where the length has no room for 16 tokens of text.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + length) * 101 + depth)

    def drawn(words: Sequence[str]) -> list[str]:
        return [words[i] for i in torch.randperm(len(words), generator=generator).tolist()]

    asks = f"\n\nThe secret code of {drawn(PLACES)[0]} is"
    values = [f"{colour} {animal}" for colour, animal in zip(drawn(COLOURS), drawn(ANIMALS), strict=True)]
    whole = [encoded(tokenizer, f"{asks} {value}") for value in values]
    question = os.path.commonprefix(whole)  # in tokens: some tokenizers write the blank alone
    fact = encoded(tokenizer, f"{asks} {values[0]}.\n\n")
    begin = [tokenizer.bos_token_id] if _begins(tokenizer) else []
    room = length - len(begin) - len(fact) - len(question)
    if room < 16:
        return None
    first = int(torch.randint(len(filler), (), generator=generator))
    text = [filler[(first + i) % len(filler)] for i in range(room)]
    at, stop = room * depth // 100, encoded(tokenizer, "a.")[-1]
    near = [i for i in range(max(1, at - room // 20), at + room // 20 + 1) if text[i - 1] == stop]
    at = min(near, key=lambda i: abs(i - at), default=at)
    return [*begin, *text[:at], *fact, *text[at:], *question], [ids[len(question) :] for ids in whole]


@torch.no_grad()
def value_scores(
    model: PreTrainedModel, prompts: Sequence[list[int]], values: Sequence[list[list[int]]]
) -> tuple[list[bool], Tensor]:
    """Whether greedy decoding goes on with each prompt's first value, and the log-probability of every value.

    prompts: token ids, all of one length; values: for each prompt equally many. Returns [prompts] and
    [prompts, values] in nats. A prompt is read once; all values go on from its cache.
    """
    count, longest = len(values[0]), max(len(ids) for row in values for ids in row)
    ids = torch.zeros(len(prompts) * count, longest, dtype=torch.long)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for i, value in enumerate(value for row in values for value in row):
        ids[i, : len(value)] = torch.tensor(value)
        real[i, : len(value)] = True
    ids, real = ids.to(model.device), real.to(model.device)
    cache = DynamicCache(config=model.config)
    given = torch.tensor(prompts, device=model.device)
    logits = model(input_ids=given, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:]
    logits = logits.repeat_interleave(count, 0)
    if longest > 1:
        cache.batch_repeat_interleave(count)
        # Padding to the right of a causal model changes nothing to its left.
        logits = torch.cat([logits, model(input_ids=ids[:, :-1], cache=cache, use_cache=True).logits], 1)
    logs = logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0].masked_fill(~real, 0).sum(1)
    greedy = ((logits.argmax(-1) == ids) | ~real).all(1)
    return greedy.view(-1, count)[:, 0].tolist(), logs.view(-1, count).cpu()


def needle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    filler: Sequence[int],
    lengths: Sequence[int],
    prompts: int,
    seed: int,
    progress: Progress = _no_progress,
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """What is found of a sentence in a text, by length in tokens and depth in percent.

    ``{length: {depth: {"exact": [...], "rank": [...]}}}``, a number for each prompt. exact: 1 where greedy decoding
    gives the value word for word, else 0. rank: the share of the 15 other values that are less likely than it, ties
    counting half: 0.5 for a model that looks at nothing, 1 for one that finds it. The lists are empty where the
    model's positions do not reach, or the length has no room.
    """
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    limit = NEEDLE_TOKENS.get(model.device.type, NEEDLE_TOKENS["cuda"])
    found = {}
    for length in lengths:
        cells = {depth: {"exact": [], "rank": []} for depth in DEPTHS}
        made = [
            (depth, needle_prompt(tokenizer, filler, length, depth, seed + number))
            for number in range(prompts)
            for depth in DEPTHS
            if length <= longest
        ]
        made = [(depth, *prompt) for depth, prompt in made if prompt]
        at_once = max(1, limit // (len(COLOURS) * length))
        for start in range(0, len(made), at_once):
            depths, texts, values = zip(*made[start : start + at_once], strict=True)
            for depth, exact, logs in zip(depths, *value_scores(model, texts, values), strict=True):
                cells[depth]["exact"].append(float(exact))
                cells[depth]["rank"].append(float(((logs[1:] < logs[0]) + 0.5 * (logs[1:] == logs[0])).mean()))
                progress(length)
        found[str(length)] = {str(depth): cell for depth, cell in cells.items()}
    return found


# ---- repetition -----------------------------------------------------------------------------------------------------


def repeated(ids: Sequence[int], n: int = NGRAM) -> float | None:
    """Share of the n-grams of a text that it had before: 1 - different / all. None for fewer than n tokens."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def repetition_prompts(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], count: int) -> Tensor:
    """The first PROMPT + CONTINUATION tokens of the first `count` documents that have them: [N, PROMPT + CONTINUATION].

    Raises UserError when there is none.
    """
    rows = []
    for text in documents:
        ids = encoded(tokenizer, text[: 40 * (PROMPT + CONTINUATION)])
        if len(ids) >= PROMPT + CONTINUATION:
            rows.append(ids[: PROMPT + CONTINUATION])
        if len(rows) == count:
            break
    if not rows:
        raise UserError(
            f"no document has the {PROMPT + CONTINUATION} tokens of a repetition prompt", fix="name longer --data"
        )
    return torch.tensor(rows)


@torch.no_grad()
def repetition(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Tensor, progress: Progress = _no_progress
) -> list[float | None]:
    """Repeated n-grams in the greedy continuation of every prompt; rows as repetition_prompts gives them.

    Up to the end-of-text token; no penalty of the model's generation settings is applied.
    """
    begin = [first_token(tokenizer)] if _begins(tokenizer) else []
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end]) - {None}
    rates = []
    batch = max(1, BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cuda"]) // (PROMPT + CONTINUATION))
    for part in rows[:, :PROMPT].split(batch):
        ids = torch.cat([torch.tensor(begin, dtype=torch.long).expand(len(part), -1), part], dim=1).to(model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CONTINUATION,
            pad_token_id=min(ends, default=0),
            **GREEDY,
        )
        for row in out[:, ids.shape[1] :].tolist():
            stop = next((i for i, token in enumerate(row) if token in ends), len(row))
            rates.append(repeated(row[:stop]))
            progress(1)
    return rates


# What a generation config may hold that would change a greedy choice.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard error of the mean; None where there are too few values."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
