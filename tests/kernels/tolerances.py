"""One place for what counts as equal. Errors are RMS(error) / RMS(reference); an absolute error below 1e-6 passes."""

import torch

# (outputs and states, gradients of q, k, v and states, gradients of per-head scalars)
TOLERANCE = {
    "float64": (1e-12, 1e-12, 1e-12),  # same algebra, another order of summation
    "float32": (2e-6, 5e-6, 2e-5),
    "float32 strong decay": (2e-6, 5e-6, 1e-4),  # logarithms summed in float32 inside a chunk
    "float32 on GPU": (1e-5, 3e-5, 1e-4),  # sums in another order than here; MesaNet solved to 1e-6
    "float16": (2e-3, 4e-3, 1e-2),
    "bfloat16": (6e-3, 1e-2, 2e-2),
    "bfloat16 interpreted": (1.5e-2, 2e-2, 3e-2),  # the interpreter truncates when it rounds to bfloat16
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS-relative error in float64; inf when anything is not finite, 0 when the absolute error is below 1e-6."""
    assert got.shape == want.shape, (tuple(got.shape), tuple(want.shape))
    if not got.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    if not (torch.isfinite(got).all() and torch.isfinite(want).all()):
        return float("inf")
    gap = (got - want).square().mean().sqrt()
    return float(gap / want.square().mean().sqrt().clamp_min(1e-30))


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Fail with the measured error when `got` is further from `want` than `limit`."""
    measured = error(got, want)
    small = got.numel() == 0 or float((got.detach().double() - want.detach().double()).abs().max()) <= 1e-6
    # In float64 the absolute escape would hide everything, so it applies to coarser limits only.
    if limit < 1e-9:
        small = got.numel() == 0 or float((got.detach() - want.detach()).abs().max()) <= limit
    assert measured <= limit or small, f"{name}: error {measured:.2e} > {limit:.0e}"
