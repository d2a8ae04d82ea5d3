"""Linear-time replacements for softmax attention, by kind."""

from torch import nn

from linearize.mixers.base import HeadShape, MixedAttention, Mixer, Sample, Segments
from linearize.mixers.deltanet import DeltaNet
from linearize.mixers.gdn import GDN
from linearize.mixers.gdn_native import NativeGDN
from linearize.mixers.gdn_standard import StandardGDN
from linearize.mixers.kcache import KCache
from linearize.mixers.mesanet import MesaNet
from linearize.mixers.ttt import TTT
from linearize.mixers.vala import VaLA

MIXERS: dict[str, type[Mixer]] = {
    cls.kind: cls for cls in (GDN, DeltaNet, MesaNet, VaLA, TTT, KCache, StandardGDN, NativeGDN)
}


def build_mixer(attn: nn.Module, spec: dict, layer_idx: int, shape: HeadShape) -> MixedAttention:
    """Put the mixer that ``spec`` names (``{"kind": ..., **options}``) around the teacher's attention module."""
    options = dict(spec)
    kind = options.pop("kind")
    if kind not in MIXERS:
        raise ValueError(f"unknown mixer kind {kind!r}: one of {', '.join(MIXERS)}")
    return MixedAttention(attn, MIXERS[kind](shape, **options), layer_idx)


__all__ = [
    "MIXERS",
    "TTT",
    "DeltaNet",
    "GDN",
    "HeadShape",
    "KCache",
    "MesaNet",
    "MixedAttention",
    "Mixer",
    "NativeGDN",
    "Sample",
    "Segments",
    "StandardGDN",
    "VaLA",
    "build_mixer",
]
