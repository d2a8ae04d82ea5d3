"""The README's commands and its Python snippet run, on a tiny teacher in place of the Hub's model."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from linearize import cli
from linearize.recipe import OPTIONS

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


def test_quickstart(teacher_folder, tmp_path, monkeypatch, capsys):
    commands = [shlex.split(line) for line in "".join(blocks("Quickstart", "sh")).splitlines()]
    assert [c[1] for c in commands] == "plan convert eval generate report bench inspect run".split()
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
    small = "--calibrate-context 64 --align-context 64 --align-batch-tokens 512 --align-tokens 2k --calibrate-tokens 2k"
    more = {
        "convert": [*small.split(), "--heldout-tokens", "2k"],
        "eval": ["--include-path", str(tmp_path), "--lengths", "32", "--limit", "2", "--context", "64"],
        "generate": ["--max-new-tokens", "8"],
        "bench": ["--steps", "2"],
        "inspect": ["--tokens", "512", "--context", "64"],
        "run": ["--include_path", str(tmp_path)],
    }
    swap = {HUB_ID: str(teacher_folder("llama-tied")), "piqa": "tiny", "1k,8k": "16,32"}
    swap["piqa,perplexity,recall"] = "tiny,perplexity,recall"
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [swap.get(word, word) for word in command] + more.get(command[1], [])
        if command[0] == "linearize":
            assert cli.run(words[1:]) == 0, f"{words}\n{capsys.readouterr()}"
        else:
            done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0 and "acc" in done.stdout, f"{words}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "out/smollm2/report.html").exists() and list((tmp_path / "out/inspect").glob("*.png"))

    [code] = blocks("Load the result", "python")
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert "The capital of France is" in loaded.stdout


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Flags, recipe keys and files that the README and the pages name."""
    text = page.read_text(encoding="utf-8")
    flags = {option.flag for option in OPTIONS.values()}
    for command in ("plan", "eval", "generate", "inspect", "report", "export"):
        flags |= {flag for p in typer.main.get_command(cli.app).commands[command].params for flag in p.opts}
    flags |= {"--config_file", "--num_processes"}  # accelerate's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", re.sub(r"lm_eval run.*", "", text))) <= flags | NOT_FLAGS
    keys = set(re.findall(r"`((?:align|distill|calibrate|select|data|convert|run)\.[a-z_]+)\b", text))
    assert keys <= set(OPTIONS) | FILES
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link


# Which troubleshooting says there is none of; a recipe's own script's; llama.cpp's.
NOT_FLAGS = {"--resume", "--wikitext", "--outfile"}
FILES = {"align.py", "distill.py", "calibrate.py", "select.py", "convert.py"}
