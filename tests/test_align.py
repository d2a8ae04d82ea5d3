"""Alignment of one tiny layer: it learns, it is repeatable, and it stops with the layer's name when it breaks."""

import copy
import itertools
import math

import pytest
import torch
from conftest import generator, teacher_model
from torch import Tensor

from linearize.align import Step, align_layer, learning_rate, relative_error
from linearize.calibrate import calibrate_layer
from linearize.errors import UserError
from linearize.mixers import MIXERS, HeadShape, Sample, Segments, build_mixer
from linearize.observe import observe
from linearize.recipe import Align

KINDS = [kind for kind, cls in MIXERS.items() if cls.__module__.startswith("linearize.")]
OPTIONS = Align(lr=3e-3, lr_min=1e-4, warmup=3)


def batches(count: int = 3, length: int = 32) -> list[tuple[Step, Sample]]:
    """Observed attention of a layer of a tiny llama with biases, on random hidden states."""
    model, made = teacher_model("llama"), []
    for seed in range(count):
        hidden = torch.randn(2, length, 64, generator=generator(seed))
        positions = torch.arange(length)[None]
        kwargs = {"position_embeddings": model.model.rotary_emb(hidden, positions), "position_ids": positions}
        _, seen = observe(model.model.layers[1], hidden, {**kwargs, "attention_mask": None}, attention_only=True)
        sample = Sample(seen.x, seen.q, seen.k, seen.v, seen.heads, seen.output, Segments())
        made.append((Step(seen.x, seen.output, kwargs), sample))
    return made


def mixed_layer(kind: str, calibrated: bool = False):
    model = teacher_model("llama")
    attn = model.model.layers[1].self_attn
    mixed = build_mixer(copy.deepcopy(attn), {"kind": kind}, 1, HeadShape.from_config(model.config))
    if calibrated:
        calibrate_layer(mixed, [sample for _, sample in batches()], attn.scaling, 3)
    return mixed


def align(mixed, count: int, steps=None, options: Align = OPTIONS) -> tuple[list[float], list[tuple[int, float]]]:
    steps = itertools.cycle([step for step, _ in batches()]) if steps is None else steps
    said = []
    losses = align_layer(mixed, steps, count, options, name="layer 7", progress=lambda *at: said.append(at))
    return losses, said


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind):
    mixed = mixed_layer(kind, calibrated=kind == "gdn")
    losses, said = align(mixed, 60)
    assert len(losses) == 60 and said == [(64, loss) for loss in losses]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    # Losses are taken before the update, so the first is the start's.
    first = batches(1)[0][0]
    start, _ = mixed_layer(kind, calibrated=kind == "gdn")(first.x, **first.kwargs)
    assert losses[0] == pytest.approx(float(relative_error(start, first.target).detach()), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_trains_and_is_frozen_afterwards(kind):
    mixed = mixed_layer(kind)
    with torch.no_grad():  # a weight of zero shields what it weighs from a gradient
        for name, p in mixed.mixer.named_parameters():
            if name in ("readout.scales", "weight"):
                p.fill_(0.1)
    before = {name: p.detach().clone() for name, p in mixed.named_parameters()}
    align(mixed, 2)
    for name, p in mixed.named_parameters():
        assert (p != before[name]).any(), name
        assert p.isfinite().all() and not p.requires_grad and p.grad is None, name
    assert not mixed.training


def test_two_runs_give_the_same_bits():
    layers = mixed_layer("gdn", calibrated=True), mixed_layer("gdn", calibrated=True)
    assert align(layers[0], 6) == align(layers[1], 6)
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_packed_steps_reach_the_mixer():
    """The loss of packed rows differs from that of the same rows taken as one document."""
    step, _ = batches(1)[0]
    reset = torch.zeros(2, 32, dtype=torch.bool)
    reset[:, ::8] = True
    packed = Step(step.x, step.target, {**step.kwargs, "mixer_reset": reset})
    losses = [align(mixed_layer("gdn"), 1, iter([at]))[0][0] for at in (step, packed)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_learning_rate():
    options = Align(lr=1e-2, lr_min=1e-4, warmup=4)
    rates = [learning_rate(step, 20, options) for step in range(20)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[4] == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-4)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[4 + 5] + rates[19 - 5] == pytest.approx(1e-2 + 1e-4)  # a cosine is symmetric about its middle
    for steps, warmup in ((1, 0), (1, 50), (2, 0), (3, 3), (51, 50)):
        options = Align(lr=1e-2, lr_min=1e-4, warmup=warmup)
        assert all(0 < learning_rate(step, steps, options) <= 1e-2 for step in range(steps))
    # Half of a short training warms up at most: its rate is reached, and comes down again.
    rates = [learning_rate(step, 12, Align(lr=1e-2, lr_min=1e-4, warmup=50)) for step in range(12)]
    assert max(rates) == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-4)


def test_the_optimiser_follows_the_schedule():
    """With a learning rate of zero in all but the first step, later steps change nothing."""
    options = Align(lr=1e-2, lr_min=0.0, warmup=0)
    one, two = mixed_layer("gdn"), mixed_layer("gdn")
    align(one, 1, options=options)
    align(two, 2, options=options)
    assert learning_rate(1, 2, options) == 0
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_error(dtype):
    target = torch.randn(2, 5, 8, generator=generator(0)).to(dtype)
    assert relative_error(target, target) == 0
    assert float(relative_error(torch.zeros_like(target), target)) == pytest.approx(1)
    assert float(relative_error(3 * target, target)) == pytest.approx(4, rel=1e-2)
    assert relative_error(target, target).dtype == torch.float32
    assert float(relative_error(target, torch.zeros_like(target))) > 1e6  # finite
    assert relative_error(target, torch.zeros_like(target)).isfinite()


def broken(step: Step, value: float) -> Step:
    target: Tensor = step.target.clone()
    target[0, 3, 5] = value
    return Step(step.x, target, step.kwargs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at, fix", [(0, "calibrate.tokens"), (2, "align.lr")])
def test_divergence_names_the_layer_and_the_step_and_keeps_the_last_good_weights(value, at, fix):
    good = [step for step, _ in batches()]
    mixed, same = mixed_layer("gdn"), mixed_layer("gdn")
    steps = iter([*good[:at], broken(good[at], value), *good])
    with pytest.raises(UserError) as caught:
        align(mixed, 5, steps)
    assert f"alignment of layer 7 diverged at step {at + 1}" in str(caught.value)
    assert fix in str(caught.value) and "\n" not in str(caught.value)
    # As it was after the last good step: the same steps without the bad one, at the same point of the schedule. A batch
    # is asked for before the one before it is learnt.
    with pytest.raises(StopIteration):
        align(same, 5, iter(good[: at + 1]))
    for (name, a), b in zip(mixed.named_parameters(), same.parameters(), strict=True):
        assert a.isfinite().all() and torch.equal(a, b), name


def test_an_infinite_gradient_is_caught():
    """The loss is finite, its gradient is not."""
    mixed = mixed_layer("gdn")
    mixed.mixer.readout.mean.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(UserError, match="layer 7"):
        align(mixed, 1)


def align_with_bad_gradients(bad: set[int], count: int = 30) -> list[list[Tensor]]:
    """The weights after every step, where those of `bad` have a finite loss and an infinite gradient."""
    mixed, backwards, weights = mixed_layer("gdn"), itertools.count(), []

    def spoil(grad: Tensor) -> Tensor:
        return grad * float("inf") if next(backwards) in bad else grad

    mixed.mixer.readout.mean.register_hook(spoil)

    def remember(tokens: int, loss: float) -> None:
        assert math.isfinite(loss)
        weights.append([p.detach().clone() for p in mixed.parameters()])

    steps = itertools.cycle([step for step, _ in batches()])
    try:
        align_layer(mixed, steps, count, OPTIONS, name="layer 7", progress=remember)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), weights[-1], strict=True))
    return weights


def test_a_step_without_a_finite_gradient_is_left_out_and_the_training_goes_on():
    with pytest.warns(UserWarning) as told:
        weights = align_with_bad_gradients({1, 3, 4})
    assert [str(w.message).split("the gradient of ")[1].split(" is")[0] for w in told] == ["step 2", "step 4", "step 5"]
    same = [all(map(torch.equal, *pair)) for pair in itertools.pairwise(weights)]
    assert len(weights) == 30 and same[:5] == [True, False, True, True, False]
    assert all(p.isfinite().all() for p in weights[-1])


def test_several_such_steps_in_a_row_stop_the_training():
    with pytest.warns(UserWarning, match="layer 7"), pytest.raises(UserError, match="layer 7 diverged at step 5"):
        align_with_bad_gradients({2, 3, 4})


def test_fewer_of_fewer_steps_stop_it():
    """Half of a short training would else be left out, and nothing but a warning say so."""
    with pytest.raises(UserError, match="layer 7 diverged at step 3"):
        align_with_bad_gradients({2}, 6)


def test_a_parameter_without_a_gradient_is_an_error():
    mixed = mixed_layer("gdn")
    mixed.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="spare of layer 7"):
        align(mixed, 1)
