"""What qa.yaml asks: questions from a local file, and whether an answer is the expected one."""

import json
import os
import re
from pathlib import Path

import datasets

from linearize.errors import UserError

FIX = "LINEARIZE_QA=FILE, a .json or .jsonl of objects with question, answer and support"


def questions(**_) -> datasets.DatasetDict:
    """The split "test" of the file that LINEARIZE_QA names: ``{"support", "question", "answers"}`` a row.

    Where some questions have a text, those without one are left out. Raises UserError when there is no such file, and
    for a file of another form.
    """
    name = os.environ.get("LINEARIZE_QA")
    path = Path(name or "").expanduser()
    if not path.is_file():
        raise UserError("qa_exact has no file of questions", value=name, fix=FIX)
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix != ".json" else None
        rows = [_row(row) for row in (json.loads(text) if rows is None else rows)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not questions ({type(error).__name__}: {error})", value=str(path), fix=FIX) from error
    if any(row["support"] for row in rows):
        rows = [row for row in rows if row["support"]]
    if not rows:
        raise UserError("no question in the file", value=str(path), fix=FIX)
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _row(row: dict) -> dict:
    answers = row.get("answers") or [row["answer"] if "answer" in row else row["correct_answer"]]
    return {
        "support": (row.get("support") or "").strip(),
        "question": row["question"].strip(),
        "answers": [answer.strip() for answer in answers],
    }


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, one blank between words."""
    text = re.sub(r"[^\w\s]", " ", text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def score(doc: dict, results: list[str]) -> dict[str, float]:
    """1 where the answer is one of the expected ones, else 0."""
    return {"exact_match": float(normalised(results[0]) in [normalised(answer) for answer in doc["answers"]])}
