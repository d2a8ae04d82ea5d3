"""Which teachers are taken, and that every refusal says why in one line."""

import pytest
from transformers import GenerationMixin

from linearize.errors import UserError
from linearize.families import FAMILIES, REFUSED, family_of

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize("name", FAMILIES)
def test_default_config_is_taken(name):
    family = FAMILIES[name]
    config = family.config_class()()
    assert config.model_type == name
    assert family_of(config) is family
    assert family_of(config.to_dict()) is family
    assert issubclass(family.causal_lm_class(), GenerationMixin)


def test_names_are_unique_and_not_both():
    assert not set(FAMILIES) & set(REFUSED)


def message(config) -> str:
    with pytest.raises(UserError) as error:
        family_of(config)
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("vaultgemma", "soft-cap"),
        ("mixtral", "not yet"),
        ("qwen2_moe", "not yet"),
        ("bert", "encoder"),
        ("roberta", "encoder"),
        ("t5", "encoder-decoder"),
        ("qwen3_5_text", "linear already"),
        ("qwen3_next", "linear already"),
        ("mamba", "linear already"),
        ("gpt_oss", "sinks"),
        ("gemma3", "text model"),
        ("never_heard_of_it", "no entry"),
    ],
)
def test_refused_family(model_type, word):
    text = message({"model_type": model_type, "num_attention_heads": 4})
    assert repr(model_type) in text and word in text
    assert all(name in text for name in FAMILIES)


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"attn_logit_softcapping": 50.0}, "soft-cap"),
        ({"attention_chunk_size": 8192}, "chunks"),
        ({"num_local_experts": 8}, "experts"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"num_attention_heads": [4, 2]}, "numbers of heads"),
        ({"is_causal": False}, "encoder"),
    ],
)
def test_refused_field(field, word):
    assert word in message(LLAMA | field)


def test_unknown_family_is_refused_for_what_its_config_says():
    assert "experts" in message({"model_type": "new", "num_attention_heads": 4, "num_experts": 64})
    assert "text model" in message({"model_type": "new", "vision_config": {"depth": 2}})


def test_bidirectional_gemma3_is_refused():
    config = FAMILIES["gemma3_text"].config_class()(use_bidirectional_attention=True)
    assert "bidirectional" in message(config)


def test_no_model_type_and_converted_model():
    assert "without a model_type" in message({})
    assert "converted model" in message(LLAMA | {"model_type": "linearize_llama"})
