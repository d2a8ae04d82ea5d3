"""Every mixer against a slow form written from derivation.md, and against itself however the text is cut up.

A mixer added to MIXERS is covered by all but the tests that name a kind; it needs a slow form in SLOW.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, perturb
from linearize_kernels import log_norm
from safetensors.torch import load_file, save_file
from slow import slow_kcache, slow_ttt
from torch import Tensor

from linearize.mixers import GDN, MIXERS, DeltaNet, HeadShape, MesaNet, NativeGDN, Segments, StandardGDN, VaLA
from linearize.mixers.centred import CentredMixer
from linearize.mixers.expansion import Layout, forget_logit, strengths

KINDS = [kind for kind, cls in MIXERS.items() if cls.__module__.startswith("linearize.")]
CENTRED = [kind for kind, cls in MIXERS.items() if issubclass(cls, CentredMixer) and kind in KINDS]
FROM_QKV = [kind for kind in KINDS if not MIXERS[kind].own_projections]
SHAPE = HeadShape(hidden=12, q_heads=4, kv_heads=2, key_dim=8, value_dim=6)
SCALE = 0.3
LENGTHS = [1, 2, 63, 64, 65, 130]  # around the chunks of 64
EXACT = {"atol": 1e-10, "rtol": 1e-10}


@dataclasses.dataclass
class Batch:
    """What a mixer is called with: x [B, T, hidden], q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, Hk, V]."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def map(self, change) -> "Batch":
        return Batch(*(change(tensor) for tensor in (self.x, self.q, self.k, self.v)))

    def row(self, i: int, keep) -> "Batch":
        """The tokens ``keep`` of row i, as a batch of one."""
        return self.map(lambda tensor: tensor[i : i + 1, keep])


def text(batch: int, length: int, seed: int = 0, dtype=torch.float64) -> Batch:
    draw = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, length, *shape, dtype=torch.float64, generator=draw)

    q, k = 1.5 * normal(SHAPE.q_heads, SHAPE.key_dim), 2 * normal(SHAPE.kv_heads, SHAPE.key_dim)
    made = Batch(normal(SHAPE.hidden), q + 0.5, k + 1, normal(SHAPE.kv_heads, SHAPE.value_dim) + 0.5)
    return made.map(lambda tensor: tensor.to(dtype))


def call(mixer, batch: Batch, *, mask=None, reset=None, state=None, output_state=False):
    return mixer(
        batch.x,
        batch.q,
        batch.k,
        batch.v,
        SCALE,
        segments=Segments(mask, reset),
        state=state,
        output_state=output_state,
    )


def read(mixer, batch: Batch) -> dict[str, Tensor]:
    """What the mixer reads of a batch."""
    return {"x": batch.x} if mixer.own_projections else vars(batch)


def random_mixer(kind: str, seed: int = 0, dtype=torch.float64, **options):
    """Every parameter away from its neutral value."""
    mixer = MIXERS[kind](SHAPE, **options)
    perturb(mixer, seed)
    return mixer.to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    """RMS error over the RMS of what is wanted; inf when anything is not finite."""
    if not (got.isfinite().all() and want.isfinite().all()):
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def without_padding(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with the cached keys of real tokens alone, where there are any."""
    if "keys" not in state:
        return state
    real = state["real"]
    return state | {"keys": state["keys"][real], "real": real.sum(1)}


def assert_same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    got, want = without_padding(got), without_padding(want)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **EXACT, msg=lambda m, name=name: f"state {name}: {m}")


# Slow forms: one document, one token after the other, float64.


def by_blocks(head: int) -> int:
    """The KV head of a query head."""
    return head // SHAPE.group


def by_rows(head: int) -> int:
    """What repeating in the wrong order gives."""
    return head % SHAPE.kv_heads


def slow_means(weight: Tensor, forget: Tensor, rows: Tensor) -> tuple[list, list, list, list]:
    """§2 for one head: b_t, 1 - b_t, and the mean of ``rows`` before and including each token."""
    z, mean = torch.zeros((), dtype=torch.float64), torch.zeros_like(rows[0])
    b, keep, before, after = [], [], [], []
    for w, lam, row in zip(weight, forget, rows, strict=True):
        before.append(mean)
        keep.append(lam * z / (lam * z + w))
        z = lam * z + w
        b.append(w / z)
        mean = mean + w / z * (row - mean)
        after.append(mean)
    return b, keep, before, after


@dataclasses.dataclass
class Seen:
    """What the memory of one head sees, token by token: rows of keys and values and their means, q - r, b and 1 - b."""

    gap: Tensor
    keys: Tensor
    key_before: list
    key_mean: list
    values: Tensor
    value_before: list
    b: list
    keep: list


def slow_centred(m: CentredMixer, batch: Batch, serves, remember) -> Tensor:
    """§2, §5 and §6 for a batch of one document: [T, H, V]. remember(p, h, gates, seen): [T, V] of the memory."""
    x, q, k, v = (tensor[0].double() for tensor in (batch.x, batch.q, batch.k, batch.v))
    p = {name: tensor.detach().double() for name, tensor in m.named_parameters()}
    residual = (x @ p["gates.weight"].T + p["gates.bias"]).view(len(x), -1, SHAPE.q_heads)
    heads = []
    for h in range(SHAPE.q_heads):
        keys, values, r = k[:, serves(h)], v[:, serves(h)], p["reference"][h]
        *gates, write, forget = residual[:, :, h].T
        w, lam = (SCALE * keys @ r + write).exp(), (-F.softplus(forget)).exp()
        b, keep, key_before, key_mean = slow_means(w, lam, keys)
        _, _, value_before, value_mean = slow_means(w, lam, values)
        scale_means = []
        for reference, logit in zip(p["readout.scale_reference"][h], p["readout.scale_forget"][h], strict=True):
            w = (SCALE * keys @ reference).exp()
            scale_means.append(slow_means(w, (-F.softplus(logit)).exp().expand_as(w), values)[3])
        read = remember(p, h, gates, Seen(q[:, h] - r, keys, key_before, key_mean, values, value_before, b, keep))
        out = []
        for t in range(len(x)):
            o = p["readout.mean"][h] * value_mean[t] + read[t]
            for j, tap in enumerate(p["readout.taps"][:, h]):
                if t >= j:
                    o = o + tap * values[t - j]
            o = o + p["readout.sink"][h] * values[0]
            for rho, mean in zip(p["readout.scales"][h], scale_means, strict=True):
                o = o + rho * mean[t]
            out.append(o)
        heads.append(torch.stack(out))
    return torch.stack(heads, 1)


def no_memory() -> Tensor:
    return torch.zeros(SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64)


def slow_gdn(m: GDN, batch: Batch, serves=by_blocks) -> Tensor:
    """§4, the stable form on unit keys."""

    def remember(p, h, gates, at):
        exponent, erase = gates
        c, s, out = p["log_balance"][h].exp(), no_memory(), []
        for t in range(len(at.gap)):
            key = c * (at.keys[t] - at.key_mean[t])
            n = key.norm()
            if t:
                s = s * at.keep[t] ** exponent[t].exp()
            if t and n > 0:
                beta = (at.b[t].log() - at.keep[t].log() + 2 * n.log() + erase[t]).sigmoid()
                u, target = key / n, at.keep[t] * (at.values[t] - at.value_before[t]) / n
                s = s + beta * torch.outer(u, target - s.T @ u)
            out.append(p["read_state"][h] * s.T @ (SCALE * at.gap[t] / c))
        return out

    return slow_centred(m, batch, serves, remember)


def covariances(at: Seen, gates: list[Tensor]):
    """§3 and §7, token by token: the running covariances of k and v, and of k."""
    g, h = no_memory(), torch.zeros(SHAPE.key_dim, SHAPE.key_dim, dtype=torch.float64)
    exponent, logit = gates
    for t in range(len(at.gap)):
        if t:
            decay = at.keep[t] ** exponent[t].exp()
            b = (at.b[t].log() - at.keep[t].log() + logit[t]).sigmoid()
            key = at.keys[t] - at.key_mean[t]
            g = decay * g + b * torch.outer(key, at.values[t] - at.value_before[t])
            h = decay * h + b * torch.outer(key, at.keys[t] - at.key_before[t])
        yield g, h


def slow_vala(m: VaLA, batch: Batch, serves=by_blocks) -> Tensor:
    """§3."""

    def remember(p, h, gates, at):
        states = covariances(at, gates)
        return [p["read_state"][h] * SCALE * a.T @ gap for (a, _), gap in zip(states, at.gap, strict=True)]

    return slow_centred(m, batch, serves, remember)


def slow_mesanet(m: MesaNet, batch: Batch, serves=by_blocks) -> Tensor:
    """§7, by a solve for every token."""

    def remember(p, h, gates, at):
        ridge, variance = p["log_ridge"][h].exp(), p["log_variance"][h].exp()
        out = []
        for (a, gram), gap in zip(covariances(at, gates), at.gap, strict=True):
            solution = torch.linalg.solve(gram + torch.diag(ridge), (variance + ridge) * SCALE * gap)
            out.append(p["read_state"][h] * a.T @ solution)
        return out

    return slow_centred(m, batch, serves, remember)


def slow_deltanet(m: DeltaNet, batch: Batch, serves=by_blocks) -> Tensor:
    """§7, on unit keys."""

    def remember(p, h, gates, at):
        s, out = no_memory(), []
        for t in range(len(at.gap)):
            key, value = at.keys[t] - at.key_before[t], at.values[t] - at.value_before[t]
            n = key.norm()
            if t and n > 0:
                eta = (p["log_rate"][h] + gates[0][t]).exp() * at.b[t] ** p["schedule"][h]
                beta, u = eta * n**2 / (1 + eta * n**2), key / n
                s = s + beta * torch.outer(u, value / n - s.T @ u)
            out.append(s.T @ (p["key_readout"][h] * at.gap[t]))
        return out

    return slow_centred(m, batch, serves, remember)


def slow_standard(m: StandardGDN, batch: Batch, serves=by_blocks) -> Tensor:
    """The gated delta rule, decay first, on L2-normed q and k."""
    x, q, k, v = (tensor[0].double() for tensor in (batch.x, batch.q, batch.k, batch.v))
    p = {name: tensor.detach().double() for name, tensor in m.named_parameters()}
    gates = (x @ p["gates.weight"].T + p["gates.bias"]).view(len(x), 2, SHAPE.q_heads)
    heads = []
    for h in range(SHAPE.q_heads):
        s, out = torch.zeros(SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64), []
        for t in range(len(x)):
            alpha = (-p["log_rate"][h].exp() * F.softplus(gates[t, 0, h])).exp()
            u, query = k[t, serves(h)] / k[t, serves(h)].norm(), q[t, h] / q[t, h].norm()
            s = alpha * s
            s = s + gates[t, 1, h].sigmoid() * torch.outer(u, v[t, serves(h)] - s.T @ u)
            out.append(s.T @ query / SHAPE.key_dim**0.5)
        heads.append(torch.stack(out))
    return torch.stack(heads, 1)


def slow_native(m: NativeGDN, batch: Batch, serves=by_blocks) -> Tensor:
    """Qwen3.5's layer up to its output projection: SiLU short convolution, unit q and k, gated norm."""
    x = batch.x[0].double()
    p = {name: tensor.detach().double() for name, tensor in m.named_parameters()}
    inputs = x @ p["in_proj_qkv.weight"].T
    mixed = torch.zeros_like(inputs)
    for t in range(len(x)):
        for j in range(min(t + 1, 4)):
            mixed[t] += p["conv1d.weight"][:, 0, 3 - j] * inputs[t - j]
    mixed = mixed * mixed.sigmoid()
    q, k, v = mixed.split(
        [len(mixed[0]) - SHAPE.q_heads * (SHAPE.key_dim + SHAPE.value_dim)]
        + [SHAPE.q_heads * SHAPE.key_dim, SHAPE.q_heads * SHAPE.value_dim],
        -1,
    )
    heads = []
    for h in range(SHAPE.q_heads):
        key, value = (
            slice(h * SHAPE.key_dim, (h + 1) * SHAPE.key_dim),
            slice(h * SHAPE.value_dim, (h + 1) * SHAPE.value_dim),
        )
        s, out = torch.zeros(SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64), []
        for t in range(len(x)):
            s = s * (-p["A_log"][h].exp() * F.softplus(x[t] @ p["in_proj_a.weight"][h] + p["dt_bias"][h])).exp()
            u = k[t, key] / (k[t, key].square().sum() + 1e-6).sqrt()
            s = s + (x[t] @ p["in_proj_b.weight"][h]).sigmoid() * torch.outer(u, v[t, value] - s.T @ u)
            o = s.T @ q[t, key] / (q[t, key].square().sum() + 1e-6).sqrt() / SHAPE.key_dim**0.5
            z = p["in_proj_z.weight"][value] @ x[t]
            out.append(o / (o.square().mean() + SHAPE.norm_eps).sqrt() * p["norm.weight"] * z * z.sigmoid())
        heads.append(torch.stack(out))
    return torch.stack(heads, 1)


SLOW = {
    "gdn": slow_gdn,
    "vala": slow_vala,
    "deltanet": slow_deltanet,
    "mesanet": slow_mesanet,
    "gdn-standard": slow_standard,
    "gdn-native": slow_native,
    "ttt": lambda m, batch, serves=by_blocks: slow_ttt(m, batch, SCALE, serves),
    "k-cache": lambda m, batch, serves=by_blocks: slow_kcache(m, batch, SCALE, serves),
}


# Parity with the slow form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_slow_form(kind, length):
    mixer, batch = random_mixer(kind), text(2, length)
    o, state = call(mixer, batch)
    assert state is None and o.dtype == torch.float64
    row = length % 2  # the other one is in another length's test
    torch.testing.assert_close(o[row], SLOW[kind](mixer, batch.row(row, slice(None))), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_slow_form_in_single_precision(kind):
    mixer, batch = random_mixer(kind, dtype=torch.float32), text(1, 130, dtype=torch.float32)
    want = SLOW[kind](mixer, batch)
    o, _ = call(mixer, batch)
    assert o.dtype == torch.float32
    assert relative(o[0], want) < 1e-6
    torch.testing.assert_close(o[0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", FROM_QKV)
def test_equals_the_slow_form_at_step_zero(kind):
    """Calibrated values with gates that do not yet depend on the data, and the uncalibrated start."""
    batch = text(1, 130)
    calibrated = random_mixer(kind)
    torch.nn.init.zeros_(calibrated.gates.weight)
    if kind in CENTRED:
        with torch.no_grad():
            calibrated.gates.bias.view(-1, SHAPE.q_heads)[:-1] = 0
    start = MIXERS[kind](SHAPE).double()
    for mixer in (calibrated, start):
        torch.testing.assert_close(call(mixer, batch)[0][0], SLOW[kind](mixer, batch), **EXACT)


@pytest.mark.parametrize("kind", FROM_QKV)
def test_kv_heads_serve_blocks_of_query_heads(kind):
    mixer, batch = random_mixer(kind), text(1, 20)
    o, _ = call(mixer, batch)
    assert relative(o[0], SLOW[kind](mixer, batch, by_blocks)) < 1e-10
    assert relative(o[0], SLOW[kind](mixer, batch, by_rows)) > 0.1


def test_uncalibrated_start_is_the_plain_expansion():
    """r = 0, c_h = 1, o = vbar + S^T s q: with almost no forgetting b_t = 1 / t, and the mean is the plain mean."""
    mixer, batch = GDN(SHAPE).double(), text(1, 50)
    with torch.no_grad():
        mixer.read_state.zero_()
    plain = batch.v.cumsum(1) / torch.arange(1.0, 51, dtype=torch.float64)[:, None, None]
    got, _ = call(mixer, batch)
    assert 0 < relative(got, plain.repeat_interleave(2, 2)) < 0.005  # lambda = .9999 over 50 tokens


# The terms of the readout, each alone


def silent(**options) -> GDN:
    """A GDN with every parameter random and every readout zero."""
    mixer = random_mixer("gdn", **options)
    with torch.no_grad():
        part = mixer.readout
        for read in (mixer.read_state, part.mean, part.sink, part.taps, part.scales):
            read.zero_()
    return mixer


def repeated(v: Tensor) -> Tensor:
    return torch.stack([v[:, :, by_blocks(h)] for h in range(SHAPE.q_heads)], 2)


def test_silent_readout_is_silent():
    assert not call(silent(), text(1, 70))[0].any()


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_taps_alone(taps):
    mixer, batch = silent(taps=taps), text(2, 70)
    with torch.no_grad():
        mixer.readout.taps.copy_(torch.randn(mixer.readout.taps.shape, generator=generator(3)))
    values = repeated(batch.v)
    want = sum(
        mixer.readout.taps[j, :, None] * F.pad(values, (0, 0, 0, 0, j, 0))[:, : values.shape[1]] for j in range(taps)
    )
    torch.testing.assert_close(call(mixer, batch)[0], want, **EXACT)


def test_sink_alone():
    mixer, batch = silent(), text(2, 70)
    with torch.no_grad():
        mixer.readout.sink.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    want = (mixer.readout.sink[:, None] * repeated(batch.v[:, :1])).expand(2, 70, -1, -1)
    torch.testing.assert_close(call(mixer, batch)[0], want, **EXACT)


@pytest.mark.parametrize("scales", [0, 1, 3])
def test_time_scales_alone(scales):
    """Softmax attention of the reference query with log lambda a step as an additive bias."""
    mixer, batch = silent(time_scales=scales), text(1, 70)
    with torch.no_grad():
        mixer.readout.scales.copy_(torch.randn(mixer.readout.scales.shape, generator=generator(4)))
    age = torch.arange(70.0, dtype=torch.float64)
    want = torch.zeros(70, SHAPE.q_heads, SHAPE.value_dim, dtype=torch.float64)
    for h in range(SHAPE.q_heads):
        keys, values = batch.k[0, :, by_blocks(h)], batch.v[0, :, by_blocks(h)]
        for m in range(scales):
            score = SCALE * keys @ mixer.readout.scale_reference[h, m]
            bias = F.softplus(mixer.readout.scale_forget[h, m]) * (age[None] - age[:, None])
            weights = (score[None] + bias).masked_fill(age[None] > age[:, None], float("-inf")).softmax(-1)
            want[:, h] += mixer.readout.scales[h, m] * weights @ values
    torch.testing.assert_close(call(mixer, batch)[0][0], want, **EXACT)


def test_options_are_checked():
    for options in ({"taps": 0}, {"time_scales": -1}):
        with pytest.raises(ValueError, match="taps >= 1"):
            GDN(SHAPE, **options)


# Pieces, padding, packing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[1], [2], [3], [63], [64], [65], [100], [1, 2, 3], [50, 51, 100], [64, 128]])
def test_pieces_are_the_whole(kind, cuts):
    mixer, batch = random_mixer(kind), text(2, 130)
    want, want_state = call(mixer, batch, output_state=True)
    state, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, 130], strict=True):
        part, state = call(mixer, batch.map(lambda x, s=start, e=end: x[:, s:e]), state=state, output_state=True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), want, **EXACT)
    assert_same_state(state, want_state)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_whole(kind):
    mixer, batch = random_mixer(kind), text(2, 70)
    want, want_state = call(mixer, batch, output_state=True)
    state, parts = None, []
    for t in range(70):
        part, state = call(mixer, batch.map(lambda x, t=t: x[:, t : t + 1]), state=state, output_state=True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), want, **EXACT)
    assert_same_state(state, want_state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 5, 20])
def test_pieces_without_gradients_are_the_whole(kind, length):
    """As a model decodes, where a mixer may take another way; and a call leaves the state it was given."""
    mixer, batch = random_mixer(kind), text(2, 20 + 2 * length)
    want, want_state = call(mixer, batch, output_state=True)
    with torch.no_grad():
        first, state = call(mixer, batch.map(lambda x: x[:, :20]), output_state=True)
        kept = {name: tensor.clone() for name, tensor in state.items()}
        middle, later = call(mixer, batch.map(lambda x: x[:, 20 : 20 + length]), state=state, output_state=True)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        last, later = call(mixer, batch.map(lambda x: x[:, 20 + length :]), state=later, output_state=True)
    torch.testing.assert_close(torch.cat([first, middle, last], 1), want, **EXACT)
    assert_same_state(later, want_state)


def padding(length: int) -> Tensor:
    """Rows padded left, right, inside, everywhere, not at all, and with one real token."""
    mask = torch.ones(7, length, dtype=torch.bool)
    mask[0, : length // 2 + 5] = False
    mask[1, length // 3 :] = False
    mask[2, 3 : length - 20] = False
    mask[3] = torch.rand(length, generator=generator(5)) < 0.6
    mask[5] = False
    mask[5, length - 2] = True
    mask[6, 0] = False
    return mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[], [1], [40], [64], [100, 101]])
def test_padding_anywhere_is_no_padding(kind, cuts):
    """On the real tokens and in the state, in one call and in pieces, some of which are all padding in some rows."""
    mixer, mask = random_mixer(kind), padding(130)
    batch = text(len(mask), 130)
    batch = batch.map(lambda x: torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, 37.0))
    state, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, 130], strict=True):
        piece = batch.map(lambda x, s=start, e=end: x[:, s:e])
        part, state = call(mixer, piece, mask=mask[:, start:end], state=state, output_state=True)
        parts.append(part)
    o = torch.cat(parts, 1)
    assert o.isfinite().all()
    for i, real in enumerate(mask):
        want, want_state = call(mixer, batch.row(i, real), output_state=True)
        torch.testing.assert_close(o[i : i + 1, real], want, **EXACT)
        assert_same_state({name: tensor[i : i + 1] for name, tensor in state.items()}, want_state)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_gradients_are_unpadded_gradients(kind):
    mixer, mask = random_mixer(kind), padding(130)[:4]
    batch = text(4, 130)
    (call(mixer, batch, mask=mask)[0] * mask[..., None, None]).square().sum().backward()
    got = {name: p.grad.clone() for name, p in mixer.named_parameters()}
    mixer.zero_grad()
    sum(call(mixer, batch.row(i, real))[0].square().sum() for i, real in enumerate(mask)).backward()
    for name, p in mixer.named_parameters():
        assert relative(got[name], p.grad) < 1e-10, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [[[0, 1, 64, 129]], [[40], [0, 66, 67]], [[], []]])
def test_packed_documents_are_separate(kind, starts):
    """Rows of the batch are separate as well, whether or not their first token is marked."""
    mixer, batch = random_mixer(kind), text(len(starts), 130)
    reset = torch.zeros(len(starts), 130, dtype=torch.bool)
    for row, places in enumerate(starts):
        reset[row, places] = True
    o, _ = call(mixer, batch, reset=reset)
    for row, places in enumerate(starts):
        bounds = sorted({0, *places, 130})
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            want, _ = call(mixer, batch.row(row, slice(start, end)))
            torch.testing.assert_close(o[row : row + 1, start:end], want, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_refuse_a_cache(kind):
    mixer, batch = random_mixer(kind), text(1, 4)
    with pytest.raises(ValueError, match="use_cache=False"):
        call(mixer, batch, reset=torch.tensor([[True, False, True, False]]), output_state=True)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_touch_each_other(kind):
    """Not even when another row is NaN."""
    mixer, batch = random_mixer(kind), text(3, 70)
    want = torch.cat([call(mixer, batch.row(i, slice(None)))[0] for i in range(3)])
    torch.testing.assert_close(call(mixer, batch)[0], want, **EXACT)
    for tensor in (batch.x, batch.q, batch.k, batch.v):
        tensor[1] = float("nan")
    torch.testing.assert_close(call(mixer, batch)[0][[0, 2]], want[[0, 2]], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_causal(kind):
    mixer, batch = random_mixer(kind), text(1, 100)
    o, _ = call(mixer, batch)
    later = text(1, 100, seed=1)
    pairs = zip(vars(batch).values(), vars(later).values(), strict=True)
    changed = Batch(*(torch.cat([a[:, :70], b[:, 70:]], 1) for a, b in pairs))
    o_changed, _ = call(mixer, changed)
    torch.testing.assert_close(o_changed[:, :70], o[:, :70], **EXACT)
    assert ((o_changed - o)[:, 70].abs() > 1e-3).any()


# Gradients and hard inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_dtype_of_activations(kind, dtype):
    """In and out in one dtype, fp32 parameters and statistics: as far off as rounding the inputs explains."""
    mixer, batch = random_mixer(kind, dtype=torch.float32), text(2, 100)
    want, _ = call(mixer.double(), batch)
    o, _ = call(mixer.float(), batch.map(lambda x: x.to(dtype)))
    assert o.dtype == dtype and relative(o, want) < {torch.float32: 1e-5, torch.float16: 5e-3}.get(dtype, 3e-2)


@pytest.mark.parametrize("kind", FROM_QKV)
def test_gates_start_without_effect_and_with_a_gradient(kind):
    mixer, batch = MIXERS[kind](SHAPE).double(), text(2, 70)
    o, _ = call(mixer, batch)
    torch.testing.assert_close(call(mixer, dataclasses.replace(batch, x=-3 * batch.x))[0], o, **EXACT)
    (o * text(2, 70, seed=2).q[..., : SHAPE.value_dim]).sum().backward()
    grad = mixer.gates.weight.grad
    assert not mixer.gates.weight.any() and grad.isfinite().all()
    assert (grad.norm(dim=1) > 0).all()  # every gate of every head


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences(kind):
    mixer, batch = random_mixer(kind), text(1, 66)
    leaves = [tensor.requires_grad_() for tensor in read(mixer, batch).values()] + list(mixer.parameters())
    weight = text(1, 66, seed=2).q[..., : SHAPE.value_dim]

    def loss():
        return (call(mixer, batch)[0] * weight).sum()

    grads = torch.autograd.grad(loss(), leaves)
    for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        direction = torch.randn(leaf.shape, dtype=torch.float64, generator=generator(i))
        want = (grad * direction).sum()
        with torch.no_grad():
            step, (up, down) = 1e-5, (None, None)
            leaf.add_(step * direction)
            up = loss()
            leaf.sub_(2 * step * direction)
            down = loss()
            leaf.add_(step * direction)
        torch.testing.assert_close((up - down) / (2 * step), want, atol=1e-5, rtol=1e-5)
        assert grad.any()


def identical(batch: Batch) -> Batch:
    return batch.map(lambda x: x[:, :1].expand_as(x).contiguous())


def sized(size: float):
    return lambda batch: dataclasses.replace(batch, q=size * batch.q, k=size * batch.k)


HARD = {
    "identical tokens": (130, identical),
    "first token": (1, lambda batch: batch),
    "huge": (130, sized(1e3)),
    "tiny": (130, sized(1e-6)),
    "zero": (130, lambda batch: batch.map(torch.zeros_like)),
    "huge values": (130, lambda batch: dataclasses.replace(batch, v=1e4 * batch.v)),
    "huge input": (130, lambda batch: dataclasses.replace(batch, x=100 * batch.x)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hard_inputs_stay_finite(kind, case, dtype):
    length, change = HARD[case]
    mixer = random_mixer(kind, dtype=torch.float32)
    batch = change(text(2, length)).map(lambda x: x.to(dtype).requires_grad_())
    o, state = call(mixer, batch, output_state=True)
    assert o.dtype == dtype and o.isfinite().all()
    # log Z of nothing is -inf; here every row has real tokens.
    assert all(tensor.isfinite().all() for tensor in state.values())
    o.float().square().mean().backward()
    for name, tensor in [*read(mixer, batch).items(), *mixer.named_parameters()]:
        assert tensor.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", [0, 1, 40, 64])
@pytest.mark.parametrize("nats", [25.0, -25.0])
def test_extreme_tilt(nats, place, dtype):
    """One key whose write weight jumps by 25 nats: finite, with gradients, and right."""
    mixer = random_mixer("gdn", dtype=torch.float32)
    batch = text(1, 130)
    with torch.no_grad():
        mixer.reference.zero_()[:, 0] = 1
    batch.k[:, :, :, 0] = 0.1 * batch.k[:, :, :, 0]
    batch.k[:, place, :, 0] = nats / SCALE
    batch = batch.map(lambda x: x.to(dtype).requires_grad_())
    o, _ = call(mixer, batch)
    o.float().square().mean().backward()
    for name, tensor in [*vars(batch).items(), *mixer.named_parameters()]:
        assert tensor.grad.isfinite().all(), name
    want = slow_gdn(mixer, batch.map(torch.Tensor.detach))
    assert relative(o[0].detach(), want) < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_strengths_keep_their_digits_in_single_precision():
    """log(1 - b) of a small b next to a large log Z: never above 0 (alpha <= 1), and right to fp32."""
    log_write = torch.full((1, 5000, 1), 60.0)
    log_z = log_norm(log_write, torch.zeros_like(log_write))
    at = strengths(log_write, torch.zeros_like(log_write), log_z, Layout.of(log_write, Segments()), None)
    t = torch.arange(2.0, 5001, dtype=torch.float64)
    assert (at.log_keep <= 0).all()
    torch.testing.assert_close(at.log_keep[0, 1:, 0].double(), torch.log1p(-1 / t), atol=0, rtol=1e-5)
    torch.testing.assert_close(at.log_strength[0, 1:, 0].double(), -t.log(), atol=0, rtol=1e-5)


def test_strengths_of_packed_documents_start_afresh():
    log_write = torch.zeros(1, 6, 1)
    reset = torch.tensor([[False, False, True, True, False, False]])
    log_z = log_norm(log_write, log_write, cu_seqlens=torch.tensor([0, 2, 3, 6]))
    at = strengths(log_write, log_write, log_z, Layout.of(log_write, Segments(reset=reset)), None)
    assert at.live[0, :, 0].tolist() == [False, True, False, False, True, True]
    torch.testing.assert_close(at.log_strength[0, :, 0].exp(), torch.tensor([1, 1 / 2, 1, 1, 1 / 2, 1 / 3]))


def test_a_token_that_forgets_everything_does_not_blur_the_decay_of_the_others():
    """Sums of log decay over a chunk stay exact beside a decay of exp(-1e9)."""
    mixer, batch = random_mixer("gdn"), text(1, 70)
    with torch.no_grad():
        mixer.gates.weight[: SHAPE.q_heads] = 0
        mixer.gates.weight[: SHAPE.q_heads, 0] = 25
    batch.x[..., 0] = 0
    batch.x[:, [5, 20, 66], 0] = 1
    torch.testing.assert_close(call(mixer, batch)[0][0], slow_gdn(mixer, batch), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_inputs(kind):
    """bf16 q, k, v with fp32 gates, statistics and states: no further off than rounding the inputs explains."""
    mixer = random_mixer(kind, dtype=torch.float32)
    batch = text(1, 130).map(lambda x: x.bfloat16())
    o, state = call(mixer, batch, output_state=True)
    assert relative(o[0], SLOW[kind](mixer, batch)) < 1e-2
    assert state["memory"].dtype == torch.float32


# Sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, HeadShape(16, 6, 2, 4, 4), HeadShape(16, 3, 3, 5, 7)])
def test_state_bytes(kind, shape):
    for options in [{}] if kind not in CENTRED else [{}, {"taps": 1, "time_scales": 0}, {"taps": 2, "time_scales": 5}]:
        mixer = MIXERS[kind](shape, **options)
        x, q = torch.randn(3, 5, shape.hidden), torch.randn(3, 5, shape.q_heads, shape.key_dim)
        k = torch.randn(3, 5, shape.kv_heads, shape.key_dim)
        v = torch.randn(3, 5, shape.kv_heads, shape.value_dim)
        _, state = mixer(x, q, k, v, SCALE, segments=Segments(), output_state=True)
        assert all(len(tensor) == 3 for tensor in state.values())
        assert mixer.state_bytes(shape, 5, **options) == sum(tensor.nbytes for tensor in state.values()) // 3


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_fp32_and_reset_restores_them(kind):
    mixer = MIXERS[kind](SHAPE)
    start = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    assert {p.dtype for p in mixer.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in mixer.parameters())
    perturb(mixer, 0)
    mixer.reset_parameters()
    assert all(torch.equal(p, start[name]) for name, p in mixer.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_groups_hold_every_parameter_once(kind):
    mixer = MIXERS[kind](SHAPE)
    grouped = [id(p) for group in mixer.parameter_groups().values() for p in group]
    assert sorted(grouped) == sorted(id(p) for p in mixer.parameters())
    if kind in CENTRED:
        assert mixer.parameter_groups()["gates"] == [mixer.gates.weight, mixer.gates.bias]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_the_same(kind, tmp_path):
    mixer, batch = random_mixer(kind, dtype=torch.float32), text(1, 40, dtype=torch.float32)
    save_file(mixer.state_dict(), tmp_path / "mixer.safetensors")
    other = MIXERS[kind](SHAPE)
    other.load_state_dict(load_file(tmp_path / "mixer.safetensors"), strict=True)
    assert torch.equal(call(other, batch)[0], call(mixer, batch)[0])


def test_neutral_standard_gates():
    """A half-life of 128 tokens: after one key and 128 orthogonal tokens half of what it wrote is left."""
    mixer = StandardGDN(SHAPE).double()
    batch = text(1, 129)
    batch.k.zero_()
    batch.k[:, 0, :, 0] = 5
    batch.k[:, 1:, :, 1] = 5
    batch.q.zero_()
    batch.q[..., 0] = 3
    o, _ = call(mixer, batch)
    torch.testing.assert_close(o[:, 0], 0.5 * repeated(batch.v)[:, 0] / SHAPE.key_dim**0.5, **EXACT)
    assert relative(o[:, 128], o[:, 0] / 2) < 1e-6  # the parameter is an fp32 number


def test_gdn_starts_at_the_forgetting_it_names():
    bias = GDN(SHAPE).gates.bias.view(4, -1)
    assert not bias[:3].any()
    assert bias[3].tolist() == pytest.approx([forget_logit(0.9999)] * SHAPE.q_heads, rel=1e-6)
