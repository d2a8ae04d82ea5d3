"""Write a model as a native architecture: Qwen3.5 dense text, which transformers, vLLM and SGLang know by themselves.

Softmax layers map exactly. Their output gate is opened half way by zero rows and the output projection doubled; norm
weights are stored less one, after powers of two have moved into the following projections, so that bf16 keeps every
bit. Teachers without QK-norm get constants in padding dimensions of each head, under which the norm does nothing (off
unless asked for). Mixers of kind gdn-native go over name for name. Whatever cannot be expressed is refused before a
byte is written.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from linearize import __version__
from linearize.checkpoint import CONFIG, RunState, TensorIndex, atomic_write_text, some
from linearize.console import Console
from linearize.data import bundled_documents
from linearize.errors import UsageError, UserError
from linearize.families import STUDENT_PREFIX, family_of
from linearize.mixers import HeadShape
from linearize.mixers.gdn_native import KERNEL, NativeGDN
from linearize.models import hushed
from linearize.student import CONFIGS, MODELS, mixer_specs
from linearize.teacher import Teacher, open_teacher

TARGETS = ("qwen3_5",)
RECORD = "linearize.json"

# Pre-norm blocks with separate projections, full rotary embeddings and a gated SiLU MLP.
BLOCKS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
OTHER_BLOCKS = {
    "olmo2": "it normalises after attention and MLP, the target before them",
    "granite": "it multiplies embeddings, residuals and logits by constants",
    "phi3": "its projections are fused and its rotary embedding partial",
    "gemma2": "it normalises before and after attention and MLP, and caps its logits",
    "gemma3_text": "it normalises before and after attention and MLP",
    "glm4": "it normalises before and after attention and MLP",
    "qwen3_moe": "it is a mixture of experts and the target dense",
}
ROPES = ("default", "linear", "llama3", "yarn")

# Head padding. The pad dimensions hold constants whose mean square is WEIGHT^2 in q's norm, so that dividing by the
# root mean square and multiplying by WEIGHT is no change, up to |q|^2 / (2 WEIGHT^2 D). 256 is the largest power of
# two whose predecessor, which is what is stored, bf16 can hold.
PAD = 8
WEIGHT = 256
BIAS_LIMIT = 1e-3  # of that relative error from the biases alone

# Kept in fp32 whatever the dtype of the rest: they set the decay, exponentially. So are norm weights less one that
# feed nothing into which powers of two could move: half precision does not hold the predecessor of most small numbers.
FLOAT32 = (".A_log", ".dt_bias")


def exportable(
    config: PreTrainedConfig, mixers: Mapping[int, Mapping], *, allow_head_padding: bool = False
) -> str | None:
    """Why a model cannot be written as Qwen3.5 dense text, in one line, or None when it can.

    config: a teacher's or a student's; mixers: ``{"kind": ...}`` by converted layer. Reads no weight.
    """
    family = config.model_type.removeprefix(STUDENT_PREFIX)
    if family not in BLOCKS:
        reason = OTHER_BLOCKS.get(family, "its blocks have not been compared with the target's")
        return f"{family} blocks: {reason}"
    layers = config.num_hidden_layers
    softmax = [i for i in range(layers) if i not in mixers]
    for i, spec in sorted(mixers.items()):
        if spec["kind"] != NativeGDN.kind:
            return f"layer {i}: a {spec['kind']} mixer has no native form, only {NativeGDN.kind} has"
    if not softmax:
        return "no softmax layer is left, and the target takes the length of its cache from one: keep at least one"
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        for i in softmax:
            if kinds is None or kinds[i] == "sliding_attention":
                return f"layer {i}: softmax in a window of {window} tokens, and the target's sees the whole past"
    if family == "smollm3":
        for i in softmax:
            if not config.no_rope_layers[i]:
                return f"layer {i}: softmax without rotary embedding, and all of the target's have one"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPES:
        return f"rotary embedding of type {rope['rope_type']}: only {', '.join(ROPES)} have been compared"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary embedding"
    if config.hidden_act != "silu":
        return f"an MLP with {config.hidden_act}: the target's has silu"
    if getattr(config, "mlp_bias", False):
        return "an MLP with biases"
    if mixers and getattr(config, "attention_bias", False) and family != "qwen2":
        return f"layer {min(mixers)}: an output projection with a bias, and the target's linear layers have none"
    if family != "qwen3" and not allow_head_padding:
        return (
            "no QK-norm, which the target cannot leave out: --allow-head-padding makes it do nothing, at a KV cache "
            f"larger by {PAD} in {HeadShape.from_config(config).key_dim} and a relative error of about 1e-4 in the "
            "attention logits"
        )
    return None


@dataclass(frozen=True)
class Source:
    """What is exported: a converted model (mixers by layer) or a plain teacher (none)."""

    model: Teacher  # for a converted model: its own folder, configuration and tensors
    mixers: dict[int, dict]

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def pad(self) -> int:
        """Padding dimensions of every softmax head."""
        return 0 if self.config.model_type.endswith("qwen3") else PAD

    @property
    def output_biases(self) -> bool:
        """Whether softmax layers have biases on their output projections, which vLLM does not read."""
        return any(name.endswith("self_attn.o_proj.bias") for name in self.model.tensors.names())

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The source itself through transformers, in evaluation mode."""
        cls = MODELS.get(self.config.model_type) or self.model.family.causal_lm_class()
        with hushed():
            return cls.from_pretrained(self.model.folder, dtype=dtype, local_files_only=True).eval()


def open_source(model: str, say: Callable[[str], None]) -> Source:
    """Open a converted model's folder, or whatever ``open_teacher`` opens. Raises UserError as that does."""
    folder = Path(model).expanduser()
    try:
        fields = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        fields = {}
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not (isinstance(kind, str) and kind.startswith(STUDENT_PREFIX)):
        return Source(open_teacher(model, say=say), {})
    if kind not in CONFIGS:
        raise UserError("unknown model type", value=kind, fix="pip install --upgrade linearize")
    config = CONFIGS[kind].from_pretrained(folder, local_files_only=True)
    mixers = mixer_specs(config)
    tensors = TensorIndex.open(folder)
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in MODELS[kind](copy.deepcopy(config)).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    wrong = [n for n, shape in wanted.items() if n not in tensors or tensors.shape(n) != shape]
    wrong += [n for n in tensors.names() if n not in wanted]
    if wrong:
        raise UserError(f"the tensors of {folder} do not fit its config.json: {some(wrong)}", fix="convert again")
    family = family_of({**fields, "model_type": kind.removeprefix(STUDENT_PREFIX)})
    return Source(Teacher(model, None, folder, config, family, tensors), mixers)


def native_config(source: Source, dtype: torch.dtype) -> Qwen3_5TextConfig:
    """The target's configuration."""
    config, shape = source.config, HeadShape.from_config(source.config)
    head_dim = shape.key_dim + source.pad
    rope = dict(config.rope_parameters)
    # With padding the rotary part is the first key_dim dimensions; the half is against rounding down.
    rope["partial_rotary_factor"] = (shape.key_dim + 0.5) / head_dim if source.pad else 1.0
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "use_cache",
        "tie_word_embeddings",
        "attention_dropout",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
    return Qwen3_5TextConfig(
        **{name: getattr(config, name) for name in kept},
        num_key_value_heads=shape.kv_heads,
        head_dim=head_dim,
        rope_parameters=rope,
        attention_bias=has_biases(source),
        layer_types=[
            "linear_attention" if i in source.mixers else "full_attention" for i in range(config.num_hidden_layers)
        ],
        linear_conv_kernel_dim=KERNEL,
        linear_num_key_heads=shape.q_heads,
        linear_num_value_heads=shape.q_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
        architectures=[Qwen3_5ForCausalLM.__name__],
        dtype=dtype,
    )


def config_text(config: Qwen3_5TextConfig) -> str:
    """config.json: the target's fields, and three by which vLLM, SGLang and llama.cpp's converter know them."""
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    fields["partial_rotary_factor"] = config.rope_parameters["partial_rotary_factor"]
    if config.attention_bias:
        fields["qkv_bias"] = True
    interval = config.layer_types.index("full_attention") + 1
    even = ["linear_attention" if i % interval else "full_attention" for i in range(1, len(config.layer_types) + 1)]
    if config.layer_types == even:
        fields["full_attention_interval"] = interval
    return json.dumps(fields, indent=2) + "\n"


def has_biases(source: Source) -> bool:
    """Whether the target's softmax projections need biases: the source's own, or the constants of the padding."""
    return bool(source.pad) or any(name.endswith("self_attn.q_proj.bias") for name in source.model.tensors.names())


def four_squares(n: int) -> tuple[int, int, int, int]:
    """Four integers whose squares sum to n (Lagrange: they exist), descending."""
    root = range(int(n**0.5), -1, -1)
    return next(
        (a, b, c, d)
        for a, b, c in itertools.product(root, repeat=3)
        if a >= b >= c and (rest := n - a * a - b * b - c * c) >= 0 and (d := round(rest**0.5)) ** 2 == rest and d <= c
    )


def fold(weight: Tensor, linears: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Store a norm's weight less one without losing bits, by moving powers of two into the linears it feeds.

    weight: [d]; linears: [n, d] by name, all that read the norm's output. Per channel s = sign(w) 2^-floor(log2 |w|):
    ``w s`` lies in [1, 2), whose predecessor the dtype holds exactly, and the linears' columns are divided by s. A
    channel in which that division would not be exact (underflow) keeps s = 1. Returns (w s - 1, the linears).
    """
    w = weight.float()
    _, exponent = torch.frexp(w)
    inverse = torch.ldexp(torch.where(w == 0, 1.0, w.sign()), torch.where(w == 0, 0, exponent - 1))
    moved = {name: (linear.float() * inverse).to(linear.dtype) for name, linear in linears.items()}
    for name, linear in linears.items():
        lost = (moved[name].float() / inverse != linear.float()).any(0)
        inverse = torch.where(lost, torch.ones_like(inverse), inverse)
    moved = {name: (linear.float() * inverse).to(linear.dtype) for name, linear in linears.items()}
    return (w / inverse - 1).to(weight.dtype), moved


def native_tensors(source: Source, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The target's tensors by name, one layer after another. get: the source's tensor of a name, as it is to be stored.

    Works on meta tensors too.
    """
    tied = source.config.tie_word_embeddings
    embed = "model.embed_tokens.weight"
    yield embed, get(embed if embed in source.model.tensors else "lm_head.weight")
    for i in range(source.config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        inputs, rest = (_linear if i in source.mixers else _softmax)(source, prefix + "self_attn.", get)
        norm, inputs = fold(get(prefix + "input_layernorm.weight"), inputs)
        yield prefix + "input_layernorm.weight", norm
        for name, tensor in {**inputs, **rest}.items():
            yield prefix + name, tensor
        inputs = {f"mlp.{name}.weight": get(f"{prefix}mlp.{name}.weight") for name in ("gate_proj", "up_proj")}
        norm, inputs = fold(get(prefix + "post_attention_layernorm.weight"), inputs)
        yield prefix + "post_attention_layernorm.weight", norm
        for name, tensor in inputs.items():
            yield prefix + name, tensor
        yield prefix + "mlp.down_proj.weight", get(prefix + "mlp.down_proj.weight")
    norm = get("model.norm.weight")
    if tied:  # the head is the embedding, whose columns cannot change
        yield "model.norm.weight", norm.float() - 1
        return
    norm, head = fold(norm, {"lm_head.weight": get("lm_head.weight")})
    yield "model.norm.weight", norm
    yield "lm_head.weight", head["lm_head.weight"]


def _linear(source: Source, prefix: str, get: Callable[[str], Tensor]) -> tuple[dict, dict]:
    """A gdn-native layer: (what reads the layer's norm, everything else)."""
    inputs = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
    rest = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
    inputs, rest = ({f"linear_attn.{n}": get(f"{prefix}mixer.{n}") for n in names} for names in (inputs, rest))
    return inputs, {**rest, "linear_attn.out_proj.weight": get(prefix + "attn.o_proj.weight")}


def _softmax(source: Source, prefix: str, get: Callable[[str], Tensor]) -> tuple[dict, dict]:
    """A softmax layer, likewise."""
    shape, pad = HeadShape.from_config(source.config), source.pad
    q_heads, kv_heads, dim = shape.q_heads, shape.kv_heads, shape.key_dim

    def rows(x: Tensor, heads: int, extra: int) -> Tensor:
        """[heads * dim, ...] with `extra` zero rows after every head."""
        x = x.unflatten(0, (heads, dim))
        return torch.cat([x, x.new_zeros(heads, extra, *x.shape[2:])], 1).flatten(0, 1)

    # The gate's rows follow the query's in every head: sigmoid(0) = 1/2, which the doubled output projection undoes.
    gate = pad + dim + pad
    weights = {name: get(f"{prefix}{name}_proj.weight") for name in ("q", "k", "v", "o")}
    inputs = {
        "self_attn.q_proj.weight": rows(weights["q"], q_heads, gate),
        "self_attn.k_proj.weight": rows(weights["k"], kv_heads, pad),
        "self_attn.v_proj.weight": rows(weights["v"], kv_heads, pad),
    }
    output = F.pad(weights["o"].unflatten(1, (q_heads, dim)), (0, pad)).flatten(1)
    rest = {"self_attn.o_proj.weight": output * 2}
    if has_biases(source):

        def bias(name: str, size: int) -> Tensor:
            full = f"{prefix}{name}_proj.bias"
            return get(full) if full in source.model.tensors else weights[name].new_zeros(size)

        q, k = bias("q", q_heads * dim).view(q_heads, dim), bias("k", kv_heads * dim).view(kv_heads, dim)
        rest |= {
            "self_attn.q_proj.bias": torch.cat([q, _constants(q, dim + pad, pad), q.new_zeros(q_heads, dim + pad)], 1),
            "self_attn.k_proj.bias": torch.cat([k, _constants(k, dim, pad)], 1),
            "self_attn.v_proj.bias": rows(bias("v", kv_heads * dim), kv_heads, pad),
            "self_attn.o_proj.bias": bias("o", source.config.hidden_size),
        }
        rest = {name: tensor.flatten() if name.endswith(".bias") else tensor for name, tensor in rest.items()}
    for name in ("q_norm", "k_norm"):
        if pad:
            ones = weights["q"].new_ones(dim)
            norm = torch.cat([ones * (WEIGHT - 1), -weights["q"].new_ones(pad)])
        else:
            norm = get(f"{prefix}{name}.weight").float() - 1
        rest[f"self_attn.{name}.weight"] = norm
    return inputs, rest


def _constants(like: Tensor, squares: int, pad: int) -> Tensor:
    """What the pad dimensions of every head hold, [heads, pad]: WEIGHT times integers whose squares sum to `squares`.

    Over D' = D + pad dimensions the mean square is then WEIGHT^2 for q (squares = D') and WEIGHT^2 D / D' for k
    (squares = D), which makes up for the softmax scale of D' in place of D.
    """
    if not pad:
        return like.new_zeros(len(like), 0)
    values = torch.tensor([*four_squares(squares), *[0] * (pad - 4)], dtype=like.dtype, device=like.device)
    return (WEIGHT * values).expand(len(like), pad)


def refuse_large_biases(source: Source) -> None:
    """UserError where the biases alone would use up the accuracy of the head padding (Qwen2 has such layers)."""
    shape = HeadShape.from_config(source.config)
    if not source.pad:
        return
    for i in range(source.config.num_hidden_layers):
        for name in ("q", "k"):
            full = f"model.layers.{i}.self_attn.{name}_proj.bias"
            if i in source.mixers or full not in source.model.tensors:
                continue
            bias = source.model.tensors.get(full).float().unflatten(0, (-1, shape.key_dim))
            error = float(bias.square().sum(1).max()) / (2 * WEIGHT**2 * shape.key_dim)
            if error > BIAS_LIMIT:
                raise UserError(
                    f"cannot be exported: layer {i}: the bias of its {name} projection is too large for head padding",
                    value=f"a relative error of {error:.1e} in the attention logits",
                    fix=f"at most {BIAS_LIMIT:g} is allowed; convert that layer to {NativeGDN.kind}",
                )


def export(
    model: str,
    out: Path,
    console: Console,
    *,
    to: str = TARGETS[0],
    allow_head_padding: bool = False,
    dtype: str = "auto",
    max_shard_size: int = 5_000_000_000,
    check: bool = False,
) -> dict:
    """Write MODEL to OUT as the native architecture `to`, print what was done, and return it.

    dtype: of the weights, "auto" for the source's own. check: reload OUT in a fresh process and compare. Raises
    UserError, before anything is written, for what the target cannot express; after a check whose numbers are above
    LIMITS as well.
    """
    if to not in TARGETS:
        raise UsageError("unknown architecture", value=to, fix=f"one of {', '.join(TARGETS)}")
    source = open_source(model, console.line)
    reason = exportable(source.config, source.mixers, allow_head_padding=allow_head_padding)
    if reason is not None:
        raise UserError(f"{model} cannot be exported to {to}: {reason}")
    refuse_large_biases(source)
    if any((out / name).exists() for name in (RECORD, CONFIG)):
        raise UserError("the folder holds a model already", value=str(out), fix="name an empty or new folder for OUT")
    chosen = source.config.dtype if dtype == "auto" else getattr(torch, dtype)
    chosen = chosen or source.model.dtype

    def stored(name: str) -> torch.dtype:
        return torch.float32 if name.endswith(FLOAT32) else chosen

    config = native_config(source, chosen)
    planned = _plan(source, config, stored)
    named = (getattr(source.config, "linearize", None) or {}).get("teacher")
    record = {
        "linearize": __version__,
        "teacher": named or {"source": source.model.source, "revision": source.model.revision},
        "source": model,
        "to": to,
        "dtype": str(chosen).removeprefix("torch."),
        "layers": config.layer_types,
        "head_padding": source.pad,
        "output_biases": source.output_biases,
        "bytes": sum(planned.values()),
    }
    with RunState(out, {"export": record}, needed=record["bytes"], say=console.line) as run:
        writer = run.writer(max_shard_size)
        tensors = source.model.tensors
        with console.stage("export", len(planned), unit="tensors") as bar:
            for name, tensor in native_tensors(source, lambda n: tensors.get(n).to(stored(n))):
                writer.add(name, tensor)
                bar.advance()
        writer.finish()
        source.model.copy_side_files(out)
        atomic_write_text(out / "README.md", card(record, config))
        atomic_write_text(out / RECORD, json.dumps(record, indent=2) + "\n")
        run.finish(config_text(config))
    rows = [("softmax layers", config.layer_types.count("full_attention")), ("linear layers", len(source.mixers))]
    rows += [("dtype", record["dtype"]), ("padding of softmax heads", source.pad)]
    console.table(f"{out}: {Qwen3_5ForCausalLM.__name__}", ("", ""), rows)
    comparison = compare(source, out, chosen) if check else None
    if comparison:
        columns = ("", "mode", "dtype", "relative error", "KL, nats", "top-1 agreement")
        keys = ("model", "mode", "dtype", "relative_error", "kl", "top1")
        console.table("against the source in float32", columns, [[row[key] for key in keys] for row in comparison])
    console.result({**record, "out": out, "check": comparison})
    if comparison:
        _judge(comparison, bool(source.pad))
    return {**record, "check": comparison}


def _plan(source: Source, config: Qwen3_5TextConfig, stored: Callable[[str], torch.dtype]) -> dict[str, int]:
    """Bytes of every tensor to be written, by name, after comparing names and shapes with the target's own class."""
    tensors = source.model.tensors
    planned = {
        name: tensor
        for name, tensor in native_tensors(
            source, lambda n: torch.empty(tensors.shape(n), dtype=stored(n), device="meta")
        )
    }
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in Qwen3_5ForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    wrong = wanted.keys() ^ planned.keys() | {
        n for n in wanted.keys() & planned.keys() if wanted[n] != planned[n].shape
    }
    if wrong:
        raise UserError(
            f"the target has other tensors than expected: {some(wrong)}", fix="pip install transformers==5.24"
        )
    return {name: tensor.nbytes for name, tensor in planned.items()}


def card(record: dict, config: Qwen3_5TextConfig) -> str:
    """README.md of an exported model."""
    name = record["source"].rstrip("/").rsplit("/", 1)[-1]
    linear = [str(i) for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    lines = ["---", "library_name: transformers", "tags: [linearize]", "---", "", f"# {name} as {record['to']}", ""]
    lines += [
        f"`{record['source']}` in the layout of Qwen3.5's dense text model, so that tools which know that architecture",
        "load it. It has nothing else to do with Qwen, whatever name a tool shows.",
        "",
        f"Layers {', '.join(linear)} are Gated DeltaNet layers; the others are softmax attention."
        if linear
        else "All layers are softmax attention, as in the source.",
    ]
    if record["head_padding"]:
        lines += [
            "",
            f"The source has no QK-norm. {record['head_padding']} constant dimensions were added to every head of the",
            "softmax layers, so that the norm of the target changes nothing but about 1e-4 of the attention logits.",
            "SGLang has no biases in this architecture and cannot load it.",
        ]
    if record["output_biases"]:
        lines += ["", "Its output projections have biases. vLLM, which has none there, skips them and is then wrong."]
    lines += ["", "The licence of the source applies to these weights.", ""]
    return "\n".join(lines)


# ---- the check ------------------------------------------------------------------------------------------------------

ROWS, LENGTH, DECODED = 16, 64, 8

# float32: rounding only; head padding adds the relative error of the attention logits. bfloat16: as far from the source
# in float32 as the source in bfloat16 is in the same mode, on the same tokens, with a tenth for luck, of which fewer
# tokens need more: a few of them make most of the KL.
LIMITS = {"relative_error": 1e-4, "relative_error_padded": 1e-2, "kl": 1e-6, "bfloat16_kl_factor": 1.1}

# Runs, with the source of the two functions below, in a process that has not imported this package: only what any user
# of transformers has.
CHILD = """
import json, sys
if not torch.cuda.is_available():
    sys.modules["fla"] = None  # transformers would take it for the CPU too, where it does not run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
folder, file, decoded = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = load_file(file)
result = []
for dtype in ("float32", "bfloat16"):
    options = {"dtype": getattr(torch, dtype), "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    result += [{"model": "export", "dtype": dtype, **row} for row in errors(model.eval(), decoded=decoded, **data)]
print(json.dumps(result))
"""


def in_modes(model, ids, decoded):
    """Logits [tokens, vocabulary] by mode, with which tokens of ids [rows, length] they follow, bool [rows, length]."""
    rows, length = ids.shape
    every = torch.ones_like(ids, dtype=torch.bool)
    yield "whole text", model(ids, use_cache=False).logits.flatten(0, 1), every
    out = model(ids[:, : length - decoded], use_cache=True)
    pieces, cache = [out.logits], out.cache
    for t in range(length - decoded, length):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        pieces.append(out.logits)
    yield "cached decoding", torch.cat(pieces, 1).flatten(0, 1), every
    pads = [row * length // (2 * rows) for row in range(rows)]
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, pad in enumerate(pads):
        padded[row, pad:], mask[row, pad:] = ids[row, : length - pad], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    yield "left-padded batch", logits[mask.bool()], mask.flip(1).bool()


@torch.no_grad()
def errors(model, ids, logits, decoded):
    """One dict per mode: the mode, relative_error, kl and top1 against logits [rows, length, vocabulary]."""
    result = []
    for mode, got, tokens in in_modes(model, ids, decoded):
        relative, kl, same = [], [], []  # by token; in float64, so a few of them at a time
        for few, want in zip(got.split(64), logits[tokens].split(64), strict=True):
            few, want = few.double(), want.double()
            p, q = want.log_softmax(-1), few.log_softmax(-1)
            relative.append((few - want).norm(dim=-1) / want.norm(dim=-1))
            kl.append((p.exp() * (p - q)).sum(-1))
            same.append((few.argmax(-1) == want.argmax(-1)).double())
        row = {"relative_error": torch.cat(relative).max(), "kl": torch.cat(kl).mean(), "top1": torch.cat(same).mean()}
        result.append({"mode": mode, **{key: float(value) for key, value in row.items()}})
    return result


@torch.no_grad()
def compare(source: Source, out: Path, dtype: torch.dtype) -> list[dict]:
    """Logits of the export, reloaded by transformers alone in a fresh process, against the source's in float32.

    The source's weights are first rounded to `dtype`, as the export's were. Returns one dict per mode and dtype: model
    ("export"; "source" for the source itself in bfloat16), mode, dtype, relative_error (largest over tokens, of the
    logit vectors), kl (mean, nats), top1 (share of tokens).
    """
    ids = _text(source)
    model = source.load(torch.float32)
    for name, weight in model.named_parameters():
        if not name.endswith(FLOAT32):
            weight.copy_(weight.to(dtype))
    logits, decoded = model(ids, use_cache=False).logits, min(DECODED, ids.shape[1] - 1)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "expected.safetensors"
        save_file({"ids": ids, "logits": logits}, file)
        program = "\n".join(["import torch", *map(inspect.getsource, (in_modes, errors)), CHILD])
        command = [sys.executable, "-c", program, str(out.absolute()), str(file), str(decoded)]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=scratch)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{out} does not load with transformers' own classes", value=lines[-1])
    own = errors(source.load(torch.bfloat16), ids, logits, decoded)
    rows = json.loads(done.stdout.splitlines()[-1])
    return [*rows, *({"model": "source", "dtype": "bfloat16", **row} for row in own)]


def _text(source: Source) -> Tensor:
    """Held-out text as the source's tokens [ROWS, LENGTH], shorter for a model of shorter context."""
    length = min(LENGTH, source.config.max_position_embeddings)
    text = "\n\n".join(bundled_documents("heldout"))[: 8 * ROWS * length]  # a token is mostly shorter than that
    with hushed():  # the text is longer than a context, and cut below
        ids = source.model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids).repeat(ROWS * length)[: ROWS * length].view(ROWS, length)


def _judge(comparison: list[dict], padded: bool) -> None:
    """UserError when a number is above LIMITS."""
    own = {row["mode"]: row["kl"] for row in comparison if row["model"] == "source"}
    for row in comparison:
        if row["model"] == "source":
            continue
        if row["dtype"] == "float32":
            limits = {"relative_error": LIMITS["relative_error_padded" if padded else "relative_error"]}
            limits["kl"] = LIMITS["kl"]
        else:
            limits = {"kl": LIMITS["bfloat16_kl_factor"] * own[row["mode"]] + LIMITS["kl"]}
        for key, limit in limits.items():
            if not row[key] <= limit:
                raise UserError(
                    f"the export differs from its source: {key} of {row['mode']} in {row['dtype']}",
                    value=f"{row[key]:.2e}",
                    fix=f"at most {limit:.1e} is expected; do not use it",
                )
