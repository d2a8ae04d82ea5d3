"""Gated DeltaNet exactly as Qwen3.5's dense text model has it, so that a converted model has a native form."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from linearize_kernels import gated_delta
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Segments
from linearize.mixers.expansion import Layout, local_taps

KERNEL = 4  # taps of the short convolution
L2_EPS = 1e-6
HALF_LIFE = 128.0  # tokens; about a quarter of a short training context, far from both forgetting and hoarding


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """An fp32 projection in x's precision, through the module's own call, so that an adapter on it counts."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return linear(x)
    with torch.autocast(x.device.type, x.dtype):
        return linear(x)


class NativeGDN(Mixer):
    """The gated delta rule on projections of its own, every tensor under the native model's name and layout.

    ``q, k, v = SiLU(conv(W_qkv x))``; q and k to unit length; decay ``exp(-exp(A_log) softplus(W_a x + dt_bias))``,
    write strength ``sigmoid(W_b x)``; output ``norm(S^T q / sqrt(K)) SiLU(W_z x)`` per head, then the teacher's output
    projection. No rotary embedding, no QK-norm, no bias, and every query head has keys and values of its own.

    Parameters, fp32, H query heads, C = H (2K + V): in_proj_qkv.weight [C, hidden], in_proj_z.weight [H V, hidden],
    in_proj_b.weight and in_proj_a.weight [H, hidden], conv1d.weight [C, 1, 4], A_log and dt_bias [H], norm.weight [V].
    """

    kind = "gdn-native"
    own_projections: ClassVar[bool] = True

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.shape = shape
        heads, f32 = shape.q_heads, torch.float32
        channels = heads * (2 * shape.key_dim + shape.value_dim)
        self.in_proj_qkv = nn.Linear(shape.hidden, channels, bias=False, dtype=f32)
        self.in_proj_z = nn.Linear(shape.hidden, heads * shape.value_dim, bias=False, dtype=f32)
        self.in_proj_b = nn.Linear(shape.hidden, heads, bias=False, dtype=f32)
        self.in_proj_a = nn.Linear(shape.hidden, heads, bias=False, dtype=f32)
        self.conv1d = nn.Conv1d(channels, channels, KERNEL, groups=channels, bias=False, dtype=f32)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=f32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=f32))
        self.norm = nn.RMSNorm(shape.value_dim, eps=shape.norm_eps, dtype=f32)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections that pass on slices of the input, a convolution that does nothing, a half-life of 128 tokens,
        write strength 1/2.
        """
        hidden = self.shape.hidden
        for linear in (self.in_proj_qkv, self.in_proj_z):
            rows = len(linear.weight)
            init.copy_(linear.weight, torch.eye(hidden).repeat(-(-rows // hidden), 1)[:rows])
        for linear in (self.in_proj_b, self.in_proj_a):
            init.zeros_(linear.weight)
        identity = torch.zeros(self.conv1d.weight.shape)
        identity[:, :, -1] = 1
        init.copy_(self.conv1d.weight, identity)
        # exp(A_log) softplus(0) = log 2 / HALF_LIFE, and softplus(0) = log 2.
        init.constant_(self.A_log, -math.log(HALF_LIFE))
        init.zeros_(self.dt_bias)
        init.ones_(self.norm.weight)

    @torch.no_grad()
    def adopt(self, attn: nn.Module) -> None:
        """Copy the teacher's q, k and v weights, K and V by head blocks; drop all but the output projection.

        A QK-norm's weight goes into the convolution's last tap: between there and the unit length a SiLU is in the way,
        nothing else. Biases are left behind, there is nothing to hold them.
        """
        shape = self.shape
        sizes = [shape.q_heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim]
        if hasattr(attn, "qkv_proj"):
            q, k, v = attn.qkv_proj.weight.split(sizes)
        else:
            q, k, v = attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight
        k, v = (w.unflatten(0, (shape.kv_heads, -1)).repeat_interleave(shape.group, 0).flatten(0, 1) for w in (k, v))
        self.in_proj_qkv.weight.copy_(torch.cat([q, k, v]))
        for norm, part in (("q_norm", 0), ("k_norm", 1)):
            if hasattr(attn, norm):
                gain = getattr(attn, norm)(torch.ones_like(getattr(attn, norm).weight))  # whatever its convention is
                gain = gain.view(-1, shape.key_dim)
                gain = gain.repeat_interleave(shape.q_heads // len(gain), 0).flatten()
                size = shape.q_heads * shape.key_dim
                self.conv1d.weight[part * size : (part + 1) * size, 0, -1].copy_(gain)
        for name in [name for name, _ in attn.named_children() if name != "o_proj"]:
            delattr(attn, name)

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0) -> int:
        heads, key, value = shape.q_heads, shape.key_dim, shape.value_dim
        return 4 * heads * (key * value + (KERNEL - 1) * (2 * key + value))

    def forward(
        self,
        x: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        *,
        segments: Segments,
        state: dict[str, Tensor] | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """As every mixer, but from x alone: q, k, v and the softmax scale are not read."""
        shape, mask = self.shape, segments.mask
        layout = Layout.of(x, segments, cached=state is not None or output_state)
        old = state or {}
        dtype = self.A_log.dtype
        mixed = project(self.in_proj_qkv, x)[:, :, None]
        shifted, tail = local_taps(mixed, self.conv1d.weight[0, 0], layout, mask, old.get("tail"))
        taps = self.conv1d.weight[:, 0].flip(1)  # entry j weighs the input j tokens back
        mixed = F.silu(sum(shift[:, :, 0].to(dtype) * taps[:, j] for j, shift in enumerate(shifted)))
        heads, key = shape.q_heads, shape.key_dim
        q, k, v = mixed.split([heads * key, heads * key, heads * shape.value_dim], -1)
        q, k, v = (tensor.unflatten(-1, (heads, -1)) for tensor in (q, k, v))
        q, k = (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + L2_EPS) for tensor in (q, k))

        wide = x.to(dtype)
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(wide) + self.dt_bias)
        beta = self.in_proj_b(wide).sigmoid()
        if mask is not None:
            real = mask.to(dtype)[..., None]
            log_decay, beta = log_decay * real, beta * real
        o, memory = gated_delta(
            *(layout.pack(tensor.to(x.dtype)) for tensor in (q, k, v)),
            layout.pack(log_decay),
            layout.pack(beta),
            initial_state=old.get("memory"),
            output_final_state=output_state,
            cu_seqlens=layout.cu_seqlens,
        )
        o = self.norm(layout.unpack(o).to(dtype))
        z = project(self.in_proj_z, x).unflatten(-1, (heads, -1))
        o = (o * F.silu(z.to(dtype))).to(x.dtype)
        return o, {"memory": memory, "tail": tail} if output_state else None
