"""Attention without a mask where rows are known to be whole documents."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from linearize.causal import NAME, attention, whole_rows

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def models(request):
    """A model with its usual attention, and the same with ours."""
    kind, config = request.param
    torch.manual_seed(0)
    usual = kind(config(**SHAPE, **({"sliding_window": 8} if kind is MistralForCausalLM else {}))).eval()
    ours = kind._from_config(usual.config, attn_implementation=NAME).eval()
    ours.load_state_dict(usual.state_dict())
    return usual, ours


KINDS = [(LlamaForCausalLM, LlamaConfig), (MistralForCausalLM, MistralConfig)]
both = pytest.mark.parametrize("models", KINDS, indirect=True, ids=["full", "window"])


def masks(model, monkeypatch):
    """The masks that reach the layers of the next call."""
    seen = []
    forward = model.model.layers[0].forward

    def look(*args, **kwargs):
        seen.append(kwargs["attention_mask"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0], "forward", look)
    return seen


def test_names():
    assert attention("sdpa") == NAME and attention("eager") == "eager"


@both
@pytest.mark.parametrize("length", [1, 8, 9, 20])
def test_whole_rows_as_a_graph_sees_them(models, length, monkeypatch):
    usual, ours = models
    ids = torch.randint(40, (3, length))
    want = usual.model(input_ids=ids, use_cache=False).last_hidden_state
    # As if a graph were captured: nothing is looked at.
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    seen = masks(ours, monkeypatch)
    with whole_rows(True):
        got = ours.model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(got, want)
    window = getattr(ours.config, "sliding_window", None)
    assert (seen[0] is None) == (window is None or length <= window)
    ours.model(input_ids=ids, use_cache=False)
    assert seen[1] is not None  # not known to be whole


@both
def test_packed_rows(models):
    usual, ours = models
    ids, positions = torch.randint(40, (2, 20)), torch.cat([torch.arange(13), torch.arange(7)]).expand(2, -1)
    for known in (False, None):
        with whole_rows(known):
            got, want = (
                m.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state for m in (ours, usual)
            )
        torch.testing.assert_close(got, want)
    apart = usual.model(input_ids=ids[:, 13:], use_cache=False).last_hidden_state
    torch.testing.assert_close(got[:, 13:], apart)


@both
@pytest.mark.parametrize("rows, length", [(1, 8), (3, 8), (3, 20)])
def test_whole_rows_among_packed_ones_have_the_mask_of_a_captured_graph(models, rows, length, monkeypatch):
    usual, ours = models
    ids, positions = torch.randint(40, (rows, length)), torch.arange(length).expand(rows, -1)
    seen = masks(ours, monkeypatch)
    with whole_rows(False):
        got = ours.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(got, usual.model(input_ids=ids, use_cache=False).last_hidden_state)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    with whole_rows(False):
        ours.model(input_ids=ids, position_ids=positions, use_cache=False)
    plain, captured = seen
    # A compiled layer asks for the same strides as well.
    assert torch.equal(plain, captured) and plain.stride() == captured.stride() and plain.dtype == captured.dtype
