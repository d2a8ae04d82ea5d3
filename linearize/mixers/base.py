"""What every mixer shares: the teacher's attention module as the source of q, k, v, and the cache protocol.

A transformers attention module computes q, k and v (projections, biases, QK-norm, RoPE or none, fused weights,
multipliers), hands them to the function registered for its ``_attn_implementation`` and projects what comes back.
:class:`MixedAttention` keeps the teacher's module whole and registers a function that calls a mixer instead of the
softmax. Everything a family does around the softmax is therefore the family's own code.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

IMPLEMENTATION = "linearize"


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one attention layer. KV head ``h // (q_heads // kv_heads)`` serves query head ``h`` (head blocks)."""

    hidden: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float = 1e-6  # of the model's own norms
    itemsize: int = 4  # bytes of a number of q, k and v, for what is cached as it comes

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @classmethod
    def from_config(cls, config) -> "HeadShape":
        """Read the sizes from a transformers config; ``head_dim`` is taken as given where the config has one."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        eps = getattr(config, "rms_norm_eps", cls.norm_eps)
        return cls(config.hidden_size, heads, kv_heads, head_dim, head_dim, eps)


@dataclass(frozen=True)
class Segments:
    """Which tokens of a [B, T] batch are real, and where documents start.

    mask: [B, T] bool, False on padding, or None when nothing is padded.
    reset: [B, T] bool, True on the first token of every packed document, or None when each row is one document.
    documents: a number that the documents of all rows do not exceed, if the caller knows one; without it the GPU has to
    be asked for their number.
    """

    mask: Tensor | None = None
    reset: Tensor | None = None
    documents: int | None = None


@dataclass
class Sample:
    """One batch of calibration text at one layer.

    x: [B, T, hidden] normed input, q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, Hk, V]: the student's, on the student's
    hidden states. heads [B, T, Hq, V] and output [B, T, hidden]: the teacher's head outputs and attention output on
    the same tokens and the teacher's hidden states.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    output: Tensor
    segments: Segments

    @property
    def real(self) -> Tensor:
        """[B, T] bool, True on real tokens."""
        mask = self.segments.mask
        return torch.ones(self.q.shape[:2], dtype=torch.bool, device=self.q.device) if mask is None else mask.bool()


class Mixer(nn.Module):
    """Replacement of ``softmax(scale q k^T) v``: a recurrence over tokens.

    A subclass sets :attr:`kind`, holds its own parameters in fp32 and implements :meth:`forward`,
    :meth:`reset_parameters` and :meth:`state_bytes`; one that is derived from the softmax implements :meth:`start`. It
    never sees files, configs or cache objects.
    """

    kind: ClassVar[str]
    calibrated: ClassVar[bool] = True  # False: no start and no refit of the output projection, as the control has it
    own_projections: ClassVar[bool] = False  # True: works from x alone and is given no q, k, v
    shape: HeadShape

    def adopt(self, attn: nn.Module) -> None:
        """Take over, and remove from the teacher's attention module, what becomes the mixer's own; mostly nothing.

        Called once, when the mixer takes its place. The output projection stays where it is.
        """

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
        """Mix one batch.

        x: [B, T, hidden], the layer's normed input. q: [B, T, Hq, K], k: [B, T, Hk, K], v: [B, T, Hk, V], after the
        teacher's biases, QK-norm and RoPE. scale: the softmax scale. state: what an earlier call returned, to
        continue each row, or None. Returns o [B, T, Hq, V] in q's dtype and, when asked, the state after the last
        token as a dict of tensors whose first dimension is B. Rows of o on padding are finite and meaningless.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set every own parameter to its uncalibrated start with ``transformers.initialization`` functions only."""
        raise NotImplementedError

    def start(self, samples: list[Sample], scale: float, select: int) -> dict[str, list[float]]:
        """Set the own parameters in closed form from the teacher; called without gradients.

        samples: text in order; the first ``select`` of them, at least two, choose and fit, half of them held out.
        Returns the error ladder, rung by rung: the relative RMS error of every query head's output on the held-out
        samples, the last rung "full" being the mixer as it then is; {} for a mixer whose parameters stay as they are.
        """
        return {}

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The own parameters by purpose, each exactly once, so that training can give groups rates of their own."""
        return {"mixer": list(self.parameters())}

    @classmethod
    def state_bytes(cls, shape: HeadShape, tokens: int = 0, **options) -> int:
        """Bytes of state per sequence and layer after ``tokens`` tokens; most mixers hold the same at any length."""
        raise NotImplementedError


def _call_mixer(module, query, key, value, attention_mask, *, scaling: float, mixer_core: Callable, **kwargs):
    out = mixer_core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling)
    return out, None


AttentionInterface.register(IMPLEMENTATION, _call_mixer)


@contextmanager
def weights_in_place(mixer: Mixer) -> Iterator[None]:
    """Fetch what accelerate keeps on another device or disk (``device_map="auto"`` with too little memory).

    Its hooks on a submodule fire when that is called, and mixers read their submodules' weights directly.
    """
    hooked = [module for module in mixer.modules() if module is not mixer and "_hf_hook" in module.__dict__]
    for module in hooked:
        module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        for module in hooked:
            module._hf_hook.post_forward(module, ())


class MixedAttention(nn.Module):
    """Takes the place of ``self_attn``: the teacher's attention module with a mixer where its softmax was.

    Parameters: ``attn.*`` are the teacher's, name for name; ``mixer.*`` are the mixer's own, in fp32. Of a mixer with
    projections of its own only ``attn.o_proj`` is left.
    """

    def __init__(self, attn: nn.Module, mixer: Mixer, layer_idx: int):
        super().__init__()
        # A copy, so that the softmax layers of the same model keep their own implementation.
        attn.config = copy.copy(attn.config)
        attn.config._attn_implementation = IMPLEMENTATION
        mixer.adopt(attn)
        self.attn = attn
        self.mixer = mixer
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache=None,
        position_ids: Tensor | None = None,
        mixer_mask: Tensor | None = None,
        mixer_reset: Tensor | None = None,
        mixer_documents: int | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Same contract as a transformers attention module; returns (output [B, T, hidden], None).

        mixer_mask, mixer_reset: [B, T] bool or None, and mixer_documents: see :class:`Segments`. The layer's own 4-D
        attention mask is not used: a recurrence is causal by construction.
        """
        layer = None if cache is None else cache.layers[self.layer_idx]
        new_state = None

        def core(q: Tensor | None, k: Tensor | None, v: Tensor | None, scale: float) -> Tensor:
            nonlocal new_state
            borrowed = q is not None
            if borrowed:
                # Under autocast, rotary tables leave q and k in fp32 beside a v in bf16.
                q, k = q.to(v.dtype), k.to(v.dtype)
            # A mixer decides for itself what it computes in fp32; its products must not become bf16 behind its back.
            exact = torch.autocast(hidden_states.device.type, enabled=False) if borrowed else nullcontext()
            with exact, weights_in_place(self.mixer):
                o, new_state = self.mixer(
                    hidden_states,
                    q,
                    k,
                    v,
                    scale,
                    segments=Segments(mixer_mask, mixer_reset, mixer_documents),
                    state=None if layer is None else layer.states(),
                    output_state=layer is not None,
                )
            return o

        if self.mixer.own_projections:
            out = self.attn.o_proj(core(None, None, None, 1.0).flatten(2))
        else:
            kwargs.pop("use_cache", None)
            out, _ = self.attn(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=None,
                cache=None,
                position_ids=position_ids,
                mixer_core=core,
                **kwargs,
            )
        if layer is not None:
            layer.advance(hidden_states.shape[1], **new_state)
        return out, None
