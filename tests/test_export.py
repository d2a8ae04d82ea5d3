"""The native form of a model gives the model's logits, to rounding; what has none is refused before writing."""

import copy
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from conftest import SIZES, TEACHERS, generator, make_student, randomise, tiny_tokenizer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM

from linearize import cli
from linearize import export as export_module
from linearize.checkpoint import ShardWriter, TensorIndex
from linearize.console import Console
from linearize.errors import UsageError, UserError
from linearize.export import WEIGHT, export, exportable, fold, four_squares
from linearize.families import FAMILIES

NATIVE = {"kind": "gdn-native"}
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")

# name: (family, fields beyond SIZES, mixers; None for a teacher)
SOURCES = {
    "qwen3": ("qwen3", {"rope_parameters": TEACHERS["qwen3"][1]["rope_parameters"]}, None),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}, None),
    "qwen3-hybrid": ("qwen3", {"rms_norm_eps": 1e-5}, {0: NATIVE, 1: NATIVE, 3: NATIVE}),
    "qwen3-nothing-converted": ("qwen3", {}, {}),
    "llama": (*TEACHERS["llama"], None),
    "llama-tied": (*TEACHERS["llama-tied"], None),
    "llama-hybrid": ("llama", {}, {1: NATIVE, 2: NATIVE}),
    "mistral": ("mistral", {"sliding_window": None}, None),
    "qwen2": ("qwen2", {}, None),
    "qwen2-hybrid": ("qwen2", {}, {0: NATIVE}),
    "smollm3-hybrid": ("smollm3", {"no_rope_layer_interval": 2}, {1: NATIVE, 3: NATIVE}),
}


def build(family: str, fields: dict, mixers: dict | None):
    config = FAMILIES[family].config_class()(**SIZES | fields)
    torch.manual_seed(0)
    model = FAMILIES[family].causal_lm_class()(config).eval()
    randomise(model, 0)
    return model if mixers is None else make_student(model, mixers)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function from a name in SOURCES to (folder, model)."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("source") / name
            model = build(*SOURCES[name])
            model.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return get


def run(folder, out, **options) -> dict:
    return export(str(folder), out, Console(quiet=True), **{"allow_head_padding": True} | options)


def native(out, **options):
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, **options)
    assert type(model) is Qwen3_5ForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(4, 260, (rows, length), generator=generator(3))


def decoded(model, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of all tokens: the first `start` at once, then one at a time through the cache."""
    out = model(ids[:, :start], use_cache=True)
    pieces, cache = [out.logits], out.cache
    for t in range(start, ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def divergence(got: torch.Tensor, want: torch.Tensor) -> float:
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_logits_are_the_sources(source, name, tmp_path):
    """The whole text, decoding through a cache and a left-padded batch, all against one forward of the source."""
    folder, model = source(name)
    run(folder, tmp_path / "out")
    copy_ = native(tmp_path / "out")
    ids = text(2, 70)  # beyond one chunk of 64
    want = model(ids, use_cache=False).logits
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :10], mask[1, :17] = 0, 0
    padded = torch.stack([torch.cat([torch.zeros(10, dtype=torch.long), ids[0]]), *[torch.zeros(80, dtype=torch.long)]])
    padded[1, 17:] = ids[1, :63]
    left = copy_(padded, attention_mask=mask, use_cache=False).logits
    pairs = [(copy_(ids, use_cache=False).logits, want), (decoded(copy_, ids, 60), want)]
    pairs += [(left[0, 10:], want[0]), (left[1, 17:], want[1, :63])]
    for got, expected in pairs:
        if SOURCES[name][0] == "qwen3":
            assert relative(got, expected) < 1e-5
        assert relative(got, expected) < 2e-3
        assert divergence(got, expected) < 1e-6


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_from_teacher_to_native(source, family, tmp_path):
    """convert writes and trains gdn-native layers under the names that export and transformers expect."""
    folder, _ = source(family)
    argv = f"convert {folder} {tmp_path / 'student'} --mixer gdn-native --keep-softmax 2 -q --sample {''!r} "
    argv += "--calibrate-tokens 256 --calibrate-context 32 --align-tokens 256 --align-context 32 "
    argv += "--align-batch-tokens 64 --distill-tokens 256 --distill-context 32 --distill-batch-tokens 64 "
    argv += "--heldout-tokens 0"
    assert cli.run(shlex.split(argv)) == 0
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert not [name for name in student.state_dict() if ".attn." in name and "o_proj" not in name]
    run(tmp_path / "student", tmp_path / "out")
    exported, ids = native(tmp_path / "out"), text(2, 40)
    with torch.no_grad():
        want = student(ids, use_cache=False).logits
        for got in (exported(ids, use_cache=False).logits, decoded(exported, ids, 30)):
            assert divergence(got, want) < 1e-6
            assert family != "qwen3" or relative(got, want) < 1e-5
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Layers 0, 1, 3 are Gated DeltaNet" in card


@torch.no_grad()
def test_bfloat16_is_as_near_as_the_source_in_bfloat16(source, tmp_path):
    folder, model = source("qwen3-hybrid")
    run(folder, tmp_path / "out", dtype="bfloat16")
    ids = text(16, 50)
    want = model(ids, use_cache=False).logits
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids, use_cache=False).logits
    got = native(tmp_path / "out")(ids, use_cache=False).logits
    assert got.dtype == torch.bfloat16
    assert divergence(got, want) < 1.1 * divergence(own, want)
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                kept = key.endswith(("A_log", "dt_bias", "q_norm.weight", "k_norm.weight"))
                assert tensors.get_slice(key).get_dtype() == ("F32" if kept else "BF16"), key


@pytest.mark.parametrize("name", ["qwen3-biased-tied", "qwen3-hybrid", "llama-tied"])
@torch.no_grad()
def test_bfloat16_loses_nothing_but_the_rounding_of_the_source(source, name, tmp_path):
    """Small norm weights included, also of norms that feed nothing into which powers of two could move."""
    _, model = source(name)
    model = copy.deepcopy(model)
    for key, weight in model.named_parameters():
        if "norm" in key:
            weight.mul_(0.1)
        if not key.endswith(("A_log", "dt_bias")):
            weight.copy_(weight.bfloat16())
    model.save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    run(tmp_path / "source", tmp_path / "out", dtype="bfloat16")
    ids = text(2, 50)
    want = model(ids, use_cache=False).logits
    got = native(tmp_path / "out", dtype=torch.float32)(ids, use_cache=False).logits
    assert relative(got, want) < (1e-5 if SOURCES[name][0] == "qwen3" else 2e-3)
    assert divergence(got, want) < 1e-7


# ---- powers of two and squares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_folding_loses_no_bit(dtype):
    """Of every w in the dtype's reach, its sign included; where it would, the channel stays as it is."""
    exponents = torch.arange(-18.0, 8.0)
    fractions = 1 + torch.arange(128) / 128
    w = (2**exponents[:, None] * fractions).flatten()
    w = torch.cat([w, -w, torch.zeros(1)]).to(dtype)
    linears = {name: torch.randn(5, len(w), generator=generator(i)).to(dtype) for i, name in enumerate("ab")}
    linears["b"][:, ::50] *= 2.0**-12  # in fp16 the next division underflows
    stored, moved = fold(w, linears)
    assert stored.dtype == dtype
    back = 1 + stored.double()
    untouched = torch.zeros(len(w), dtype=torch.bool)
    for name, linear in linears.items():
        untouched |= (moved[name] == linear).all(0)
        # (w s) (W / s) = w W, product by product, exactly
        product = back * moved[name].double()
        exact = product == w.double() * linear.double()
        assert (exact.all(0) | untouched).all()
    folded = ~untouched & (w != 0)
    assert ((back[folded] >= 1) & (back[folded] < 2)).all()
    in_range = (w.abs() >= 1) & (w.abs() < 2) & (w > 0)
    assert (untouched | ~in_range).all()
    if dtype != torch.float16:
        assert untouched.sum() == in_range.sum() + 1  # and the zero


def test_plain_subtraction_would_lose_bits():
    w = torch.tensor([0.2001953125], dtype=torch.bfloat16)
    stored, moved = fold(w, {"a": torch.ones(1, 1, dtype=torch.bfloat16)})
    assert (1 + (w.float() - 1).bfloat16().float()) != w.float()
    assert (1 + stored.float()) * moved["a"].float() == w.float()


def test_four_squares():
    for n in range(1, 300):
        assert sum(a * a for a in four_squares(n)) == n


def test_what_is_stored_for_padding_is_exact_in_bfloat16(source, tmp_path):
    folder, _ = source("llama-hybrid")
    run(folder, tmp_path / "out", dtype="bfloat16")
    tensors = TensorIndex.open(tmp_path / "out")
    dim, prefix = 32, "model.layers.0.self_attn."
    q = tensors.get(prefix + "q_proj.bias").double().view(4, 2, dim + 8)
    k = tensors.get(prefix + "k_proj.bias").double().view(2, dim + 8)
    assert not q[:, 1].any() and not q[:, 0, :dim].any() and not k[:, :dim].any()
    assert (q[:, 0].square().sum(1) == WEIGHT**2 * (dim + 8)).all()
    assert (k.square().sum(1) == WEIGHT**2 * dim).all()
    norm = tensors.get(prefix + "q_norm.weight").double() + 1
    assert norm.tolist() == [WEIGHT] * dim + [0] * 8
    assert not tensors.get(prefix + "q_proj.weight").view(4, 2, dim + 8, 64)[:, 1].any()


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_the_folder(source, tmp_path):
    folder, _ = source("llama-hybrid")
    out = tmp_path / "out"
    record = run(folder, out, max_shard_size=100_000)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert not (out / ".linearize").exists() and not list(out.glob("*.partial"))
    assert AutoTokenizer.from_pretrained(out)("a b")["input_ids"] == tiny_tokenizer()("a b")["input_ids"]
    written = json.loads((out / "linearize.json").read_text())
    assert written == {k: v for k, v in record.items() if k != "check"}
    assert written["layers"] == ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert written["bytes"] == TensorIndex.open(out).nbytes
    assert written["teacher"]["source"] == str(folder)
    readme = (out / "README.md").read_text()
    assert "Layers 1, 2 are Gated DeltaNet" in readme and "no QK-norm" in readme and "not" in readme
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["head_dim"] == 40 and config["linear_key_head_dim"] == config["linear_value_head_dim"] == 32
    assert config["linear_num_key_heads"] == config["linear_num_value_heads"] == 4
    # SGLang reads the factor from the top, vLLM wants a flag for the biases.
    assert int(config["partial_rotary_factor"] * 40) == 32
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"]
    assert config["qkv_bias"] is True and "linearize" not in config and "auto_map" not in config


def test_a_model_without_padding_says_so(source, tmp_path):
    folder, _ = source("qwen3")
    run(folder, tmp_path / "out", allow_head_padding=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["partial_rotary_factor"] == 1.0 and "qkv_bias" not in config and config["head_dim"] == 32
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "QK-norm" not in readme and "vLLM" not in readme


@pytest.mark.parametrize("mixers, interval", [((0, 2), 2), ((0, 1, 2), 4), ((), 1), ((1, 2), None), ((0, 1), None)])
def test_even_distances_of_softmax_layers_are_said(mixers, interval, tmp_path):
    """llama.cpp's converter reads no list of layers."""
    build("qwen3", {}, dict.fromkeys(mixers, NATIVE)).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    run(tmp_path / "source", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("full_attention_interval") == interval
    assert native(tmp_path / "out").config.layer_types == [
        "linear_attention" if i in mixers else "full_attention" for i in range(4)
    ]


def test_output_biases_are_named(source, tmp_path):
    """vLLM reads none there, and would load such a model without a word."""
    run(source("llama")[0], tmp_path / "out")
    assert "vLLM, which has none there" in (tmp_path / "out" / "README.md").read_text()


def test_decoding_is_measured_beside_the_teacher(source, tmp_path):
    """The native classes under `linearize bench`, with the cache that they hold."""
    run(source("qwen3-hybrid")[0], tmp_path / "out")
    record = json.loads((tmp_path / "out" / "linearize.json").read_text())
    record["teacher"] = {"source": str(source("qwen3")[0]), "revision": None}
    (tmp_path / "out" / "linearize.json").write_text(json.dumps(record))
    argv = f"bench decode {tmp_path / 'out'} --teacher --context 16,64 --device cpu --steps 2 -q"
    assert cli.run(shlex.split(argv)) == 0
    cells = json.loads((tmp_path / "out" / "eval" / "decode.json").read_text())["cells"]
    assert [(c["model"], c["context"]) for c in cells] == [
        (side, context) for context in (16, 64) for side in ("teacher", "student")
    ]
    for side, softmax_layers in (("teacher", 4), ("student", 1)):
        short, long = (c["cache_bytes"] for c in cells if c["model"] == side)
        assert long - short == softmax_layers * 48 * 2 * 2 * 32 * 4  # keys and values of 2 heads of 32 dims


def test_a_stopped_export_is_done_again(source, tmp_path, monkeypatch):
    folder, _ = source("qwen3")
    out, add = tmp_path / "out", ShardWriter.add

    def stop(self, name, tensor):
        if "layers.2" in name:
            raise KeyboardInterrupt
        add(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, out, max_shard_size=10_000)
    assert not (out / "config.json").exists() and not (out / "linearize.json").exists()
    monkeypatch.undo()
    run(folder, out)
    native(out)
    with pytest.raises(UserError, match="holds a model already"):
        run(folder, out)


# vLLM's loader of Qwen3_5ForCausalLM as of commit 00def4f8421153e037ff6270c0a8c31912a00206: load_weights and
# packed_modules_mapping in vllm/model_executor/models/qwen3_5.py, its layers in qwen3_next.py there and in
# vllm/model_executor/layers/mamba/gdn_linear_attn.py. The parameter on the left is filled from the checkpoint's tensors
# on the right, each its own part of the rows.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def vllm_parameters(config: dict) -> dict[str, list[int]]:
    """Names and shapes of what vLLM allocates, on one device."""
    d, ff, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], d]
    for i, kind in enumerate(config["layer_types"]):
        own = {
            "input_layernorm.weight": [d],
            "post_attention_layernorm.weight": [d],
            "mlp.gate_up_proj.weight": [2 * ff, d],
            "mlp.down_proj.weight": [d, ff],
        }
        if kind == "full_attention":
            own |= {
                "self_attn.qkv_proj.weight": [2 * q + 2 * kv, d],
                "self_attn.o_proj.weight": [d, q],
                "self_attn.q_norm.weight": [dim],
                "self_attn.k_norm.weight": [dim],
            }
            if config.get("qkv_bias", False):
                own["self_attn.qkv_proj.bias"] = [2 * q + 2 * kv]
        else:
            own |= {
                "linear_attn.in_proj_qkvz.weight": [2 * keys + 2 * values, d],
                "linear_attn.in_proj_ba.weight": [2 * heads, d],
                "linear_attn.conv1d.weight": [2 * keys + values, 1, config["linear_conv_kernel_dim"]],
                "linear_attn.A_log": [heads],
                "linear_attn.dt_bias": [heads],
                "linear_attn.norm.weight": [config["linear_value_head_dim"]],
                "linear_attn.out_proj.weight": [d, values],
            }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


@pytest.mark.parametrize("name", ["qwen3-hybrid", "llama-hybrid", "qwen2", "llama-tied"])
def test_names_and_shapes_are_those_of_vllms_loader(source, name, tmp_path):
    run(source(name)[0], tmp_path / "out")
    tensors = TensorIndex.open(tmp_path / "out")
    found: dict[str, list[int]] = {}
    for key in tensors.names():
        shape, target = list(tensors.shape(key)), key
        for packed, parts in STACKED.items():
            for part in parts:
                target = re.sub(rf"\.{part}\.", f".{packed}.", target)
        if target in found:
            shape[0] += found[target][0]
        found[target] = shape
    # vLLM has no o_proj.bias and skips one; it must then be zero.
    for key in [key for key in found if key.endswith("o_proj.bias")]:
        assert not tensors.get(key).any()
        del found[key]
    assert found == vllm_parameters(json.loads((tmp_path / "out" / "config.json").read_text()))


# ---- refusals -------------------------------------------------------------------------------------------------------

QWEN3, LLAMA = ("qwen3", {}), ("llama", {})
REFUSALS = [
    (QWEN3, {2: {"kind": "gdn"}}, "layer 2: a gdn mixer has no native form, only gdn-native"),
    (QWEN3, dict.fromkeys(range(4), NATIVE), "no softmax layer is left"),
    (TEACHERS["qwen3"], {}, "layer 2: softmax in a window of 6 tokens"),
    (TEACHERS["mistral"], {}, "layer 0: softmax in a window of 6 tokens"),
    (("smollm3", {"no_rope_layer_interval": 2}), {1: NATIVE}, "layer 3: softmax without rotary embedding"),
    (("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}), {}, "type dynamic"),
    (("llama", {"hidden_act": "gelu"}), {}, "an MLP with gelu"),
    (("llama", {"mlp_bias": True}), {}, "an MLP with biases"),
    (("llama", {"attention_bias": True}), {1: NATIVE}, "layer 1: an output projection with a bias"),
    (("olmo2", {}), {}, "olmo2 blocks: it normalises after"),
    (("granite", {}), {}, "granite blocks: it multiplies"),
    (("phi3", {}), {}, "phi3 blocks: its projections are fused"),
    (TEACHERS["gemma3_text"], {}, "gemma3_text blocks: it normalises before and after"),
    (TEACHERS["gemma2"], {}, "gemma2 blocks: it normalises before and after"),
    (TEACHERS["glm4"], {}, "glm4 blocks: it normalises before and after"),
    (TEACHERS["qwen3_moe"], {}, "qwen3_moe blocks: it is a mixture of experts"),
]


@pytest.mark.parametrize("teacher, mixers, reason", REFUSALS, ids=[r[2][:24] for r in REFUSALS])
def test_refusals(teacher, mixers, reason):
    family, fields = teacher
    config = FAMILIES[family].config_class()(**SIZES | fields)
    found = exportable(config, mixers, allow_head_padding=True)
    assert found is not None and reason in found and "\n" not in found


def test_every_family_is_known():
    assert set(FAMILIES) == {*export_module.BLOCKS, *export_module.OTHER_BLOCKS}


def test_head_padding_must_be_asked_for():
    for family in export_module.BLOCKS:
        config = FAMILIES[family].config_class()(**SIZES | {name: None for name in WINDOWS[:1]})
        config.no_rope_layers = [1] * 4
        found = exportable(config, {0: NATIVE})
        assert (found is None) is (family == "qwen3")
        assert exportable(config, {0: NATIVE}, allow_head_padding=True) is None
        if found:
            assert "--allow-head-padding" in found and "KV cache larger by 8 in 32" in found


@pytest.mark.parametrize("mixers", [{1: {"kind": "gdn"}}, None], ids=["kind", "padding"])
def test_refused_before_a_byte_is_written(mixers, tmp_path, capsys):
    build("llama", {}, mixers).save_pretrained(tmp_path / "source")
    argv = ["export", str(tmp_path / "source"), str(tmp_path / "out"), *(["--allow-head-padding"] if mixers else [])]
    assert cli.run(argv) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "cannot be exported to qwen3_5: " in error
    assert ("layer 1: a gdn mixer" if mixers else "--allow-head-padding") in error
    assert not (tmp_path / "out").exists()


def test_large_key_biases_are_refused(tmp_path):
    model = build("qwen2", {}, None)
    with torch.no_grad():
        model.model.layers[3].self_attn.k_proj.bias[5] = 400.0
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match="layer 3: the bias of its k projection.*relative error of 3.8e-02"):
        run(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_target_and_a_damaged_source(source, tmp_path):
    folder, model = source("qwen3-hybrid")
    with pytest.raises(UsageError, match="unknown architecture .got 'mamba'.: one of qwen3_5"):
        run(folder, tmp_path / "out", to="mamba")
    model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["linearize"]["mixers"].pop("3")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="do not fit its config.json: .*self_attn"):
        run(tmp_path / "source", tmp_path / "out")


# ---- the check ------------------------------------------------------------------------------------------------------


MODES = ("whole text", "cached decoding", "left-padded batch")


def test_check_in_a_fresh_process(source, tmp_path, capsys):
    argv = ["export", str(source("qwen3-hybrid")[0]), str(tmp_path / "out"), "--check", "--json", "-q"]
    assert cli.run(argv) == 0
    said = json.loads(capsys.readouterr().out)
    rows = {(row["model"], row["dtype"], row["mode"]): row for row in said["check"]}
    runs = [("export", "float32"), ("export", "bfloat16"), ("source", "bfloat16")]
    assert list(rows) == [(*run, mode) for run in runs for mode in MODES]
    for mode in MODES:
        exact, low, own = (rows[*run, mode] for run in runs)
        assert exact["kl"] < 1e-6 and exact["top1"] == 1
        assert exact["relative_error"] < 1e-5
        assert 0 < low["kl"] < 1.1 * own["kl"] < 0.1
        assert own["relative_error"] < 0.1 and own["top1"] > 0.9


@torch.no_grad()
def test_the_check_knows_which_tokens_a_mode_has(source):
    """In every mode the logits are those of the whole text at the tokens that are named, each row of its own length."""
    model, ids = source("qwen3-hybrid")[1], text(4, 24)
    want, counts = model(ids, use_cache=False).logits, {}
    for mode, got, tokens in export_module.in_modes(model, ids, 5):
        assert relative(got, want[tokens]) < 1e-5, mode
        counts[mode] = tokens.sum(1).tolist()
    assert counts == dict(zip(MODES, ([24] * 4, [24] * 4, [24, 21, 18, 15]), strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, None),
        ({"relative_error": 2e-4}, "relative_error of cached decoding in float32"),
        ({"kl": 2e-6}, "kl of cached decoding in float32"),
        ({"kl": float("nan")}, "kl of cached decoding in float32"),
        ({"dtype": "bfloat16", "kl": 0.00112}, "kl of cached decoding in bfloat16"),
        ({"dtype": "bfloat16", "kl": 0.00108, "relative_error": 0.1}, None),
    ],
)
def test_a_check_above_its_limits_fails(source, tmp_path, capsys, monkeypatch, change, message):
    good = {"model": "export", "dtype": "float32", "mode": MODES[1], "relative_error": 5e-5, "kl": 1e-8, "top1": 1.0}
    own = {**good, "model": "source", "dtype": "bfloat16", "relative_error": 0.1}
    # The source in the same mode counts, wherever it stands.
    others = [{**own, "mode": mode, "kl": kl} for mode, kl in zip(MODES, (0.01, 0.001, 0.0001), strict=True)]
    monkeypatch.setattr(export_module, "compare", lambda *args: [{**good, **change}, *others])
    argv = ["export", str(source("qwen3-hybrid")[0]), str(tmp_path / "out"), "--check", "-q"]
    assert cli.run(argv) == (0 if message is None else 1)
    captured = capsys.readouterr()
    assert "cached decoding" in captured.out
    if message:
        assert f"error: the export differs from its source: {message}" in captured.err


def test_the_vllm_script_compares():
    """Its own part, without vLLM: where rows part, and by how much they differ until then."""
    path = Path(__file__).parents[1] / "recipes" / "vllm-smoke" / "smoke.py"
    smoke = runpy.run_path(str(path))
    want = [([1, 2, 3], [-0.1, -0.2, -0.3]), ([4, 5], [-1.0, -1.0])]
    got = [([1, 2, 3], [-0.1, -0.25, -0.3]), ([4, 6], [-1.5, -0.1])]
    rows = smoke["compare"](want, got)
    assert [row["same_tokens"] for row in rows] == [3, 1] and [row["of"] for row in rows] == [3, 2]
    assert [row["largest_difference"] for row in rows] == pytest.approx([0.05, 0.5])
