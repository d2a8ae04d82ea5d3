"""Stage 0: a layer's start values in closed form from the teacher's q, k, v and outputs (derivation.md §6).

The mixer sets its own parameters (:meth:`linearize.mixers.Mixer.start`); then the output projection is refitted by
ridge regression, shrunk towards the teacher's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.mixers.base import MixedAttention, Sample
from linearize.mixers.fit import choosing

OUTPUT_RIDGE = 0.1  # of the mean square of the head outputs, pulling the output projection to the teacher's


@dataclass(frozen=True)
class Ladder:
    """The error ladder of one layer; relative RMS errors.

    heads: per rung the error of every query head on held-out tokens, as the mixer's start returns it. output: error of
    the attention output after the refit of its projection, on the tokens it was fitted on. pooled: the rungs over all
    heads (squares weighted by each head's power), then "output".
    """

    heads: dict[str, list[float]]
    pooled: dict[str, float]


@torch.no_grad()
def calibrate_layer(layer: MixedAttention, samples: list[Sample], scale: float, select: int) -> Ladder:
    """Set the start values of one layer from its samples and report the error ladder.

    The first ``select`` samples (at least 2; every second one is held out) choose and fit the mixer's own parameters;
    the output projection is refitted on all of them. Raises ValueError for fewer than two samples.
    """
    chosen = choosing(samples, select)
    heads = layer.mixer.start(samples, scale, select)
    output = refit_output(layer, samples, scale)
    power = sum(at.heads[at.real].double().square().sum((0, 2)) for at in chosen[1::2])
    pooled = {name: _pool(errors, power) for name, errors in heads.items()}
    return Ladder(heads, pooled | {"output": output})


def _pool(errors: list[float], power: Tensor) -> float:
    squares = torch.tensor(errors, dtype=power.dtype, device=power.device).square()
    return float(((squares * power).sum() / power.sum().clamp(min=1e-30)).sqrt())


@torch.no_grad()
def refit_output(layer: MixedAttention, samples: list[Sample], scale: float) -> float:
    """Ridge regression of the teacher's attention output on the mixer's head outputs; replaces o_proj's weight.

    ``W + argmin_D |Y - X (W + D)^T|^2 + mu |D|^2`` with mu = OUTPUT_RIDGE times the mean square of X, so that with no
    evidence the teacher's projection stays. A bias is kept as it is. Returns the relative error of the output.
    """
    projection: nn.Linear = layer.attn.o_proj
    gram = cross = 0.0
    power = error = 0.0
    weight = projection.weight.detach()
    for sample in samples:
        o, _ = layer.mixer(sample.x, sample.q, sample.k, sample.v, scale, segments=sample.segments)
        o = o[sample.real].flatten(1)
        target = sample.output[sample.real]
        residual = target - F.linear(o, weight, projection.bias)
        gram = gram + (o.T @ o).double()
        cross = cross + (o.T @ residual).double()
        error = error + residual.double().square().sum()
        power = power + target.double().square().sum()
    ridge = OUTPUT_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = torch.linalg.solve(gram + ridge, cross)
    projection.weight.add_(change.T.to(weight.dtype))
    error = error - 2 * (change * cross).sum() + (change * (gram @ change)).sum()
    return float((error / power.clamp(min=1e-30)).clamp(min=0).sqrt())
