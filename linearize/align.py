"""Stage 1: one layer's mixer learns the teacher's attention output, on the teacher's inputs (layer by layer)."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linearize.errors import UserError
from linearize.mixers import MixedAttention
from linearize.processes import half_precision
from linearize.recipe import Align
from linearize.replay import Replay

BETAS = (0.9, 0.95)
CLIP = 1.0  # of the gradient's norm
# A step whose loss is finite and whose gradient is not changes nothing; after so many in a row, or a tenth of all,
# the weights are suspect.
SKIPS = 3


@dataclass
class Step:
    """One batch of one step: the attention's input and the teacher's output [B, T, hidden], and the layer's kwargs."""

    x: Tensor
    target: Tensor
    kwargs: dict


def learning_rate(step: int, steps: int, options: Align) -> float:
    """Linear warm-up to ``lr``, over half of the steps at most, then a cosine to ``lr_min`` at the last step."""
    warmup = min(options.warmup, steps // 2)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup - 1)
    return options.lr_min + (options.lr - options.lr_min) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the target's mean square, over all tokens of the batch, in fp32."""
    target = target.float()
    return (output.float() - target).square().sum() / target.square().sum().clamp(min=1e-12)


def align_layer(
    mixed: MixedAttention,
    steps: Iterator[Step],
    count: int,
    options: Align,
    *,
    name: str,
    progress: Callable[[int, float], None],
) -> list[float]:
    """Train a calibrated mixer for ``count`` steps; returns the loss of each, taken before its update.

    steps: an endless iterator of batches. All of the layer's attention trains, projections included, with weights in
    fp32. progress is called with the tokens and the loss of each step. A step with a finite loss and a gradient that is
    not finite is left out, with a warning. Raises UserError when the loss stops being finite, or so many steps in a row
    as SKIPS says, with the mixer as it was after the last good step.
    """
    mixed.train().requires_grad_(True)
    parameters = dict(mixed.named_parameters())
    fused = next(mixed.parameters()).device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters.values(), lr=options.lr, betas=BETAS, weight_decay=0.0, fused=fused)
    losses, skipped, most = [], 0, max(1, min(SKIPS, count // 10))

    @Replay
    def descend(x: Tensor, target: Tensor, kwargs: dict) -> Tensor:
        with half_precision(x.device):
            output, _ = mixed(x, **kwargs)
        loss = relative_error(output, target)
        loss.backward()
        return loss.detach()

    batch = next(steps)
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, count, options)
        loss = descend(batch.x, batch.target, batch.kwargs)
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        tokens = batch.x.shape[0] * batch.x.shape[1]
        if step + 1 < count:
            batch = next(steps)  # made while a GPU is busy with this one
        losses.append(float(loss))
        sound = bool(torch.isfinite(norm))
        skipped = 0 if sound else skipped + 1
        if not math.isfinite(losses[-1]) or skipped == most:
            good = step + 1 - max(skipped, 1)
            fix = "lower align.lr" if good else "the calibrated start is not usable: raise calibrate.tokens"
            value = f"loss {losses[-1]:g}, gradient {float(norm):g}"
            raise UserError(f"alignment of {name} diverged at step {step + 1}", value=value, fix=fix)
        if step == 0:
            _check_gradients(parameters, name)
        if sound:
            optimizer.step()
        else:
            warnings.warn(f"alignment of {name}: the gradient of step {step + 1} is not finite: left out", stacklevel=2)
        optimizer.zero_grad(set_to_none=False)
        progress(tokens, losses[-1])
    optimizer.zero_grad(set_to_none=True)
    mixed.eval().requires_grad_(False)
    return losses


def _check_gradients(parameters: dict[str, nn.Parameter], name: str) -> None:
    missing = [key for key, p in parameters.items() if p.grad is None and p.numel()]
    if missing:
        raise RuntimeError(f"no gradient reached {', '.join(missing)} of {name}")
