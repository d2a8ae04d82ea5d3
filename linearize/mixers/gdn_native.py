"""Gated DeltaNet exactly as Qwen3.5's dense text model has it, so that a converted model has a native form."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from linearize_kernels import gated_delta
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Sample, Segments
from linearize.mixers.expansion import Layout, local_taps
from linearize.mixers.fit import choosing

KERNEL = 4  # taps of the short convolution
L2_EPS = 1e-6

# The start. A SiLU bends what comes through it unless it is small: SiLU(u) = u / 2 + u^2 / 4 - ... Unit length takes
# the size of q and k away again, and that of v is free, so the last tap makes them small. Likewise the output's norm
# divides by sqrt(mean square + eps) and is nearly linear where the memory's outputs are well below sqrt(eps). The sizes
# are root mean squares, of the SiLU's input and of the memory's output over sqrt(eps).
SMALL = 0.05
SIZES = (SMALL, 0.3, 1.0)  # of q and k: bent, they have a common direction, which reads the plain mean
READ = 0.3
STRENGTHS = (0.02, 0.1, 0.3, 0.9)
DECAYS = (0.998, 0.99, 0.97, 0.9, 0.7, 0.4)
OPEN = 2.0  # input of the output gate of the head with the largest gain
CONSTANT_RIDGE = 1e-3  # both of the inputs' mean square
GATE_RIDGE = 1e-1
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
        self.biases: Tensor | None = None  # the teacher's, between `adopt` and `start`

    @torch.no_grad()
    def adopt(self, attn: nn.Module) -> None:
        """Copy the teacher's q, k and v weights, K and V by head blocks; drop all but the output projection.

        A QK-norm's weight goes into the convolution's last tap: between there and the unit length a SiLU is in the way,
        nothing else. There is no place for biases; :meth:`start` makes up for them as well as x allows.
        """
        shape = self.shape
        sizes = [shape.q_heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim]
        linears = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]

        def expand(rows: Tensor) -> Tensor:
            q, k, v = rows.split(sizes)
            k, v = (part.unflatten(0, (shape.kv_heads, -1)).repeat_interleave(shape.group, 0) for part in (k, v))
            return torch.cat([q, k.flatten(0, 1), v.flatten(0, 1)])

        self.in_proj_qkv.weight.copy_(expand(torch.cat([linear.weight for linear in linears])))
        if linears[0].bias is not None:
            self.biases = expand(torch.cat([linear.bias for linear in linears])).to(self.A_log.dtype)
        for norm, part in (("q_norm", 0), ("k_norm", 1)):
            if hasattr(attn, norm):
                gain = getattr(attn, norm)(torch.ones_like(getattr(attn, norm).weight))  # whatever its convention is
                gain = gain.view(-1, shape.key_dim)
                gain = gain.repeat_interleave(shape.q_heads // len(gain), 0).flatten()
                self.conv1d.weight[part * sizes[0] : (part + 1) * sizes[0], 0, -1].copy_(gain)
        for name in [name for name, _ in attn.named_children() if name != "o_proj"]:
            delattr(attn, name)

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Start values from the teacher's weights and head outputs; what is constant is read off x, which has no bias.

        Per head, by held-out error: decay and write strength of the memory, then the size of q and k at the SiLU. The
        output gate takes the head's gain, and varies with x where that lowers the held-out error. Rungs: "memory", its
        output times the best factor; "full", the mixer.
        """
        chosen = choosing(samples, select)
        shape, heads, device = self.shape, self.shape.q_heads, samples[0].x.device
        constant = constant_direction(samples)
        if self.biases is not None:
            self.in_proj_qkv.weight.add_(torch.outer(self.biases.to(device), constant))
            self.biases = None
        targets = [sample.heads[sample.real] for sample in chosen]
        taps = self.conv1d.weight[:, 0, -1]
        widths = [heads * shape.key_dim] * 2 + [heads * shape.value_dim]
        parts = [part.unflatten(0, (heads, -1)) for part in taps.split(widths)]  # views: q, k, v [H, K or V]
        inputs = torch.cat([self.in_proj_qkv(sample.x[sample.real]) for sample in samples]) * taps
        for part, u in zip(parts, inputs.split(widths, -1), strict=True):
            size = u.unflatten(-1, (heads, -1)).square().mean((0, 2)).sqrt()[:, None]
            part.copy_(part / size.clamp(min=1e-12))
        del inputs
        units = [part.clone() for part in parts]

        def set_sizes(of_keys: float | Tensor, of_values: float | Tensor) -> None:
            for part, unit, size in zip(parts, units, (of_keys, of_keys, of_values), strict=True):
                part.copy_(unit * size)

        def read(decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
            """(Best factor [H] on the fitting half, squared error with it on the other) of the memory's output."""
            return best_factor([self.memory(sample, decay, strength) for sample in chosen], targets)

        grid = torch.tensor([(d, b) for d in DECAYS for b in STRENGTHS], device=device)
        set_sizes(SMALL, SMALL)
        errors = torch.stack([read(d.expand(heads), b.expand(heads))[1] for d, b in grid])
        decay, strength = grid[errors.argmin(0)].T
        trials = []
        for size in SIZES:
            set_sizes(size, SMALL)
            trials.append(read(decay, strength)[1])
        size = torch.tensor(SIZES, device=device)[torch.stack(trials).argmin(0)][:, None]
        set_sizes(size, SMALL)
        factor, error = read(decay, strength)

        # Small enough for the norm, with the sign of the factor.
        out = torch.cat([self.memory(sample, decay, strength) for sample in chosen])
        rms = out.square().mean((0, 2)).sqrt().clamp(min=1e-12)
        small = (READ * shape.norm_eps**0.5 / rms).clamp(max=1) * factor.sign()
        set_sizes(size, SMALL * small[:, None])
        self.A_log.copy_((-decay.log() / math.log(2)).log())
        self.dt_bias.zero_()
        self.in_proj_a.weight.zero_()
        self.in_proj_b.weight.copy_(torch.outer(strength.logit(), constant))

        self.norm.weight.fill_(1)
        normed = [self.norm(self.memory(sample, decay, strength)) for sample in chosen]
        gain, _ = best_factor(normed, targets)
        weight = gain.max().clamp(min=1e-12) / F.silu(torch.tensor(OPEN))
        self.norm.weight.fill_(weight)
        neutral = silu_inverse((gain / weight).clamp(min=1e-3))
        rows = self.fit_gate(chosen, [weight * n for n in normed], targets, neutral, constant)
        self.in_proj_z.weight.copy_(rows.repeat_interleave(shape.value_dim, 0))

        power = sum(target.double().square().sum((0, 2)) for target in targets[1::2]).clamp(min=1e-30)
        full = 0.0
        for sample, target in list(zip(chosen, targets, strict=True))[1::2]:
            o, _ = self(sample.x, None, None, None, scale, segments=sample.segments)
            full = full + (o[sample.real] - target).double().square().sum((0, 2))
        return {"memory": (error / power).sqrt().tolist(), "full": (full / power).sqrt().tolist()}

    def fit_gate(
        self, chosen: list[Sample], normed: list[Tensor], targets: list[Tensor], neutral: Tensor, constant: Tensor
    ) -> Tensor:
        """Rows of the output gate, one per head [H, hidden]: neutral, or varying with x where that is better held out.

        One step of least squares around the neutral gate: minimises ``|t - n (SiLU(c) + SiLU'(c) w.x)|^2`` over w.
        """
        slope = neutral.sigmoid() * (1 + neutral * (1 - neutral.sigmoid()))
        flat = torch.outer(neutral, constant)
        gram = cross = 0.0
        for sample, n, target in list(zip(chosen, normed, targets, strict=True))[::2]:
            x = sample.x[sample.real].double()
            residual = target - n * F.silu(x.to(flat.dtype) @ flat.T)[..., None]
            weight = (n.square().sum(-1) * slope.square()).double()
            gram = gram + torch.einsum("nh,nd,ne->hde", weight, x, x)
            cross = cross + torch.einsum("nh,nd->hd", ((residual * n).sum(-1) * slope).double(), x)
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        change = torch.linalg.solve(gram + (GATE_RIDGE * mean + 1e-30) * eye, cross).to(flat.dtype)
        errors = torch.zeros(2, len(neutral), dtype=torch.float64, device=gram.device)
        for sample, n, target in list(zip(chosen, normed, targets, strict=True))[1::2]:
            x = sample.x[sample.real]
            for i, rows in enumerate((flat, flat + change)):
                errors[i] += (target - n * F.silu(x @ rows.T)[..., None]).double().square().sum((0, 2))
        return torch.where((errors[1] < errors[0])[:, None], flat + change, flat)

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0) -> int:
        heads, key, value = shape.q_heads, shape.key_dim, shape.value_dim
        return heads * (4 * key * value + shape.itemsize * (KERNEL - 1) * (2 * key + value))

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
        mask = segments.mask
        layout = Layout.of(x, segments, cached=state is not None or output_state)
        old = state or {}
        dtype = self.A_log.dtype
        q, k, v, tail = self.heads(x, layout, mask, old.get("tail"))
        z = project(self.in_proj_z, x).unflatten(-1, (self.shape.q_heads, -1))
        with torch.autocast(x.device.type, enabled=False):  # meant for the projections above alone
            wide = x.to(dtype)
            log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(wide) + self.dt_bias)
            beta = self.in_proj_b(wide).sigmoid()
            if mask is not None:
                real = mask.to(dtype)[..., None]
                log_decay, beta = log_decay * real, beta * real
            o, memory = gated_delta(
                *(layout.pack(tensor) for tensor in (q, k, v)),
                layout.pack(log_decay),
                layout.pack(beta),
                initial_state=old.get("memory"),
                output_final_state=output_state,
                cu_seqlens=layout.cu_seqlens,
            )
            o = self.norm(layout.unpack(o).to(dtype))
            o = (o * F.silu(z.to(dtype))).to(x.dtype)
        return o, {"memory": memory, "tail": tail} if output_state else None

    def heads(
        self, x: Tensor, layout: Layout, mask: Tensor | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k [B, T, H, K] of unit length and v [B, T, H, V], in the dtype of the projection's output, and the
        convolution's next tail [B, 3, 1, C].
        """
        shape, dtype = self.shape, self.A_log.dtype
        inputs = project(self.in_proj_qkv, x)[:, :, None]
        shifted, tail = local_taps(inputs, self.conv1d.weight[0, 0], layout, mask, tail)
        taps = self.conv1d.weight[:, 0].flip(1)  # entry j weighs the input j tokens back
        mixed = F.silu(sum(shift[:, :, 0].to(dtype) * taps[:, j] for j, shift in enumerate(shifted)))
        keys = shape.q_heads * shape.key_dim
        parts = mixed.split([keys, keys, shape.q_heads * shape.value_dim], -1)
        q, k, v = (part.unflatten(-1, (shape.q_heads, -1)) for part in parts)
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS) for part in (q, k))
        q, k, v = (part.to(inputs.dtype) for part in (q, k, v))
        return q, k, v, tail

    def memory(self, sample: Sample, decay: Tensor, strength: Tensor) -> Tensor:
        """What the memory reads at the N real tokens, [N, H, V], with a constant decay and write strength [H] each."""
        mask = sample.segments.mask
        layout = Layout.of(sample.x, sample.segments)
        q, k, v, _ = self.heads(sample.x, layout, mask, None)
        real = sample.real[..., None].to(decay.dtype)
        o, _ = gated_delta(
            *(layout.pack(tensor) for tensor in (q, k, v)),
            layout.pack(decay.log() * real),
            layout.pack(strength * real),
            cu_seqlens=layout.cu_seqlens,
        )
        return layout.unpack(o)[sample.real]


def constant_direction(samples: list[Sample]) -> Tensor:
    """The w [hidden] whose w.x is nearest to 1 on every token, by ridge regression: what stands in for a bias."""
    gram, total, count = 0.0, 0.0, 0
    for sample in samples:
        x = sample.x[sample.real].double()
        gram, total, count = gram + x.T @ x, total + x.sum(0), count + len(x)
    ridge = CONSTANT_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge, total).to(samples[0].x.dtype)


def best_factor(outputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The factor [H] that brings outputs nearest to targets, [N, H, V] each, on every second batch from the first on,
    and the squared error with it on the others.
    """
    half = []
    for part in (0, 1):
        pairs = list(zip(outputs[part::2], targets[part::2], strict=True))
        half.append(
            [
                sum((a * b).sum((0, 2)).double() for a, b in of)
                for of in (pairs, [(o, o) for o, _ in pairs], [(t, t) for _, t in pairs])
            ]
        )
    factor = half[0][0] / half[0][1].clamp(min=1e-30)
    cross, square, power = half[1]
    error = (power - 2 * factor * cross + factor.square() * square).clamp(min=0)
    return factor.to(outputs[0].dtype), error


def silu_inverse(y: Tensor) -> Tensor:
    """The positive u with SiLU(u) = y, for y > 0; Newton's method."""
    u = y.clamp(min=0) + 0.5
    for _ in range(20):
        gate = u.sigmoid()
        u = u - (u * gate - y) / (gate * (1 + u * (1 - gate)))
    return u
