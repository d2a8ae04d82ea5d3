"""Text sampled from the teacher: its distribution, its borders, its cache, and steps that a CUDA graph can hold."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import TEACHERS, teacher_model, tiny_tokenizer
from test_data import make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from linearize.data import Loader, content_hash, open_sources, sample_text, self_text
from linearize.data.sampling import _Prompt, _Sampler
from linearize.errors import UserError


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        # The 7 ids beyond the tokenizer's vocabulary are padding of the embedding: no document may start with them.
        vocab_size=70, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()



def test_sampled_rows_are_full_documents_of_the_teacher(model):
    reported = []
    rows = self_text(model, make_tokenizer(), 190, 40, seed=5, batch_size=3, progress=reported.append)
    assert rows.ids.shape == rows.positions.shape == (5, 40)
    assert sum(reported) == rows.tokens == 200
    starts = rows.positions == 0
    assert starts[:, 0].all() and starts.sum() > 5  # some documents end before their row does
    assert (rows.ids[starts] == 1).all()
    seconds = rows.ids[rows.positions == 1]
    assert ((seconds >= 3) & (seconds < 63)).all()  # neither special nor padding of the embedding
    for ids, positions in zip(rows.ids.tolist(), rows.positions.tolist(), strict=True):
        for t in range(1, 40):
            ended = ids[t - 1] == 2 and positions[t - 1] > 1
            assert positions[t] == (0 if ended else positions[t - 1] + 1)


def test_a_sampled_document_does_not_see_the_one_before(model):
    """Nearly greedy sampling makes each token a function of its document alone, which is then recomputed alone."""
    rows = self_text(model, make_tokenizer(), 40 * 8, 40, seed=5, batch_size=8, temperature=1e-4)
    checked = 0
    for ids, positions in zip(rows.ids, rows.positions, strict=True):
        borders = [*torch.where(positions == 0)[0].tolist(), 40]
        for start, stop in zip(borders, borders[1:], strict=False):
            if start and stop - start > 2:
                with torch.no_grad():
                    best = model(ids[None, start:stop]).logits[0].argmax(-1)
                assert torch.equal(best[1:-1], ids[start + 2 : stop])
                checked += 1
    assert checked >= 3


def test_sampling_follows_the_teacher(model):
    """The model finds its own text likelier than text drawn uniformly."""
    rows = self_text(model, make_tokenizer(bos=False), 1600, 20, seed=0, batch_size=16)

    def loss(ids):
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    noise = torch.randint(3, 63, rows.ids.shape, generator=torch.Generator().manual_seed(0))
    assert loss(rows.ids) < loss(noise) - 0.5
    assert ((rows.ids[:, 0] >= 3) & (rows.ids[:, 0] < 63)).all()


def test_sampling_resumes_to_the_same_rows(model, tmp_path):
    arguments = dict(seed=1, batch_size=2)
    whole = self_text(model, make_tokenizer(), 160, 16, **arguments)
    calls = []

    def killed(tokens):
        calls.append(tokens)
        if len(calls) == 3:  # in the third batch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_text(model, make_tokenizer(), 160, 16, cache_path=tmp_path, progress=killed, **arguments)
    kept = sorted(tmp_path.rglob("*.safetensors"))
    assert len(kept) == 2 and not list(tmp_path.rglob("*.tmp"))
    before = [file.stat().st_mtime_ns for file in kept]
    torch.rand(7)  # the global generator plays no part
    resumed = self_text(model, make_tokenizer(), 160, 16, cache_path=tmp_path, **arguments)
    assert content_hash(resumed) == content_hash(whole)
    assert [file.stat().st_mtime_ns for file in kept] == before  # taken from the disk, not sampled again
    kept[0].write_bytes(b"damaged")
    again = self_text(model, make_tokenizer(), 160, 16, cache_path=tmp_path, **arguments)
    assert content_hash(again) == content_hash(whole)


def test_sampled_rows_do_not_depend_on_how_many_are_asked_for(model):
    few = self_text(model, make_tokenizer(), 48, 16, seed=1, batch_size=4)
    many = self_text(model, make_tokenizer(), 160, 16, seed=1, batch_size=4)
    assert torch.equal(many.ids[:3], few.ids)
    other = self_text(model, make_tokenizer(), 48, 16, seed=2, batch_size=4)
    assert not torch.equal(other.ids, few.ids)


def test_another_teacher_never_reads_the_cache_of_the_first(model, tmp_path):
    first = self_text(model, make_tokenizer(), 32, 16, cache_path=tmp_path, batch_size=2)
    torch.manual_seed(1)
    other = LlamaForCausalLM(model.config).eval()
    second = self_text(other, make_tokenizer(), 32, 16, cache_path=tmp_path, batch_size=2)
    assert not torch.equal(first.ids, second.ids)
    assert len(list(tmp_path.iterdir())) == 2


def test_sampling_errors(model, tmp_path):
    with pytest.raises(UserError, match="temperature must be positive"):
        self_text(model, make_tokenizer(), 32, 16, temperature=0)
    with pytest.raises(UserError, match="nothing to sample"):
        self_text(model, make_tokenizer(), 0, 16)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be kept"):
        self_text(model, make_tokenizer(), 16, 8, batch_size=2, cache_path=tmp_path / "file")
    broken = LlamaForCausalLM(model.config).eval()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(UserError, match="not finite"):
        self_text(broken, make_tokenizer(), 16, 8, batch_size=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_logit_that_is_not_finite_is_noticed(model, value):
    broken = copy.deepcopy(model)
    broken.lm_head.register_forward_hook(lambda head, args, logits: logits.index_fill(-1, torch.tensor([5]), value))
    with pytest.raises(UserError, match="not finite"):
        self_text(broken, make_tokenizer(), 16, 8, batch_size=2)


def sampler_of(model, tokenizer, context, batch, temperature=1.0, graphs=False):
    prompt = _Prompt(model, tokenizer, next(model.parameters()).device)
    return _Sampler(model, prompt, context, batch, temperature, graphs)


@pytest.fixture
def short_reads(monkeypatch):
    """The cache is read in several lengths within a short row."""
    monkeypatch.setattr("linearize.data.sampling.READ_STEP", 16)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_family_samples_what_it_would_alone(name, short_reads):
    """Nearly greedy: each token is the likeliest one after the document so far, sliding windows and all."""
    model = teacher_model(name)
    rows = self_text(model, tiny_tokenizer(), 3 * 44, 44, batch_size=3, temperature=1e-5)
    checked = 0
    for ids, positions in zip(rows.ids, rows.positions, strict=True):
        borders = [*torch.where(positions == 0)[0].tolist(), 44]
        for start, stop in zip(borders, borders[1:], strict=False):
            with torch.no_grad():
                logits = model(ids[None, start:stop]).logits[0, :-1]
            taken = logits.gather(-1, ids[start + 1 : stop, None])[:, 0]
            # The first one or two tokens are not the model's.
            assert ((logits.max(-1).values - taken)[1:] < 1e-3).all()
            checked += max(0, stop - start - 2)
    assert checked > 60


class HostLooks(TorchDispatchMode):
    """Counts operations that wait for a value on the host, which no CUDA graph can hold."""

    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(wait in str(function) for wait in self.waits):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TEACHERS)
def test_a_step_never_waits_for_the_device_and_keeps_its_tensors(name, short_reads):
    sampler = sampler_of(teacher_model(name), tiny_tokenizer(), 40, 2)
    with torch.inference_mode():
        sampler._step(16)  # sets the cache up
        buffers = [value for value in vars(sampler).values() if isinstance(value, torch.Tensor)]
        buffers += [tensor for layer in sampler.cache.layers for tensor in (layer.keys, layer.values)]
        places = [tensor.data_ptr() for tensor in buffers]
        with HostLooks() as looks:
            for length in (16, 32, 40):
                sampler._step(length)
    assert not looks.seen
    now = [value for value in vars(sampler).values() if isinstance(value, torch.Tensor)]
    now += [tensor for layer in sampler.cache.layers for tensor in (layer.keys, layer.values)]
    assert [tensor.data_ptr() for tensor in now] == places and sampler.slot.item() == 4


class Strangers(TorchDispatchMode):
    """Notes operations that take a tensor from another device than the model's."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.seen += [str(function) for tensor in tensors if tensor.device.type != "meta"]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TEACHERS)
def test_a_step_needs_no_values_and_no_copies_from_the_host(name, monkeypatch):
    """On the meta device a tensor has no value to look at; a copy from the host would stop a capture too."""
    model = copy.deepcopy(teacher_model(name)).to("meta", torch.bfloat16)
    monkeypatch.setattr(torch, "Generator", lambda device: None)
    sampler = sampler_of(model, tiny_tokenizer(), 40, 2)
    with torch.inference_mode():
        sampler._step(16)
        with Strangers() as strangers:
            sampler._step(32)
    assert not strangers.seen


def test_host_looks_are_noticed():
    with HostLooks() as looks:
        torch.ones(()).item()
    assert looks.seen


def test_tokens_are_drawn_from_the_softmax(model):
    """Second tokens of many rows that begin alike, at two temperatures."""
    sampler = sampler_of(model, make_tokenizer(bos=False), 2, 20_000)
    sampler.prompt.starts.fill_(7)
    with torch.no_grad():
        logits = model(torch.tensor([[7]])).logits[0, -1]
    for temperature in (1.0, 0.5):
        sampler.temperature = temperature
        drawn = sampler.sample(0, 0, lambda steps: None)["ids"]
        assert (drawn[:, 0] == 7).all()
        share = torch.bincount(drawn[:, 1], minlength=70) / len(drawn)
        assert (share - torch.softmax(logits / temperature, -1)).abs().sum() < 0.06


def test_lengths_of_reading_do_not_change_the_text(model, monkeypatch):
    plain = self_text(model, make_tokenizer(), 120, 40, batch_size=3)
    monkeypatch.setattr("linearize.data.sampling.READ_STEP", 8)
    assert content_hash(self_text(model, make_tokenizer(), 120, 40, batch_size=3)) == content_hash(plain)


def test_processes_share_the_batches(model, tmp_path):
    arguments = dict(seed=1, batch_size=2, cache_path=tmp_path)
    whole = self_text(model, make_tokenizer(), 160, 16, seed=1, batch_size=2)
    parts = [sample_text(model, make_tokenizer(), 160, 16, rank=rank, world=2, **arguments) for rank in (0, 1)]
    for part in parts:
        assert torch.equal(torch.cat([rows.ids for rows in part.batches]), whole.ids)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5
    with pytest.raises(UserError, match="share sampled text through a folder"):
        sample_text(model, make_tokenizer(), 160, 16, rank=0, world=2)


def test_the_batch_size_of_kept_batches_is_used_again(model, tmp_path):
    first = self_text(model, make_tokenizer(), 64, 16, batch_size=2, cache_path=tmp_path)
    more = self_text(model, make_tokenizer(), 96, 16, cache_path=tmp_path)
    assert torch.equal(more.ids[:4], first.ids) and len(list(tmp_path.iterdir())) == 1


def test_sampled_text_feeds_the_loader_and_is_read_batch_by_batch(model, tmp_path):
    def loader():
        sampled = sample_text(model, make_tokenizer(), 112, 16, batch_size=2, cache_path=tmp_path)
        return Loader(open_sources("self", sampled=sampled), make_tokenizer(), 16, 1, seed=0), sampled

    stream, sampled = loader()
    epoch = [next(stream) for _ in range(7)]
    rows = torch.cat([rows.ids for rows in sampled.batches])
    assert sorted(torch.cat([batch.ids for batch in epoch]).tolist()) == sorted(rows.tolist())
    state = stream.state_dict()
    following = [next(stream).ids for _ in range(7)]
    assert [ids.tolist() for ids in following] != [batch.ids.tolist() for batch in epoch]
    again, _ = loader()
    again.load_state_dict(state)
    assert all(torch.equal(next(again).ids, ids) for ids in following)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="part of the sampled text is gone"):
        list(sampled.batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TEACHERS)
def test_graphs_sample_what_plain_steps_sample(name, short_reads, recwarn):
    model = copy.deepcopy(teacher_model(name)).to("cuda", torch.bfloat16)
    arguments = dict(seed=3, batch_size=4, device="cuda")
    plain = self_text(model, tiny_tokenizer(), 12 * 48, 48, graphs=False, **arguments)
    replayed = self_text(model, tiny_tokenizer(), 12 * 48, 48, graphs=True, **arguments)
    assert torch.equal(plain.ids, replayed.ids)
    assert not [warning for warning in recwarn if "CUDA graphs" in str(warning.message)]


class PretendGraph:
    """Runs the step again that was made while it was captured."""

    def register_generator_state(self, generator):
        self.generator = generator

    def pool(self):
        return "pool"

    def replay(self):
        self.again()


@pytest.mark.parametrize("fail", [False, True])
def test_graphs_are_made_once_for_every_length_and_used(model, monkeypatch, short_reads, fail):
    step, made = _Sampler._step, []

    @contextlib.contextmanager
    def capture(graph, pool):
        if fail:
            raise RuntimeError("not here")
        before = len(made)
        yield
        [sampler, length] = made[before]
        graph.again = lambda: step(sampler, length)
        assert pool == ("pool" if captured else None) and graph.generator is sampler.generator
        captured.append(length)

    def recorded(self, length):
        made.append((self, length))
        step(self, length)

    captured: list[int] = []
    plain = self_text(model, make_tokenizer(), 160, 40, batch_size=2)
    monkeypatch.setattr(_Sampler, "_step", recorded)
    nothing = SimpleNamespace(wait_stream=lambda stream: None)
    for name, value in (
        ("CUDAGraph", PretendGraph), ("graph", capture), ("Stream", lambda: nothing),
        ("current_stream", lambda: nothing), ("stream", lambda stream: contextlib.nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.warns(UserWarning, match="without CUDA graphs") if fail else contextlib.nullcontext():
        rows = self_text(model, make_tokenizer(), 160, 40, batch_size=2, graphs=True)
    assert content_hash(rows) == content_hash(plain)
    assert captured == ([] if fail else [16, 32, 40])
    # Three steps to warm up, three captured; then only replays, or only plain steps.
    assert len(made) == (3 + 2 * 40 if fail else 6)
