"""Stage 2 on a tiny student: it learns, every way of computing a step agrees, and it survives what goes wrong."""

import copy
import dataclasses
import functools
import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, generator, make_student, randomise, teacher_model
from transformers import LlamaConfig, LlamaForCausalLM

from linearize import causal, mixers
from linearize import distill as distill_module
from linearize.checkpoint import RunState
from linearize.data import Rows
from linearize.distill import Pass, Trainer, choose_trained, parameter_groups, passes
from linearize.errors import UserError
from linearize.kl import chunked_kl
from linearize.metrics import Metrics
from linearize.mixers.expansion import Layout
from linearize.processes import Processes
from linearize.recipe import Distill

HERE = Processes(torch.device("cpu"))
OPTIONS = Distill(
    tokens=6 * 64, context=16, batch_tokens=64, micro_tokens=32, lr=1e-3, lr_mixer=3e-3, warmup=2, checkpointing=False
)
MIXERS = {0: {"kind": "gdn", "taps": 2, "time_scales": 1}, 2: {"kind": "gdn-standard"}}
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "vocab_size": 40}


class Batch:
    def __init__(self, ids, positions):
        self.ids, self.positions = ids, positions


class Loader:
    """Endless random rows of two or three documents each; batch n is a function of n alone."""

    def __init__(self, context: int, rows: int, here: Processes = HERE):
        self.context, self.rows, self.here, self.number = context, rows, here, 0

    def __iter__(self):
        while True:
            self.number += 1
            yield self.batch(self.number)

    def batch(self, number: int) -> Batch:
        draw = generator(number)
        ids = torch.randint(4, 40, (self.rows, self.context), generator=draw)
        positions = torch.arange(self.context).repeat(self.rows, 1)
        for row in positions:
            cut = int(torch.randint(1, self.context, (), generator=draw))
            row[cut:] -= cut
        mine = slice(self.here.rank, None, self.here.world)
        return Batch(ids[mine], positions[mine])

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer(options: Distill = OPTIONS, name: str = "", dtype=torch.float32, loader=Loader, **kwargs) -> Trainer:
    """A trainer for the student of a teacher of conftest, or of one with a single layer, which is much faster."""
    if name:
        teacher, mixers = teacher_model(name), MIXERS
    else:
        torch.manual_seed(0)
        teacher, mixers = LlamaForCausalLM(LlamaConfig(**SIZES | SMALL)), {0: {"kind": "gdn-standard"}}
        randomise(teacher, 0)
    student = make_student(teacher, mixers).to(dtype)
    return Trainer(student, copy.deepcopy(teacher).to(dtype), options, loader, HERE, **kwargs)


def changed(**changes) -> Distill:
    return Distill(**vars(OPTIONS) | changes)


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.student.named_parameters()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients_of(made: Trainer, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = made.gradients(batch.ids, batch.positions, batch.ids.numel())
    found = {name: p.grad.clone() for name, p in made.weights.items()}
    made.optimizer.zero_grad(set_to_none=True)
    return loss, found


def agree(one, other, rtol: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=rtol)
    for name in one[1]:
        scale = float(one[1][name].abs().max())
        assert float((one[1][name] - other[1][name]).abs().max()) <= rtol * scale, name


# ---- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied", "granite", "gemma2", "qwen3"])
def test_a_step_is_the_mean_kl_of_plain_models(name):
    """Loss and gradient against transformers' own logits of each document alone: packed, tied, scaled, capped."""
    made, batch = trainer(name=name, dtype=torch.float64), Loader(16, 4).batch(1)
    got = gradients_of(made, batch)
    made.student.eval()
    total = 0.0
    for ids, positions in zip(batch.ids, batch.positions, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in zip(starts, starts[1:], strict=False):
            piece = ids[None, start:end]
            q = F.log_softmax(made.student(piece, use_cache=False).logits, -1)
            with torch.no_grad():
                p = F.log_softmax(made.targets.teacher(piece, use_cache=False).logits, -1)
            total = total + (p.exp() * (p - q)).sum()
    total = total / batch.ids.numel()
    total.backward()
    # fp32 inside the rotary tables and norms of transformers.
    agree((float(total.detach()), {n: p.grad for n, p in made.weights.items()}), got, 1e-5)


def test_rows_that_may_be_captured_have_a_mask_or_none_in_plain_runs_too(monkeypatch):
    """What runs plainly first is what is captured, where transformers cannot look at the positions.

    For compiled layers short rows of one document each have a mask as well, so that they compile once.
    """
    seen, batch = [], Loader(16, 4).batch(1)
    whole = Batch(batch.ids, torch.arange(16).expand(4, -1))

    def masks(replays: bool, batch: Batch, compiled: bool = False) -> list[bool]:
        made = trainer(name="llama-tied")
        made.options = dataclasses.replace(made.options, compile=compiled)
        for model in (made.student, made.targets.teacher):
            model.config._attn_implementation = causal.NAME
            layer = model.model.layers[1]  # softmax in both
            layer.register_forward_pre_hook(
                lambda _, __, given: seen.append(given["attention_mask"] is not None), with_kwargs=True
            )
        made.replays = made.tells = replays
        seen.clear()
        results.append(gradients_of(made, batch))
        return sorted(set(seen))

    results = []
    assert masks(True, batch) == [True] and masks(True, whole, compiled=True) == [True]
    assert masks(True, whole) == [False] and masks(False, whole) == [False]
    agree(results[1], results[2], 2e-5)
    agree(results[1], results[3], 2e-5)
    monkeypatch.setattr("linearize.student.SHORT_ROWS", 8)
    assert masks(True, whole, compiled=True) == [False] and masks(True, batch, compiled=True) == [True]


@pytest.mark.parametrize("whole", [False, True])
def test_mixers_are_told_how_many_documents_there_are(whole, monkeypatch):
    """In training and in measuring, also where nothing is captured: they would ask the GPU, each of them."""
    told, of, batch = [], Layout.of, Loader(16, 4).batch(1)
    monkeypatch.setattr(Layout, "of", lambda x, segments, **more: told.append(segments.documents) or of(x, segments))
    positions = torch.arange(16).repeat(4, 1) if whole else batch.positions
    found = []
    for tells in (False, True):
        made = trainer()
        made.tells = tells
        told.clear()
        found.append((gradients_of(made, Batch(batch.ids, positions)), made.measure(Rows(batch.ids, positions))))
        assert set(told) == ({2 if whole else 8} if tells else {None})  # rows, or four documents in each of two rows
    agree(found[0][0], found[1][0], 2e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_accumulated_is_one_big_batch():
    batch = Loader(16, 4).batch(1)
    agree(gradients_of(trainer(), batch), gradients_of(trainer(changed(micro_tokens=64)), batch), 2e-5)


def test_checkpointed_is_plain():
    """Packed rows included: the mixers see the same document starts when a layer is computed again."""
    batch, forwards = Loader(16, 4).batch(1), []
    plain, again = trainer(name="qwen3"), trainer(changed(checkpointing=True), name="qwen3")
    for made in (plain, again):
        layer = made.student.model.layers[0].self_attn.mixer
        layer.register_forward_hook(lambda *args, made=made: forwards.append(made))
    agree(gradients_of(plain, batch), gradients_of(again, batch), 1e-6)
    assert forwards.count(plain) == 2 and forwards.count(again) == 4


def test_a_trial_runs_the_teacher_each_time_and_keeps_nothing(tmp_path, monkeypatch):
    made, seen = trainer(changed(top_k=4, cache=str(tmp_path))), []
    made.targets.teacher.model.register_forward_hook(lambda *_: seen.append(1))
    made.trial()
    assert not list(tmp_path.iterdir()), "random text"
    assert len(seen) == 2, "its time counts in the step that is measured"
    batch = Loader(16, 4).batch(1)
    made.gradients(batch.ids, batch.positions, 64)
    assert len(list(tmp_path.iterdir())) == 2


def test_targets_of_another_teacher_or_number_format_are_not_taken(tmp_path):
    options, batch = changed(top_k=4, cache=str(tmp_path)), Loader(16, 4).batch(1)
    for count, (dtype, identity) in enumerate(
        [(torch.float32, {"files": "a"}), (torch.float32, {"files": "b"}), (torch.bfloat16, {"files": "b"})], 1
    ):
        trainer(options, dtype=dtype, identity=identity).gradients(batch.ids, batch.positions, 64)
        assert len(list(tmp_path.iterdir())) == 2 * count


def test_temperature_and_top_k_reach_the_loss():
    batch = Loader(16, 4).batch(1)
    losses = [gradients_of(trainer(changed(**c)), batch)[0] for c in ({}, {"temperature": 2.0}, {"top_k": 8})]
    assert losses[2] < losses[0] and losses[1] != losses[0]
    whole = gradients_of(trainer(changed(top_k=39)), batch)
    agree(gradients_of(trainer(), batch), whole, 1e-4)


def test_kept_targets_stand_in_for_the_teacher(tmp_path):
    options = changed(top_k=8, cache=str(tmp_path / "cache"))
    batch = Loader(16, 4).batch(1)
    first = gradients_of(trainer(options), batch)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2 and not list(tmp_path.rglob("*.partial"))
    made = trainer(options)
    made.targets.teacher = None
    agree(first, gradients_of(made, batch), 0.0)
    other = trainer(options, identity={"teacher": "another"})
    other.targets.teacher = None
    with pytest.raises(AttributeError):
        gradients_of(other, batch)


@pytest.mark.parametrize("kind", [k for k, c in mixers.MIXERS.items() if c.__module__.startswith("linearize.")])
def test_in_bf16_arithmetic(kind, monkeypatch):
    """As on a GPU, by the CPU's autocast: bf16 where it may be, packed rows, several chunks of the vocabulary."""
    teacher, batch = teacher_model("llama-tied"), Loader(16, 4).batch(1)
    monkeypatch.setattr(distill_module, "chunked_kl", functools.partial(chunked_kl, chunk=5 * 260))
    seen: list[list[torch.dtype]] = []

    def computed(bf16: bool, rounded: bool = False):
        student = make_student(teacher, {1: {"kind": kind}})
        for p in student.parameters() if rounded else ():
            p.data.copy_(p.data.bfloat16())
        made = Trainer(student, copy.deepcopy(teacher), changed(checkpointing=True), Loader, HERE)
        on_cpu = lambda device: torch.autocast("cpu", torch.bfloat16, enabled=bf16)  # noqa: E731
        monkeypatch.setattr(distill_module, "half_precision", on_cpu)
        mixer = student.model.layers[1].self_attn.mixer
        mixer.register_forward_pre_hook(lambda module, args: seen.append([x.dtype for x in args[1:4] if x is not None]))
        loss, gradients = gradients_of(made, batch)
        assert all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients.values())
        return loss, gradients

    exact, rough = computed(False), computed(True)
    assert rough[0] == pytest.approx(exact[0], rel=0.1) and rough[0] != exact[0]
    if not mixers.MIXERS[kind].own_projections:
        assert seen[0] == [torch.float32] * 3 and seen[-1] == [torch.bfloat16] * 3
    large = max(exact[1], key=lambda name: float(exact[1][name].norm()))

    def apart(other) -> float:
        return float((other[1][large] - exact[1][large]).norm() / exact[1][large].norm())

    # A mixer of random projections is so ill conditioned that bf16 weights alone change its gradients as much.
    assert apart(rough) < 0.2 or apart(rough) < 1.5 * apart(computed(False, rounded=True))


# ---- what trains ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", ["all", "attention", "mixers"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_groups_hold_everything_that_trains_once(train, name):
    student = make_student(teacher_model(name), MIXERS)
    choose_trained(student, train)
    groups = parameter_groups(student)
    listed = [id(p) for parameters in groups.values() for p in parameters]
    named = {n: p for n, p in student.named_parameters() if p.numel()}
    wanted = {
        "all": lambda n: True,
        "attention": lambda n: any(f"layers.{i}.self_attn." in n for i in MIXERS),
        "mixers": lambda n: ".mixer." in n,
    }[train]
    assert len(listed) == len(set(listed)) and set(listed) == {id(p) for n, p in named.items() if wanted(n)}
    for group, parameters in groups.items():
        names = [n for n, p in named.items() if any(p is q for q in parameters)]
        assert all((".mixer." in n) == group.startswith("mixer.") for n in names)


@pytest.mark.parametrize("kind", [k for k, c in mixers.MIXERS.items() if c.__module__.startswith("linearize.")])
def test_every_mixer_names_its_parameters_once(kind):
    student = make_student(teacher_model("llama"), {1: {"kind": kind}})
    own = [p for p in student.model.layers[1].self_attn.mixer.parameters()]
    listed = [p for ps in student.model.layers[1].self_attn.mixer.parameter_groups().values() for p in ps]
    assert sorted(map(id, own)) == sorted(map(id, listed))


@pytest.mark.parametrize("train", ["all", "attention", "mixers"])
def test_only_what_trains_changes_and_at_its_own_rate(train):
    made = trainer(changed(train=train, warmup=0, lr_end=1.0, tokens=64))
    before = weights(made)
    made.train(None)
    for name, p in weights(made).items():
        moved = float((p - before[name]).abs().max()) if p.numel() else 0.0
        trains = {"all": True, "attention": "layers.0.self_attn." in name}.get(
            train, ".mixer." in name
        )
        # The first step of AdamW moves by the learning rate.
        rate = (3e-3 if ".mixer." in name else 1e-3) if trains and p.numel() else 0.0
        assert moved == pytest.approx(rate, rel=0.02), name


def test_rates():
    options = changed(lr_end=0.1, warmup=2)
    at = Pass(16, 4, 0, 12, 1e-3, 3e-3)
    rates = [at.rate(step, options) for step in range(12)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0]) and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[2:], rates[3:], strict=False))
    shifted = Pass(16, 4, 100, 12, 1e-3, 3e-3)
    assert [shifted.rate(step, options) for step in range(100, 112)] == rates
    assert all(0 < Pass(16, 4, 0, n, 1, 1).rate(s, options) <= 1 for n in (1, 2, 3) for s in range(n))


def test_passes():
    options = changed(tokens=640, batch_tokens=70, long_tokens=150, long_context=32, long_lr=5e-5)
    assert passes(options, HERE) == [Pass(16, 4, 0, 10, 1e-3, 3e-3), Pass(32, 2, 10, 2, 5e-5, 5e-5)]
    with pytest.raises(UserError, match=r"4 rows of 16 tokens .* 3 processes .*: set distill.batch_tokens=96"):
        passes(options, Processes(torch.device("cpu"), 0, 3))


# ---- training -------------------------------------------------------------------------------------------------------


def test_it_learns():
    made = trainer(changed(tokens=24 * 64, lr=5e-3, lr_mixer=1e-2))
    said = []
    made.train(None, advance=lambda tokens, **fields: said.append((tokens, fields["loss"])))
    assert len(made.progress.losses) == 24 and said == [(64, loss) for loss in made.progress.losses]
    assert sum(made.progress.losses[-5:]) < 0.6 * sum(made.progress.losses[:5])


def test_ema_is_its_formula():
    options = changed(ema=0.7)
    made, seen = trainer(options), []
    update = made.update

    def recording(at):
        rate = update(at)
        seen.append(weights(made))
        return rate

    mean = weights(made)
    made.update = recording
    made.train(None)
    for at in seen:
        mean = {name: 0.7 * mean[name] + 0.3 * at[name] for name in mean}
    made.finish(torch.float32)
    for name, p in made.student.named_parameters():
        assert torch.allclose(p, mean[name], rtol=1e-5, atol=1e-7), name
        assert not p.numel() or not torch.equal(p, seen[-1][name]), name


def test_the_result_is_what_will_be_written():
    made = trainer(changed(tokens=64))
    made.train(None)
    made.finish(torch.bfloat16)
    for name, p in made.student.named_parameters():
        rounded = torch.equal(p.detach(), p.detach().bfloat16().float())
        assert rounded == (".mixer." not in name) or not p.numel() or p.ndim == 1, name


def test_a_parameter_without_a_gradient_is_an_error():
    made = trainer()
    made.student.model.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    made.weights["spare"] = made.student.model.spare
    with pytest.raises(RuntimeError, match="no gradient reached spare"):
        made.train(None)


def test_measured_like_plain_models():
    made = trainer(name="llama")
    batch = Loader(16, 5).batch(9)
    got = made.measure(Rows(batch.ids, batch.positions))
    kl = agreed = 0.0
    losses, count = torch.zeros(2, dtype=torch.float64), 0
    for ids, positions in zip(batch.ids, batch.positions, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in zip(starts, starts[1:], strict=False):
            piece = ids[None, start:end]
            models = made.targets.teacher, made.student
            with torch.no_grad():
                p, q = (model(piece, use_cache=False).logits[0].log_softmax(-1) for model in models)
            kl += float((p.exp() * (p - q)).sum())
            agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
            losses += torch.stack([F.nll_loss(x[:-1], piece[0, 1:], reduction="sum") for x in (p, q)]).double()
            count += len(piece[0]) - 1
    assert got["tokens"] == count
    assert got["kl"] == pytest.approx(kl / 80, rel=1e-4) and got["top1_agreement"] == pytest.approx(agreed / 80)
    for loss, who in zip((losses / count).tolist(), ("teacher", "student"), strict=True):
        assert math.log(got[f"{who}_perplexity"]) == pytest.approx(loss, rel=1e-5)


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights and losses of the second pass too, of a run that nothing stops."""
    made = trainer(LONG)
    made.train(None)
    return weights(made), made.progress.losses


LONG = changed(ema=0.5, long_tokens=64 * 3, long_context=32, save_steps=2)


def stop_after(made: Trainer, step: int) -> None:
    """The run ends, as a kill would end it, once a step is done."""

    def advance(tokens, **fields):
        if fields and made.progress.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.train(made.run, made.metrics, advance=advance)


@pytest.mark.parametrize("stops", [(1,), (2, 3), (5, 6, 7, 8)])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, uninterrupted, stops):
    for stop in (*stops, None):
        with RunState(tmp_path / "out", {}) as run:
            made = trainer(LONG)
            made.run, made.metrics = run, Metrics(tmp_path / "out")
            if stop is not None:
                stop_after(made, stop)
            else:
                made.train(run, made.metrics)
    expected, losses = uninterrupted
    assert same(weights(made), expected)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10)) and [line["loss"] for line in lines] == losses
    assert [line["tokens"] for line in lines] == [64 * n for n in range(1, 10)]
    assert {"stage", "step", "loss", "lr", "tokens", "tokens_per_second"} <= set(lines[0])
    folders = [path.name for path in (tmp_path / "out/.linearize").glob("training-*")]
    assert folders == ["training-00000009"]


def test_a_finished_run_has_nothing_to_do(tmp_path, uninterrupted):
    with RunState(tmp_path, {}) as run:
        trainer(LONG).train(run)
        again = trainer(LONG)
        again.train(run)
        assert again.progress.losses == uninterrupted[1] and same(weights(again), uninterrupted[0])
        again.finish(torch.float32)
        assert not same(weights(again), uninterrupted[0])  # the mean weights came back as well


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_first(tmp_path, uninterrupted, number):
    before = signal.getsignal(number)
    with RunState(tmp_path, {}) as run:
        made = trainer(changed(**vars(LONG) | {"save_steps": 0}))

        def advance(tokens, **fields):
            if fields and made.progress.step == 3:
                os.kill(os.getpid(), number)

        with pytest.raises(KeyboardInterrupt):
            made.train(run, advance=advance)
        # The step in which the signal came may have been the fourth already.
        assert run.kept_folder("training")[1]["step"] == 4
        assert signal.getsignal(number) == before
        made = trainer(LONG)
        made.train(run)
        assert same(weights(made), uninterrupted[0])


def test_a_damaged_state_says_what_to_do(tmp_path):
    with RunState(tmp_path, {}) as run:
        trainer(LONG).train(run)
        [file] = run.kept_folder("training")[0].glob("*.distcp")
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(UserError, match=r"training state in .* cannot be read .*remove .*training.json"):
            trainer(LONG).train(run)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def poison(made: Trainer, batches: dict[int, float]) -> list[int]:
    """Multiply the losses and gradients of some batches, by their numbers."""
    gradients, calls = made.gradients, []

    def poisoned(ids, positions, tokens):
        loss = gradients(ids, positions, tokens)
        calls.append(made.loader_now.number)
        factor = batches.get(calls[-1])
        if factor is not None:
            for p in made.weights.values():
                p.grad.mul_(factor)
            loss *= factor
        return loss

    made.gradients = poisoned
    loaders = made.loaders

    def remembered(context, rows):
        made.loader_now = loaders(context, rows)
        return made.loader_now

    made.loaders = remembered
    return calls


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_bad_batch_is_skipped(factor):
    """As if it had not been there."""

    class Without(Loader):
        def __iter__(self):
            return (batch for batch in super().__iter__() if self.number != 3)

    made, expected, said = trainer(), trainer(), []
    calls = poison(made, {3: factor})
    made.train(None, say=said.append)
    expected.loaders = Without
    expected.train(None)
    assert calls == [1, 2, 3, 4, 5, 6, 7] and made.progress.skipped == 1 and len(said) == 1
    assert "step 3" in said[0] and "skipped" in said[0]
    assert same(weights(made), weights(expected))


def test_a_spike_is_skipped_once_the_mean_has_settled():
    made = trainer(changed(tokens=14 * 64))
    calls = poison(made, {2: 50.0, 13: 50.0})
    made.train(None)
    assert made.progress.skipped == 1 and calls == list(range(1, 16))
    assert made.progress.losses[1] > 20 * made.progress.losses[0]  # too early to know what is usual


def test_bad_batches_in_a_row_roll_back(tmp_path):
    """To the saved state of step 4, and on behind the batches that were bad."""
    options = changed(save_steps=2, tokens=8 * 64)
    with RunState(tmp_path, {}) as run:
        made, said, metrics = trainer(options), [], Metrics(tmp_path)
        calls = poison(made, dict.fromkeys((6, 7, 8), float("nan")))
        made.train(run, metrics, say=said.append)
    assert calls == list(range(1, 13)) and made.progress.roll_backs == 1 and made.progress.skipped == 3
    assert "rolled back from step 6 to step 4" in said[-1]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9)) and len(made.progress.losses) == 8

    # Step 5, which was made on batch 5, was taken back.
    class Without(Loader):
        def __iter__(self):
            return (batch for batch in super().__iter__() if self.number not in (5, 6, 7, 8))

    expected = trainer(options)
    expected.loaders = Without
    expected.train(None)
    assert same(weights(made), weights(expected))


def test_it_gives_up_in_one_line(tmp_path):
    with RunState(tmp_path, {}) as run:
        made = trainer(changed(save_steps=2))
        calls = poison(made, dict.fromkeys(range(4, 1000), float("nan")))
        with pytest.raises(UserError) as caught:
            made.train(run)
    text = str(caught.value)
    assert "\n" not in text and "step 3, also after 5 roll-backs" in text and "lower distill.lr" in text
    assert len(calls) == 3 + 3 * (distill_module.ROLL_BACKS + 1)


def test_a_run_without_a_state_to_go_back_to_gives_up():
    made = trainer()
    poison(made, dict.fromkeys(range(1, 1000), float("nan")))
    with pytest.raises(UserError, match="diverging at step 1"):
        made.train(None)
