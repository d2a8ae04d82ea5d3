"""Sequence-mixer operators of `linearize`: torch everywhere, Triton kernels on GPUs.

Importing this package touches no driver and does not need Triton.
"""

from .api import (
    centre,
    centre_step,
    centred_delta_step,
    centred_gated_delta,
    centred_gated_delta_step,
    centred_linear_attn,
    centred_linear_attn_step,
    centred_mesa_step,
    gated_delta,
    gated_delta_step,
    kl_divergence_,
    linear_attn,
    linear_attn_step,
    log_norm,
    mesa,
    mesa_step,
    readout,
    running_mean,
    running_mean_step,
    top_kl_divergence_,
)

__all__ = [
    "centre",
    "centre_step",
    "centred_delta_step",
    "centred_gated_delta",
    "centred_gated_delta_step",
    "centred_linear_attn",
    "centred_linear_attn_step",
    "centred_mesa_step",
    "gated_delta",
    "gated_delta_step",
    "kl_divergence_",
    "linear_attn",
    "linear_attn_step",
    "log_norm",
    "mesa",
    "mesa_step",
    "readout",
    "running_mean",
    "running_mean_step",
    "top_kl_divergence_",
]
