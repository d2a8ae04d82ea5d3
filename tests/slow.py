"""TTT and the K-only cache as derivation.md writes them: one document, one head, one token after the other, float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.mixers import Mixer


def softmax_means(score: Tensor, log_forget: Tensor) -> Tensor:
    """Weights of the running means of §2: row t holds those of tokens 0..t, forgetting as an additive bias. [T, T]."""
    fade = log_forget.cumsum(0)
    later = torch.ones(len(score), len(score), dtype=torch.bool).triu(1)
    return (score[None] + fade[:, None] - fade[None]).masked_fill(later, -torch.inf).softmax(-1)


def zeroth_order(p: dict[str, Tensor], h: int, mean: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """§6 without the memory: [T, V] of head h. mean: the running mean of the values."""
    o = p["readout.mean"][h] * mean + p["readout.sink"][h] * values[:1]
    for j, tap in enumerate(p["readout.taps"][:, h]):
        o[j:] = o[j:] + tap * values[: len(values) - j]
    for m, rho in enumerate(p["readout.scales"][h]):
        log_forget = -F.softplus(p["readout.scale_forget"][h, m]).expand(len(keys))
        o = o + rho * softmax_means(scale * keys @ p["readout.scale_reference"][h, m], log_forget) @ values
    return o


def slow(m: Mixer, batch, scale: float, serves, remember) -> Tensor:
    """[T, H, V] of a batch of one.

    serves: the KV head of a query head. remember(p, h, q, k, v, rest): what the memory of head h adds, [T, V]; rest:
    strengths b [T], 1 - b [T], means of k before and after each token, of v likewise, and the memory's gates, each [T].
    """
    x, q, k, v = (tensor[0].detach().double() for tensor in (batch.x, batch.q, batch.k, batch.v))
    p = {name: tensor.detach().double() for name, tensor in m.named_parameters()}
    gates = (x @ p["gates.weight"].T + p["gates.bias"]).view(len(x), -1, m.shape.q_heads)
    heads = []
    for h in range(m.shape.q_heads):
        keys, values = k[:, serves(h)], v[:, serves(h)]
        *own, write, forget = gates[:, :, h].T
        weights = softmax_means(scale * keys @ p["reference"][h] + write, -F.softplus(forget))
        key_mean, value_mean = weights @ keys, weights @ values
        before = [torch.cat([torch.zeros_like(mean[:1]), mean[:-1]]) for mean in (key_mean, value_mean)]
        rest = weights.diagonal(), weights.tril(-1).sum(-1), before[0], key_mean, before[1], value_mean, own
        o = zeroth_order(p, h, value_mean, keys, values, scale)
        heads.append(o + remember(p, h, q[:, h], keys, values, rest))
    return torch.stack(heads, 1)


def phi(x: Tensor, hidden: Tensor, threshold: Tensor, weight: Tensor) -> Tensor:
    """[..., K] -> [..., K + m], the inner model's features."""
    unit = x @ hidden.T - threshold * x.norm(dim=-1, keepdim=True)
    return torch.cat([x, weight * unit.clamp(min=0)], -1)


def slow_ttt(m: Mixer, batch, scale: float, serves) -> Tensor:
    """Gradient descent by autograd: weight decay, then one step on the squared error of the centred value."""

    def remember(p, h, q, k, v, rest):
        b, keep, _, key_mean, value_before, _, (exponent, erase) = rest
        c = p["log_balance"][h].exp()
        inner = [p[name][h] for name in ("hidden", "threshold", "weight")]
        w = torch.zeros(k.shape[1] + len(inner[1]), v.shape[1], dtype=torch.float64)
        average, out = torch.zeros_like(w), []
        for t in range(len(k)):
            if t:
                w = keep[t] ** exponent[t].exp() * w
                key = phi(c * (k[t] - key_mean[t]), *inner)
                rate = b[t] / keep[t] * erase[t].exp()
                w.requires_grad_()
                loss = (keep[t] * (v[t] - value_before[t]) - key @ w).square().sum() / 2
                (slope,) = torch.autograd.grad(loss, w)
                # The minimiser of rate * loss + |change|^2 / 2, which lies along the gradient.
                w = w.detach() - rate / (1 + rate * key.square().sum()) * slope
                if m.moves:
                    theta = p["momentum"][h].sigmoid()
                    average = theta * average + (1 - theta) * w
            read = (1 - p["share"][h]) * w + p["share"][h] * average if m.moves else w
            out.append(p["read_state"][h] * phi(scale * (q[t] - p["reference"][h]) / c, *inner) @ read)
        return torch.stack(out)

    return slow(m, batch, scale, serves, remember)


def slow_kcache(m: Mixer, batch, scale: float, serves) -> Tensor:
    """Softmax over all keys, then the ridge regression of v on k, solved directly at every token."""

    def remember(p, h, q, k, v, rest):
        b, keep, key_before, key_mean, value_before, _, (exponent, logit) = rest
        g = torch.zeros(k.shape[1], v.shape[1], dtype=torch.float64)
        cov = torch.zeros(k.shape[1], k.shape[1], dtype=torch.float64)
        ridge, out = p["log_ridge"][h].exp() * torch.eye(k.shape[1], dtype=torch.float64), []
        for t in range(len(k)):
            if t:
                kd, vd = k[t] - key_before[t], v[t] - value_before[t]
                decay = keep[t] ** exponent[t].exp()
                size = (b[t].log() - keep[t].log() + logit[t]).sigmoid() * keep[t]
                g, cov = decay * g + size * torch.outer(kd, vd), decay * cov + size * torch.outer(kd, kd)
            kappa = (scale * k[: t + 1] @ q[t]).softmax(0) @ k[: t + 1]
            out.append(p["read_state"][h] * g.T @ torch.linalg.solve(cov + ridge, kappa - key_mean[t]))
        return torch.stack(out)

    return slow(m, batch, scale, serves, remember)
