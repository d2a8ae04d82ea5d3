"""The README's quickstart commands and its Python snippet run, on a tiny teacher in place of the Hub's model."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)^## ", README, re.M | re.S)[1]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.S)


def test_quickstart(teacher_folder, tmp_path):
    commands = [shlex.split(line) for line in "".join(blocks("Quickstart", "sh")).splitlines()]
    assert [c[:2] for c in commands] == [["linearize", "plan"], ["linearize", "convert"], ["lm_eval", "run"]]
    docs = [{"question": "Two and two", "choices": [" four", " five"], "answer": i % 2} for i in range(3)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "tiny.yaml").write_text(TASK.format(docs=tmp_path / "docs.jsonl"))
    bin_folder = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_DATASETS_OFFLINE": "1",
    }
    # What differs from the README: the model, less text in shorter rows, and a task that needs no network.
    swap = {HUB_ID: [str(teacher_folder("llama-tied"))], "piqa": ["tiny", "--include_path", str(tmp_path)]}
    for command in commands:
        words = [new for word in command for new in swap.get(word, [word])]
        if command[0] == "linearize":
            words += ["--calibrate-context", "64", "--align-context", "64", "--align-batch-tokens", "512"]
            words += ["--calibrate-tokens", "2k", "--align-tokens", "2k", "--heldout-tokens", "2k"]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    assert "acc" in done.stdout

    [code] = blocks("Load the result", "python")
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert "The capital of France is" in loaded.stdout


def test_flags_in_the_readme_exist():
    from linearize.recipe import OPTIONS

    known = {option.flag for option in OPTIONS.values()}
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert named and named <= known
