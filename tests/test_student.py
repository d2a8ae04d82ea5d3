"""The converted model behaves as a transformers model: every way of feeding it the same text gives the same logits."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, TEACHERS, Toy, generator, make_student, randomise, teacher_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Phi3Config, Phi3ForCausalLM, StaticCache

from linearize import student as student_module
from linearize.errors import UserError
from linearize.families import FAMILIES
from linearize.mixers import MIXERS
from linearize.student import (
    SHIM,
    SHIM_FILE,
    MixerState,
    build_student,
    check_transformers,
    mixer_specs,
    mixer_tensors,
    packed_starts,
    student_config,
    student_name,
)

GDN, STANDARD, NATIVE, TOY = ({"kind": kind} for kind in ("gdn", "gdn-standard", "gdn-native", "toy"))
LAYOUTS = {"hybrid": {0: GDN, 2: TOY}, "linear": {0: GDN, 1: STANDARD, 2: TOY, 3: GDN}}

# Every family hybrid and fully linear; every kind of mixer alone, on one of them.
CASES = [(name, layout) for name in TEACHERS for layout in LAYOUTS]
CASES += [("llama", kind) for kind in sorted(MIXERS)]

# Logits of order 1 in fp32: sums are taken in another order, nothing else differs.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def student_of(name: str, layout: str):
    mixers = LAYOUTS[layout] if layout in LAYOUTS else {i: {"kind": layout} for i in range(4)}
    return make_student(teacher_model(name), mixers)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def student(request):
    return student_of(*request.param)


@pytest.fixture(scope="module")
def hybrid():
    return student_of("llama", "hybrid")


def text(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length] without special tokens."""
    return torch.randint(4, 260, (batch, length), generator=generator(seed))


def generate(model, ids, mask=None, **kwargs):
    """Greedy, eight tokens however likely the end is. Returns (new tokens, their logits [B, 8, vocab])."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | kwargs
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


def left_pad(ids: torch.Tensor, pads: list[int]):
    """The rows' first `len - pad` tokens, moved to the right, with their mask."""
    length = ids.shape[1]
    mask = torch.stack([(torch.arange(length) >= pad).long() for pad in pads])
    padded = torch.stack([F.pad(row[: length - pad], (pad, 0)) for row, pad in zip(ids, pads, strict=True)])
    return padded, mask


# ---- the essential matrix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEACHERS)
def test_nothing_converted_is_the_teacher_bit_for_bit(name):
    teacher = teacher_model(name)
    model = make_student(teacher, {})
    ids = text(2, 13)
    padded, mask = left_pad(ids, [0, 5])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, teacher(ids).logits)
        assert torch.equal(model(padded, attention_mask=mask).logits, teacher(padded, attention_mask=mask).logits)
        assert torch.equal(model(ids, labels=ids).loss, teacher(ids, labels=ids).loss)
    mine, theirs = generate(model, padded, mask), generate(teacher, padded, mask)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


@torch.no_grad()
def test_converted_layers_matter(student):
    """Guards the tests below: a mixer that were skipped, or ran as softmax, would pass them."""
    ids = text(1, 12)
    name = next(n for n in TEACHERS if TEACHERS[n][0] in student.config.model_type)
    assert (student(ids).logits - teacher_model(name)(ids).logits).abs().max() > 0.05


@torch.no_grad()
def test_cached_generation_is_the_full_forward_and_needs_no_cache(student):
    ids = text(2, 9)
    tokens, logits = generate(student, ids)
    full = student(torch.cat([ids, tokens], dim=1), use_cache=False).logits[:, 8:-1]
    torch.testing.assert_close(logits, full, **CLOSE)
    plain_tokens, plain = generate(student, ids, use_cache=False)
    assert torch.equal(tokens, plain_tokens)
    torch.testing.assert_close(plain, full, **CLOSE)


@torch.no_grad()
def test_left_padding_is_no_padding(student):
    ids = text(3, 11)
    pads = [0, 4, 7]
    padded, mask = left_pad(ids, pads)
    logits = student(padded, attention_mask=mask).logits
    tokens, steps = generate(student, padded, mask)
    for row, pad in enumerate(pads):
        alone = ids[row : row + 1, : 11 - pad]
        torch.testing.assert_close(logits[row : row + 1, pad:], student(alone).logits, **CLOSE)
        alone_tokens, alone_steps = generate(student, alone)
        torch.testing.assert_close(steps[row : row + 1], alone_steps, **CLOSE)
        assert torch.equal(tokens[row : row + 1], alone_tokens)


@torch.no_grad()
def test_right_padding_is_no_padding_with_and_without_a_mask(student):
    ids = text(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    padded = ids * mask
    alone = student(ids[1:, :6]).logits
    for given in (None, mask):
        logits = student(padded, attention_mask=given).logits
        torch.testing.assert_close(logits[1:, :6], alone, **CLOSE)
        torch.testing.assert_close(logits[:1], student(ids[:1]).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[4, 1, 6], [1] * 11], ids=["chunks", "tokens"])
def test_pieces_are_the_whole(student, sizes):
    """Through a cache, left-padded, with positions left to the model."""
    padded, mask = left_pad(text(2, 11), [0, 5])
    whole = student(padded, attention_mask=mask, use_cache=False).logits
    cache, pieces, end = None, [], 0
    for size in sizes:
        start, end = end, end + size
        out = student(padded[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    assert cache.get_seq_length() == 11
    got = torch.cat(pieces, dim=1)
    for row, pad in enumerate([0, 5]):
        torch.testing.assert_close(got[row, pad:], whole[row, pad:], **CLOSE)


# ---- caches and generation ------------------------------------------------------------------------------------------

KINDS = ["hybrid", "linear"]


@pytest.fixture(
    scope="module", params=[(n, layout) for n in ("llama", "mistral", "gemma3_text") for layout in KINDS], ids="-".join
)
def some_student(request):
    return student_of(*request.param)


@torch.no_grad()
def test_beam_search_reorders_the_states(some_student):
    padded, mask = left_pad(text(2, 7), [0, 3])
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = some_student.generate(padded, attention_mask=mask, **options)
    assert torch.equal(cached, some_student.generate(padded, attention_mask=mask, use_cache=False, **options))


@torch.no_grad()
def test_static_cache(some_student):
    padded, mask = left_pad(text(2, 7), [0, 3])
    tokens, logits = generate(some_student, padded, mask)
    static_tokens, static = generate(some_student, padded, mask, cache_implementation="static")
    torch.testing.assert_close(static, logits, **CLOSE)
    assert torch.equal(static_tokens, tokens)


@torch.no_grad()
def test_any_cache_of_the_users(some_student):
    ids = text(2, 9)
    full = some_student(ids, use_cache=False).logits
    for cache in (
        DynamicCache(),
        DynamicCache(config=some_student.config),
        StaticCache(config=some_student.config, max_cache_len=16),
    ):
        first = some_student(ids[:, :6], cache=cache).logits
        second = some_student(ids[:, 6:], cache=cache).logits
        torch.testing.assert_close(torch.cat([first, second], dim=1), full, **CLOSE)
        assert cache.get_seq_length(0) == 9
        kinds = [isinstance(layer, MixerState) for layer in cache.layers]
        assert kinds == [i in mixer_specs(some_student.config) for i in range(4)]
        cache.reset()
        torch.testing.assert_close(some_student(ids[:, :6], cache=cache).logits, first, **CLOSE)


@torch.no_grad()
def test_going_on_from_a_returned_cache(hybrid):
    ids = text(1, 9)
    out = hybrid.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, return_dict_in_generate=True)
    more = torch.cat([out.sequences, text(1, 3, seed=9)], dim=1)
    kept = copy.deepcopy(out.cache)
    for cache in (out.cache, kept):
        tokens, logits = generate(hybrid, more, cache=cache)
        fresh_tokens, fresh = generate(hybrid, more)
        torch.testing.assert_close(logits, fresh, **CLOSE)
        assert torch.equal(tokens, fresh_tokens)


@torch.no_grad()
def test_several_sequences_and_chunked_prefill_and_embeddings(hybrid):
    ids = text(2, 9)
    tokens, logits = generate(hybrid, ids)
    torch.manual_seed(3)
    sampled = hybrid.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, num_return_sequences=3, max_new_tokens=6
    )
    torch.manual_seed(3)
    plain = hybrid.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=6,
        use_cache=False,
    )
    assert sampled.shape[0] == 6 and torch.equal(sampled, plain)
    _, chunked = generate(hybrid, ids, prefill_chunk_size=4)
    torch.testing.assert_close(chunked, logits, **CLOSE)
    embedded = hybrid.generate(
        inputs_embeds=hybrid.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
    )
    assert torch.equal(embedded, tokens)


@torch.no_grad()
@pytest.mark.parametrize("layout", KINDS)
def test_longrope_past_its_switch(layout):
    """Phi-3 changes all rotary frequencies at a certain length and then drops the cache: the states must go too."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = Phi3Config(**sizes, original_max_position_embeddings=12, rope_parameters=rope)
    teacher = Phi3ForCausalLM(config).eval()
    randomise(teacher, 0)
    model = make_student(teacher, LAYOUTS[layout])
    ids = text(1, 8)
    tokens, logits = generate(model, ids)
    plain_tokens, plain = generate(model, ids, use_cache=False)
    torch.testing.assert_close(logits, plain, **CLOSE)
    assert torch.equal(tokens, plain_tokens)


def test_state_layer():
    layer = MixerState()
    assert layer.states() is None and layer.get_seq_length() == 0
    layer.advance(3, a=torch.arange(2.0)[:, None], b=torch.arange(2)[:, None, None])
    layer.advance(2, **layer.states())
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(4) == (9, 0) and layer.get_max_length() == -1
    layer.reorder_cache(torch.tensor([1, 1]))
    assert layer.states()["a"].flatten().tolist() == [1.0, 1.0]
    layer.advance(0, a=torch.arange(2.0)[:, None])
    layer.batch_repeat_interleave(2)
    assert layer.states()["a"].flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
    layer.batch_select_indices(torch.tensor([0, 3]))
    assert layer.states()["a"].flatten().tolist() == [0.0, 1.0]
    assert layer.update(None, None) == (None, None)
    with pytest.raises(NotImplementedError):
        layer.update(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="rolled back"):
        layer.crop(1)
    layer.reset()
    assert layer.states() is None and layer.get_seq_length() == 0


def test_a_state_that_lies_transposed_stays_so():
    matrix = torch.arange(24.0).view(2, 1, 3, 4).mT
    layer = MixerState()
    for change, want in (
        (lambda: layer.reorder_cache(torch.tensor([1, 0, 1])), matrix[[1, 0, 1]]),
        (lambda: layer.batch_repeat_interleave(2), matrix[[0, 0, 1, 1]]),
        (lambda: layer.batch_select_indices(torch.tensor([1])), matrix[1:]),
    ):
        layer.advance(1, matrix=matrix)
        change()
        assert torch.equal(layer.states()["matrix"], want) and layer.states()["matrix"].mT.is_contiguous()


def test_what_cannot_work_says_so(hybrid):
    ids = text(2, 6)
    with pytest.raises(ValueError, match="stateful"):
        hybrid.generate(ids[:1], assistant_model=teacher_model("llama"), max_new_tokens=4)
    with pytest.raises(ValueError, match="stateful"):
        hybrid.generate(ids[:1], prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(TypeError, match="Cache"):
        hybrid(ids, cache=((torch.ones(1), torch.ones(1)),))
    with pytest.raises(ValueError, match="2-D padding mask"):
        hybrid(ids, attention_mask=torch.ones(2, 1, 6, 6))
    with pytest.raises(ValueError, match="2-D padding mask"):
        hybrid(ids, attention_mask={"full_attention": None})
    with pytest.raises(ValueError, match="5 columns.*needs 6"):
        hybrid(ids, attention_mask=torch.ones(2, 5))
    with torch.no_grad():
        foreign = teacher_model("llama")(ids, use_cache=True).cache
        with pytest.raises(ValueError, match="another model"):
            hybrid(ids, cache=foreign)
        own = hybrid(ids, use_cache=True).cache
        with pytest.raises(ValueError, match="6 columns.*needs 7"):
            hybrid(ids[:, :1], attention_mask=torch.ones(2, 6), cache=own)
        with pytest.raises(ValueError, match="rolled back"):
            own.crop(2)


def test_sharded_sequences_are_refused(hybrid, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    ids = text(2, 6)
    hybrid(ids, position_ids=torch.arange(6)[None], use_cache=False)
    with pytest.raises(ValueError, match="sequence parallelism"):
        hybrid(ids, position_ids=torch.arange(6, 12)[None], use_cache=False)
    assert hybrid.supports_context_parallel is False


@torch.no_grad()
def test_every_way_to_call(hybrid):
    ids = text(2, 6)
    want = hybrid.model(input_ids=ids, use_cache=False).last_hidden_state
    mask, positions = torch.ones_like(ids), torch.arange(6)[None]
    cache = DynamicCache()
    for got in (
        hybrid.model(ids),
        hybrid.model(ids, mask, positions, cache),
        hybrid.model(inputs_embeds=hybrid.model.embed_tokens(ids), past_key_values=DynamicCache()),
    ):
        torch.testing.assert_close(got.last_hidden_state, want, **CLOSE)
        assert got.cache.get_seq_length() == 6
    assert isinstance(cache.layers[0], MixerState)
    with pytest.raises(ValueError, match="input_ids"):
        hybrid.model()
    hidden = hybrid(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 5


# ---- packed rows and training ---------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("layout", KINDS)
def test_packed_documents_are_separate_documents(name, layout):
    model = student_of(name, layout)
    ids = text(2, 12)
    lengths = [[5, 7], [3, 9]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    for options in ({"use_cache": False}, {}):  # forgetting it must be harmless
        packed = model(ids, position_ids=positions, **options).logits
        for row, (first, _) in enumerate(lengths):
            for part in (slice(0, first), slice(first, 12)):
                alone = model(ids[row : row + 1, part], use_cache=False).logits
                torch.testing.assert_close(packed[row : row + 1, part], alone, **CLOSE)


def test_packed_documents_refuse_caches_and_masks(hybrid):
    ids = text(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="use_cache=False"):
        hybrid(ids, position_ids=positions, use_cache=True)
    with pytest.raises(ValueError, match="no cache"):
        hybrid(ids, position_ids=positions, cache=DynamicCache())
    with pytest.raises(ValueError, match="attention_mask=None"):
        hybrid(ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="position_ids"):
        hybrid(ids, cu_seq_lens_q=torch.tensor([0, 3, 6]))


def test_packed_starts():
    assert packed_starts(torch.arange(5)[None], 2) is None
    starts = packed_starts(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]), 2)
    assert starts.tolist() == [[True, False, True, False], [True, False, False, False]]
    assert packed_starts(torch.tensor([[0, 0]]), 3).tolist() == [[True, True]] * 3


def gradients(model, ids, **kwargs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **kwargs).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model = student_of("llama", "hybrid").train()
    ids = text(2, 10)
    plain = gradients(model, ids, use_cache=False)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    checkpointed = gradients(model, ids)
    assert set(plain) == set(checkpointed) == {name for name, _ in model.named_parameters()}
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_every_mixer_tensor_gets_a_gradient_and_a_cache_changes_none():
    model = student_of("llama", "linear").train()
    ids = text(2, 10)
    plain, cached = gradients(model, ids, use_cache=False), gradients(model, ids, use_cache=True)
    for name in mixer_tensors(model.config):
        assert plain[name].isfinite().all() and plain[name].abs().max() > 0, name
        torch.testing.assert_close(cached[name], plain[name], atol=1e-6, rtol=1e-4, msg=name)


def test_loss_is_the_causal_one(hybrid):
    ids = text(2, 10)
    out = hybrid(ids, labels=ids)
    want = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, want)


# ---- heads ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("scrambled", [False, True])
def test_kv_heads_serve_blocks_of_query_heads(scrambled):
    """The toy mixer against sums written out per token, with q, k, v from the weights: no shared code.

    Query head h reads KV head h // 2. Repeating by rows instead (h % 2), the classic mistake, must not pass.
    """
    name = "qwen2"
    model = make_student(teacher_model(name), {1: TOY})
    config, layer = model.config, model.model.layers[1].self_attn
    x = torch.randn(1, 7, config.hidden_size, generator=generator(5))
    positions = torch.arange(7)[None]
    cos, sin = model.model.rotary_emb(x, positions)
    got, _ = layer(x, position_embeddings=(cos, sin), position_ids=positions)

    weights, mixer = layer.attn, layer.mixer

    def project(linear, heads):
        return (x[0] @ linear.weight.T + linear.bias).view(7, heads, 32)

    def rotate(heads):
        a, b = heads[..., :16], heads[..., 16:]
        c, s = cos[0, :, None, :16], sin[0, :, None, :16]
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    q, k, v = rotate(project(weights.q_proj, 4)), rotate(project(weights.k_proj, 2)), project(weights.v_proj, 2)
    keep = (x[0] @ mixer.forget.weight.T + mixer.forget.bias).sigmoid()
    rows = []
    for t in range(7):
        heads = []
        for h in range(4):
            kv = h % 2 if scrambled else h // 2
            top, bottom, decay = torch.zeros(32), torch.zeros(()), torch.ones(())
            for i in range(t, -1, -1):
                w = decay * (mixer.reference[h] @ k[i, kv] / 32**0.5).exp()
                top, bottom = top + w * v[i, kv], bottom + w
                decay = decay * keep[i, h]
            heads.append(top / bottom * (q[t, h] @ mixer.reference[h] / 32**0.5).sigmoid())
        rows.append(torch.cat(heads))
    want = torch.stack(rows) @ weights.o_proj.weight.T
    same = torch.allclose(got[0], want, **CLOSE)
    assert same is not scrambled


@torch.no_grad()
@pytest.mark.parametrize("name", TEACHERS)
def test_attention_is_called_with_the_teachers_q_k_v(name):
    """With a softmax in place of the mixer, a converted layer is the teacher's own."""

    class Softmax(Toy):
        def forward(self, x, q, k, v, scale, *, segments, state=None, output_state=False):
            group = self.shape.group
            k, v = (tensor.repeat_interleave(group, dim=2) for tensor in (k, v))
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            logits = scale * q @ k.mT
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
            return (logits.softmax(-1) @ v).transpose(1, 2), None

    teacher = teacher_model(name)
    cap = getattr(teacher.config, "attn_logit_softcapping", None)
    model = make_student(teacher, dict.fromkeys(range(4), TOY))
    for layer in model.model.layers:
        layer.self_attn.mixer.__class__ = Softmax
    ids = text(2, 5)  # inside the sliding windows of the fixtures
    torch.testing.assert_close(model(ids, use_cache=False).logits, teacher(ids).logits, **CLOSE)


# ---- configuration, names, saving and loading -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TEACHERS)
def test_config_keeps_every_field_of_the_teacher(name):
    config = teacher_model(name).config
    mine = student_config(config, LAYOUTS["hybrid"], {"source": "somewhere", "revision": None})
    assert mine.model_type == "linearize_" + TEACHERS[name][0]
    theirs, ours = config.to_dict(), mine.to_dict()
    added = {"linearize", "auto_map"}
    changed = {"model_type", "architectures"}
    assert set(ours) - added == set(theirs)
    assert {k: v for k, v in ours.items() if k not in added | changed} == {
        k: v for k, v in theirs.items() if k not in changed
    }
    again = type(mine).from_dict(json.loads(mine.to_json_string(use_diff=False)))
    assert again.linearize == mine.linearize == {
        "format": 1,
        "teacher": {"source": "somewhere", "revision": None},
        "mixers": {"0": GDN, "2": TOY},
    }
    assert again.to_dict() == ours


def test_bad_sections_are_refused():
    config = teacher_model("llama").config
    with pytest.raises(UserError, match="layers 0 to 3"):
        student_config(config, {4: TOY})
    with pytest.raises(UserError, match="unknown kind of mixer .got 'nonsense'.: one of"):
        student_config(config, {0: {"kind": "nonsense"}})
    mine = student_config(config, {0: TOY})
    mine.linearize["format"] = 99
    with pytest.raises(UserError, match="format is unknown .got 99.*upgrade"):
        mixer_specs(mine)


@pytest.mark.parametrize("name", TEACHERS)
def test_names_and_mixer_tensors_are_exact(name):
    teacher = teacher_model(name)
    mixers = LAYOUTS["linear"] | {3: NATIVE}
    model = build_student(teacher.config, {"mixers": mixers}, device="meta")
    names = {student_name(n, mixers) for n in teacher.state_dict()}
    extra = mixer_tensors(model.config)
    state = model.state_dict()
    assert (names - {None}) | set(extra) == set(state) and not names & set(extra)
    assert all(state[n].shape == shape and state[n].dtype == torch.float32 for n, shape in extra.items())
    assert all(tensor.is_meta for tensor in state.values())


def test_names_of_a_teachers_attention():
    prefix = "model.layers.1.self_attn."
    assert student_name(prefix + "q_proj.weight", {2: TOY}) == prefix + "q_proj.weight"
    assert student_name(prefix + "q_proj.weight", {1: TOY}) == prefix + "attn.q_proj.weight"
    assert student_name(prefix + "q_proj.weight", {1: NATIVE}) is None
    assert student_name(prefix + "q_norm.weight", {1: NATIVE}) is None
    assert student_name(prefix + "o_proj.weight", {1: NATIVE}) == prefix + "attn.o_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A hybrid Qwen2 student (biases, tied head) in a folder with its tokenizer, and logits of some text."""
    model = make_student(teacher_model("qwen2"), {0: GDN, 2: STANDARD})
    out = tmp_path_factory.mktemp("saved") / "student"
    model.save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    ids = text(2, 9)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, out.parent / "expected.safetensors")
    return out


def expected(saved: Path) -> dict[str, torch.Tensor]:
    return load_file(saved.parent / "expected.safetensors")


@torch.no_grad()
def test_save_load_save(saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "linearize_qwen2"
    assert config["auto_map"] == {
        "AutoConfig": "modeling_linearize.LinearizeQwen2Config",
        "AutoModelForCausalLM": "modeling_linearize.LinearizedQwen2ForCausalLM",
    }
    assert config["architectures"] == ["LinearizedQwen2ForCausalLM"]
    want = expected(saved)
    for trust in (False, True):
        model, info = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=trust, output_loading_info=True)
        assert type(model) is student_module.LinearizedQwen2ForCausalLM
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(model(want["ids"]).logits, want["logits"])
        again = tmp_path / str(trust)
        model.save_pretrained(again)
        assert json.loads((again / "config.json").read_text()) == config
        assert (again / SHIM_FILE).read_text() == SHIM
        assert sorted(p.name for p in again.glob("*.py")) == [SHIM_FILE]
    AutoConfig.from_pretrained(saved).save_pretrained(tmp_path / "config")
    assert (tmp_path / "config" / SHIM_FILE).exists()


@torch.no_grad()
def test_the_identity_loads_from_the_teachers_folder(teacher_folder):
    model = student_module.LinearizedLlamaForCausalLM.from_pretrained(teacher_folder("llama-tied"))
    ids = text(1, 6)
    assert torch.equal(model(ids).logits, teacher_model("llama-tied")(ids).logits)


def damaged(saved: Path, out: Path, change) -> Path:
    out.mkdir()
    for file in ("config.json", SHIM_FILE):
        (out / file).write_bytes((saved / file).read_bytes())
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.mixer.gates.bias",
        "model.layers.0.self_attn.attn.k_proj.bias",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor_is_named(saved, tmp_path, name):
    path = damaged(saved, tmp_path / "x", lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=f"missing {name}"):
        AutoModelForCausalLM.from_pretrained(path)


def test_an_unexpected_and_a_mismatched_tensor_are_named(saved, tmp_path):
    def change(tensors):
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(3)

    path = damaged(saved, tmp_path / "x", change)
    with pytest.raises(UserError) as error:
        AutoModelForCausalLM.from_pretrained(path)
    text = str(error.value)
    assert "unexpected model.layers.2.self_attn.q_proj.weight" in text
    assert "model.norm.weight (3,) for (64,)" in text and "missing" not in text.split(": ", 1)[0]
    assert "\n" not in text


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixers_stay_fp32_in_a_low_precision_model(saved, dtype):
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    mixers = mixer_tensors(model.config)
    want = load_file(saved / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name in mixers else dtype), name
        if name in mixers:
            assert torch.equal(tensor, want[name])
    ids, logits = expected(saved)["ids"], expected(saved)["logits"]
    got = model(ids).logits
    assert got.dtype == dtype
    assert (got.float() - logits).norm() < 0.05 * logits.norm()
    generate(model, ids)


def test_a_student_is_built_in_the_wanted_precision():
    config = teacher_model("qwen2").config
    model = build_student(config, {"mixers": LAYOUTS["hybrid"]}, dtype=torch.bfloat16)
    mixers = mixer_tensors(model.config)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name in mixers else torch.bfloat16), name


@torch.no_grad()
def test_pickle_and_deepcopy():
    model = student_of("llama", "hybrid")
    ids = text(2, 8)
    tokens, logits = generate(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other_tokens, other_logits = generate(other, ids)
        assert torch.equal(other_tokens, tokens) and torch.equal(other_logits, logits)
        for weight in other.model.layers[0].self_attn.mixer.parameters():
            weight.zero_()
        assert not torch.equal(other(ids).logits, model(ids).logits)


def test_initialisation_reaches_the_mixers():
    """And is the same each time, whatever the random numbers of the modules around them."""
    mixers = LAYOUTS["hybrid"] | {1: NATIVE}
    model = make_student(teacher_model("llama"), mixers)
    fresh = build_student(teacher_model("llama").config, {"mixers": mixers})
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    for name in mixer_tensors(model.config):
        assert torch.equal(model.state_dict()[name], fresh.state_dict()[name]), name


def test_classes_of_every_family_are_registered():
    for family in FAMILIES.values():
        config = student_module.CONFIGS[family.student_type]
        assert type(AutoConfig.for_model(family.student_type)) is config
        assert AutoModelForCausalLM._model_mapping[config] is student_module.MODELS[family.student_type]
        assert issubclass(student_module.MODELS[family.student_type], family.causal_lm_class())


def test_versions_of_transformers():
    check_transformers("5.24.0")
    check_transformers("5.39.2.dev0")
    for version in ("4.57.1", "5.23.9", "5.40.0", "6.0"):
        with pytest.raises(UserError, match="transformers>=5.24,<5.40"):
            check_transformers(version)


# ---- other processes ------------------------------------------------------------------------------------------------

ROOT = Path(student_module.__file__).parents[1]

IMPORTED = """
import sys, torch, linearize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
path, expected = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path)
want = load_file(expected)
with torch.no_grad():
    assert torch.equal(model(want["ids"]).logits, want["logits"])
tokenizer = AutoTokenizer.from_pretrained(path)
assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"
"""

# The shim alone: nothing here imports the package. Ends with lm-eval's own loader, batch 1 against batch 3.
REMOTE = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
path, expected, copy, tasks = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("loaded without trust")
assert "linearize" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
want = load_file(expected)
with torch.no_grad():
    assert torch.equal(model(want["ids"]).logits, want["logits"])
model.save_pretrained(copy)
AutoTokenizer.from_pretrained(path, trust_remote_code=True).save_pretrained(copy)
with torch.no_grad():
    again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)
    assert torch.equal(again(want["ids"]).logits, want["logits"])

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path=tasks, include_defaults=False)
results = []
for batch in (1, 3):
    out = simple_evaluate(
        model="hf",
        model_args={"pretrained": copy, "dtype": "float32", "trust_remote_code": True},
        tasks=["tiny_choice", "tiny_generation"],
        task_manager=manager,
        batch_size=batch,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    results.append({name: [s["resps"] for s in samples] for name, samples in out["samples"].items()})
print(json.dumps(results))
"""

TASKS = {
    "tiny_choice": """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "tiny_generation": """
task: tiny_generation
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def run(script: str, *args, home: Path) -> str:
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, env=env, cwd=home, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fresh_process_with_import(saved, tmp_path):
    run(IMPORTED, saved, saved.parent / "expected.safetensors", home=tmp_path)


def test_fresh_process_with_trust_and_lm_eval(saved, tmp_path):
    questions = ["Why?", "What is the colour of the sky at noon?", "Two and two", "a", "Then he said that"]
    docs = [
        {"question": q, "choices": ["yes", " no, never", " x" * (1 + i)], "answer": i % 3}
        for i, q in enumerate(questions)
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tasks / 'docs.jsonl'}}}}}\ntest_split: test\n"
    for name, body in TASKS.items():
        (tasks / f"{name}.yaml").write_text(body + source)
    out = run(REMOTE, saved, saved.parent / "expected.safetensors", tmp_path / "copy", tasks, home=tmp_path)
    one, three = json.loads(out.splitlines()[-1])
    assert len(one["tiny_choice"]) == len(one["tiny_generation"]) == 5
    assert one["tiny_generation"] == three["tiny_generation"]
    scores = [torch.tensor([[float(c[0][0]) for c in doc] for doc in r["tiny_choice"]]) for r in (one, three)]
    torch.testing.assert_close(*scores, **CLOSE)
    assert scores[0].std() > 0.1


def test_shim_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "linearize", None)
    with pytest.raises(ImportError, match="pip install linearize"):
        exec(SHIM, {})
