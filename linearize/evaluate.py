"""Measures of a model: perplexity from hidden states, and a sample of its text."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.data import Rows
from linearize.teacher import BlockRunner


@torch.no_grad()
def perplexity(runner: BlockRunner, hidden: Tensor, rows: Rows) -> tuple[float, int]:
    """Perplexity of every next token within its document, and how many there were.

    hidden: [N, T, d], what leaves the last layer for the tokens of ``rows``. The logits are made a few rows at a time.
    """
    follows = torch.zeros_like(rows.positions, dtype=torch.bool)
    follows[:, :-1] = rows.positions[:, 1:] == rows.positions[:, :-1] + 1
    target = rows.ids.roll(-1, 1).flatten()
    follows = follows.flatten()
    total = 0.0
    for part, logits in runner.head_rows(hidden):
        loss = F.cross_entropy(logits.float(), target[part].to(logits.device), reduction="none")
        total += float(loss[follows[part].to(logits.device)].double().sum())
    count = int(follows.sum())
    return math.exp(total / count), count


@torch.no_grad()
def continue_text(model, tokenizer, prompt: str, tokens: int = 40) -> str:
    """Greedy continuation of a prompt, with the chat template where the tokenizer has one; the new text alone."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
