import copy
import json
import os
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy
import pytest
import torch
from conftest import TEACHERS, VOCAB, teacher_model
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from linearize import teacher as teacher_module
from linearize.checkpoint import ShardWriter, TensorIndex
from linearize.errors import UsageError, UserError
from linearize.families import FAMILIES
from linearize.teacher import open_teacher

IDS = torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
# Row 0 holds three documents, row 1 one.
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0], list(range(12))])


@pytest.fixture
def folder(teacher_folder, tmp_path):
    """A copy of a tiny teacher's folder that a test may damage."""

    def copied(name="llama"):
        return shutil.copytree(teacher_folder(name), tmp_path / name)

    return copied


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ---- a block at a time ----


def run_blocks(runner, ids, positions):
    hidden = runner.embed(ids)
    for i in range(runner.num_layers):
        with runner.block(i) as layer:
            hidden = layer(hidden, **runner.layer_kwargs(i, ids, positions))
    return hidden


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for name in TEACHERS for attention in sorted({"eager", FAMILIES[TEACHERS[name][0]].softmax})],
)
@pytest.mark.parametrize("positions", [None, PACKED], ids=["whole", "packed"])
@torch.no_grad()
def test_blocks_give_the_logits_of_the_model_bit_for_bit(teacher_folder, name, positions, attention):
    model = copy.deepcopy(teacher_model(name))
    model.set_attn_implementation(attention)
    expected = model(IDS, position_ids=positions, use_cache=False).logits
    runner = open_teacher(str(teacher_folder(name))).runner(attn_implementation=attention)
    hidden = run_blocks(runner, IDS, positions)
    assert torch.equal(runner.head(hidden), expected)
    if positions is not None:
        whole = model(IDS, use_cache=False).logits
        assert not torch.equal(whole, expected), "packing must matter, or this test shows nothing"


@pytest.mark.parametrize("name", TEACHERS)
@torch.no_grad()
def test_layers_get_what_the_model_gives_them(teacher_folder, name):
    model, seen = copy.deepcopy(teacher_model(name)), {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.update({i: kwargs}), with_kwargs=True)
    model(IDS, position_ids=PACKED, use_cache=False)
    runner = open_teacher(str(teacher_folder(name))).runner()
    for i in seen:
        got = runner.layer_kwargs(i, IDS, PACKED)
        assert got.keys() == seen[i].keys()
        for key, value in seen[i].items():
            pairs = zip(got[key], value, strict=True) if isinstance(value, tuple) else [(got[key], value)]
            for a, b in pairs:
                assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, key


def test_layer_kwargs_are_kept_and_bounded(teacher_folder, monkeypatch):
    runner = open_teacher(str(teacher_folder("llama"))).runner()
    runs = []
    run = runner._run
    monkeypatch.setattr(runner, "_run", lambda **inputs: runs.append(1) or run(**inputs))
    first = runner.layer_kwargs(0, IDS, PACKED)
    first["mixer_mask"] = None
    assert "mixer_mask" not in runner.layer_kwargs(0, IDS, PACKED)
    runner.layer_kwargs(3, torch.zeros(2, 12, 64), PACKED)
    assert len(runs) == 1
    runner.layer_kwargs(0, IDS, PACKED.flip(0))
    runner.layer_kwargs(0, IDS)
    assert len(runs) == 3
    monkeypatch.setattr(teacher_module, "MASK_CACHE", 1)
    runner.layer_kwargs(0, IDS[:1])
    assert len(runner._kwargs) == 1


@torch.no_grad()
def test_head_in_chunks_and_with_gradients(teacher_folder):
    runner = open_teacher(str(teacher_folder("granite"))).runner()
    hidden = run_blocks(runner, IDS, None)
    whole = runner.head(hidden)
    parts = list(runner.head_rows(hidden, rows=5))
    assert [part.stop - part.start for part, _ in parts] == [5, 5, 5, 5, 4]
    joined = torch.cat([logits for _, logits in parts])
    torch.testing.assert_close(joined, whole.reshape(-1, VOCAB), rtol=1e-5, atol=1e-5)
    [(part, logits)] = runner.head_rows(hidden)
    assert part == slice(0, 24) and torch.equal(logits, whole.reshape(-1, VOCAB))
    with torch.enable_grad():
        leaf = hidden.clone().requires_grad_()
        runner.head(leaf).square().sum().backward()
    assert leaf.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in runner.model.parameters())


@torch.no_grad()
def test_runner_in_bfloat16(teacher_folder):
    model = copy.deepcopy(teacher_model("gemma3_text")).bfloat16()
    teacher = open_teacher(str(teacher_folder("gemma3_text")))
    assert teacher.dtype == torch.float32
    runner = teacher.runner(dtype=torch.bfloat16)
    hidden = run_blocks(runner, IDS, None)
    assert hidden.dtype == torch.bfloat16
    # transformers keeps the rotary table in fp32 when it loads in bf16; .bfloat16() above casts it.
    model.model.rotary_emb = copy.deepcopy(teacher_model("gemma3_text").model.rotary_emb)
    assert torch.equal(runner.head(hidden), model(IDS, use_cache=False).logits)


@torch.no_grad()
def test_attention_of_a_block_can_be_replaced(teacher_folder):
    class Nothing(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.zeros_like(hidden_states), None

    runner = open_teacher(str(teacher_folder("llama"))).runner()
    hidden = runner.embed(IDS)
    with runner.block(1) as layer:
        assert layer.self_attn.config is runner.config
        before = layer(hidden, **runner.layer_kwargs(1, IDS))
        layer.self_attn = Nothing()
        after = layer(hidden, **runner.layer_kwargs(1, IDS))
    assert not torch.equal(before, after)
    assert not torch.is_grad_enabled() or not any(w.requires_grad for w in layer.parameters())
    with runner.block(1) as layer:
        assert torch.equal(layer(hidden, **runner.layer_kwargs(1, IDS)), before)


def test_only_one_layer_is_held(teacher_folder):
    runner = open_teacher(str(teacher_folder("llama"))).runner()
    with runner.block(0) as layer:
        assert not any(tensor.is_meta for tensor in layer.state_dict().values())
        assert not any(weight.requires_grad for weight in layer.parameters()) and not layer.training
    assert all(weight.is_meta for weight in runner._layers.parameters())
    assert not any(tensor.is_meta for tensor in (*runner.model.parameters(), *runner.model.buffers()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(folder, name, value):
    path = folder()
    edit_weights(path, lambda tensors: tensors[name].view(-1)[7:8].fill_(value))
    with pytest.raises(UserError, match=f"tensor {name} of .*model.safetensors holds NaN or infinite values"):
        with open_teacher(str(path)).runner().block(2):
            pass


def test_weights_too_large_for_half_precision_are_named(folder):
    path = folder()
    edit_weights(path, lambda tensors: tensors["model.norm.weight"][:1].fill_(1e6))
    open_teacher(str(path)).runner(dtype=torch.bfloat16)
    with pytest.raises(UserError, match="too large for torch.float16: use --dtype bfloat16"):
        open_teacher(str(path)).runner(dtype=torch.float16)


# ---- ties ----


def test_tied_weights_share_memory_whichever_is_stored(folder):
    path = folder("llama-tied")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    expected = open_teacher(str(path)).runner().head(torch.ones(1, 64))

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def both(tensors):
        tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()

    for change in (rename, both):
        edit_weights(path, change)
        runner = open_teacher(str(path)).runner()
        assert torch.equal(runner.head(torch.ones(1, 64)), expected)
        assert runner.model.lm_head.weight.data_ptr() == runner.model.model.embed_tokens.weight.data_ptr()


@torch.no_grad()
def test_weights_called_tied_but_stored_apart_are_believed(folder):
    path = folder("llama")
    edit_json(path / "config.json", tie_word_embeddings=True)
    runner = open_teacher(str(path)).runner()
    assert torch.equal(runner.head(run_blocks(runner, IDS, None)), teacher_model("llama")(IDS).logits)


# ---- what a folder must be ----


def test_weights_and_config_must_fit(folder):
    path = folder()

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.1.self_attn.ghost"] = torch.ones(1)
        tensors["model.norm.weight"] = torch.ones(65)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    edit_weights(path, change)
    with pytest.raises(UserError) as error:
        open_teacher(str(path))
    line = str(error.value)
    assert "1 missing (model.layers.1.self_attn.q_proj.weight)" in line
    assert "1 unexpected (model.layers.1.self_attn.ghost)" in line
    assert "1 of another shape (model.norm.weight [65] for [64])" in line
    assert "1 not floating point of 16 bits or more (lm_head.weight torch.int8)" in line
    assert "\n" not in line


def test_rotary_buffers_of_old_checkpoints_are_left_out(folder):
    path = folder()
    edit_weights(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    teacher = open_teacher(str(path))
    assert sorted(teacher.tensors.names()) == sorted(teacher_model("llama").state_dict())


def test_support_is_decided_before_weights_are_looked_at(folder, monkeypatch):
    path = folder()
    edit_json(path / "config.json", model_type="vaultgemma")
    monkeypatch.setattr(TensorIndex, "open", lambda folder: pytest.fail("weights were opened"))
    with pytest.raises(UserError, match="'vaultgemma' is not supported.*soft-caps"):
        open_teacher(str(path))
    edit_json(path / "config.json", model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="quantised \\(gptq\\)"):
        open_teacher(str(path))


@pytest.mark.parametrize("model_type", ["llama", "something_new"])
@pytest.mark.parametrize("trust", [False, True])
def test_model_code_of_a_repository_never_runs(folder, tmp_path, model_type, trust):
    path, mark = folder(), tmp_path / "it ran"
    (path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(path / "config.json", auto_map=auto_map, model_type=model_type)
    if model_type == "llama":
        assert open_teacher(str(path), trust_remote_code=trust).config.model_type == "llama"
    else:
        with pytest.raises(UserError, match="'something_new' is not supported"):
            open_teacher(str(path), trust_remote_code=trust)
    assert not mark.exists()


def test_wrappers_of_several_modalities_are_refused(folder):
    path = folder()
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text, "vision_config": {}}))
    with pytest.raises(UserError, match="several modalities"):
        open_teacher(str(path))


def test_our_own_output_is_already_converted(folder):
    path = folder()
    section = {"format": 1, "teacher": {"source": "someone/teacher", "revision": None}, "mixers": {}}
    edit_json(path / "config.json", model_type="linearize_llama", linearize=section)
    with pytest.raises(UserError, match="already converted: convert its teacher, someone/teacher"):
        open_teacher(str(path))


def test_pickles_are_never_opened(folder, monkeypatch):
    path = folder()
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a pickle was opened"))
    with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model.bin\)"):
        open_teacher(str(path))


@pytest.mark.parametrize(
    "text, said",
    [("{", "cannot read"), ("[]", "not a JSON object"), ("{}", "without a model_type"), (None, "has no config.json")],
)
def test_damaged_config(folder, text, said):
    path = folder()
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    with pytest.raises(UserError, match=said):
        open_teacher(str(path))


def test_config_with_a_wrong_field(folder):
    path = folder()
    edit_json(path / "config.json", hidden_size="many")
    with pytest.raises(UserError, match="config.json is damaged") as error:
        open_teacher(str(path))
    assert "\n" not in str(error.value)


def test_paths_that_are_no_models(tmp_path, folder):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.gguf").write_bytes(b"GGUF")
    for path, said in [
        (tmp_path / "notes.txt", "not a model"),
        (tmp_path / "nothing", "no such model: no file or folder /"),
        (tmp_path / "nothing.gguf", "no such model: no file or folder /"),
        ("./nothing", "no such model: no file or folder /"),
        ("a/b/c", "not a Hub id either"),
        (tmp_path / "many", "name one of them, such as .*a.gguf"),
    ]:
        with pytest.raises(UserError, match=said):
            open_teacher(str(path))
    with pytest.raises(UsageError, match="drop --revision"):
        open_teacher(str(folder()), revision="main")


def test_side_files_and_tokenizer(folder, tmp_path):
    path, out = folder(), tmp_path / "out"
    out.mkdir()
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "LICENSE").write_text("free")
    (path / "weights.py").write_text("")
    teacher = open_teacher(str(path))
    assert teacher.generation_config.eos_token_id == 2
    assert teacher.tokenizer.decode(teacher.tokenizer("héllo")["input_ids"]) == "héllo"
    teacher.copy_side_files(out)
    names = {"chat_template.jinja", "LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in out.iterdir()} == names
    for name in names:
        assert (out / name).read_bytes() == (path / name).read_bytes()


def test_tokenizer_config_gets_its_class(folder, tmp_path):
    path, out = folder(), tmp_path / "out"
    out.mkdir()
    (path / "tokenizer_config.json").write_text("{}")
    open_teacher(str(path)).copy_side_files(out)
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"]


def test_missing_tokenizer_is_one_line(folder):
    path = folder()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).unlink()
    teacher = open_teacher(str(path))
    assert teacher.generation_config is None
    with pytest.raises(UserError, match="cannot load the tokenizer") as error:
        teacher.tokenizer  # noqa: B018
    assert "\n" not in str(error.value)


# ---- the Hub ----

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A Hub that is a folder: downloads are links into a cache laid out as huggingface_hub lays it out."""

    def __init__(self, cache, source):
        self.cache, self.source, self.calls = cache, source, []

    def snapshot_download(self, repo, *, revision=None, allow_patterns):
        from huggingface_hub.utils import filter_repo_objects

        names = sorted(p.name for p in self.source.iterdir())
        chosen = list(filter_repo_objects(names, allow_patterns=allow_patterns))
        self.calls.append((repo, revision, chosen))
        return fill_cache(self.cache, repo, self.source, chosen)


def fill_cache(cache, repo, source, names):
    root = cache / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    for name in names:
        blob = root / "blobs" / f"blob-{name}"
        shutil.copyfile(source / name, blob)
        if not (snapshot / name).exists():
            (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return str(snapshot)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty Hub cache and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_downloads_config_first_then_the_shards(teacher_folder, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(teacher_folder("qwen3"), source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "config.json").rename(tmp_path / "config.json")
    writer = ShardWriter(source, 100_000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    (tmp_path / "config.json").rename(source / "config.json")
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md"):
        (source / name).write_bytes(b"")
    hub = Hub(tmp_path / "hub", source)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    teacher = open_teacher("someone/tiny", revision="main")
    assert teacher.revision == COMMIT and teacher.source == "someone/tiny"
    (_, first_revision, first), (_, second_revision, second) = hub.calls
    assert (first_revision, second_revision) == ("main", COMMIT)
    assert {"config.json", "tokenizer.json", "README.md"} <= set(first) and "model.safetensors.index.json" in first
    assert not any(name.endswith((".safetensors", ".bin", ".py")) for name in first)
    assert second == sorted(p.name for p in source.glob("model-*.safetensors"))
    assert torch.equal(teacher.tensors.get("model.norm.weight"), tensors["model.norm.weight"])


def test_hub_weights_of_an_unsupported_family_are_not_downloaded(folder, tmp_path, monkeypatch):
    source = folder()
    edit_json(source / "config.json", model_type="mixtral")
    hub = Hub(tmp_path / "hub", source)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(UserError, match="'mixtral' is not supported"):
        open_teacher("someone/tiny")
    assert len(hub.calls) == 1


def test_hub_repository_without_safetensors(folder, tmp_path, monkeypatch):
    source = folder()
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    hub = Hub(tmp_path / "hub", source)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(UserError, match="no safetensors weights"):
        open_teacher("someone/tiny")


def test_existing_path_comes_before_the_hub(folder, monkeypatch):
    path = folder()
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the Hub was asked"))
    assert open_teacher("llama").revision is None


def test_hub_cache_offline(teacher_folder, offline):
    source = teacher_folder("llama")
    names = [p.name for p in source.iterdir()]
    with pytest.raises(UserError, match="no file or folder /.*someone/tiny, and the Hub cannot be reached") as error:
        open_teacher("someone/tiny")
    assert "\n" not in str(error.value)
    fill_cache(offline, "someone/tiny", source, [n for n in names if n != "model.safetensors"])
    with pytest.raises(UserError, match="someone/tiny"):
        open_teacher("someone/tiny")
    fill_cache(offline, "someone/tiny", source, names)
    teacher = open_teacher("someone/tiny")
    assert teacher.revision == COMMIT
    assert teacher.tokenizer("a")["input_ids"]
    with pytest.raises(UserError, match="cache lacks someone/tiny at revision v2"):
        open_teacher("someone/tiny", revision="v2")


def response(status):
    return SimpleNamespace(status_code=status, headers={}, request=None, url="", text="")


@pytest.mark.parametrize(
    "error, said",
    [
        (lambda: hub_errors.GatedRepoError("no", response=response(403)), "is gated on the Hub: accept its terms at"),
        (lambda: hub_errors.RepositoryNotFoundError("no", response=response(404)), "no file or folder /"),
        (lambda: hub_errors.RevisionNotFoundError("no", response=response(404)), "no such revision"),
        (lambda: hub_errors.HfHubHTTPError("502\nbad", response=response(502)), "cannot download .*: 502: run again"),
        (lambda: RuntimeError("storage\ndetails"), "cannot download .*: storage: run again"),
        (lambda: OSError(28, "No space left on device"), "no space left"),
    ],
)
def test_hub_trouble_is_one_line(monkeypatch, error, said):
    def fail(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=said) as told:
        open_teacher("someone/tiny", revision="main")
    assert "\n" not in str(told.value)


# ---- .gguf ----


def write_gguf(path, model, template="{{ messages }}"):
    """A tiny llama as llama.cpp's converter writes it: its names, q and k rows reordered for its rotary layout."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    alphabet = [*map(chr, range(33, 127))]
    tokens = ["<pad>", "<bos>", "<eos>", *alphabet, "ab", "cd"]
    tokens += [f"<{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (config.vocab_size - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(template)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        base, array = name.removesuffix(".weight"), tensor.numpy()
        if base == "lm_head" and config.tie_word_embeddings:
            continue
        if base in top:
            writer.add_tensor(f"{top[base]}.weight", array)
            continue
        _, _, i, part = base.split(".", 3)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{i}.{names[part]}.weight", numpy.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def gguf_model(request):
    """A tiny llama that .gguf can hold: head_dim is hidden / heads, plain RoPE, no biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=request.param,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_gguf_becomes_a_folder_of_plain_weights(gguf_model, tmp_path, capsys):
    path, cache, said = tmp_path / "tiny.gguf", tmp_path / "cache", []
    write_gguf(path, gguf_model)
    teacher = open_teacher(str(path), cache_dir=cache, say=said.append)
    assert capsys.readouterr().err == ""
    assert len(said) == 1 and "dequantising tiny.gguf" in said[0]
    assert teacher.source == str(path) and teacher.revision is None
    assert not hasattr(teacher.config, "quantization_config")
    assert teacher.dtype == torch.float32
    tied = gguf_model.config.tie_word_embeddings
    assert teacher.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in teacher.tensors) == (not tied)
    assert torch.equal(
        teacher.tensors.get("model.layers.0.self_attn.q_proj.weight"),
        gguf_model.model.layers[0].self_attn.q_proj.weight,
    )
    runner = teacher.runner()
    expected = gguf_model(IDS, position_ids=PACKED, use_cache=False).logits
    assert torch.equal(runner.head(run_blocks(runner, IDS, PACKED)), expected)
    assert teacher.tokenizer.chat_template == "{{ messages }}"
    assert teacher.tokenizer.eos_token_id == 2 and teacher.tokenizer.model_max_length == 128
    assert teacher.tokenizer.decode(teacher.tokenizer("abc")["input_ids"]) == "abc"
    assert teacher.generation_config.eos_token_id == 2 and teacher.generation_config.pad_token_id == 0

    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(teacher.folder)
    plain.save_pretrained(tmp_path / "saved")
    assert torch.equal(plain.float()(IDS).logits, gguf_model(IDS).logits)


def test_gguf_is_dequantised_once_and_redone_when_the_copy_is_broken(gguf_model, tmp_path):
    path, cache, said = tmp_path / "tiny.gguf", tmp_path / "cache", []
    write_gguf(path, gguf_model)
    first = open_teacher(str(path), cache_dir=cache, say=said.append)
    again = open_teacher(str(path), cache_dir=cache, say=said.append)
    assert again.folder == first.folder and len(said) == 1
    with open(first.folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (first.folder.with_name(first.folder.name + ".partial")).mkdir()
    assert open_teacher(str(path), cache_dir=cache, say=said.append).folder == first.folder
    assert len(said) == 2
    os.utime(path, (1, 1))
    assert open_teacher(str(path), cache_dir=cache, say=said.append).folder != first.folder
    assert not list(cache.glob("*.partial"))


def test_gguf_interrupted_leaves_no_copy(gguf_model, tmp_path, monkeypatch):
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(path, gguf_model)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        open_teacher(str(path), cache_dir=cache)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_gguf_that_cannot_be_read(gguf_model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, gguf_model)
    whole = path.read_bytes()
    for length in (4, 100, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="cannot read .*tiny.gguf") as error:
            open_teacher(str(path), cache_dir=tmp_path / "cache", say=lambda text: None)
        assert "\n" not in str(error.value)
    split = tmp_path / "tiny-00001-of-00002.gguf"
    split.write_bytes(whole)
    with pytest.raises(UserError, match="one part of a split"):
        open_teacher(str(split), cache_dir=tmp_path / "cache")
