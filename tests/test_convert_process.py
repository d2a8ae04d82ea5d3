"""A converted folder in other programs, and the memory that a conversion takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SIZES, generator, tiny_tokenizer
from test_convert import FAST, run_convert
from transformers import LlamaConfig, LlamaForCausalLM

from linearize.checkpoint import ShardWriter

ROOT = Path(__file__).resolve().parents[1]


def run(arguments: list, home: Path, **variables: str) -> subprocess.CompletedProcess:
    offline = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env = os.environ | offline | variables
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_scores_the_folder(teacher_folder, tmp_path):
    """As a user would: lm_eval's own command in a process that has not imported linearize."""
    pytest.importorskip("lm_eval")
    out, tasks = tmp_path / "out", tmp_path / "tasks"
    run_convert(teacher_folder("qwen3"), out)
    tasks.mkdir()
    questions = ["Why?", "What is the colour of the sky at noon?", "Two and two", "a", "Then he said that"]
    docs = [{"question": q, "choices": ["yes", " no, never", " x"], "answer": i % 3} for i, q in enumerate(questions)]
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tasks / "tiny_choice.yaml").write_text(TASK.format(docs=tasks / "docs.jsonl"))
    model_args = f"pretrained={out},trust_remote_code=True,dtype=float32"
    arguments = f"-m lm_eval --model hf --model_args {model_args} --tasks tiny_choice --include_path {tasks}".split()
    run([*arguments, *"--device cpu --batch_size 2 --log_samples --output_path".split(), tmp_path / "scores"], tmp_path)
    [results] = (tmp_path / "scores").rglob("results_*.json")
    scores = json.loads(results.read_text())
    assert 0 <= scores["results"]["tiny_choice"]["acc,none"] <= 1
    [samples] = (tmp_path / "scores").rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    likelihoods = [float(choice[0][0]) for line in lines for choice in line["resps"]]
    assert len(likelihoods) == 15 and all(value < 0 for value in likelihoods) and len(set(likelihoods)) == 15


# ---- memory ---------------------------------------------------------------------------------------------------------

MEASURE = """
import json, re, sys, threading
from pathlib import Path
from linearize.console import Console
from linearize.convert import convert
from linearize.recipe import Recipe

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

values, small, large, out = json.loads(sys.argv[1]), *map(Path, sys.argv[2:])
convert(str(small), out / "small", Recipe.from_values(values), Console(quiet=True))  # imports, caches, arenas
peak, stop = [anonymous()], threading.Event()
before = peak[0]

def sample():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous())

thread = threading.Thread(target=sample)
thread.start()
convert(str(large), out / "large", Recipe.from_values(values), Console(quiet=True))
stop.set()
thread.join()
print(json.dumps({"growth": max(peak[0], anonymous()) - before}))
"""
LAYERS, WIDTH = 96, 256
DEEP = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 1152, "head_dim": 64}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_is_that_of_a_few_blocks(teacher_folder, tmp_path):
    """A model of 96 layers and 400 MB is converted, calibration, alignment and all, in a fraction of its size."""
    config, folder = LlamaConfig(**SIZES | DEEP), tmp_path / "deep"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    folder.mkdir()
    writer = ShardWriter(folder, 10**9)
    draw = generator(0)
    for name, weight in model.state_dict().items():
        noise = torch.randn(weight.shape, generator=draw)
        writer.add(name, 1 + 0.1 * noise if noise.ndim == 1 else noise / noise.shape[1] ** 0.5)
    writer.finish()
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    total = (folder / "model.safetensors").stat().st_size
    block = 4 * sum(weight.numel() for weight in model.model.layers[0].parameters())
    assert total > 400e6 and block < 4.5e6

    values = FAST | {
        "calibrate.tokens": 96,
        "calibrate.select_tokens": 96,
        "align.tokens": 96,
        "align.batch_tokens": 96,
        "data.heldout_tokens": 96,
        "convert.keep_softmax": "83%",  # 80 of 96 layers
        "run.max_shard_size": 8_000_000,  # the writer holds one shard
    }
    arguments = ["-c", MEASURE, json.dumps(values), teacher_folder("llama"), folder, tmp_path]
    done = run(arguments, tmp_path)
    growth = json.loads(re.search(r"\{.*\}", done.stdout.splitlines()[-1])[0])["growth"]
    print(f"grew by {growth / 1e6:.1f} MB; model {total / 1e6:.0f} MB, block {block / 1e6:.1f} MB")
    # Weights of a block three times (the teacher's, the copy, a read), AdamW's three, the shard and activations come to
    # some eight blocks; what the C heap holds back of freed ones varies from run to run by about as many again.
    assert growth < 24 * block < total / 3.9
    config = json.loads((tmp_path / "large/config.json").read_text())
    assert len(config["linearize"]["mixers"]) == 16
