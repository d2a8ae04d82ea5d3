"""What transformers and its neighbours do with a model works for every kind of mixer, or is refused in one line.

A matrix of mixers and features on one small hybrid with biases (Qwen2). Families, caches of other makers and single
requests are in test_student.py.
"""

import copy
import functools

import pytest
import torch
from conftest import SIZES, generator, make_student, randomise, teacher_model
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache, Trainer, TrainingArguments

from linearize.mixers import MIXERS
from linearize.student import mixer_tensors

KINDS = [kind for kind, cls in MIXERS.items() if cls.__module__.startswith("linearize.")]
LAYOUTS = {"hybrid": (0, 2), "linear": (0, 1, 2, 3)}

# Logits of order 1 in fp32: sums are taken in another order, nothing else differs.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
EVERY = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def student(kind: str, layout: str = "hybrid"):
    """Shared: do not change it."""
    return make_student(teacher_model("qwen2"), {i: {"kind": kind} for i in LAYOUTS[layout]})


def text(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 260, (batch, length), generator=generator(seed))


def padded_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of 11, two of them left-padded, and their mask."""
    ids, mask = text(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, :4], mask[2, :7] = 0, 0
    return ids * mask, mask


def generate(model, ids, mask=None, **options):
    """Greedy. Returns (all tokens, logits of the new ones [B, N, vocab])."""
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0} | options
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return out.sequences, torch.stack(out.logits, dim=1)


# ---- generation -----------------------------------------------------------------------------------------------------


@EVERY
@torch.no_grad()
def test_batched_left_padded_generation_is_each_row_alone(kind):
    model = student(kind)
    ids, mask = padded_text()
    tokens, logits = generate(model, ids, mask)
    for row in range(3):
        alone = ids[row : row + 1, mask[row] == 1]
        alone_tokens, alone_logits = generate(model, alone, use_cache=False)
        assert torch.equal(tokens[row, 11:], alone_tokens[0, alone.shape[1] :])
        torch.testing.assert_close(logits[row], alone_logits[0], **CLOSE)
        full = model(tokens[row : row + 1, mask[row].argmax() :], use_cache=False).logits
        torch.testing.assert_close(logits[row], full[0, -5:-1], **CLOSE)


@EVERY
@torch.no_grad()
def test_right_padded_scoring_with_and_without_a_mask(kind):
    """As lm-eval scores: the padding follows what counts."""
    model, ids = student(kind), text(2, 12)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, 7:], mask[1, 7:] = 0, 0
    want = model(ids[1:, :7]).logits[0]
    for masked in (None, mask):
        torch.testing.assert_close(model(padded, attention_mask=masked).logits[1, :7], want, **CLOSE)


@EVERY
@torch.no_grad()
def test_beams_reorder_the_states(kind):
    model = student(kind)
    ids, mask = padded_text()
    options = {"num_beams": 3, "num_return_sequences": 2}
    cached = generate(model, ids, mask, **options)[0]
    assert torch.equal(cached, generate(model, ids, mask, use_cache=False, **options)[0])


@EVERY
@torch.no_grad()
def test_static_cache(kind):
    model = student(kind)
    ids, mask = padded_text()
    tokens, logits = generate(model, ids, mask)
    static_tokens, static = generate(model, ids, mask, cache_implementation="static")
    assert torch.equal(static_tokens, tokens)
    torch.testing.assert_close(static, logits, **CLOSE)


@EVERY
@torch.no_grad()
def test_turns_of_a_chat_are_one_long_prompt(kind):
    """The cache of one answer is carried to the next question; each turn equals starting from nothing."""
    model = student(kind, "linear")
    history, cache = text(1, 5), None
    for turn in range(2):
        out = model.generate(
            history,
            attention_mask=torch.ones_like(history),
            cache=cache,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        fresh_tokens, fresh = generate(model, history)
        assert torch.equal(out.sequences, fresh_tokens)
        torch.testing.assert_close(torch.stack(out.logits, 1), fresh, **CLOSE)
        cache = out.cache
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        history = torch.cat([out.sequences, text(1, 3, seed=turn + 1)], dim=1)


@EVERY
@torch.no_grad()
def test_position_ids_that_go_on_are_no_position_ids(kind):
    model, ids = student(kind), text(2, 12)
    want = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        positions = torch.arange(start, end).expand(2, -1)
        out = model(ids[:, start:end], position_ids=positions, cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)


@EVERY
@pytest.mark.parametrize("request_", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_decoding_that_rolls_back_is_refused_in_one_line(kind, request_):
    request_ = {name: teacher_model("qwen2") if value is True else value for name, value in request_.items()}
    with pytest.raises(ValueError, match="stateful") as error:
        student(kind).generate(text(1, 5), max_new_tokens=4, **request_)
    assert "\n" not in str(error.value).strip()


@EVERY
@torch.no_grad()
def test_the_decode_step_compiles_without_a_break(kind):
    """With a static cache, and twice only: the token count is a number first and a symbol from then on."""
    config = Qwen2Config(**SIZES | {"num_hidden_layers": 2})
    teacher = Qwen2ForCausalLM(config).eval()
    randomise(teacher, 0)
    model, ids = make_student(teacher, {0: {"kind": kind}}), text(1, 12)
    want = model(ids, use_cache=False).logits
    torch.compiler.reset()
    counters.clear()
    cache = StaticCache(config=model.config, max_cache_len=16)
    pieces = [model(ids[:, :6], cache=cache).logits]
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for t in range(6, 12):
        pieces.append(step(ids[:, t : t + 1], cache=cache).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


# ---- training -------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_packed_documents_are_separate(kind, layout):
    model, ids = student(kind, layout), text(2, 12)
    lengths = [(5, 7), (1, 11)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = model(ids, position_ids=positions).logits
    for row, (first, _) in enumerate(lengths):
        for part in (slice(0, first), slice(first, 12)):
            alone = model(ids[row : row + 1, part], use_cache=False).logits
            torch.testing.assert_close(packed[row : row + 1, part], alone, **CLOSE)


def gradients(model, ids, **kwargs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **kwargs).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@EVERY
def test_gradient_checkpointing_and_a_cache_change_no_gradient(kind):
    model, ids = copy.deepcopy(student(kind)).train(), text(2, 10)
    plain = gradients(model, ids, use_cache=False)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert set(plain) == trained
    assert all(plain[name].isfinite().all() and plain[name].any() for name in mixer_tensors(model.config))
    cached = gradients(model, ids, use_cache=True)
    model.activation_checkpointing_enable()
    checkpointed = gradients(model, ids)
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@EVERY
def test_autocast_trains(kind):
    model, ids = copy.deepcopy(student(kind)).train(), text(2, 10)
    plain = model(ids, labels=ids, use_cache=False).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    assert abs(float(loss.detach() - plain.detach())) < 0.05 * float(plain.detach())
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@EVERY
def test_a_trainer_step(kind, tmp_path):
    """Every weight moves, the loss falls, and what the Trainer saves loads again."""
    model = copy.deepcopy(student(kind))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [{"input_ids": row, "labels": row} for row in text(4, 16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=3e-3,
        activation_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]
    after = model.state_dict()
    assert all(not torch.equal(after[name], weight) for name, weight in before.items())
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(weight, after[name]) for name, weight in again.state_dict().items())


@EVERY
def test_lora(kind, tmp_path):
    """Adapters on projections inside and outside of converted layers: train, save, load, merge."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'linearize[test]'")
    base, ids = copy.deepcopy(student(kind)), text(2, 10)
    want = base(ids).logits
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "in_proj_qkv", "down_proj"])
    model = peft.get_peft_model(base, options)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    inside = "mixer.in_proj_qkv" if kind == "gdn-native" else "attn.q_proj"
    assert {f"base_model.model.model.layers.{i}.self_attn.{inside}" for i in (0, 2)} <= adapted
    torch.testing.assert_close(model(ids).logits, want, **CLOSE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # an adapter's first half gets no gradient before its second half has moved
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_" in name)
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    model.eval()
    tuned = model(ids).logits.detach()
    assert (tuned - want).abs().max() > 1e-2
    tokens = generate(model, ids)[0]
    assert torch.equal(tokens, generate(model, ids, use_cache=False)[0])
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(student(kind)), tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, tuned, **CLOSE)
    merged = loaded.merge_and_unload()
    assert type(merged) is type(base)
    torch.testing.assert_close(merged(ids).logits, tuned, atol=1e-3, rtol=1e-3)  # the sum of two products is now one


# ---- saving and loading ---------------------------------------------------------------------------------------------


@EVERY
@torch.no_grad()
def test_saved_and_loaded_in_every_precision(kind, tmp_path):
    """Bit for bit in fp32, also when device_map leaves weights on disk; in half precision the mixers stay fp32."""
    model, ids = student(kind), text(2, 9)
    model.save_pretrained(tmp_path)
    want, state = model(ids).logits, model.state_dict()
    for options in ({}, {"max_memory": {"cpu": "300KB"}, "offload_folder": tmp_path / "offload"}):
        placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto", **options)
        assert ("disk" in getattr(placed, "hf_device_map", {}).values()) is bool(options)
        assert torch.equal(placed(ids).logits, want)
    allowed = {torch.float32: 0.0, torch.bfloat16: 0.1, torch.float16: 0.02}
    for dtype, error in allowed.items():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        mixers = mixer_tensors(loaded.config)
        for name, tensor in loaded.state_dict().items():
            exact = name in mixers or dtype == torch.float32
            assert tensor.dtype == (torch.float32 if exact else dtype), name
            assert not exact or torch.equal(tensor, state[name]), name
        got = loaded(ids).logits
        assert got.dtype == dtype and (got.float() - want).norm() <= error * want.norm()
        assert generate(loaded, ids)[0].shape == (2, 13)
