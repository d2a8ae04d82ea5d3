"""The diagnosis of a model: every number against a plain computation on the whole model, and what is printed."""

import copy
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import TEACHERS, teacher_model, tiny_tokenizer
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from linearize import cli, plots
from linearize import inspect as module
from linearize.card import licence_of
from linearize.console import Console
from linearize.convert import convert
from linearize.data import documents, open_sources, pack_rows
from linearize.errors import UsageError, UserError
from linearize.inspect import MARGIN, Attention, add_attention, final_error, inspect, suggest
from linearize.observe import Observed
from linearize.recipe import MIXER_KINDS, Recipe

TOKENS, CONTEXT = 256, 32
FAST = {
    "calibrate.tokens": TOKENS,
    "calibrate.context": CONTEXT,
    "calibrate.taps": 2,
    "calibrate.time_scales": 1,
    "run.device": "cpu",
}
HELD_OUT = torch.tensor([3, 7])  # every fourth row
FIT = torch.tensor([0, 1, 2, 4, 5, 6])
CHOOSE = torch.tensor([4, 5, 6])  # the second of two batches of three
RELATIVE = 2e-4  # fp32 sums in another order


def look(folder, **options) -> dict:
    return inspect(str(folder), Recipe.from_values(FAST | {"run.json": True}), Console(quiet=True), **options)


# ---- the whole model, plainly ---------------------------------------------------------------------------------------


@torch.no_grad()
def plain_attention(name: str, ids) -> dict[int, dict]:
    """What goes on in every layer of the whole model with a softmax written out here: x, q, k, v, p, heads, output."""
    seen: dict[int, dict] = {}

    def spy(layer, q, k, v, mask, scaling, softcap=None, **_):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = scaling * q @ k.transpose(2, 3)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        p = (scores + mask).softmax(-1)
        seen[layer.layer_idx] = {"q": q, "k": k, "v": v, "p": p, "heads": p @ v}
        return (p @ v).transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", eager_mask)
    model = copy.deepcopy(teacher_model(name))
    model.set_attn_implementation("spy")
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda attn, args, given, out: seen[attn.layer_idx].update(x=given["hidden_states"], output=out[0]),
            with_kwargs=True,
        )
    model(ids, use_cache=False)
    return seen


def relative(wrong, right, dims=None) -> torch.Tensor:
    return ((wrong - right).square().sum(dims) / right.square().sum(dims)).sqrt()


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def both(request, teacher_folder):
    """(name, the report's layers, the same layers of the whole model)."""
    rows = pack_rows(documents(open_sources("bundled")), tiny_tokenizer(), CONTEXT, TOKENS, long_only=True)
    report = look(teacher_folder(request.param), layers="1-2", mixers="gdn-standard")
    assert [at["layer"] for at in report["layers"]] == [1, 2]
    assert (report["tokens"], report["context"]) == (TOKENS, CONTEXT)
    plain = plain_attention(request.param, rows.ids)
    return request.param, report["layers"], [plain[1], plain[2]]


def test_entropy_sink_and_distance(both):
    name, found, plain = both
    behind = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
    for at, true in zip(found, plain, strict=True):
        p = true["p"].double()
        wanted = {
            "entropy": -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(-1).mean((0, 2)),
            "sink": p[:, :, 1:, 0].mean((0, 2)),  # the first token sees itself alone
            "distance": (p * behind).sum(-1).mean((0, 2)),
        }
        for key, heads in wanted.items():
            assert torch.tensor(at["heads"][key], dtype=torch.float64).sub(heads).abs().max() < RELATIVE * heads.max()
            assert at[key] == pytest.approx(float(heads.mean()), rel=RELATIVE)
            assert 0 < at[key] < {"entropy": math.log(CONTEXT), "sink": 1, "distance": CONTEXT}[key]
    if TEACHERS[name][1].get("sliding_window"):  # six keys at most where the window slides
        assert min(at["distance"] for at in found) < 6


def test_lambda_and_its_r2(both):
    _, found, plain = both
    for at, true in zip(found, plain, strict=True):
        q, m = true["q"].double(), (true["p"] @ true["k"]).double()
        slope = (q * m)[FIT].sum((0, 2, 3)) / (q * q)[FIT].sum((0, 2, 3))
        wrong, right = (m - slope[:, None, None] * q)[HELD_OUT].square(), m[HELD_OUT].square()
        r2 = 1 - wrong.sum((0, 2, 3)) / right.sum((0, 2, 3))
        assert torch.tensor(at["heads"]["lambda_q"]).sub(slope).abs().max() < RELATIVE * slope.abs().max()
        assert torch.tensor(at["heads"]["key_r2"]).sub(r2).abs().max() < RELATIVE
        assert at["lambda_q"] == pytest.approx(float(slope.mean()), rel=RELATIVE)
        assert at["key_r2"] == pytest.approx(1 - float(wrong.sum() / right.sum()), abs=RELATIVE)
        assert r2.max() - r2.min() > 10 * RELATIVE


def test_first_rung_of_the_ladder(both):
    """The running mean of the values, forgetting hardly anything, against the head outputs."""
    _, found, plain = both
    weights = 0.9999 ** (torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)).double()
    weights = weights.tril() / weights.tril().sum(1, keepdim=True)
    for at, true in zip(found, plain, strict=True):
        mean, heads = (weights @ true["v"].double())[CHOOSE], true["heads"].double()[CHOOSE]
        assert at["heads"]["ladder"]["mean"] == pytest.approx(relative(mean, heads, (0, 2, 3)).tolist(), rel=RELATIVE)
        assert at["ladder"]["mean"] == pytest.approx(float(relative(mean, heads)), rel=RELATIVE)
        assert list(at["ladder"]) == ["mean", "vala", "gdn", "tilted", "readout", "full"]
        assert at["ladder"]["full"] < at["ladder"]["mean"]


def test_start_error(both):
    """Of the control: the standard delta rule on unit keys, half-life 128, write strength 1/2, o_proj as it was."""
    name, found, plain = both
    for at, true, i in zip(found, plain, (1, 2), strict=True):
        q, k = (F.normalize(true[of][HELD_OUT].double(), dim=-1) for of in "qk")
        v = true["v"][HELD_OUT].double()
        state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=torch.float64)
        rows = []
        for t in range(CONTEXT):
            state = state * 0.5 ** (1 / 128)
            old = torch.einsum("nhkv,nhk->nhv", state, k[:, :, t])
            state = state + 0.5 * torch.einsum("nhk,nhv->nhkv", k[:, :, t], v[:, :, t] - old)
            rows.append(torch.einsum("nhkv,nhk->nhv", state, q[:, :, t]) / q.shape[-1] ** 0.5)
        o = torch.stack(rows, 2)
        heads = relative(o, true["heads"][HELD_OUT].double(), (0, 2, 3))
        assert at["heads"]["start"]["gdn-standard"] == pytest.approx(heads.tolist(), rel=RELATIVE)
        project = teacher_model(name).model.layers[i].self_attn.o_proj
        output = project(o.transpose(1, 2).flatten(2).float()).detach()
        error = float(relative(output, true["output"][HELD_OUT]))
        assert at["start"] == {"gdn-standard": pytest.approx(error, rel=RELATIVE)}


# ---- parts ----------------------------------------------------------------------------------------------------------


def random_batch(batch: int, length: int) -> Observed:
    draw = torch.Generator().manual_seed(batch)
    q = torch.randn(batch, length, 4, 8, generator=draw)
    k, v = torch.randn(2, batch, length, 2, 8, generator=draw)
    return Observed(q, q, k, v, q, q, 1.5)


def test_packed_documents_count_as_if_alone_and_chunks_do_not_matter(monkeypatch):
    seen = random_batch(2, 12)
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = starts[1, 9] = True
    document = starts.cumsum(1)
    mask = (document[:, None, :, None] == document[:, None, None, :]) & torch.ones(12, 12, dtype=torch.bool).tril()
    packed, alone, small = (Attention.empty(4, torch.device("cpu")) for _ in range(3))
    add_attention(packed, seen, mask, starts, True)
    for row, a, b in ((0, 0, 5), (0, 5, 12), (1, 0, 9), (1, 9, 12)):
        part = Observed(*(getattr(seen, of)[row : row + 1, a:b] for of in ("x", "q", "k", "v", "heads", "output")), 1.5)
        add_attention(alone, part, None, None, True)
    monkeypatch.setattr(module, "SCORES", 100)  # two queries at a time
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~mask, torch.finfo(torch.float32).min)
    add_attention(small, seen, additive, starts, True)
    for other in (alone, small):
        assert (packed.tokens, packed.followers) == (other.tokens, other.followers) == (24, 20)
        for name in ("entropy", "sink", "distance", "power", "match", "keys"):
            assert torch.allclose(getattr(packed, name), getattr(other, name), rtol=1e-5, atol=1e-6), name


def test_attention_weights_never_exist_whole(monkeypatch):
    """Whatever the context: no tensor with more than SCORES elements per query chunk."""
    monkeypatch.setattr(module, "SCORES", 2**12)
    sizes = []
    softmax = torch.Tensor.softmax

    def counting(scores, *args, **kwargs):
        sizes.append(scores.numel())
        return softmax(scores, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "softmax", counting)
    add_attention(Attention.empty(4, torch.device("cpu")), random_batch(1, 256), None, None, False)
    assert len(sizes) == 256 // 4 and max(sizes) <= 2**12


def test_suggestion_rule():
    sizes = {"a": (100, 100), "b": (50, 50), "cache": (0, 9999)}
    assert suggest({"a": 0.50, "b": 0.50 * (1 + MARGIN) - 1e-6, "cache": 0.1}, sizes) == "b"
    assert suggest({"a": 0.50, "b": 0.50 * (1 + MARGIN) + 1e-6, "cache": 0.1}, sizes) == "a"
    assert suggest({"a": math.nan, "b": 3.0}, sizes) == "b"
    assert suggest({"cache": 0.1}, sizes) is None
    assert f"{100 * MARGIN:.0f} % higher" in module.RULE


def test_final_error():
    assert final_error([9.0] * 18 + [0.01, 0.07]) == pytest.approx(0.2)
    assert final_error([0.25]) == 0.5 and final_error([]) is None


# ---- the command ----------------------------------------------------------------------------------------------------

SMALL = "--tokens 96 --context 24 --device cpu --mixers gdn --layers 0"


def test_json_is_one_object_and_files_are_there(teacher_folder, tmp_path, capsys):
    assert (
        cli.run(
            ["inspect", str(teacher_folder("llama-tied")), *SMALL.split(), "--out", str(tmp_path / "a/b"), "--json"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["layers"][0]["suggested"] == "gdn" and report["keep_first"] == [0]
    assert all(
        len(report["layers"][0]["heads"][key]) == 4 for key in ("entropy", "sink", "distance", "lambda_q", "key_r2")
    )
    assert "inspect: layer 0" in err
    names = {path.name for path in (tmp_path / "a/b").iterdir()}
    assert names == {"inspect.json", *(f"{n}.png" for n in ("ladder", "starts", "heads", "attention", "key-readout"))}
    assert sorted(report["files"]) == sorted(str(tmp_path / "a/b" / name) for name in names)
    assert all((tmp_path / "a/b" / n).read_bytes().startswith(b"\x89PNG") for n in names if n.endswith("png"))
    written = json.loads((tmp_path / "a/b/inspect.json").read_text())
    assert written == {key: value for key, value in report.items() if key != "files"}


def test_without_matplotlib(teacher_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    assert cli.run(["inspect", str(teacher_folder("llama-tied")), *SMALL.split(), "-q", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "warning: no figures: matplotlib is missing, pip install 'linearize[plots]'" in err.splitlines()
    assert "entropy" in out and [path.name for path in tmp_path.iterdir()] == ["inspect.json"]


def test_tables_fit_a_hundred_columns(capsys):
    rungs = dict.fromkeys(("mean", "vala", "gdn", "tilted", "readout", "full"), 1.5)
    layer = {
        "layer": 99,
        "entropy": 10.25,
        "sink": 0.5,
        "distance": 1234.5,
        "lambda_q": -0.25,
        "key_r2": -0.125,
        "ladder": rungs,
        "start": dict.fromkeys(MIXER_KINDS, 1e16) | {"gdn": 0.5},
        "suggested": max(MIXER_KINDS, key=len),
        "converted": {"aligned": 0.25},
    }
    report = {"model": "a/b", "tokens": 8000, "context": 512, "mixers": MIXER_KINDS, "rule": "r"}
    module._show(report | {"layers": [layer], "keep_first": [99]}, Console(quiet=True))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "1e+16*" in out and "0.500 " in out and "1234.5" in out and "-0.125" in out


def test_a_converted_folder_shows_its_teacher_and_what_came_of_it(teacher_folder, tmp_path):
    changes = {"align.tokens": 96, "align.context": 24, "align.batch_tokens": 48, "data.heldout_tokens": 0}
    recipe = Recipe.from_values(FAST | changes | {"convert.keep_softmax": "2,3", "calibrate.select_tokens": 64})
    teacher = shutil.copytree(teacher_folder("llama-tied"), tmp_path / "teacher")
    (teacher / "README.md").write_text("---\nlicense: mit\n---\n")
    record = convert(str(teacher), tmp_path / "out", recipe, Console(quiet=True))
    assert licence_of(tmp_path / "out") == {"license": "mit"}, "the teacher's, in the card of the result"
    found = look(tmp_path / "out", layers="1-2", mixers="gdn-standard")
    direct = look(teacher, layers="1-2", mixers="gdn-standard")
    assert found["teacher"] == direct["teacher"] and found["model"] == str(tmp_path / "out")
    one, two = found["layers"]
    assert two.pop("converted") is None
    done = one.pop("converted")
    assert done["kind"] == "gdn" and done["calibrated"] == record["layers"][1]["ladder"]["output"]
    assert done["aligned"] == pytest.approx(record["layers"][1]["losses"][-1] ** 0.5)
    assert found["layers"] == direct["layers"]


@pytest.mark.parametrize(
    "words, code, line",
    [
        ("--layers 4", 2, "--layers: no layer 4 (got '4'): the layers are 0 to 3"),
        ("--layers 3-1", 2, "runs backwards"),
        ("--layers a", 2, "--layers is not understood"),
        ("--mixers gdm", 2, "no such mixer (got 'gdm')"),
        ("--data self", 2, "sampling text takes the whole model"),
        ("--tokens 32 --context 32", 1, "three rows of text are needed"),
        ("--tokens many", 2, "calibrate.tokens"),
        ("--device cuda:99", 2, "no such device"),
    ],
)
def test_mistakes(teacher_folder, capsys, words, code, line):
    assert cli.run(["inspect", str(teacher_folder("llama")), *words.split()]) == code
    out, err = capsys.readouterr()
    assert out == "" and line in err and len(err.splitlines()) == 1


def test_an_unfinished_conversion(tmp_path):
    (tmp_path / ".linearize").mkdir()
    with pytest.raises(UserError, match="not finished"):
        look(tmp_path)


def test_a_converted_folder_without_its_teacher(tmp_path):
    config = {"model_type": "linearize_llama", "linearize": {"teacher": {"source": "/gone", "revision": None}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "linearize.json").write_text("{}")
    with pytest.raises(UserError, match="teacher of .* cannot be opened: no such model"):
        look(tmp_path)
    with pytest.raises(UsageError, match="revision"):
        inspect(str(tmp_path), Recipe.from_values({"model.revision": "main"}), Console(quiet=True))
