"""What the start alone gives, with no gradient step: derived, standard GDN and zeroed attention, at two layer choices.

    python recipes/smollm2-135m-start/measure.py MODEL --data web.jsonl.gz --out results.json [--device cuda]

MODEL: SmolLM2-135M-Instruct as a Hub id, folder or .gguf file. --data: files of web text (`linearize convert --data`);
about a twentieth of the documents, chosen by hash, is held out and measured on. --wikitext: WikiText-2 articles as
.jsonl with the field `page`, measured on and nothing else. Writes perplexities, their ratio to the teacher's, error
ladders and seconds.
"""

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from linearize.console import Console
from linearize.convert import convert
from linearize.data import Rows, pack_rows, read_documents, split_documents
from linearize.processes import device_name
from linearize.recipe import Recipe
from linearize.teacher import open_teacher

KEEP = {"8 of 30 kept": "25%", "none kept": "none"}


@torch.no_grad()
def perplexity(model, rows: Rows, device: str) -> float:
    """Over every next token within its document, in batches of 8 rows."""
    total, count = 0.0, 0
    for ids, positions in rows.batches(8):
        ids, positions = ids.to(device), positions.to(device)
        logits = model(ids, position_ids=positions, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        follows = positions[:, 1:] == positions[:, :-1] + 1
        total, count = total + float(loss[follows].double().sum()), count + int(follows.sum())
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--wikitext")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calibrate-tokens", default="32k")
    parser.add_argument("--heldout-tokens", type=int, default=32768)
    args = parser.parse_args()

    teacher = open_teacher(args.model)
    _, heldout = split_documents(read_documents(args.data))
    random.Random(0).shuffle(heldout)  # the files hold one kind of text each
    texts = {"web": pack_rows(heldout, teacher.tokenizer, 512, args.heldout_tokens, long_only=True)}
    if args.wikitext:
        lines = Path(args.wikitext).read_text(encoding="utf-8").splitlines()
        pages = [json.loads(line)["page"] for line in lines]
        texts["wikitext2"] = pack_rows(pages, teacher.tokenizer, 512, args.heldout_tokens, long_only=True)

    load = teacher.family.causal_lm_class().from_pretrained
    model = load(teacher.folder, dtype=torch.float32).to(args.device).eval()
    teacher_ppl = {name: perplexity(model, rows, args.device) for name, rows in texts.items()}
    results = {
        "command": f"measure.py MODEL --data ... --calibrate-tokens {args.calibrate_tokens} --device {args.device}",
        "device": device_name(torch.device(args.device)),
        "torch": torch.__version__,
        "heldout_tokens": {name: rows.tokens for name, rows in texts.items()},
        "teacher": teacher_ppl,
        "arms": [],
    }

    def add(arm: str, keep: str, model, **more) -> None:
        ppl = {name: perplexity(model, rows, args.device) for name, rows in texts.items()}
        ratio = {name: ppl[name] / teacher_ppl[name] for name in ppl}
        results["arms"].append({"arm": arm, "keep": keep, "perplexity": ppl, "ratio": ratio, **more})
        print(f"{keep:14} {arm:14} " + "  ".join(f"{n} {ppl[n]:.2f} ({ratio[n]:.2f}x)" for n in ppl), flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    for keep, spec in KEEP.items():
        for arm in ("gdn", "gdn-standard"):
            values = {
                "convert.mixer": arm,
                "convert.keep_softmax": spec,
                "calibrate.tokens": args.calibrate_tokens,
                "align.tokens": 0,
                "data.source": args.data,
                "data.heldout_tokens": 0,
                "run.device": args.device,
                "run.dtype": "float32",
            }
            with tempfile.TemporaryDirectory() as out:
                began = time.monotonic()
                record = convert(args.model, Path(out) / "out", Recipe.resolve(flags=values), Console(quiet=True))
                seconds = time.monotonic() - began
                student = AutoModelForCausalLM.from_pretrained(Path(out) / "out").to(args.device).eval()
                ladders = [layer["ladder"] | {"layer": layer["layer"]} for layer in record["layers"] if arm == "gdn"]
                add(arm, keep, student, seconds=round(seconds, 1), ladders=ladders)
        converted = [int(i) for i in record["mixers"]]
        zeroed = load(teacher.folder, dtype=torch.float32).to(args.device).eval()
        for i in converted:
            zeroed.model.layers[i].self_attn.o_proj.weight.zero_()
        add("zeroed", keep, zeroed)


if __name__ == "__main__":
    with torch.no_grad():
        main()
