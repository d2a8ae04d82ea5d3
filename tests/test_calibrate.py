"""The closed-form start against direct least squares, and against what the calibrated mixer then does."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, teacher_model
from torch import Tensor, nn

from linearize.calibrate import OUTPUT_RIDGE, calibrate_layer, refit_output
from linearize.mixers import GDN, MIXERS, HeadShape, Mixer, Sample, Segments, StandardGDN, build_mixer
from linearize.mixers.expansion import forget_logit
from linearize.mixers.fit import DECAYS, RIDGE, Moments, attended_keys
from linearize.mixers.gdn import ERASES
from linearize.observe import observe

SHAPE = HeadShape(hidden=24, q_heads=4, kv_heads=2, key_dim=8, value_dim=8)
SCALE = 0.35
LENGTH = 96


def normal(*shape: int, seed: int, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


def expand(x: Tensor) -> Tensor:
    """[B, T, Hk, D] -> [B, T, Hq, D], by blocks of query heads."""
    return torch.stack([x[:, :, h // SHAPE.group] for h in range(SHAPE.q_heads)], 2)


def causal(score: Tensor) -> Tensor:
    """Softmax over the keys up to each query. score: [..., T, T] or what broadcasts to it."""
    length = score.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return score.expand(*score.shape[:-2], length, length).masked_fill(later, float("-inf")).softmax(-1)


def sample(seed: int, rows: int = 2, length: int = LENGTH) -> Sample:
    """Softmax attention on random q, k, v whose means are not zero."""
    x, v = normal(rows, length, SHAPE.hidden, seed=seed), normal(rows, length, 2, 8, seed=seed + 1) + 0.3
    q = normal(rows, length, 4, 8, seed=seed + 2) + 1.5 * normal(4, 8, seed=1001)
    k = 1.5 * normal(rows, length, 2, 8, seed=seed + 3) + normal(2, 8, seed=1002)
    weights = causal(SCALE * torch.einsum("bthk,bshk->bhts", q, expand(k)))
    made = Sample(x, q, k, v, torch.einsum("bhts,bshv->bthv", weights, expand(v)), x, Segments())
    made.output = F.linear(made.heads.flatten(2), fresh().attn.o_proj.weight.detach())
    return made


def fresh(**options) -> SimpleNamespace:
    """What calibration needs of a layer: a mixer and an output projection, the teacher's."""
    projection = nn.Linear(32, SHAPE.hidden, bias=False)
    with torch.no_grad():
        projection.weight.copy_(normal(SHAPE.hidden, 32, seed=1003) / 32**0.5)
    return SimpleNamespace(mixer=GDN(SHAPE, **options), attn=SimpleNamespace(o_proj=projection))


@torch.no_grad()
def heads_of(mixer: GDN, at: Sample) -> Tensor:
    return mixer(at.x, at.q, at.k, at.v, SCALE, segments=at.segments)[0]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


def start(layer, samples: list[Sample], select: int = 2) -> SimpleNamespace:
    """The pooled error ladder, rung by rung."""
    return SimpleNamespace(**calibrate_layer(layer, samples, SCALE, select).pooled)


def head_error(mixer: GDN, at: Sample) -> float:
    return relative(heads_of(mixer, at)[at.real], at.heads[at.real])


def parameters(layer) -> dict[str, Tensor]:
    return {**dict(layer.mixer.named_parameters()), "o_proj": layer.attn.o_proj.weight}


def balanced(at: Sample, reference: Tensor, decay: float) -> Tensor:
    """log c_h of §4 from one batch, by explicit weights. reference: [H, K]. Returns [H]."""
    keys, position = expand(at.k), torch.arange(at.k.shape[1])
    age = math.log(decay) * (position[:, None] - position[None])
    weights = causal(SCALE * torch.einsum("bshk,hk->bhs", keys, reference)[:, :, None] + age)
    gap = keys - torch.einsum("bhts,bshk->bthk", weights, keys)
    reach = (SCALE * (at.q - reference)).norm(dim=-1).mean((0, 1))
    return 0.5 * (reach / gap.norm(dim=-1).mean((0, 1))).log()


# Least squares


def test_moments_are_least_squares_on_the_stacked_terms():
    terms = [normal(50, 3, 7, 4, seed=i, dtype=torch.float64) for i in range(3)]
    terms = [x * torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None] for x in terms]
    targets = [normal(50, 3, 4, seed=9 + i, dtype=torch.float64) for i in range(3)]
    moments = Moments()
    for i in (0, 1, 2):
        moments.add(terms[i], targets[i], i % 2)
    index = torch.tensor([[[0, 3, 6], [1, 2, 5], [4, 0, 2]], [[2, 1, 0], [6, 5, 4], [3, 3, 1]]])  # [2, H, 3]
    for both, fitting in ((False, [0, 2]), (True, [0, 1, 2])):
        fitted = moments.fit(index, both=both)
        errors = moments.error(index, fitted)
        for trial in range(2):
            for h in range(3):
                pick = index[trial, h]
                x = torch.cat([terms[i][:, h, pick].transpose(1, 2).reshape(-1, 3) for i in fitting])
                y = torch.cat([targets[i][:, h].reshape(-1) for i in fitting])
                # The ridge as further rows: RIDGE of each term's mean square.
                rows = torch.cat([x, RIDGE**0.5 * torch.diag(x.norm(dim=0))])
                want = torch.linalg.lstsq(rows, torch.cat([y, y.new_zeros(3)])[:, None]).solution[:, 0]
                torch.testing.assert_close(fitted[trial, h], want, atol=0, rtol=1e-8)
                out = terms[1][:, h, pick].transpose(1, 2) @ want
                torch.testing.assert_close(errors[trial, h], (out - targets[1][:, h]).square().sum())
        power = torch.stack([targets[1][:, h].square().sum() for h in range(3)])
        torch.testing.assert_close(moments.relative(index, fitted), (errors / power).sqrt(), atol=0, rtol=1e-12)


def test_collinear_and_empty_terms_stay_finite():
    terms = normal(30, 2, 3, 4, seed=0)
    terms[:, :, 1], terms[:, :, 2] = terms[:, :, 0], 0
    moments = Moments()
    for half in (0, 1):
        moments.add(terms, terms[:, :, 0], half)
    index = torch.tensor([[0, 1, 2], [0, 1, 2]])
    fitted = moments.fit(index)
    torch.testing.assert_close(fitted, torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64), atol=1e-4, rtol=0)
    assert (moments.relative(index, fitted) < 1e-3).all()


# The ladder


def test_every_rung_is_what_a_mixer_does_on_the_held_out_batch():
    fit, held = sample(0), sample(100)
    layer = fresh()
    ladder = start(layer, [fit, held])
    mixer = layer.mixer

    plain = GDN(SHAPE)  # r = 0, lambda = .9999
    with torch.no_grad():
        plain.log_balance.copy_(balanced(fit, torch.zeros(4, 8), DECAYS[0]))
        assert head_error(plain, held) == pytest.approx(ladder.gdn, rel=1e-4)
        plain.log_balance.add_(0.5 * math.log(ERASES[0]))
        assert head_error(plain, held) == pytest.approx(ladder.vala, rel=1e-4)
        plain.read_state.zero_()
        assert head_error(plain, held) == pytest.approx(ladder.mean, rel=1e-4)

        two = copy.deepcopy(mixer)
        for read in (two.readout.sink, two.readout.taps, two.readout.scales):
            read.zero_()
        two.readout.mean.fill_(1)
        two.read_state.fill_(1)
        assert head_error(two, held) == pytest.approx(ladder.tilted, rel=1e-4)
        # Readout: least squares on the two terms of the fitting batch, applied to the held-out one.
        terms = {}
        for name, at in (("fit", fit), ("held", held)):
            both = heads_of(two, at)
            two.read_state.fill_(0)
            mean = heads_of(two, at)
            two.read_state.fill_(1)
            terms[name] = torch.stack([mean, both - mean], -1).double()
        out = torch.empty_like(held.heads)
        for h in range(4):
            x, y = terms["fit"][:, :, h].reshape(-1, 2), fit.heads[:, :, h].reshape(-1, 1).double()
            out[:, :, h] = (terms["held"][:, :, h] @ torch.linalg.lstsq(x, y).solution)[..., 0].float()
        assert relative(out, held.heads) == pytest.approx(ladder.readout, rel=1e-3)

    # The mixer's coefficients are fitted on both batches, which can only do better on the held-out one.
    error = head_error(mixer, held)
    assert 0.5 * ladder.full < error <= ladder.full * (1 + 1e-4)
    assert ladder.readout < 1.02


def test_full_rung_is_the_mixer_and_the_ladder_falls_on_fitting_data():
    """With the fitting batch held out as well, nothing is estimated any more."""
    for seed in (0, 200):
        at, layer = sample(seed), fresh()
        ladder = start(layer, [at, at])
        assert head_error(layer.mixer, at) == pytest.approx(ladder.full, rel=1e-4)
        assert 1 >= ladder.readout and ladder.tilted >= ladder.readout >= ladder.full > 0
        assert ladder.full < head_error(GDN(SHAPE), at)


def test_readout_is_no_worse_than_zero_where_attention_is_noise():
    """Targets that have nothing to do with q, k and v."""
    fit, held = sample(0), sample(100)
    fit.heads, held.heads = normal(*fit.heads.shape, seed=1), normal(*fit.heads.shape, seed=2)
    ladder = start(fresh(), [fit, held])
    assert 0.97 < ladder.readout < 1.02
    assert ladder.full < 1.05


def test_pooled_ladder_is_over_the_tokens_of_all_heads():
    held, layer = sample(100), fresh()
    held.heads[:, :, 1] *= 5  # a head that weighs more than the others
    ladder = calibrate_layer(layer, [sample(0), held, sample(200)], SCALE, 2)
    assert list(ladder.pooled) == [*ladder.heads, "output"]
    assert list(ladder.heads) == ["mean", "vala", "gdn", "tilted", "readout", "full"]
    power = held.heads.double().square().sum((0, 1, 3))
    for name, errors in ladder.heads.items():
        square = (torch.tensor(errors, dtype=torch.float64).square() * power).sum() / power.sum()
        assert ladder.pooled[name] == pytest.approx(float(square.sqrt()), rel=1e-9)
    mean = expand(held.v).cumsum(1) / torch.arange(1.0, LENGTH + 1)[:, None, None]
    plain = [relative(mean[:, :, h], held.heads[:, :, h]) for h in range(4)]
    assert ladder.heads["mean"] == pytest.approx(plain, rel=1e-2)  # lambda = .9999


def test_the_control_has_no_start():
    control = StandardGDN(SHAPE)
    before = [p.clone() for p in control.parameters()]
    assert not control.calibrated and GDN.calibrated
    assert control.start([sample(0), sample(100)], SCALE, 2) == {}
    assert all(torch.equal(*pair) for pair in zip(control.parameters(), before, strict=True))


# Known structure


def test_uniform_local_and_sink_heads_are_recovered():
    batches = [sample(0), sample(100)]
    for at in batches:
        v = expand(at.v)
        count = torch.arange(1.0, LENGTH + 1)[:, None]
        at.heads = torch.stack(
            [
                v[:, :, 0].cumsum(1) / count,  # every token alike
                F.pad(v[:, :, 1], (0, 0, 1, 0))[:, :-1],  # the token before
                v[:, :1, 2].expand(-1, LENGTH, -1),  # the first token
                0.5 * v[:, :, 3] + 0.3 * v[:, :1, 3] + 0.2 * v[:, :, 3].cumsum(1) / count,
            ],
            2,
        )
    layer = fresh()
    calibrate_layer(layer, batches, SCALE, 2)
    fresh_batch = sample(300)
    for at in (*batches, fresh_batch):
        got = heads_of(layer.mixer, at)
        v = expand(at.v)
        mean = v.cumsum(1) / torch.arange(1.0, LENGTH + 1)[:, None, None]
        assert relative(got[:, :, 0], mean[:, :, 0]) < 5e-3
        assert relative(got[:, 1:, 1], v[:, :-1, 1]) < 5e-3
        assert relative(got[:, :, 2], v[:, :1, 2].expand(-1, LENGTH, -1)) < 5e-3
        assert relative(got[:, :, 3], 0.5 * v[:, :, 3] + 0.3 * v[:, :1, 3] + 0.2 * mean[:, :, 3]) < 5e-3


def test_a_gdn_on_the_grid_is_found_again():
    """Targets made by a GDN at grid points: reference, forgetting and erase come back, and the error vanishes."""
    batches = [sample(0), sample(100)]
    mean_query = torch.cat([at.q.flatten(0, 1) for at in batches]).mean(0)
    teacher = GDN(SHAPE)
    with torch.no_grad():
        decays, erases = torch.tensor([0.97, 0.9, 0.99, 0.97]), torch.tensor([1.0, 0.3, 1.0, 0.3])
        tilts = torch.tensor([1.0, 0.0, 1.0, 0.0])
        teacher.reference.copy_(tilts[:, None] * mean_query)
        forget = torch.tensor([forget_logit(d) for d in decays.tolist()])
        teacher.gates.bias.view(4, 4)[3] = forget
        for h in range(4):
            teacher.log_balance[h] = balanced(batches[0], teacher.reference, float(decays[h]))[h]
        teacher.log_balance += 0.5 * erases.log()
        teacher.read_state.copy_(torch.tensor([1.5, 2.0, 1.0, 1.5]))
        teacher.readout.taps.copy_(0.2 * normal(4, 4, seed=5))
        for at in batches:
            at.heads = heads_of(teacher, at)
    layer = fresh(time_scales=0)
    ladder = start(layer, batches)
    for name in ("reference", "log_balance"):
        torch.testing.assert_close(getattr(layer.mixer, name), getattr(teacher, name), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.mixer.gates.bias.view(4, 4)[3], forget)
    assert ladder.full < 1e-3
    assert head_error(layer.mixer, batches[1]) < 1e-3
    torch.testing.assert_close(layer.mixer.read_state, teacher.read_state, atol=0, rtol=1e-3)


@torch.no_grad()
def test_time_scales_differ_from_the_main_point_and_from_each_other():
    layer = fresh(time_scales=4)
    calibrate_layer(layer, [sample(0), sample(100)], SCALE, 2)
    mixer = layer.mixer
    for h in range(4):
        points = [(*mixer.reference[h].tolist(), float(mixer.gates.bias.view(4, 4)[3, h]))]
        for reference, forget in zip(mixer.readout.scale_reference[h], mixer.readout.scale_forget[h], strict=True):
            points.append((*reference.tolist(), float(forget)))
        assert len(set(points)) == 5
    assert not mixer.gates.weight.any() and not mixer.gates.bias.view(4, 4)[:3].any()
    assert all(p.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("options", [{"taps": 1}, {"taps": 6, "time_scales": 1}, {"time_scales": 0}])
def test_options_change_the_size_of_the_fit(options):
    at, layer = sample(0), fresh(**options)
    ladder = start(layer, [at, at])
    assert head_error(layer.mixer, at) == pytest.approx(ladder.full, rel=1e-4)


# Every mixer that starts itself


# Of the teacher's q, k and v, which are all that these samples hold together.
STARTED = [kind for kind, cls in MIXERS.items() if cls.start is not Mixer.start and not cls.own_projections]


def layer_of(kind: str, **options) -> SimpleNamespace:
    return SimpleNamespace(mixer=MIXERS[kind](SHAPE, **options), attn=fresh().attn)


def structured(seed: int) -> Sample:
    """Heads that look for what came before like tokens: keys and values are functions of a few recurring tokens."""
    at = sample(seed)
    token = torch.randint(6, at.q.shape[:2], generator=generator(seed))
    at.k = at.k * 0.3 + 2 * normal(6, 2, 8, seed=1010)[token]
    at.v = at.v * 0.3 + normal(6, 2, 8, seed=1011)[token]
    at.q = at.q * 0.5 + expand(2 * normal(6, 2, 8, seed=1010)[token])
    weights = causal(SCALE * torch.einsum("bthk,bshk->bhts", at.q, expand(at.k)))
    at.heads = torch.einsum("bhts,bshv->bthv", weights, expand(at.v))
    return at


@pytest.mark.parametrize("kind", STARTED)
@pytest.mark.parametrize("make", [sample, structured])
def test_start_beats_the_mean_and_a_readout_without_memory(kind, make):
    """On held-out tokens; and what is reported is what the mixer does."""
    fit, held, fresh_batch = make(0), make(100), make(300)
    layer = layer_of(kind)
    ladder = calibrate_layer(layer, [fit, held], SCALE, 2)
    assert list(ladder.heads)[0] == "mean" and list(ladder.heads)[-1] == "full"
    full = ladder.pooled["full"]
    assert full < 0.95 * ladder.pooled["mean"] and full < 1
    assert head_error(layer.mixer, held) <= full * 1.001  # fitted on both batches
    assert head_error(layer.mixer, fresh_batch) < 0.97 * head_error(MIXERS[kind](SHAPE), fresh_batch)


@pytest.mark.parametrize("kind", STARTED)
def test_the_last_rung_is_the_mixer(kind):
    at, layer = sample(0), layer_of(kind, time_scales=1)
    ladder = calibrate_layer(layer, [at, at], SCALE, 2)
    got = heads_of(layer.mixer, at)
    errors = [relative(got[:, :, h], at.heads[:, :, h]) for h in range(4)]
    assert ladder.heads["full"] == pytest.approx(errors, rel=2e-3)
    assert all(len(rung) == 4 for rung in ladder.heads.values())


@pytest.mark.parametrize("kind", STARTED)
def test_data_dependent_gates_start_without_effect(kind):
    at, layer = sample(0), layer_of(kind)
    calibrate_layer(layer, [at, sample(100)], SCALE, 2)
    want = heads_of(layer.mixer, at)
    at.x = -7 * at.x
    assert torch.equal(heads_of(layer.mixer, at), want)
    assert all(p.isfinite().all() for p in layer.mixer.parameters())


@pytest.mark.parametrize("kind", [kind for kind in STARTED if kind != "gdn"])
def test_any_start_of_packed_and_padded_samples_is_that_of_separate_ones(kind):
    batches = [sample(0), sample(100)]
    want, joint, edged = layer_of(kind), layer_of(kind), layer_of(kind)
    ladder = calibrate_layer(want, batches, SCALE, 2).pooled
    for layer, change in ((joint, joined), (edged, padded)):
        again = calibrate_layer(layer, [change(at) for at in batches], SCALE, 2).pooled
        assert again == pytest.approx(ladder, rel=1e-3), change
        assert relative(heads_of(layer.mixer, batches[1]), heads_of(want.mixer, batches[1])) < 1e-2, change


def test_limits_of_mesanet_are_rungs_of_vala():
    """Lambda without bound is VaLA, rung for rung where nothing is chosen."""
    batches = [sample(0), sample(100)]
    mesa, vala = (calibrate_layer(layer_of(kind), batches, SCALE, 2).heads for kind in ("mesanet", "vala"))
    assert mesa["vala"] == pytest.approx(vala["vala"], rel=1e-4)


# The key that attention sees


def test_attended_keys_are_attention_with_keys_as_values():
    at = sample(0)
    weights = causal(SCALE * torch.einsum("bthk,bshk->bhts", at.q, expand(at.k)))
    want = torch.einsum("bhts,bshk->bthk", weights, expand(at.k)).flatten(0, 1)
    torch.testing.assert_close(attended_keys(at, SCALE), want, atol=1e-5, rtol=1e-4)


def test_attended_keys_of_packed_and_padded_samples():
    want = attended_keys(sample(0), SCALE)
    for change in (joined, padded):
        torch.testing.assert_close(attended_keys(change(sample(0)), SCALE), want, atol=1e-5, rtol=1e-4)


# Output projection


def test_refit_keeps_the_projection_when_the_heads_are_the_teachers():
    layer, batches = fresh(), [sample(0), sample(100)]
    before = layer.attn.o_proj.weight.detach().clone()
    for at in batches:
        at.output = F.linear(heads_of(layer.mixer, at).flatten(2), before)
    assert refit_output(layer, batches, SCALE) < 1e-6
    torch.testing.assert_close(layer.attn.o_proj.weight.detach(), before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_refit_is_the_ridge_regression_towards_the_teacher(bias):
    layer, batches = fresh(), [sample(0), sample(100), sample(200)]
    projection = layer.attn.o_proj
    if bias:
        projection.bias = nn.Parameter(normal(SHAPE.hidden, seed=7))
    before = projection.weight.detach().clone()
    x = torch.cat([heads_of(layer.mixer, at).flatten(0, 1).flatten(1) for at in batches]).double()
    y = torch.cat([at.output.flatten(0, 1) for at in batches]).double()
    y = y if projection.bias is None else y - projection.bias.detach().double()
    target = torch.cat([at.output.flatten(0, 1) for at in batches]).double()

    def error(weight: Tensor) -> float:
        return float((x @ weight.double().T - y).norm() / target.norm())

    got = refit_output(layer, batches, SCALE)
    # The ridge as further rows that pull the change of the weight to zero.
    ridge = (OUTPUT_RIDGE * x.square().sum(0).mean()).sqrt() * torch.eye(32, dtype=torch.float64)
    residual = torch.cat([y - x @ before.double().T, y.new_zeros(32, SHAPE.hidden)])
    change = torch.linalg.lstsq(torch.cat([x, ridge]), residual).solution.T
    torch.testing.assert_close(projection.weight.detach().double(), before.double() + change, atol=1e-5, rtol=1e-5)
    assert got == pytest.approx(error(projection.weight.detach()), rel=1e-4)
    assert got < error(before)
    if bias:
        torch.testing.assert_close(projection.bias.detach(), normal(SHAPE.hidden, seed=7), atol=0, rtol=0)


# Packing, padding, repeatability, refusals


def joined(at: Sample) -> Sample:
    """The rows of a batch packed into one row."""
    reset = torch.zeros(1, at.q.shape[0] * LENGTH, dtype=torch.bool)
    reset[:, ::LENGTH] = True
    tensors = (x.flatten(0, 1)[None] for x in (at.x, at.q, at.k, at.v, at.heads, at.output))
    return Sample(*tensors, Segments(reset=reset))


def padded(at: Sample) -> Sample:
    """The rows of a batch with padding on both sides, full of large numbers."""

    def pad(x: Tensor) -> Tensor:
        edge = x.new_full((x.shape[0], 7, *x.shape[2:]), 50.0)
        return torch.cat([edge, x, edge[:, :4]], 1)

    mask = F.pad(torch.ones(at.q.shape[:2], dtype=torch.bool), (7, 4))
    return Sample(*(pad(x) for x in (at.x, at.q, at.k, at.v, at.heads, at.output)), Segments(mask=mask))


@pytest.mark.parametrize("change", [joined, padded])
def test_packed_and_padded_samples_give_what_separate_ones_give(change):
    batches = [sample(0), sample(100)]
    want, got = fresh(), fresh()
    want_ladder = start(want, batches)
    got_ladder = start(got, [change(at) for at in batches])
    for name, value in vars(want_ladder).items():
        assert getattr(got_ladder, name) == pytest.approx(value, rel=1e-4), name
    for name, tensor in parameters(want).items():
        torch.testing.assert_close(parameters(got)[name], tensor, atol=1e-3, rtol=1e-3, msg=name)


def test_two_runs_give_the_same_bits():
    layers = fresh(), fresh()
    ladders = [calibrate_layer(layer, [sample(0), sample(100), sample(200)], SCALE, 2) for layer in layers]
    assert ladders[0] == ladders[1]
    for name, tensor in parameters(layers[0]).items():
        assert torch.equal(tensor, parameters(layers[1])[name]), name


def test_later_samples_only_refit_the_output():
    """Apart from the mean query, which all samples give."""
    batches = [sample(0), sample(100)]
    third = sample(200)
    third.q = third.q - third.q.mean((0, 1)) + torch.cat([at.q for at in batches]).mean((0, 1))
    few, more = fresh(), fresh()
    calibrate_layer(few, batches, SCALE, 2)
    calibrate_layer(more, [*batches, third], SCALE, 2)
    for name, tensor in few.mixer.named_parameters():
        torch.testing.assert_close(dict(more.mixer.named_parameters())[name], tensor, atol=1e-3, rtol=1e-3, msg=name)
    assert relative(more.attn.o_proj.weight, few.attn.o_proj.weight) > 1e-3


def test_one_batch_is_refused():
    with pytest.raises(ValueError, match="two batches"):
        calibrate_layer(fresh(), [sample(0)], SCALE, 2)


# A real layer


@torch.no_grad()
def test_a_llama_layer():
    """Observed q, k, v and heads are the layer's own; the calibrated module reproduces the ladder's last rung."""
    model = teacher_model("llama")
    layer = model.model.layers[1]
    samples = []
    for seed in range(3):
        hidden = normal(2, 64, 64, seed=seed)
        positions = torch.arange(64)[None]
        kwargs = {"position_embeddings": model.model.rotary_emb(hidden, positions), "position_ids": positions}
        out, seen = observe(layer, hidden, {**kwargs, "attention_mask": None})
        stopped, again = observe(layer, hidden, {**kwargs, "attention_mask": None}, attention_only=True)
        assert stopped is None and torch.equal(again.heads, seen.heads)
        torch.testing.assert_close(out, layer(hidden, attention_mask=None, **kwargs), atol=1e-6, rtol=1e-6)
        score = seen.scale * torch.einsum("bthk,bshk->bhts", seen.q, expand(seen.k))
        heads = torch.einsum("bhts,bshv->bthv", causal(score), expand(seen.v))
        torch.testing.assert_close(seen.heads, heads, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.self_attn.o_proj(seen.heads.flatten(2)), seen.output, atol=1e-5, rtol=1e-5)
        samples.append((kwargs, Sample(seen.x, seen.q, seen.k, seen.v, seen.heads, seen.output, Segments())))

    mixed = build_mixer(copy.deepcopy(layer.self_attn), {"kind": "gdn"}, 1, HeadShape.from_config(model.config))

    def output_error() -> float:
        error = power = 0.0
        for kwargs, at in samples:
            error += float((mixed(at.x, **kwargs)[0] - at.output).square().sum())
            power += float(at.output.square().sum())
        return (error / power) ** 0.5

    start = output_error()
    ladder = calibrate_layer(mixed, [at for _, at in samples], layer.self_attn.scaling, 3).pooled
    assert output_error() == pytest.approx(ladder["output"], rel=1e-3)
    assert ladder["output"] < 0.8 * start
    assert ladder["full"] < min(1.0, *(ladder[name] for name in ("mean", "vala", "gdn", "tilted")))
