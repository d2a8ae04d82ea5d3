"""Tiny random teachers of every family, as models and as folders, and a mixer simple enough to be checked by eye."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test touches the network

import functools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers import initialization as init

from linearize.families import FAMILIES
from linearize.mixers import MIXERS, Mixer
from linearize.student import build_student, mixer_tensors, student_name

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
VOCAB = len(SPECIAL) + 256

# head_dim is not hidden_size / heads; two query heads share a KV head.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# name: (family, what differs from SIZES)
TEACHERS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "llama-tied": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": (
        "qwen3",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}),
    "glm4": ("glm4", {"eos_token_id": 2}),
    # Caps low enough to bend most logits.
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
}


# Files that take minutes: begun first, so that no process is left alone with one of them at the end.
LONG = ("test_smollm2", "test_interpreted", "test_mixers", "test_convert_resume", "test_convert_distill")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights with which every part matters: attention far from uniform, biases and norms away from 0 and 1."""
    draw = functools.partial(torch.randn, generator=generator(seed))
    for name, weight in model.named_parameters():
        noise = draw(weight.shape)
        if weight.ndim == 1:
            weight.add_(0.2 * noise.to(weight.dtype))
        elif "embed" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)


def teacher_config(name: str):
    family, fields = TEACHERS[name]
    return FAMILIES[family].config_class()(**SIZES | fields)


@functools.cache
def teacher_model(name: str):
    """The teacher of that name in fp32, in evaluation mode. Shared: do not change it."""
    torch.manual_seed(0)
    model = FAMILIES[TEACHERS[name][0]].causal_lm_class()(teacher_config(name)).eval()
    randomise(model, 0)
    return model


def make_student(teacher, mixers: dict[int, dict], seed: int = 1):
    """The teacher with the mixers in place, their parameters away from every neutral value."""
    student = build_student(teacher.config, {"mixers": mixers})
    names = {name: student_name(name, mixers) for name in teacher.state_dict()}
    tensors = {names[name]: tensor for name, tensor in teacher.state_dict().items() if names[name] is not None}
    missing, unexpected = student.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) == set(mixer_tensors(student.config))
    for i in mixers:
        perturb(student.model.layers[i].self_attn.mixer, seed + i)
    return student


@torch.no_grad()
def perturb(mixer: Mixer, seed: int) -> None:
    draw = functools.partial(torch.randn, generator=generator(seed))
    for weight in mixer.parameters():
        weight.add_(0.3 * draw(weight.shape) / (weight.shape[-1] ** 0.5 if weight.ndim == 2 else 1.0))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after the four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=256,
    )


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory):
    """A function from a teacher's name to its folder: config.json, model.safetensors, tokenizer."""

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("teacher") / name
        teacher_model(name).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        return path

    return folder


class Toy(Mixer):
    """An exponential running mean of v per query head: ``(sum g^(t-i) w_i v_i) / (sum g^(t-i) w_i)``, gated.

    The forgetting g comes from x, the weight w = exp(scale r.k) from the key at its absolute position, the gate from
    the query; one token after the other. Written apart from the package's own mixers, with nothing shared.
    """

    kind = "toy"

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.forget = nn.Linear(shape.hidden, shape.q_heads, dtype=torch.float32)
        self.reference = nn.Parameter(torch.empty(shape.q_heads, shape.key_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self):
        init.zeros_(self.forget.weight)
        init.constant_(self.forget.bias, 2.0)
        init.zeros_(self.reference)

    @classmethod
    def state_bytes(cls, shape, tokens=0):
        return 4 * shape.q_heads * (shape.value_dim + 1)

    def forward(self, x, q, k, v, scale, *, segments, state=None, output_state=False):
        group = self.shape.group
        keep = self.forget(x.float()).sigmoid()
        k, v = (tensor.float().repeat_interleave(group, dim=2) for tensor in (k, v))
        write = (scale * (k * self.reference).sum(-1)).exp()
        gate = (scale * (q.float() * self.reference).sum(-1)).sigmoid()
        if segments.mask is not None:
            real = segments.mask[..., None]
            keep, write = torch.where(real, keep, 1.0), torch.where(real, write, 0.0)
        if segments.reset is not None:
            keep = torch.where(segments.reset[..., None], 0.0, keep)
        total: Tensor = torch.zeros_like(v[:, 0]) if state is None else state["total"]
        weight: Tensor = torch.zeros_like(write[:, 0]) if state is None else state["weight"]
        rows = []
        for t in range(x.shape[1]):
            total = keep[:, t, :, None] * total + write[:, t, :, None] * v[:, t]
            weight = keep[:, t] * weight + write[:, t]
            rows.append(total / weight.clamp(min=1e-30)[..., None])
        out = (torch.stack(rows, dim=1) * gate[..., None]).to(q.dtype)
        return out, {"total": total, "weight": weight} if output_state else None


MIXERS["toy"] = Toy
