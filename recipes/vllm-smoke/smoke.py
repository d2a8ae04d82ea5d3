"""Serve an exported model with vLLM and compare it with transformers: greedy tokens and their log-probabilities.

    linearize export DIR OUT --check
    python recipes/vllm-smoke/smoke.py OUT

Needs a GPU and `pip install vllm`. NOT RUN: written from vLLM's source and documentation; no claim that vLLM serves an
export rests on it until somebody has run it and written the result here.

Prints one JSON object. Exit status 0 when the log-probabilities of all tokens that both chose agree within --tolerance
and no row parts before --same tokens; 1 otherwise. Near ties may part earlier than anything is wrong: look at the rows.
"""

import argparse
import json
import sys

PROMPTS = ("The capital of France is", "Water boils at", "def add(a, b):\n", "Once upon a time there was")


def of_transformers(folder: str, dtype: str, tokens: int) -> list[tuple[list[int], list[float]]]:
    """(new tokens, their log-probabilities) of every prompt, greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to("cuda").eval()
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to("cuda")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, ids.shape[1] :].tolist()
        scores = [logits[0].float().log_softmax(-1)[token] for logits, token in zip(out.logits, new, strict=True)]
        rows.append((new, [float(score) for score in scores]))
    del model
    torch.cuda.empty_cache()
    return rows


def of_vllm(folder: str, dtype: str, tokens: int) -> list[tuple[list[int], list[float]]]:
    """The same from vLLM, all prompts in one batch."""
    from vllm import LLM, SamplingParams

    model = LLM(model=folder, dtype=dtype, enforce_eager=True, gpu_memory_utilization=0.5, max_model_len=1024)
    options = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, logprobs=1)
    rows = []
    for request in model.generate(list(PROMPTS), options):
        done = request.outputs[0]
        new = list(done.token_ids)
        rows.append((new, [chosen[token].logprob for token, chosen in zip(new, done.logprobs, strict=True)]))
    return rows


def compare(want: list[tuple[list[int], list[float]]], got: list[tuple[list[int], list[float]]]) -> list[dict]:
    """Per prompt: tokens until the two part, and the largest difference of a log-probability until then."""
    rows = []
    for (tokens, scores), (other, other_scores) in zip(want, got, strict=True):
        same = next((i for i, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]), len(tokens))
        gaps = [abs(a - b) for a, b in zip(scores[:same], other_scores[:same], strict=True)]
        rows.append({"same_tokens": same, "of": len(tokens), "largest_difference": max(gaps, default=0.0)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="what linearize export wrote")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--same", type=int, default=8, help="tokens that must be the same in every row")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of a log-probability, in nats")
    options = parser.parse_args()
    want = of_transformers(options.folder, options.dtype, options.tokens)
    rows = compare(want, of_vllm(options.folder, options.dtype, options.tokens))
    good = all(r["same_tokens"] >= options.same and r["largest_difference"] <= options.tolerance for r in rows)
    print(json.dumps({"folder": options.folder, "dtype": options.dtype, "rows": rows, "good": good}, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
