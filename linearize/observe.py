"""What goes on inside one decoder layer: the attention's input, q, k, v, head outputs and output."""

import copy
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

IMPLEMENTATION = "linearize_observe"


@dataclass
class Observed:
    """One batch at one softmax layer. x [B, T, hidden] is the attention's (normed) input; q [B, T, Hq, K],
    k [B, T, Hk, K], v [B, T, Hk, V] come after biases, QK-norm and RoPE; heads [B, T, Hq, V] goes into the output
    projection and output [B, T, hidden] comes out of it. scale is the softmax scale.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    output: Tensor
    scale: float


class _Enough(Exception):
    """Leaves a decoder layer after its attention."""


def _attend(module, query, key, value, attention_mask, *, seen: dict, scaling: float, softmax: str, **kwargs):
    # Every family brings its eager attention in the file that its attention module is from.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(softmax, eager)
    out, weights = attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    seen.update(q=query.transpose(1, 2), k=key.transpose(1, 2), v=value.transpose(1, 2), heads=out, scale=scaling)
    return out, weights


AttentionInterface.register(IMPLEMENTATION, _attend)


@torch.no_grad()
def observe(layer: nn.Module, hidden: Tensor, kwargs: dict, *, attention_only: bool = False):
    """Run a softmax decoder layer and record its attention.

    hidden: [B, T, hidden]; kwargs: as the base model would call the layer. Returns (what leaves the layer, Observed);
    with ``attention_only`` the layer stops there and the first is None.
    """
    attn, seen = layer.self_attn, {}
    config = attn.config
    attn.config = copy.copy(config)
    attn.config._attn_implementation = IMPLEMENTATION

    def before(module, args, given):
        seen["x"] = given["hidden_states"] if "hidden_states" in given else args[0]
        return args, {**given, "seen": seen, "softmax": config._attn_implementation}

    def after(module, args, output):
        seen["output"] = output[0]
        if attention_only:
            raise _Enough

    hooks = attn.register_forward_pre_hook(before, with_kwargs=True), attn.register_forward_hook(after)
    out = None
    try:
        out = layer(hidden, **kwargs)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
        attn.config = config
    return out, Observed(**seen)
