"""Text from a converted model, token by token, and from its teacher beside it; several prompts' at once as samples."""

import html
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import BatchEncoding, TextStreamer

from linearize.console import Console
from linearize.errors import UsageError, UserError, one_line
from linearize.models import Model, free_memory, hushed, open_model, open_named_teacher
from linearize.probes import GREEDY, NGRAM, mean_and_error, repeated
from linearize.processes import pick_device

SIDES = ("teacher", "student")  # from left to right


@dataclass(frozen=True)
class Options:
    """How `linearize generate` continues a prompt; the fields are its flags.

    chat   whether the prompt is a user's message in the tokenizer's chat template; None: where it has one
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0
    chat: bool | None = None
    system: str | None = None
    teacher: bool = False
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError("--max-new-tokens is too small", value=self.max_new_tokens, fix="at least 1")
        if self.temperature < 0:
            raise UsageError("--temperature is below 0", value=self.temperature, fix="0 takes the likeliest token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError("--top-p is a share", value=self.top_p, fix="above 0, at most 1")
        if self.top_p is not None and self.temperature == 0:
            raise UsageError("--top-p does nothing at temperature 0", fix="give --temperature too, such as 0.7")


class _Stream(TextStreamer):
    """Hands over text as it is decoded and keeps the tokens, so that nothing is lost when generation is stopped."""

    def __init__(self, tokenizer, write: Callable[[str], None] | None, count: Callable[[], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.count = write, count
        self.ids: list[int] = []
        self.began = time.perf_counter()
        self.first: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.first = self.first or time.perf_counter() - self.began
            self.ids += value.flatten().tolist()
            if self.count:
                self.count()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.write:
            self.write(text)


def generate(source: str, prompt: str, options: Options, console: Console) -> tuple[dict, bool]:
    """Continue the prompt with the model `source`, and then with its teacher where options say so.

    prompt: the text, or "-" to read it from stdin. Text appears on stdout as it is made; with the teacher on a terminal
    both answers appear side by side when they are there. Ctrl-C ends with what there is. Returns the report and whether
    it was stopped. Raises UserError for an empty prompt and for a chat that the tokenizer has no template for.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UsageError("the prompt is empty", fix='give some text, or "-" and text on stdin')
    model = open_model(source, say=console.line)
    sides = {"student" if model.ours else "model": model}
    if options.teacher:
        fix = "leave out --teacher, or run linearize generate on the teacher itself"
        sides["teacher"] = open_named_teacher(model, say=console.line, fix=fix)
    inputs = {side: _inputs(part, prompt, options) for side, part in sides.items()}
    device = pick_device(options.device)

    both = len(sides) > 1
    beside = both and sys.stdout.isatty() and not console.json
    answers: dict[str, dict] = {}
    stopped = False
    for side, part in sides.items():
        if both and not beside and not console.json:
            print(f"{chr(10) if answers else ''}{side}: {part.source}\n", flush=True)
        answers[side], stopped = _answer(part, inputs[side], options, device, side, not beside, console)
        if stopped:
            break
    if beside:
        _show_beside({side: answers[side]["text"] for side in SIDES if side in answers}, sides)
    report = {
        "model": source,
        "teacher": sides["teacher"].source if "teacher" in sides else None,
        "prompt": prompt,
        "settings": {**vars(options), "device": str(device), "chat": _chats(model, options)},
        "answers": answers,
        "stopped": stopped,
    }
    console.result(report)
    return report, stopped


def _chats(model: Model, options: Options) -> bool:
    return bool(model.tokenizer.chat_template) if options.chat is None else options.chat


def _inputs(model: Model, prompt: str, options: Options) -> BatchEncoding:
    """Token ids and mask, [1, T] each."""
    tokenizer = model.tokenizer
    if not _chats(model, options):
        if options.system is not None:
            fix = "leave out --system, or put it into the prompt"
            raise UsageError(f"--system needs a chat template, and {model.source} is used without one", fix=fix)
        return tokenizer(prompt, return_tensors="pt")
    if not tokenizer.chat_template:
        raise UsageError(f"the tokenizer of {model.source} has no chat template", fix="leave out --chat")
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # templates are programs of many authors
        raise UserError(f"the chat template of {model.source} fails: {error}", fix="--no-chat does without") from error


def _answer(
    model: Model,
    inputs: BatchEncoding,
    options: Options,
    device: torch.device,
    side: str,
    stream: bool,
    console: Console,
) -> tuple[dict, bool]:
    """One model's answer, written to stdout as it comes where `stream` says so, and whether Ctrl-C ended it."""
    shown = stream and not console.json

    def write(text: str) -> None:
        print(text, end="", flush=True)

    how = {"do_sample": False} if options.temperature == 0 else {"do_sample": True, "temperature": options.temperature}
    if options.temperature and options.top_p is not None:
        how["top_p"] = options.top_p
    stopped = False
    length = inputs["input_ids"].shape[1]
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and length + options.max_new_tokens > longest:
        console.warn(f"{model.source} is made for {longest} tokens, and this takes {length + options.max_new_tokens}")
    try:
        net = model.load(device, options.dtype)
        torch.manual_seed(options.seed)
        # Where the text is shown as it is made, that is progress enough.
        bar = nullcontext() if shown else console.stage(side, options.max_new_tokens)
        with hushed(), bar as stage:
            streamer = _Stream(model.tokenizer, write if shown else None, stage.advance if stage else None)
            try:
                net.generate(
                    **{name: inputs[name].to(device) for name in ("input_ids", "attention_mask")},
                    max_new_tokens=options.max_new_tokens,
                    pad_token_id=_pad(net),
                    streamer=streamer,
                    **how,
                )
            except KeyboardInterrupt:
                stopped = True
                streamer.end()
    except (MemoryError, torch.OutOfMemoryError) as error:
        fix = "a shorter prompt, --dtype bfloat16 or --device cpu"
        raise UserError(f"out of memory while {model.source} answers", fix=fix) from error
    seconds = time.perf_counter() - streamer.began
    tokens = len(streamer.ids)
    if shown:
        print(flush=True)
        console.line(f"{side}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")
    del net
    free_memory(device)
    answer = {
        "text": model.tokenizer.decode(streamer.ids, skip_special_tokens=True),
        "prompt_tokens": length,
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": streamer.first,
        "tokens_per_second": tokens / seconds if tokens else None,
    }
    return answer, stopped


def _pad(net) -> int | None:
    end = net.generation_config.eos_token_id
    return end[0] if isinstance(end, list) else end


def _show_beside(answers: dict[str, str], sides: dict[str, Model]) -> None:
    """Both answers in two columns of a terminal."""
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for side in answers:
        table.add_column(Text(f"{side}: {sides[side].source}", overflow="ellipsis"), ratio=1)
    table.add_row(*(Text(text.strip()) for text in answers.values()))
    Terminal(file=sys.stdout).print(table)


# ---- samples --------------------------------------------------------------------------------------------------------


def samples(source: str, prompts: Sequence[str], options: Options, console: Console) -> dict:
    """Greedy answers of a converted model and of its teacher to several prompts.

    All prompts are one batch, padded on the left. options: temperature and seed have no effect. Returns
    ``{"samples": [{"prompt", "teacher": {"text", "tokens", "ended", "repeated"}, "student": ...}], "chat",
    "max_new_tokens", "ngram", side: mean share of repeated n-grams, side_stderr}``; ended: whether the model stopped of
    itself. Raises UserError for a model that names no teacher.
    """
    student = open_model(source, say=console.line)
    fix = "name a converted model"
    sides = {"teacher": open_named_teacher(student, say=console.line, fix=fix), "student": student}
    device = pick_device(options.device)
    found = {}
    for side, model in sides.items():
        rows = [_inputs(model, prompt, options)["input_ids"][0] for prompt in prompts]
        try:
            with console.stage(f"{side}: samples", len(prompts), "prompts") as bar:
                found[side] = _together(model, rows, options.max_new_tokens, device, options.dtype)
                bar.advance(len(prompts))
        except (MemoryError, torch.OutOfMemoryError) as error:
            fix = "fewer prompts, --dtype bfloat16 or --device cpu"
            raise UserError(f"out of memory while {model.source} answers", fix=fix) from error
        free_memory(device)
    report = {"chat": _chats(student, options), "max_new_tokens": options.max_new_tokens, "ngram": NGRAM}
    report["samples"] = [
        {"prompt": prompt, **{side: answers[i] for side, answers in found.items()}} for i, prompt in enumerate(prompts)
    ]
    for side, answers in found.items():
        rates = [answer["repeated"] for answer in answers if answer["repeated"] is not None]
        report[side], report[f"{side}_stderr"] = mean_and_error(rates)
    return report


def _together(model: Model, rows: list[torch.Tensor], tokens: int, device: torch.device, dtype: str) -> list[dict]:
    """Greedy answers to prompts of different lengths, token ids [T] each."""
    net = model.load(device, dtype)
    end = net.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end]) - {None}
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), min(ends, default=0))
    real = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], real[i, longest - len(row) :] = row, 1
    with hushed():
        out = net.generate(
            input_ids=ids.to(device),
            attention_mask=real.to(device),
            max_new_tokens=tokens,
            pad_token_id=min(ends, default=0),
            **GREEDY,
        )
    answers = []
    for row in out[:, longest:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        text = model.tokenizer.decode(row[:stop], skip_special_tokens=True).strip()
        made = {"text": text, "tokens": len(row[:stop]), "ended": stop is not None, "repeated": repeated(row[:stop])}
        answers.append(made)
    return answers


def samples_page(report: dict, name: str) -> str:
    """What :func:`samples` returns as Markdown: a table of both answers under every prompt. name: of the student."""
    how = "in the chat template" if report["chat"] else "as plain text"
    lines = [
        f"# Samples of {_cell(name)}",
        "",
        f"Greedy, at most {report['max_new_tokens']} tokens, prompts {how}. In brackets: the share of "
        f"{report['ngram']}-grams that an answer had before.",
        "",
    ]
    for side in SIDES:
        if report[side] is not None:
            error = report[f"{side}_stderr"]
            lines.append(f"* {side}: {report[side]:.2f}" + ("" if error is None else f" ± {error:.2f}"))
    for number, sample in enumerate(report["samples"], 1):
        lines += ["", f"## {number}. {_cell(one_line(sample['prompt']))}", ""]
        shown = [sample[side]["repeated"] for side in SIDES]
        heads = [f"{side} ({'–' if rate is None else f'{rate:.2f}'})" for side, rate in zip(SIDES, shown, strict=True)]
        texts = [_cell(sample[side]["text"]) + ("" if sample[side]["ended"] else " …") for side in SIDES]
        lines += [f"| {' | '.join(heads)} |", "|---|---|", f"| {' | '.join(texts)} |"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The text as it is, in one line of a Markdown table."""
    text = re.sub(r"([\\`|*_#\[\]~$])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"\r?\n|\r", "<br>", text)
