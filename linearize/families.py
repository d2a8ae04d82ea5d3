"""The teacher families that can be converted, one entry each, and why the others are refused.

A mixer borrows the teacher's own attention module (:class:`linearize.mixers.MixedAttention`), so an entry says nothing
about projections, norms or rotary embeddings: it names the transformers classes and the configurations it refuses.
Every family keeps its decoder layers at ``model.layers.{i}`` and the attention of a layer at ``self_attn``; the tests
check both, and each entry's logits, against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from linearize.errors import UserError

STUDENT_PREFIX = "linearize_"


def accept(config: dict) -> str | None:
    """The rule of a family with nothing to refuse beyond :func:`common_refusal`."""
    return None


@dataclass(frozen=True)
class Family:
    """One teacher family.

    model_type: as in config.json. causal_lm, config: class names in transformers. notes: what a person should know
    before converting, one line or "". refuse: takes the fields of config.json and returns the reason, or None.
    softmax: the attention implementation that computes the teacher's attention exactly. stacked: parameters that
    transformers keeps as one tensor of all experts and checkpoints as one per expert: by the end of the parameter's
    name, the ends of the stored names whose rows make one expert's slice.
    """

    model_type: str
    causal_lm: str
    config: str
    notes: str = ""
    refuse: Callable[[dict], str | None] = accept
    softmax: str = "sdpa"
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()

    layers_prefix = "model.layers.{i}."
    attention = "self_attn"

    @property
    def student_type(self) -> str:
        """The ``model_type`` of a converted model."""
        return STUDENT_PREFIX + self.model_type

    def causal_lm_class(self) -> type:
        """The transformers class ``...ForCausalLM``."""
        import transformers

        return getattr(transformers, self.causal_lm)

    def config_class(self) -> type:
        """The transformers class ``...Config``."""
        import transformers

        return getattr(transformers, self.config)

    def stored(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Names and shapes under which a checkpoint holds the parameter `name` of `shape`, in the order of its rows."""
        for end, parts in self.stacked:
            if name.endswith(end):
                experts, rows, columns = shape
                stem = name.removesuffix(end)
                return {
                    stem + part.format(expert): (rows // len(parts), columns)
                    for expert in range(experts)
                    for part in parts
                }
        return {name: tuple(shape)}


def refuse_gemma3(config: dict) -> str | None:
    if config.get("use_bidirectional_attention"):
        return "bidirectional attention, which no recurrence can follow"
    return None


def refuse_qwen3_moe(config: dict) -> str | None:
    if config.get("output_router_logits"):
        return "a loss on the router's logits needs every layer's: set output_router_logits to false"
    return None


EXPERTS_APART = (
    ("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    ("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
)
WINDOW = "a converted sliding-window layer sees the whole past: the window is not kept"

CAPPED = "a converted layer has no cap on its logits: it starts from the capped attention's output"

FAMILIES: dict[str, Family] = {
    entry.model_type: entry
    for entry in (
        Family("llama", "LlamaForCausalLM", "LlamaConfig"),
        Family("mistral", "MistralForCausalLM", "MistralConfig", notes=WINDOW),
        Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", notes=WINDOW),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", notes=WINDOW),
        Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", notes=WINDOW),
        Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config"),
        Family("granite", "GraniteForCausalLM", "GraniteConfig"),
        Family("phi3", "Phi3ForCausalLM", "Phi3Config", notes=WINDOW),
        Family("gemma2", "Gemma2ForCausalLM", "Gemma2Config", notes=f"{CAPPED}; {WINDOW}", softmax="eager"),
        Family("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextConfig", notes=WINDOW, refuse=refuse_gemma3),
        Family("glm4", "Glm4ForCausalLM", "Glm4Config"),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            notes=WINDOW,
            refuse=refuse_qwen3_moe,
            stacked=EXPERTS_APART,
        ),
    )
}

SOFTCAP = "attention with logit soft-caps, which a linear mixer cannot express"
EXPERTS = "mixture of experts: not yet"
ENCODER = "an encoder: only decoders with causal attention can be converted"
ENCODER_DECODER = "an encoder-decoder: only decoder-only models can be converted"
ALREADY_LINEAR = "some or all of its layers are linear already"
SINKS = "attention with learned sinks, which the mixers do not carry over"
IMAGES = "a model of several modalities: convert its text model"
LATENT = "multi-head latent attention"
PARALLEL_BLOCK = "parallel attention and MLP blocks: not yet"
POSITIONS = "absolute or bias positions in place of rotary ones: not yet"

REFUSED: dict[str, str] = {
    model_type: reason
    for reason, model_types in {
        SOFTCAP: "vaultgemma",
        EXPERTS: "mixtral qwen2_moe olmoe phimoe granitemoe granitemoeshared dbrx jetmoe ernie4_5_moe "
        "glm4_moe dots1 hunyuan_v1_moe flex_olmo minimax_m2 afmoe solar_open exaone_moe",
        ENCODER: "bert roberta xlm-roberta camembert distilbert albert electra deberta deberta-v2 modernbert "
        "nomic_bert mpnet longformer big_bird eurobert esm",
        ENCODER_DECODER: "t5 mt5 umt5 bart mbart pegasus marian led longt5 m2m_100 nllb-moe t5gemma "
        "switch_transformers whisper",
        ALREADY_LINEAR: "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_next mamba mamba2 falcon_mamba falcon_h1 rwkv jamba "
        "bamba zamba zamba2 nemotron_h recurrent_gemma olmo_hybrid kimi_linear lfm2 lfm2_moe minimax granitemoehybrid "
        "bailing_hybrid xlstm",
        SINKS: "gpt_oss",
        IMAGES: "gemma3 gemma3n gemma4 llama4 mllama mistral3 qwen2_vl qwen2_5_vl qwen3_vl llava llava_next paligemma "
        "idefics3 smolvlm internvl",
        LATENT: "deepseek_v2 deepseek_v3 deepseek_v32 minicpm3 longcat_flash",
        PARALLEL_BLOCK: "cohere cohere2 gpt_neox gptj phi falcon",
        POSITIONS: "gpt2 opt bloom mpt gpt_bigcode gpt_neo biogpt xglm",
    }.items()
    for model_type in model_types.split()
}

LAYER_TYPES = {"full_attention", "sliding_attention"}


def common_refusal(config: dict, family: Family | None = None) -> str | None:
    """Why a configuration cannot be converted, apart from its family's own rule; None when it can.

    config: the fields of config.json, or of ``config.to_dict()``. family: None for one without an entry.
    """
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        return f"its weights are quantised ({method}): use the unquantised model, or a .gguf file"
    if config.get("is_encoder_decoder"):
        return ENCODER_DECODER
    if config.get("add_cross_attention"):
        return "cross-attention"
    if config.get("attn_logit_softcapping") and not (family and family.softmax == "eager"):
        return SOFTCAP
    if config.get("attention_chunk_size"):
        return "attention in chunks"
    if config.get("is_causal") is False:
        return ENCODER
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if (config.get(field) or 0) > 1 and not (family and family.stacked):
            return EXPERTS
    unknown = sorted(set(config.get("layer_types") or ()) - LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)}: only {' and '.join(sorted(LAYER_TYPES))} can be converted"
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if isinstance(heads, list) or isinstance(kv_heads, list):
        return "layers with different numbers of heads"
    if heads and heads % kv_heads:
        return f"{heads} query heads do not divide among {kv_heads} key/value heads"
    return None


def supported() -> str:
    """The supported model types, for messages."""
    return ", ".join(FAMILIES)


def refuse(model_type: object, reason: str) -> UserError:
    """The error for a model that cannot be converted."""
    name = f"model type {model_type!r}" if model_type else "a model without a model_type in its config.json"
    return UserError(f"{name} is not supported", fix=f"{reason}. Supported: {supported()}")


def family_of(config: Any) -> Family:
    """The family of a teacher's configuration: a transformers config, or the dict of a config.json.

    Raises UserError, with the reason and the supported list, for anything that cannot be converted.
    """
    fields = config if isinstance(config, dict) else config.to_dict()
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type.startswith(STUDENT_PREFIX):
        raise UserError(
            f"model type {model_type!r} is a converted model", fix="convert its teacher, named in its config.json"
        )
    family = FAMILIES.get(model_type)
    if family is not None:
        reason = common_refusal(fields, family) or family.refuse(fields)
    elif model_type in REFUSED:
        reason = REFUSED[model_type]
    elif fields.get("vision_config") or fields.get("audio_config"):
        reason = IMAGES
    else:
        reason = common_refusal(fields) if fields.get("num_attention_heads") else None
        reason = reason or "no entry for this family in linearize/families.py"
    if reason is not None:
        raise refuse(model_type, reason)
    return family
