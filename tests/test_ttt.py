"""TTT as linear attention (derivation.md §7): identities against autograd in float64, then the mixer and its start."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, perturb
from linearize_kernels import gated_delta
from slow import phi, slow_ttt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from linearize.console import Console
from linearize.convert import convert
from linearize.mixers import GDN, TTT, HeadShape, Sample, Segments
from linearize.mixers.ttt import MOMENTUM, averaged_delta, features, landmarks
from linearize.recipe import Recipe

EXACT = {"atol": 1e-11, "rtol": 1e-11}
SHAPE = HeadShape(hidden=12, q_heads=4, kv_heads=2, key_dim=8, value_dim=6)
SCALE = 0.3
T, K, V = 30, 6, 5


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


@pytest.fixture
def qkv():
    return normal(T, K, seed=1), normal(T, K, seed=2), normal(T, V, seed=3)


# The inner model, trained by autograd


@dataclasses.dataclass
class Trained:
    """A run of test-time training. outputs [T, V]: f_t(q_t) after step t. For linear attention: features of k_i before
    step i and of q_t after step t, [T, m], and g_i = -eta dL/df at step i, [T, V].
    """

    outputs: Tensor
    key_features: Tensor
    query_features: Tensor
    steps: Tensor


def train(inner: nn.Sequential, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, momentum: Tensor, rates=None) -> Trained:
    """One step a token of gradient descent with momentum on |v - f(k)|^2 / 2, on every parameter of `inner`.

    The last module is linear without bias. rate, momentum: [T]. Written with autograd alone.
    """
    params = list(inner.parameters())
    velocity = [torch.zeros_like(p) for p in params]
    out, of_key, of_query, steps = [], [], [], []
    for t in range(len(k)):
        hidden = inner[:-1](k[t])
        f = inner[-1](hidden)
        f.retain_grad()
        ((v[t] - f).square().sum() / 2).backward()
        of_key.append(hidden.detach())
        steps.append(-rate[t] * f.grad)
        with torch.no_grad():
            for p, m in zip(params, velocity, strict=True):
                m.mul_(momentum[t]).sub_(rate[t] * p.grad)
                p.add_(m)
                p.grad = None
            of_query.append(inner[:-1](q[t]))
            out.append(inner(q[t]))
    return Trained(*(torch.stack(x) for x in (out, of_key, of_query, steps)))


def effective_values(steps: Tensor, momentum: Tensor) -> Tensor:
    """g_i sum_{j=i..t} prod_{s=i+1..j} alpha_s for every t and i <= t, [T, T, V] (derivation.md §7)."""
    out = torch.zeros(len(steps), *steps.shape, dtype=steps.dtype)
    for t in range(len(steps)):
        for i in range(t + 1):
            out[t, i] = steps[i] * sum(momentum[i + 1 : j + 1].prod() for j in range(i, t + 1))
    return out


def linear_attention(run: Trained, first: Tensor, momentum: Tensor) -> Tensor:
    """o_t = phi_t(q_t) (W_0 + sum_i phi_i(k_i)^T g_i^eff)."""
    values = effective_values(run.steps, momentum)
    written = torch.einsum("tm,im,tiv->tv", run.query_features, run.key_features, values)
    return run.query_features @ first + written


def mlp(*widths: int) -> nn.Sequential:
    """Layers of these widths with SiLU between them, the last one linear and without bias; float64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-2], widths[1:-1], strict=True):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=False)).double()


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("widths", [(K, V), (K, 9, V), (K, 7, 9, V)])
def test_training_is_linear_attention(qkv, widths, momentum):
    """TTT with an inner MLP, all of whose layers train, and momentum is its linear-attention rewrite."""
    rate = 0.05 + 0.1 * torch.rand(T, dtype=torch.float64, generator=generator(4))
    alpha = torch.rand(T, dtype=torch.float64, generator=generator(5)) if momentum else torch.zeros(T)
    inner = mlp(*widths)
    before = [p.detach().clone() for p in inner.parameters()]
    run = train(inner, *qkv, rate, alpha.double())
    assert all((p != b).any() for p, b in zip(inner.parameters(), before, strict=True))
    torch.testing.assert_close(linear_attention(run, before[-1].T, alpha.double()), run.outputs, **EXACT)
    wrong = linear_attention(run, before[-1].T, alpha.double() + 0.1)
    assert (wrong - run.outputs).abs().max() > 1e-3


def test_training_a_linear_model_is_deltanet(qkv):
    """S_t = S_{t-1} + eta_t k_t (v_t - S_{t-1}^T k_t)^T, and so is the package's operator."""
    q, k, v = qkv
    rate = 0.05 + 0.1 * torch.rand(T, dtype=torch.float64, generator=generator(4))
    inner = nn.Sequential(nn.Linear(K, V, bias=False)).double()
    nn.init.zeros_(inner[0].weight)
    run = train(inner, q, k, v, rate, torch.zeros(T, dtype=torch.float64))
    s, want = torch.zeros(K, V, dtype=torch.float64), []
    for t in range(T):
        s = s + rate[t] * torch.outer(k[t], v[t] - s.T @ k[t])
        want.append(s.T @ q[t])
    torch.testing.assert_close(run.outputs, torch.stack(want), **EXACT)
    o, last = gated_delta(
        *(x[None, :, None] for x in (q, k, v)), None, rate[None, :, None], scale=1.0, output_final_state=True
    )
    torch.testing.assert_close(o[0, :, 0], run.outputs, **EXACT)
    torch.testing.assert_close(last[0, 0], inner[0].weight.T.detach(), **EXACT)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e3])
def test_the_proximal_step(rate):
    """In unit keys beta = eta n^2 / (1 + eta n^2): the minimiser of eta |v - S^T k|^2 + |S - S_before|^2."""
    k, v, s = normal(K, seed=6), normal(V, seed=7), normal(K, V, seed=8)
    n = k.norm()
    beta = rate * n**2 / (1 + rate * n**2)
    got = s + beta * torch.outer(k / n, v / n - s.T @ (k / n))
    # Normal equations of the least squares.
    left = rate * torch.outer(k, k) + torch.eye(K, dtype=torch.float64)
    want = torch.linalg.solve(left, rate * torch.outer(k, v) + s)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    if rate == 1e-3:  # to first order the plain gradient step
        assert (got - (s + rate * torch.outer(k, v - s.T @ k))).abs().max() < 20 * rate**2 * n**4


# Momentum


def test_momentum_with_the_error_where_it_leads_is_an_average():
    """The steps M = theta M + (1 - theta) k y^T of A, y taken at A + theta / (1 - theta) M, make A the mean of W."""
    q, k, v = normal(T, K, seed=1), normal(T, K, seed=2) / 3, normal(T, V, seed=3)
    theta, rate = 0.7, 0.3
    a, m, want = torch.zeros(K, V, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64), []
    for t in range(T):
        ahead = (a + theta / (1 - theta) * m).requires_grad_()
        (slope,) = torch.autograd.grad((v[t] - k[t] @ ahead).square().sum() / 2, ahead)
        m = theta * m - (1 - theta) * rate * slope
        a = a + m
        want.append(q[t] @ a)
    ones = torch.ones(1, T, 1, dtype=torch.float64)
    log_theta = torch.full_like(ones, theta).log()
    _, got, (_, last) = averaged_delta(
        *(x[None, :, None] for x in (q, k, v)), 0 * ones, rate * ones, rate * ones, log_theta
    )
    torch.testing.assert_close(got[0, :, 0], torch.stack(want), **EXACT)
    torch.testing.assert_close(last[0, 0], a, **EXACT)


def scalars(length: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_decay, beta, gain, log_momentum [2, T, H], with tokens that change nothing."""
    u = torch.rand(4, 2, length, heads, dtype=torch.float64, generator=generator(seed))
    u[:, :, 5:9] = 0
    theta = torch.where(u[3] > 0, u[3], 1.0)
    return -0.2 * u[0], 0.2 * u[1], u[2], theta.log()


def recurrent(q, k, v, log_decay, beta, gain, log_momentum, w, a):
    """The recurrence of `averaged_delta`, token by token, one KV head for every two."""
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    of_w, of_a = [], []
    for t in range(q.shape[1]):
        w = log_decay[:, t, :, None, None].exp() * w
        y = gain[:, t, :, None] * v[:, t] - beta[:, t, :, None] * torch.einsum("bhkv,bhk->bhv", w, k[:, t])
        w = w + k[:, t, :, :, None] * y[:, :, None]
        theta = log_momentum[:, t, :, None, None].exp()
        a = theta * a + (1 - theta) * w
        of_w.append(torch.einsum("bhkv,bhk->bhv", w, q[:, t]))
        of_a.append(torch.einsum("bhkv,bhk->bhv", a, q[:, t]))
    return torch.stack(of_w, 1), torch.stack(of_a, 1), (w, a)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_averaged_delta_is_its_recurrence(length):
    q, k, v = normal(2, length, 4, K, seed=1), normal(2, length, 2, K, seed=2), normal(2, length, 2, V, seed=3)
    args = q, k, v, *scalars(length, 4, 4)
    first = normal(2, 4, K, V, seed=5), normal(2, 4, K, V, seed=6)
    got, want = averaged_delta(*args, initial_state=first), recurrent(*args, *first)
    for x, y in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(x, y, **EXACT)
    log_decay, beta, gain = args[3:6]
    plain, memory = gated_delta(
        q, k, v, log_decay, beta, gain=gain, scale=1.0, initial_state=first[0], output_final_state=True
    )
    torch.testing.assert_close(got[0], plain, **EXACT)
    torch.testing.assert_close(got[2][0], memory, **EXACT)


def test_averaged_delta_continues_and_packs():
    q, k, v = normal(1, 200, 4, K, seed=1), normal(1, 200, 2, K, seed=2), normal(1, 200, 2, V, seed=3)
    args = q, k, v, *(x[:1] for x in scalars(200, 4, 4))
    whole = averaged_delta(*args)
    first = averaged_delta(*(x[:, :77] for x in args))
    second = averaged_delta(*(x[:, 77:] for x in args), initial_state=first[2])
    for i in range(2):
        torch.testing.assert_close(torch.cat([first[i], second[i]], 1), whole[i], **EXACT)
        torch.testing.assert_close(second[2][i], whole[2][i], **EXACT)
    packed = averaged_delta(*args, cu_seqlens=torch.tensor([0, 77, 200]))
    alone = averaged_delta(*(x[:, 77:] for x in args))
    for i in range(2):
        torch.testing.assert_close(packed[i], torch.cat([first[i], alone[i]], 1), **EXACT)
        torch.testing.assert_close(packed[2][i], torch.cat([first[2][i], alone[2][i]]), **EXACT)


def test_averaged_delta_gradients():
    q, k, v = normal(1, 5, 2, 3, seed=1), normal(1, 5, 1, 3, seed=2), normal(1, 5, 1, 2, seed=3)
    u = torch.rand(4, 1, 5, 2, dtype=torch.float64, generator=generator(4)) * 0.5 + 0.1
    first = normal(1, 2, 3, 2, seed=5), normal(1, 2, 3, 2, seed=6)
    leaves = [x.requires_grad_() for x in (q, k, v, -u[0], u[1], u[2], -u[3], *first)]

    def run(*x):
        o, a, last = averaged_delta(*x[:7], initial_state=x[7:])
        return o, a, *last

    assert torch.autograd.gradcheck(run, leaves)


def test_bursts_pump_up_heavy_ball_and_not_the_average():
    """Five repeats of a key, then twenty other tokens, at full write strength."""
    run = (torch.arange(600) % 25) < 5
    k = torch.where(run[:, None], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).double()
    v = torch.where(run, 1.0, 0.0).double()[:, None]
    theta = 0.9
    a, m, sizes = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64), []
    for t in range(600):
        m = theta * m + (1 - theta) * torch.outer(k[t], v[t] - a.T @ k[t])
        a = a + m
        sizes.append(float(a.norm()))
    assert max(sizes) > 1e6
    ones = torch.ones(1, 600, 1, dtype=torch.float64)
    row = k[None, :, None]
    of_w, of_a, _ = averaged_delta(row, row, v[None, :, None], 0 * ones, ones, ones, torch.full_like(ones, theta).log())
    assert of_w.abs().max() < 1 + 1e-9 and of_a.abs().max() < 1 + 1e-9


# The mixer


def text(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = normal(batch, length, 4, 8, seed=seed), normal(batch, length, 2, 8, seed=seed + 1)
    return (
        normal(batch, length, 12, seed=seed + 2),
        1.5 * q + 0.5,
        2 * k + 1,
        normal(batch, length, 2, 6, seed=seed + 3),
    )


def call(mixer: TTT, batch, *, mask=None, reset=None, **kwargs):
    return mixer(*batch, SCALE, segments=Segments(mask, reset), **kwargs)


def made(seed: int = 0, **options) -> TTT:
    mixer = TTT(SHAPE, **options)
    perturb(mixer, seed)
    return mixer.double()


@pytest.mark.parametrize("options", [{}, {"ttt_momentum": True}, {"ttt_width": 0}, {"ttt_width": 3, "time_scales": 0}])
def test_the_mixer_is_gradient_descent_on_its_inner_model(options):
    mixer, batch = made(**options), text(1, 100)
    rows = Sample(*batch, None, None, Segments())
    want = slow_ttt(mixer, rows, SCALE, lambda h: h // 2)
    torch.testing.assert_close(call(mixer, batch)[0][0], want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("width", [0, 32])
def test_the_start_is_the_gated_delta_rule(width, momentum):
    """Uncalibrated, and with any values of what the two have in common."""
    batch = text(2, 100)
    for seed in (None, 3):
        linear, mixer = GDN(SHAPE), TTT(SHAPE, ttt_width=width, ttt_momentum=momentum)
        if seed is not None:
            perturb(linear, seed)
            missing = mixer.load_state_dict(linear.state_dict(), strict=False)
            assert not missing.unexpected_keys
        want = linear.double()(*batch, SCALE, segments=Segments())[0]
        torch.testing.assert_close(call(mixer.double(), batch)[0], want, **EXACT)


def test_features_are_homogeneous_and_linear_first():
    x, hidden = normal(2, 5, 4, 8), normal(4, 7, 8, seed=1)
    threshold, weight = normal(4, 7, seed=2), normal(4, seed=3)
    got = features(x, hidden, threshold, weight)
    assert torch.equal(got[..., :8], x)
    for h in range(4):
        torch.testing.assert_close(got[:, :, h], phi(x[:, :, h], hidden[h], threshold[h], weight[h]), **EXACT)
    for c in (1e-6, 3.0, 1e4):
        torch.testing.assert_close(features(c * x, hidden, threshold, weight), c * got, atol=0, rtol=1e-10)


@pytest.mark.parametrize("cuts", [[1], [64], [30, 31, 90]])
def test_momentum_in_pieces_padded_and_packed(cuts):
    mixer, batch = made(ttt_momentum=True), text(2, 100)
    want, want_state = call(mixer, batch, output_state=True)
    state, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, 100], strict=True):
        part, state = call(mixer, [x[:, start:end] for x in batch], state=state, output_state=True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), want, **EXACT)
    for name, tensor in want_state.items():
        torch.testing.assert_close(state[name], tensor, **EXACT)

    mask = torch.rand(2, 100, generator=generator(7)) < 0.6
    o, state = call(mixer, batch, mask=mask, output_state=True)
    for i in range(2):
        alone, alone_state = call(mixer, [x[i : i + 1, mask[i]] for x in batch], output_state=True)
        torch.testing.assert_close(o[i : i + 1, mask[i]], alone, **EXACT)
        torch.testing.assert_close(state["average"][i : i + 1], alone_state["average"], **EXACT)

    reset = torch.zeros(2, 100, dtype=torch.bool)
    reset[0, cuts] = True
    o, _ = call(mixer, batch, reset=reset)
    bounds = [0, *cuts, 100]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        torch.testing.assert_close(o[:1, start:end], call(mixer, [x[:1, start:end] for x in batch])[0], **EXACT)


@pytest.mark.parametrize("options", [{}, {"ttt_width": 5}, {"ttt_momentum": True, "ttt_width": 7, "taps": 2}])
def test_state_bytes(options):
    _, state = call(TTT(SHAPE, **options), [x.float() for x in text(3, 5)], output_state=True)
    assert TTT.state_bytes(SHAPE, **options) == sum(x.nbytes for x in state.values()) // 3


def test_a_negative_width_is_refused():
    with pytest.raises(ValueError, match="ttt_width >= 0, got -1"):
        TTT(SHAPE, ttt_width=-1)


# The closed-form start


def sample(seed: int, target) -> Sample:
    """Queries and keys of one distribution; the teacher's heads are what `target` makes of q, k and v."""
    x, q, k, v = (x.float() for x in text(2, 160, seed=seed))
    made = Sample(x, q, k, v, None, None, Segments())
    made.heads = target(made)
    return made


def softmax(at: Sample) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (at.q, at.k, at.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True).transpose(1, 2)


@torch.no_grad()
def error(mixer: TTT, at: Sample) -> Tensor:
    """Relative error of every head."""
    o, _ = mixer(at.x, at.q, at.k, at.v, SCALE, segments=at.segments)
    return (o - at.heads).square().sum((0, 1, 3)).sqrt() / at.heads.square().sum((0, 1, 3)).sqrt()


@pytest.mark.parametrize("options", [{}, {"ttt_momentum": True}, {"ttt_width": 0}])
@torch.no_grad()
def test_the_ladder_is_what_the_mixer_does(options):
    """With the fitting batch held out as well, nothing is estimated any more."""
    at, mixer = sample(0, softmax), TTT(SHAPE, **options)
    ladder = mixer.start([at, at], SCALE, 2)
    assert list(ladder) == ["mean", "linear", "mlp", "tilted", "readout", "full"]
    torch.testing.assert_close(error(mixer, at), torch.tensor(ladder["full"]), atol=1e-5, rtol=1e-4)
    pooled = {name: sum(x) / 4 for name, x in ladder.items()}
    assert 1 > pooled["readout"] > pooled["full"] > 0
    assert pooled["full"] < pooled["linear"] and pooled["full"] < pooled["mean"]
    assert not mixer.gates.weight.any() and all(p.isfinite().all() for p in mixer.parameters())
    if mixer.width:
        assert (mixer.weight > 0).all()


@torch.no_grad()
def test_hidden_units_that_the_teacher_has_are_used():
    """A teacher that reads its memory through |Theta x|, which no linear read of a linear memory can follow."""
    even = TTT(SHAPE, ttt_width=6, time_scales=0)
    at = [sample(seed, softmax) for seed in (0, 100)]
    even.hidden.copy_(landmarks(at, 6))
    even.weight.fill_(1.15)
    even.log_balance.fill_(-1.5)
    for each in at:
        each.heads = even(each.x, each.q, each.k, each.v, SCALE, segments=each.segments)[0]
    errors = {}
    for width in (0, 6):
        mixer = TTT(SHAPE, ttt_width=width, time_scales=0)
        errors[width] = sum(mixer.start(at, SCALE, 2)["full"])
    assert errors[6] < 0.8 * errors[0]


def test_landmarks_are_directions_of_the_text():
    at = [sample(0, softmax), sample(100, softmax)]
    made = landmarks(at, 5)
    assert made.shape == (4, 5, 8)
    torch.testing.assert_close(made.norm(dim=-1), torch.ones(4, 5))
    q, k = torch.cat([x.q.flatten(0, 1) for x in at]), torch.cat([x.k.flatten(0, 1) for x in at])
    torch.testing.assert_close(made[:, 0], F.normalize(q[0] - q.mean(0), dim=-1))
    torch.testing.assert_close(made[:, 4], F.normalize(k[-1] - k.mean(0), dim=-1).repeat_interleave(2, 0))


def test_momentum_starts_where_it_says():
    mixer = TTT(SHAPE, ttt_momentum=True)
    torch.testing.assert_close(mixer.momentum.sigmoid(), torch.full((4,), MOMENTUM))
    assert not mixer.share.any()


# A model


def test_converted_reloaded_and_generating(teacher_folder, tmp_path):
    """A model of nothing but ttt and k-cache: what convert writes loads, answers, and has what was asked for."""
    values = {
        "convert.mixer": "0=ttt,1=k-cache,2=ttt,rest=k-cache",
        "convert.keep_softmax": "none",
        "calibrate.tokens": 288,
        "calibrate.select_tokens": 192,
        "calibrate.context": 48,
        "calibrate.ttt_width": 5,
        "calibrate.ttt_momentum": True,
        "align.tokens": 192,
        "align.context": 48,
        "align.batch_tokens": 96,
        "data.heldout_tokens": 480,
        "run.device": "cpu",
    }
    out = tmp_path / "out"
    record = convert(str(teacher_folder("llama")), out, Recipe.from_values(values), Console(quiet=True))
    assert [layer["kind"] for layer in record["layers"]] == ["ttt", "k-cache", "ttt", "k-cache"]
    for layer in record["layers"]:
        assert 0 < layer["ladder"]["full"] <= layer["ladder"]["mean"] and math.isfinite(layer["ladder"]["output"])
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    mixers = [layer.self_attn.mixer for layer in model.model.layers]
    assert [mixer.kind for mixer in mixers] == ["ttt", "k-cache", "ttt", "k-cache"]
    assert mixers[0].hidden.shape[1] == 5 and mixers[0].moves

    ids = torch.randint(4, 260, (2, 9), generator=generator(0))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=mask, **options)
    for row, start in ((0, 0), (1, 4)):
        alone = model.generate(ids[row : row + 1, start:], use_cache=False, **options)
        assert torch.equal(tokens[row, 9:], alone[0, 9 - start :])
