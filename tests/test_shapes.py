"""Families as they are published: the fields of well-known models' config.json, made small, go all the way through.

Numbers of heads, head-to-hidden relations, layer patterns, rotary settings, multipliers, biases and ties are those of
the models; sizes are cut so that each fits in a test.
"""

import json

import pytest
import torch
from conftest import VOCAB, randomise, tiny_tokenizer
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from linearize.families import FAMILIES
from linearize.plan import Source, make_plan, read_source
from linearize.recipe import Recipe, recipes_dir
from linearize.student import build_student, mixer_tensors, student_name
from linearize.teacher import open_teacher

LLAMA3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Fields as published, with heads whole; hidden_size, head_dim and the like are cut by `small`.
PUBLISHED = {
    "Llama-2-7B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Llama-2-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "max_position_embeddings": 4096,
    },
    "Llama-3-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_1,
        "max_position_embeddings": 131072,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "head_dim": 64,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_1 | {"factor": 32.0},
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "rope_theta": 100000,
        "rope_interleaved": False,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
    },
    "Mistral-Nemo": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
    },
    "Qwen2-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
        "max_window_layers": 24,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "attention_bias": False,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "max_window_layers": 36,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 36,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "rope_theta": 5000000.0,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "OLMo-2-7B": {
        "model_type": "olmo2",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "rope_theta": 500000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Phi-3-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "sliding_window": 2047,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 26,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 26,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "max_position_embeddings": 32768,
    },
    "Granite-3.1-2B": {
        "model_type": "granite",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "rope_theta": 5000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "GLM-4-9B": {
        "model_type": "glm4",
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "num_hidden_layers": 40,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}


def small(fields: dict) -> dict:
    """The configuration with its sizes cut: every relation between heads stays, and whether head_dim is given."""
    heads = fields["num_attention_heads"]
    cut = dict(fields, vocab_size=VOCAB, intermediate_size=48, num_hidden_layers=min(6, fields["num_hidden_layers"]))
    if "head_dim" in fields:
        # Heads times head_dim is larger or smaller than hidden, as in the model.
        wide = heads * fields["head_dim"] / fields["hidden_size"]
        cut |= {"head_dim": 8, "hidden_size": int(heads * 8 / wide)}
    else:
        cut |= {"hidden_size": heads * 8}
    if "query_pre_attn_scalar" in fields:
        cut["query_pre_attn_scalar"] = 8
    if fields.get("sliding_window"):
        cut["sliding_window"] = 6
    if "moe_intermediate_size" in fields:
        cut |= {"moe_intermediate_size": 16, "num_experts": 16}
    return cut | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_published_shape(tmp_path, name):
    """Headers fit, no layer converted is the teacher bit for bit, all layers converted load and run."""
    fields = small(PUBLISHED[name])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    family = FAMILIES[fields["model_type"]]
    torch.manual_seed(0)
    model = family.causal_lm_class()(config).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    # As the Hub has it, not as transformers would write it today.
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": [family.causal_lm]}))
    tiny_tokenizer().save_pretrained(tmp_path)

    ids = torch.arange(20).reshape(2, 10) + 4
    want = model(ids).logits
    teacher = open_teacher(str(tmp_path))
    none = build_student(teacher.config, {"mixers": {}})
    none.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(none(ids).logits, want)

    plan = make_plan(read_source(str(tmp_path), Recipe()), Recipe.resolve(sets=["convert.keep_softmax=none"]))
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    assert len(plan.converted) == fields["num_hidden_layers"]
    assert all(layer.kv_bytes_per_token == 4 * kv_heads * 2 * 8 for layer in plan.layers)
    assert plan.parameters == sum(p.numel() for p in model.parameters())

    mixers = {i: {"kind": "gdn"} for i in range(fields["num_hidden_layers"])}
    student = build_student(teacher.config, {"mixers": mixers})
    assert student.model.layers[0].self_attn.mixer.log_balance.shape == (heads,)
    out = tmp_path / "student"
    stored = {student_name(key, mixers): teacher.tensors.get(key) for key in teacher.tensors.names()}
    added = {key: tensor for key, tensor in student.state_dict().items() if key in mixer_tensors(student.config)}
    out.mkdir()
    save_file(stored | added, out / "model.safetensors", metadata={"format": "pt"})
    student.config.save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    whole = loaded(ids, use_cache=False).logits
    assert torch.isfinite(whole).all() and not torch.equal(whole, want)
    first = loaded(ids[:, :7], use_cache=True)
    rest = loaded(ids[:, 7:], cache=first.cache, use_cache=True)
    steps = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(steps, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("qwen3-0.6b", "Qwen3-0.6B"), ("qwen3-8b", "Qwen3-8B"), ("llama-3.1-8b", "Llama-3.1-8B")],
)
def test_recipes_that_were_not_run_have_a_plan(recipe, model):
    """On the model's own layers and heads; its first line says how many of each there will be."""
    fields = PUBLISHED[model] | {"intermediate_size": 8 * PUBLISHED[model]["hidden_size"] // 3, "vocab_size": VOCAB}
    made = Recipe.resolve(recipe)
    source = Source(model, AutoConfig.for_model(**fields), torch.bfloat16)
    plan = make_plan(source, made)
    line = (recipes_dir() / recipe / "recipe.yaml").read_text().partition("\n")[0]
    layers = fields["num_hidden_layers"]
    assert f"{len(plan.converted)} of {layers} layers" in line and "not yet run" in line
    assert f"{layers - len(plan.converted)} stay softmax" in line
    assert not (recipes_dir() / recipe / "results.json").exists()
