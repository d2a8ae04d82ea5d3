"""The control: a standard Gated DeltaNet that copies the teacher's projections and starts from neutral gates."""

import math

import torch
import torch.nn.functional as F
from linearize_kernels import gated_delta
from torch import Tensor, nn
from transformers import initialization as init

from linearize.mixers.base import HeadShape, Mixer, Segments
from linearize.mixers.expansion import Layout
from linearize.mixers.products import exact_linear

HALF_LIFE = 128.0  # tokens; about a quarter of a short training context, far from both forgetting and hoarding


class StandardGDN(Mixer):
    """Gated DeltaNet (Yang et al., ICLR 2025) on the teacher's q, k, v: L2-normed q and k, RoPE kept, no short conv.

    Decay ``exp(-exp(log_rate) softplus(a_t))`` and write strength ``sigmoid(b_t)``, both per query head. Neutral start:
    zero gate weights, a half-life of 128 tokens, write strength 1/2. Parameters, fp32: gates.weight [2H, hidden],
    gates.bias [2H] (decay rows, then write rows), log_rate [H].
    """

    kind = "gdn-standard"
    calibrated = False

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.shape = shape
        self.gates = nn.Linear(shape.hidden, 2 * shape.q_heads, dtype=torch.float32)
        self.log_rate = nn.Parameter(torch.empty(shape.q_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # exp(log_rate) softplus(0) = log 2 / HALF_LIFE, and softplus(0) = log 2.
        init.zeros_(self.gates.weight)
        init.zeros_(self.gates.bias)
        init.constant_(self.log_rate, -math.log(HALF_LIFE))

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0) -> int:
        return 4 * shape.q_heads * shape.key_dim * shape.value_dim

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        segments: Segments,
        state: dict[str, Tensor] | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        layout = Layout.of(x, segments, cached=state is not None or output_state)
        decay, write = exact_linear(x, self.gates.weight, self.gates.bias).chunk(2, -1)
        log_decay = -self.log_rate.exp() * F.softplus(decay)
        beta = write.sigmoid()
        if segments.mask is not None:
            real = segments.mask.to(beta.dtype)[..., None]
            log_decay, beta = log_decay * real, beta * real
        o, memory = gated_delta(
            layout.pack(F.normalize(q.to(self.log_rate.dtype), dim=-1).to(q.dtype)),
            layout.pack(F.normalize(k.to(self.log_rate.dtype), dim=-1).to(k.dtype)),
            layout.pack(v),
            layout.pack(log_decay),
            layout.pack(beta),
            initial_state=None if state is None else state["memory"],
            output_final_state=output_state,
            cu_seqlens=layout.cu_seqlens,
        )
        return layout.unpack(o), {"memory": memory} if output_state else None
