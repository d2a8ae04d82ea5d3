"""The start of a gdn-native layer: what it takes from the teacher, and that it is much better than nothing."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, teacher_model

from linearize.calibrate import calibrate_layer
from linearize.mixers import HeadShape, Sample, Segments, build_mixer
from linearize.mixers.gdn_native import SMALL, best_factor, constant_direction, silu_inverse
from linearize.observe import observe

SPEC = {"kind": "gdn-native"}


def layer_and_samples(name: str, layer: int = 1, batches: int = 4):
    """A decoder layer of a tiny teacher and what it saw on random text whose inputs have a mean, as real ones do."""
    model = copy.deepcopy(teacher_model(name))
    block, shape = model.model.layers[layer], HeadShape.from_config(model.config)
    samples = []
    with torch.no_grad():
        for seed in range(batches):
            hidden = torch.randn(2, 64, shape.hidden, generator=generator(seed)) + 0.5
            rotary = model.model.rotary_emb(hidden, torch.arange(64)[None])
            _, seen = observe(block, hidden, {"position_embeddings": rotary, "attention_mask": None})
            samples.append(Sample(seen.x, seen.q, seen.k, seen.v, seen.heads, seen.output, Segments()))
    return block.self_attn, shape, samples


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "olmo2", "phi3", "gemma3_text"])
def test_what_is_taken_over(name):
    """Query head h gets the keys and values of head h // 2; a norm's weight comes through; the rest is gone."""
    attn, shape, _ = layer_and_samples(name, batches=0)
    mixed = build_mixer(copy.deepcopy(attn), SPEC, 1, shape)
    assert [name for name, _ in mixed.attn.named_children()] == ["o_proj"]
    x = torch.randn(5, shape.hidden, generator=generator(1))
    taken = F.linear(x, mixed.mixer.in_proj_qkv.weight) * mixed.mixer.conv1d.weight[:, 0, -1]
    heads, dim = shape.q_heads, shape.key_dim
    q, k, v = (part.view(5, heads, dim) for part in taken.split(heads * dim, 1))
    if name == "phi3":
        rows = attn.qkv_proj.weight.split([heads * dim, 2 * dim, 2 * dim])
    else:
        rows = [getattr(attn, f"{part}_proj").weight for part in "qkv"]
    wanted = [F.linear(x, weight) for weight in rows]
    if hasattr(attn, "q_norm"):
        flat = attn.q_norm.weight.numel() == heads * dim
        for i, norm in enumerate((attn.q_norm, attn.k_norm)):
            wanted[i] = norm(wanted[i]) if flat else norm(wanted[i].unflatten(1, (-1, dim))).flatten(1)
    for got, want in zip((q, k, v), wanted, strict=True):
        want = want.unflatten(1, (-1, dim)).repeat_interleave(heads * dim // want.shape[1], 1)
        # Up to its length, which a norm sets and unit length takes away again (one length for all heads in OLMo-2).
        torch.testing.assert_close(F.normalize(got, dim=-1), F.normalize(want, dim=-1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_the_start_is_far_better_than_none(name):
    attn, shape, samples = layer_and_samples(name)
    mixed = build_mixer(copy.deepcopy(attn), SPEC, 1, shape)
    before = build_mixer(copy.deepcopy(attn), SPEC, 1, shape)
    ladder = calibrate_layer(mixed, samples, attn.scaling, len(samples))
    assert set(ladder.pooled) == {"memory", "full", "output"} and len(ladder.heads["full"]) == shape.q_heads
    assert all(weight.isfinite().all() for weight in mixed.parameters())
    held, target = samples[1::2], torch.cat([s.heads for s in samples[1::2]])

    def error(layer) -> float:
        heads = torch.cat([layer.mixer(s.x, None, None, None, 1.0, segments=s.segments)[0] for s in held])
        return float((heads - target).norm() / target.norm())

    # The rung is what the mixer does, on text that neither chose nor fitted.
    assert error(mixed) == pytest.approx(ladder.pooled["full"], rel=1e-4)
    # Random attention over random text: most of it is noise to any recurrence.
    assert ladder.pooled["full"] < 0.93 < 1.0 < error(before)
    # What the gates lose to a constant that varies here with a deviation of 0.4; 0.03 to 0.08 in trained models.
    assert ladder.pooled["full"] < ladder.pooled["memory"] + 0.08
    again = build_mixer(copy.deepcopy(attn), SPEC, 1, shape)
    calibrate_layer(again, samples, attn.scaling, len(samples))
    assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), again.parameters(), strict=True))


@torch.no_grad()
def test_what_is_constant_is_read_off_the_input():
    """Biases, the write strength and the gate have no bias of their own: one direction of x stands in for 1."""
    attn, shape, samples = layer_and_samples("qwen2")
    constant = constant_direction(samples)
    x = torch.cat([s.x for s in samples]).flatten(0, 1)
    assert (x @ constant - 1).square().mean() < 0.2  # against 1 without it
    mixed = build_mixer(copy.deepcopy(attn), SPEC, 1, shape)
    plain = mixed.mixer.in_proj_qkv.weight.clone()
    calibrate_layer(mixed, samples, attn.scaling, 4)
    values = slice(-shape.q_heads * shape.value_dim, None)
    bias = attn.v_proj.bias.view(2, -1).repeat_interleave(2, 0).flatten()
    change = (mixed.mixer.in_proj_qkv.weight - plain)[values]
    torch.testing.assert_close(change, torch.outer(bias, constant))
    assert (F.linear(x, change) - bias).norm() < 0.5 * bias.norm() * len(x) ** 0.5


@torch.no_grad()
def test_values_pass_the_silu_and_the_norm_almost_straight():
    """The whole mixer is linear in the values to a few per cent: neither the SiLU nor the norm is felt."""
    attn, shape, samples = layer_and_samples("qwen3")
    mixer = build_mixer(copy.deepcopy(attn), SPEC, 1, shape).mixer
    mixer.start(samples, attn.scaling, 4)

    def heads(factor: float) -> torch.Tensor:
        scaled = copy.deepcopy(mixer)
        scaled.conv1d.weight[-shape.q_heads * shape.value_dim :] *= factor
        return scaled(samples[1].x, None, None, None, 1.0, segments=Segments())[0]

    assert mixer.conv1d.weight[-shape.q_heads * shape.value_dim :, 0, -1].abs().max() < 10 * SMALL
    assert (heads(0.5) - 0.5 * heads(1.0)).norm() < 0.1 * heads(0.5).norm()


def test_small_algebra():
    y = torch.tensor([1e-3, 0.1, 1.0, 5.0])
    torch.testing.assert_close(F.silu(silu_inverse(y)), y, atol=1e-6, rtol=1e-5)
    outputs = [torch.randn(7, 3, 4, generator=generator(i)) for i in range(4)]
    factor = torch.tensor([2.0, -0.5, 0.0])
    found, error = best_factor(outputs, [o * factor[:, None] for o in outputs])
    torch.testing.assert_close(found, factor, atol=1e-6, rtol=1e-6)
    assert (error < 1e-8).all()
    noisy = [o * 2 + (i % 2) for i, o in enumerate(outputs)]  # only the held-out half is off by one
    _, error = best_factor(outputs, noisy)
    assert all(abs(float(e) - 2 * 7 * 4) < 1e-3 for e in itertools.chain(error))
