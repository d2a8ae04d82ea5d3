"""A few tokens after others take a mixer's step, which is what the full form would have given and leaves the old state.

The kernels' steps themselves are checked in tests/kernels.
"""

import pytest
import torch
from test_mixers import CENTRED, EXACT, SHAPE, Batch, call, random_mixer, text
from test_sampling import HostLooks
from torch import Tensor

from linearize.mixers import MIXERS, MesaNet
from linearize.mixers import mesanet as mesanet_module

STEPPING = [kind for kind in CENTRED if MIXERS[kind].stepper]
LEFT = torch.tensor([[True] * 40, [False] * 17 + [True] * 23, [False] * 40])  # the last row has seen nothing


def prefill(mixer, dtype=torch.float64, tokens: int = 40) -> tuple[Batch, dict[str, Tensor]]:
    batch = text(3, tokens + 8, dtype=dtype)
    with torch.no_grad():
        _, state = call(mixer, batch.map(lambda x: x[:, :tokens]), mask=LEFT[:, :tokens], output_state=True)
    return batch, state


def both(mixer, batch: Batch, state, mask=None) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """(o, new state) of the step and of the full form, which is what a mixer computes when gradients are wanted."""
    results = []
    for steps in (True, False):
        with torch.set_grad_enabled(not steps):
            o, new = call(mixer, batch, mask=mask, state=state, output_state=True)
        assert o.requires_grad != steps
        results.append((o.detach(), {name: x.detach() for name, x in new.items()}))
    return results


def assert_alike(got, want, **limits) -> None:
    (o, state), (wanted, states) = got, want
    torch.testing.assert_close(o, wanted, **limits)
    assert state.keys() == states.keys()
    for name, x in states.items():
        assert state[name].dtype == x.dtype
        torch.testing.assert_close(state[name], x, **limits, msg=lambda text, name=name: f"{name}: {text}")


def test_which_mixers_step():
    assert set(STEPPING) == {"gdn", "vala", "deltanet", "mesanet"}


@pytest.mark.parametrize("kind", STEPPING)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_step_is_the_full_form(kind, tokens):
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    rest = batch.map(lambda x: x[:, 40 : 40 + tokens])
    assert_alike(*both(mixer, rest, state), **EXACT)


@pytest.mark.parametrize("kind", STEPPING)
@pytest.mark.parametrize("options", [{"time_scales": 0}, {"time_scales": 1, "taps": 1}])
def test_a_step_with_other_readouts(kind, options):
    mixer = random_mixer(kind, **options)
    batch, state = prefill(mixer)
    assert_alike(*both(mixer, batch.map(lambda x: x[:, 40:43]), state), **EXACT)


@pytest.mark.parametrize("kind", STEPPING)
def test_a_step_in_single_precision(kind):
    mixer = random_mixer(kind, dtype=torch.float32)
    batch, state = prefill(mixer, torch.float32)
    limits = {"atol": 1e-4, "rtol": 1e-4} if kind == "mesanet" else {"atol": 2e-5, "rtol": 2e-5}
    assert_alike(*both(mixer, batch.map(lambda x: x[:, 40:42]), state), **limits)


@pytest.mark.parametrize("kind", STEPPING)
def test_padding_in_a_step_changes_nothing(kind):
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    mask = torch.tensor([[True, False, True, True], [False] * 4, [False, False, True, True]])
    rest = batch.map(lambda x: x[:, 40:44])
    got, want = both(mixer, rest, state, mask)
    for o in (got[0], want[0]):
        assert o.isfinite().all()
        o[~mask] = 0
    assert_alike(got, want, **EXACT)
    for name, x in got[1].items():
        torch.testing.assert_close(x[1], state[name][1], **EXACT)


@pytest.mark.parametrize("kind", STEPPING)
def test_a_step_leaves_the_state_that_others_may_hold(kind):
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    kept = {name: x.clone() for name, x in state.items()}
    with torch.no_grad():
        call(mixer, batch.map(lambda x: x[:, 40:41]), state=state, output_state=True)
    assert all(torch.equal(state[name], x) for name, x in kept.items())


@pytest.mark.parametrize("kind", STEPPING)
def test_a_step_never_waits_for_the_device(kind):
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    with torch.no_grad(), HostLooks() as looks:
        call(mixer, batch.map(lambda x: x[:, 40:41]), state=state, output_state=True)
    assert not looks.seen


@pytest.mark.parametrize("kind", STEPPING)
def test_the_memory_lies_as_steps_read_it(kind):
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    assert state["memory"].stride(2) == 1 or kind == "mesanet"
    with torch.no_grad():
        _, later = call(mixer, batch, state=state, output_state=True)
    assert later["memory"].stride() == state["memory"].stride()
    _, dense = prefill(mixer)
    dense = {name: x.contiguous() for name, x in dense.items()}
    few = batch.map(lambda x: x[:, 40:43])
    with torch.no_grad():
        steps = [call(mixer, few, state=old, output_state=True) for old in (state, dense)]
    assert_alike(*steps, **EXACT)


@pytest.mark.parametrize("kind", ["mesanet", "k-cache"])
def test_the_inverse_of_an_earlier_token_is_a_state(kind, monkeypatch):
    """The torch form solves directly and hands it on; the kernels renew it in place."""
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    assert state["preconditioner"].shape == state["key_memory"].shape and not state["preconditioner"].any()
    given = []
    place, name = (MesaNet, "stepper") if kind == "mesanet" else (mesanet_module, "mesa_step")
    step = getattr(place, name)
    spied = lambda *a, **o: (given.append(o["preconditioner"]), step(*a, **o))[1]  # noqa: E731
    monkeypatch.setattr(place, name, staticmethod(spied) if place is MesaNet else spied)
    with torch.no_grad():
        for t in (40, 41):
            token = batch.map(lambda x, t=t: x[:, t : t + 1])
            _, state = call(mixer, token, state=state, output_state=True)
    assert given[0] is given[1] is state["preconditioner"]


@pytest.mark.parametrize("kind", STEPPING)
def test_when_a_step_is_taken(kind, monkeypatch):
    taken = []
    cls = MIXERS[kind]
    full = "operator" if cls.operator else "remember"
    for name in ("step", full):
        method, kind_of = getattr(cls, name), staticmethod if name == "operator" else lambda f: f
        spied = lambda *a, f=method, n=name, **o: (taken.append(n), f(*a, **o))[1]  # noqa: E731
        monkeypatch.setattr(cls, name, kind_of(spied))
    mixer = random_mixer(kind)
    batch, state = prefill(mixer)
    taken.clear()
    few, many = (batch.map(lambda x, n=n: x[:, 40 - n : 41]) for n in (0, 8))
    with torch.no_grad():
        call(mixer, few, state=state, output_state=True)
        call(mixer, many, state=state, output_state=True)
        call(mixer, few, state=state)
        call(mixer, few, output_state=True)
    call(mixer, few, state=state, output_state=True)
    mixer.requires_grad_(False)
    call(mixer, few, state=state, output_state=True)
    assert taken == ["step", *[full] * 4, "step"]


def test_the_ridge_of_a_cache_of_keys_steps_too(monkeypatch):
    """k-cache reads through MesaNet's memory, and shares its step."""
    seen = []
    step = mesanet_module.mesa_step
    monkeypatch.setattr(mesanet_module, "mesa_step", lambda *a, **o: (seen.append(1), step(*a, **o))[1])
    mixer = random_mixer("k-cache")
    batch, state = prefill(mixer)
    assert_alike(*both(mixer, batch.map(lambda x: x[:, 40:43]), state), atol=1e-8, rtol=1e-8)
    assert seen == [1] and not isinstance(mixer, MesaNet) and SHAPE.key_dim <= 128
