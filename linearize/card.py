"""The model card: what the checkpoint is, what was measured, how to load it."""


def model_card(record: dict) -> str:
    """README.md of a converted model, from the record that linearize.json holds."""
    teacher = record["teacher"]["source"]
    mixers = record["mixers"]
    kinds = ", ".join(sorted({spec["kind"] for spec in mixers.values()}))
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {teacher}"] if record["teacher"]["revision"] else []),  # only the Hub's have a revision
        "tags: [linearize, linear-attention]",
        "---",
        "",
        f"# {teacher.rstrip('/').rsplit('/', 1)[-1]}, linearized",
        "",
        f"{len(mixers)} softmax attention layers of `{teacher}` were replaced with linear-time mixers ({kinds}): "
        f"layers {', '.join(mixers)}. Everything else is the teacher's.",
        "",
    ]
    if heldout := record["heldout"]:
        lines += [
            f"| held-out text, {heldout['tokens']} tokens, context {heldout['context']} | teacher | student |",
            "|---|---|---|",
            f"| perplexity | {heldout['teacher_perplexity']:.2f} | {heldout['student_perplexity']:.2f} |",
            f"| retained | | {heldout['retained_percent']:.1f} % |",
            "",
        ]
    lines += ["| cache of one sequence, bytes | teacher | student |", "|---|---|---|"]
    lines += [f"| {c['tokens']} tokens | {c['teacher']} | {c['student']} |" for c in record["cache"]]
    lines += [
        "",
        "```python",
        "import linearize  # registers the architecture; or pass trust_remote_code=True",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        "```",
        "",
        "The licence of the teacher applies to these weights. `recipe.yaml` makes this checkpoint again,",
        "`linearize.json` holds every figure, `metrics.jsonl` the loss of every step.",
        "",
    ]
    return "\n".join(lines)
