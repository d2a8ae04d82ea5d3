"""Broken, odd and hostile input: one clear line, exit code as documented, nothing lost, no code of a model run."""

import gzip
import json
import os
import pickle
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linearize import cli
from linearize.data import bundled_documents

FAST = {
    "calibrate.tokens": 192,
    "calibrate.select_tokens": 96,
    "calibrate.context": 48,
    "calibrate.taps": 1,
    "calibrate.time_scales": 0,
    "align.tokens": 0,
    "data.heldout_tokens": 0,
    "convert.keep_softmax": "0-2",
    "run.device": "cpu",
}
SETTINGS = [word for name, value in FAST.items() for word in ("-s", f"{name}={value}")]


@pytest.fixture
def model(teacher_folder, tmp_path) -> Path:
    """A folder to be damaged: a small Llama."""
    return shutil.copytree(teacher_folder("llama"), tmp_path / "model")


def convert(model, out, *more: str) -> int:
    return cli.run(["convert", str(model), str(out), *SETTINGS, *more, "-q"])


def one_line(capsys) -> str:
    """What the command said: exactly one line, an error; nothing on stdout."""
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line and not re.match(r"(calibrate|align|write)\b.*: ", line)]
    assert said.out == "" and len(lines) == 1, said
    assert lines[0].startswith("error: ") and "Traceback" not in lines[0] and "not expected" not in lines[0], lines[0]
    return lines[0]


def works(model, out) -> None:
    assert convert(model, out) == 0
    assert torch.isfinite(AutoModelForCausalLM.from_pretrained(out)(torch.tensor([[4, 5, 6]])).logits).all()


def edit(path: Path, **fields) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({k: v for k, v in (content | fields).items() if v is not DROP}), "utf-8")


DROP = object()

# ---- config.json ----------------------------------------------------------------------------------------------------


def config_fields(**fields):
    return lambda model: edit(model / "config.json", **fields)


def config_bytes(data: bytes):
    return lambda model: (model / "config.json").write_bytes(data)


def bom(model: Path) -> None:
    path = model / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


CONFIGS = {
    "missing": (lambda model: (model / "config.json").unlink(), "config.json"),
    "empty": (config_bytes(b""), "config.json"),
    "not JSON": (config_bytes(b"{'model_type': 'llama'}"), "config.json"),
    "cut": (config_bytes(b'{"model_type": "llama", "hidden'), "config.json"),
    "a list": (config_bytes(b"[1, 2]"), "not a JSON object"),
    "binary": (config_bytes(bytes(range(256))), "config.json"),
    "NUL bytes": (config_bytes(b'{"model_type": "llama"\0}'), "config.json"),
    "UTF-16": (config_bytes('{"model_type": "llama"}'.encode("utf-16")), "config.json"),
    "a folder": (lambda model: (model / "config.json").unlink() or (model / "config.json").mkdir(), "config.json"),
    "byte order mark": (bom, "config.json"),
    "nested deep": (config_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "config.json"),
    "no model type": (config_fields(model_type=DROP), "model_type"),
    "model type a number": (config_fields(model_type=3), "3"),
    "hidden size a word": (config_fields(hidden_size="wide"), "hidden_size"),
    "no layers": (config_fields(num_hidden_layers=0), "layers"),
    "fewer layers than stored": (config_fields(num_hidden_layers=3), "unexpected"),
    "more layers than stored": (config_fields(num_hidden_layers=5), "model.layers.4."),
    "a billion layers": (config_fields(num_hidden_layers=10**9), "layers"),
    "no heads": (config_fields(num_attention_heads=0), "heads"),
    "heads that do not divide": (config_fields(num_key_value_heads=3), "3 key/value heads"),
    "negative head size": (config_fields(head_dim=-8), "negative"),
    "vocabulary of another size": (config_fields(vocab_size=77), "embed_tokens"),
    "unknown activation": (config_fields(hidden_act="wavy"), "wavy"),
    "unknown rope": (config_fields(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
    "bitsandbytes": (config_fields(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "4"),
    "gptq": (config_fields(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    "awq": (config_fields(quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
    "fp8": (config_fields(quantization_config={"quant_method": "fp8"}), "fp8"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(model, tmp_path, capsys, case):
    damage, word = CONFIGS[case]
    damage(model)
    assert convert(model, tmp_path / "out") == 1
    assert word in one_line(capsys)
    assert not (tmp_path / "out").exists()
    assert cli.run(["plan", str(model), "-q"]) == 1
    assert word in one_line(capsys)


# ---- weights --------------------------------------------------------------------------------------------------------


def rewrite(model: Path, change) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def cast(name: str, dtype: torch.dtype):
    return lambda model: rewrite(model, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def header(data: bytes, size: int | None = None):
    """A file with this header, said to be `size` bytes long."""
    content = struct.pack("<Q", len(data) if size is None else size) + data
    return lambda model: (model / "model.safetensors").write_bytes(content)


def index(model: Path, shard: str) -> None:
    names = list(load_file(model / "model.safetensors"))
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    content = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (model / "model.safetensors.index.json").write_text(json.dumps(content))


def dangling(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "blobs" / "gone")


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")


Q = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS = {
    "empty": (lambda model: (model / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "a page of HTML": (lambda model: (model / "model.safetensors").write_text("<html>" * 100), "model.safetensors"),
    "a git-lfs pointer": (
        lambda model: (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors",
    ),
    "header longer than the file": (header(b"{}", 2**62), "model.safetensors"),
    "header no JSON": (header(b"{{{{"), "model.safetensors"),
    "offsets beyond the file": (
        header(json.dumps({Q: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()),
        "model.safetensors",
    ),
    "shape against offsets": (
        header(json.dumps({Q: {"dtype": "F32", "shape": [3], "data_offsets": [0, 0]}}).encode()),
        "model.safetensors",
    ),
    "int8": (cast(Q, torch.int8), "int8"),
    "float8": (cast(Q, torch.float8_e4m3fn), "float8"),
    "one tensor missing": (lambda model: rewrite(model, lambda tensors: tensors.pop(Q)), "missing"),
    "one tensor more": (
        lambda model: rewrite(model, lambda tensors: tensors.update(extra=torch.ones(2))),
        "unexpected",
    ),
    "another shape": (
        lambda model: rewrite(model, lambda tensors: tensors.update({Q: tensors[Q][:-1].clone()})),
        "shape",
    ),
    "infinite": (lambda model: rewrite(model, lambda tensors: tensors[Q].fill_(float("inf"))), "infinite"),
    "index to a parent": (lambda model: index(model, "../model-00001-of-00001.safetensors"), "index"),
    "index to the root": (lambda model: index(model, "/etc/passwd"), "index"),
    "index to a missing shard": (lambda model: index(model, "model-00002-of-00002.safetensors"), "00002"),
    "index no JSON": (
        lambda model: index(model, "x") or (model / "model.safetensors.index.json").write_text("{"),
        "index",
    ),
    "a dangling link": (dangling, "model.safetensors"),
    "a folder of that name": (
        lambda model: (model / "model.safetensors").unlink() or (model / "model.safetensors").mkdir(),
        "model.safetensors",
    ),
    "only a pickle": (only_pickle, "pickled"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(model, tmp_path, capsys, case):
    damage, word = WEIGHTS[case]
    damage(model)
    out = tmp_path / "out"
    assert convert(model, out) == 1
    assert word in one_line(capsys)
    # A number that is not finite is found when its layer is reached; everything else before OUT exists.
    assert not (out / "config.json").exists() and (case == "infinite" or not out.exists())


def mixed_dtypes(model: Path) -> None:
    def change(tensors):
        for i, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to([torch.float32, torch.bfloat16, torch.float16][i % 3])

    rewrite(model, change)


def shards_of_mixed_dtypes(model: Path) -> None:
    mixed_dtypes(model)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, parts, strict=True):
        save_file(part, model / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def linked_blobs(model: Path) -> None:
    """As the Hub's cache has it: every file a link into a folder of blobs."""
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))


ODD_BUT_GOOD = {
    "mixed dtypes": mixed_dtypes,
    "mixed shards": shards_of_mixed_dtypes,
    "links": linked_blobs,
    "no chat template": lambda model: (model / "chat_template.jinja").unlink(missing_ok=True),
    "no pad token": lambda model: edit(model / "tokenizer_config.json", pad_token=DROP),
    "no generation config": lambda model: (model / "generation_config.json").unlink(missing_ok=True),
    "an unknown field": config_fields(colour="blue"),
}


@pytest.mark.parametrize("case", ODD_BUT_GOOD)
def test_odd_but_good(model, tmp_path, case):
    ODD_BUT_GOOD[case](model)
    works(model, tmp_path / "out")


def test_names_with_spaces_and_letters_of_other_scripts(model, tmp_path):
    odd = tmp_path / "modèle 模型 'q' [a] 100%"
    model.rename(odd)
    works(odd, tmp_path / "aus gabe ü" / "läuft")


# ---- code that comes with a model -----------------------------------------------------------------------------------

TRAP = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\n"


class Boom:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def test_a_pickle_beside_the_weights_is_not_opened(model, tmp_path):
    marker = tmp_path / "marker"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        (model / name).write_bytes(pickle.dumps(Boom(marker)))
    works(model, tmp_path / "out")
    assert not marker.exists()
    pickle.loads((model / "model.pkl").read_bytes())
    assert marker.exists(), "the trap does not work: this shows nothing"


def test_code_of_a_model_is_not_run(model, tmp_path):
    marker = tmp_path / "marker"
    (model / "modeling_trap.py").write_text(TRAP.format(marker=str(marker)) + "class A: pass\nclass B: pass\n")
    auto = {"AutoConfig": "modeling_trap.A", "AutoModelForCausalLM": "modeling_trap.B"}
    edit(model / "config.json", auto_map=auto)
    works(model, tmp_path / "out")
    assert not marker.exists()
    assert "modeling_trap" not in (tmp_path / "out/config.json").read_text()
    assert not (tmp_path / "out/modeling_trap.py").exists()


def test_code_of_a_tokenizer_is_not_run(model, tmp_path, capsys):
    marker = tmp_path / "marker"
    (model / "tokenization_trap.py").write_text(TRAP.format(marker=str(marker)) + "class T: pass\n")
    edit(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_trap.T", None]},
        tokenizer_class="T",
    )
    convert(model, tmp_path / "out")
    assert not marker.exists()


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def no_tokenizer(model: Path) -> None:
    for path in model.glob("*token*"):
        path.unlink()


def large_tokenizer(model: Path) -> None:
    """Ids beyond the embeddings, for letters that the text has."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    for letter in "etaoin":
        content["model"]["vocab"][letter] = 100_000 + ord(letter)
    path.write_text(json.dumps(content), "utf-8")


TOKENIZERS = {
    "missing": (no_tokenizer, "tokenizer"),
    "cut": (lambda model: (model / "tokenizer.json").write_text('{"version": "1.0", "model"'), "tokenizer"),
    "binary": (lambda model: (model / "tokenizer.json").write_bytes(bytes(range(256))), "tokenizer"),
    "more tokens than embeddings": (large_tokenizer, "its model lacks"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer(model, tmp_path, capsys, case):
    damage, word = TOKENIZERS[case]
    damage(model)
    assert convert(model, tmp_path / "out") == 1
    assert word in one_line(capsys)
    assert not (tmp_path / "out/config.json").exists()


# ---- OUT ------------------------------------------------------------------------------------------------------------


def test_out_is_the_model_itself(model, capsys):
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert convert(model, model) != 0
    assert str(model) in one_line(capsys)
    assert convert(model, model, "--overwrite") != 0
    one_line(capsys)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_out_is_a_link_to_the_model(model, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    (tmp_path / "link").symlink_to(model)
    assert convert(model, tmp_path / "link", "--overwrite") != 0
    one_line(capsys)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_out_is_a_file(model, tmp_path, capsys):
    (tmp_path / "out").write_text("precious")
    assert convert(model, tmp_path / "out", "--overwrite") == 1
    assert "out" in one_line(capsys)
    assert (tmp_path / "out").read_text() == "precious"


def test_out_below_a_file(model, tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    assert convert(model, tmp_path / "file/out") == 1
    one_line(capsys)
    assert (tmp_path / "file").read_text() == "precious"


def test_out_holds_another_persons_files(model, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    assert convert(model, out, "--overwrite") == 1
    one_line(capsys)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_out_is_a_dangling_link(model, tmp_path, capsys):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    if convert(model, tmp_path / "out") == 0:
        assert (tmp_path / "nowhere/config.json").exists()
    else:
        one_line(capsys)
        assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_out_in_a_read_only_folder(model, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o555)
    assert convert(model, tmp_path / "locked/out") == 1
    assert "locked" in one_line(capsys)


def test_a_name_that_no_file_system_takes(model, tmp_path, capsys):
    assert convert(model, tmp_path / ("x" * 300)) == 1
    one_line(capsys)


# ---- text -----------------------------------------------------------------------------------------------------------

LINE = json.dumps({"text": "A sentence that is long enough to be counted as text. " * 4}).encode() + b"\n"
TEXTS = {
    "no tokens": ("a.txt", b"\n \n", "no text"),
    "nothing in it": ("a.jsonl", b"", "no text"),
    "binary": ("a.txt", bytes(range(256)) * 40, "UTF-8"),
    "NUL bytes": ("a.txt", b"text \0 text " * 400, "NUL"),
    "a picture": ("a.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(200), "UTF-8"),
    "not JSON": ("a.jsonl", LINE + b"{text: x}\n", "a.jsonl:2"),
    "no text field": ("a.jsonl", b'{"content": "x"}\n', "text"),
    "numbers": ("a.jsonl", b'{"text": 7}\n', "int"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(LINE * 99, mtime=0)[:-20], "damaged"),
    "not parquet": ("a.parquet", b"PAR1PAR1", "parquet"),
    "too short": ("a.txt", b"Too short.", "token"),
    "another kind": ("a.pdf", b"%PDF-1.4", "a.pdf"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text(model, tmp_path, capsys, case):
    name, data, word = TEXTS[case]
    (tmp_path / name).write_bytes(data)
    assert convert(model, tmp_path / "out", "--data", str(tmp_path / name)) in (1, 2)
    assert word in one_line(capsys)
    assert not (tmp_path / "out/config.json").exists()


def test_a_byte_order_mark_is_no_text(model, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\n\n".join(bundled_documents("train")[:2]).encode())
    assert convert(model, tmp_path / "out", "--data", str(tmp_path / "a.txt")) == 0


def test_a_huge_line(model, tmp_path):
    words = " ".join(f"word{i % 977}" for i in range(2_000_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": words}) + "\n" + LINE.decode() * 4)
    assert convert(model, tmp_path / "out", "--data", str(tmp_path / "a.jsonl")) == 0


# ---- recipes and flags ----------------------------------------------------------------------------------------------

RECIPES = {
    "binary": bytes(range(256)),
    "not YAML": b"align: [1, 2\n",
    "a list": b"- 1\n- 2\n",
    "code": b"align: !!python/object/apply:os.system ['touch marker']\n",
    "aliases that multiply": b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nalign:\n  tokens: *c\n",
    "an unknown key": b"align:\n  token: 300k\n",
    "a key twice": b"align:\n  tokens: 1k\n  tokens: 2k\n",
    "not a number": b"align:\n  lr: .nan\n",
    "NUL bytes": b"align:\n  tokens: 1k\0\n",
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipe(model, tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(RECIPES[case])
    assert convert(model, tmp_path / "out", "-r", "mine.yaml") == 2
    one_line(capsys)
    assert not Path("marker").exists() and not Path("out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--keep-softmax", "0,1,2,3"],
        ["--keep-softmax", "-1"],
        ["--keep-softmax", "101%"],
        ["--keep-softmax", "auto:0"],
        ["--mixer", "0-99=gdn"],
        ["--mixer", "gdm"],
        ["--align-tokens", "-5"],
        ["--align-tokens", "1e400"],
        ["--align-lr", "nan"],
        ["--seed", "x"],
        ["--max-shard-size", "0"],
        ["--dtype", "float64"],
        ["--device", "tpu"],
        ["-s", "align.tokens"],
        ["-s", "=3"],
        ["-s", "__class__.x=3"],
        ["-r", "../../etc/passwd"],
        ["--no-such-flag"],
    ],
    ids=" ".join,
)
def test_flags(model, tmp_path, capsys, words):
    assert convert(model, tmp_path / "out", *words) == 2
    one_line(capsys)
    assert not (tmp_path / "out").exists()


# ---- .gguf ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 64, b"hello " * 100], ids=range(4))
def test_gguf_that_is_none(tmp_path, capsys, data):
    (tmp_path / "a.gguf").write_bytes(data)
    assert convert(tmp_path / "a.gguf", tmp_path / "out") == 1
    assert "gguf" in one_line(capsys)
    assert not (tmp_path / "out").exists()
