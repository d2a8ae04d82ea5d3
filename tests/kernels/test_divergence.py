"""KL between rows of logits and its gradient in place, against plain float64 autograd: the torch forms, the kernels.

As in test_interpreted.py, the kernels' cases run in a process of their own; on a GPU they run here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from linearize_kernels import kl_divergence_, top_kl_divergence_
from tolerances import TOLERANCE, assert_close

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")


def rows(n, vocabulary, dtype, *, seed=0, spread=4.0, device="cpu"):
    """Student's and teacher's logits, of which the first rows are far from zero and the last far from each other."""
    make = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(k, n, vocabulary, dtype=torch.float64, generator=make) for k in (1, 2))
    logits = spread * (common + 0.3 * own)
    logits[:, 0] += 60
    logits[1, -1] = logits[1, -1].flip(-1)
    return [x.to(device, dtype) for x in logits]


def plain(student, teacher, weight, temperature, scale):
    """(weight KL, scale times the gradient of its sum), by autograd; both skip what p excludes."""
    z = student.detach().double().clone().requires_grad_()
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (z, teacher.double()))
    terms = torch.where(log_p > -INF, log_p.exp() * (log_p - torch.where(log_p > -INF, log_q, 0)), 0)
    losses = terms.sum(-1) * (1 if weight is None else weight.double())
    return losses.detach(), torch.autograd.grad(scale * losses.sum(), z)[0]


def plain_top(student, ids, log_p, weight, temperature, scale):
    z = student.detach().double().clone().requires_grad_()
    log_q = (z / temperature).log_softmax(-1)
    rest = log_q.scatter(-1, ids, -INF).logsumexp(-1, keepdim=True)
    log_p = log_p.double()
    losses = (log_p.exp() * (log_p - torch.cat([log_q.gather(-1, ids), rest], -1))).sum(-1)
    losses = losses * (1 if weight is None else weight.double())
    return losses.detach(), torch.autograd.grad(scale * losses.sum(), z)[0]


def limits(dtype):
    name = str(dtype).removeprefix("torch.")
    value = TOLERANCE["float64" if dtype == torch.float64 else "float32"][0]
    return value, TOLERANCE[name + " interpreted" * (dtype == torch.bfloat16 and INSIDE)][1]


def check(got, want, dtype):
    """The value keeps float32's accuracy, whatever the logits' type; the gradient is rounded to that."""
    for name, a, b, limit in zip(("value", "gradient"), got, want, limits(dtype), strict=True):
        assert_close(name, a, b, limit)


def both(student, *rest, call=kl_divergence_, **options):
    buffer = student.clone()
    assert torch.equal(call(buffer, *rest, gradient=False, **options), losses := call(buffer, *rest, **options))
    return losses, buffer


DEVICE = "cpu" if INSIDE or not HAS_GPU else "cuda"


@pytest.fixture(autouse=True, params=["triton"] if INSIDE else ["reference"] + ["auto"] * HAS_GPU)
def form(request, monkeypatch):
    monkeypatch.setenv("LINEARIZE_KERNELS", request.param)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 300, 1024, 1025, 4128])
def test_value_and_gradient(vocabulary, dtype):
    student, teacher = rows(4, vocabulary, dtype, device=DEVICE)
    check(both(student, teacher), plain(student, teacher, None, 1.0, 1.0), dtype)


@pytest.mark.parametrize("temperature", [0.5, 2.5])
def test_temperature_weights_and_scale(temperature):
    student, teacher = rows(5, 300, torch.float32, device=DEVICE)
    weight = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0], device=DEVICE)
    options = {"weight": weight, "temperature": temperature, "scale": 3.7}
    want = plain(student, teacher, *options.values())
    student[4], teacher[1] = float("nan"), INF  # left out, whatever they hold
    want[0][4] = want[1][4] = 0
    got = both(student.nan_to_num(), teacher, **options)
    check(got, want, torch.float32)
    buffer = student.clone()
    assert not kl_divergence_(buffer, teacher, **options)[[1, 4]].any() and not buffer[[1, 4]].any()


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_models_of_two_types(types):
    student, teacher = (x.to(t) for x, t in zip(rows(3, 333, torch.float32, device=DEVICE), types, strict=True))
    check(both(student, teacher), plain(student, teacher, None, 1.0, 1.0), types[0])


def test_excluded_tokens():
    student, teacher = rows(4, 300, torch.float32, device=DEVICE)
    teacher[0, 5:200] = -INF
    student[1, 280:] = teacher[1, 280:] = -INF
    student[2, :290] = teacher[2, :290] = -INF
    want = plain(student[:3], teacher[:3], None, 1.0, 1.0)
    student[3, 7] = -INF
    losses, gradient = both(student, teacher)
    assert losses[3] == INF and gradient.isfinite().all()
    check((losses[:3], gradient[:3]), want, torch.float32)


def test_equal_rows_have_no_divergence():
    student, _ = rows(3, 1025, torch.float32, device=DEVICE)
    losses, gradient = both(student, student.clone())
    assert not losses.any() and not gradient.any()


def test_what_is_not_a_number_is_seen():
    student, teacher = rows(3, 300, torch.float32, device=DEVICE)
    student[0, 1], teacher[1, 299] = float("nan"), INF
    losses, _ = both(student, teacher, call=lambda *a, **k: kl_divergence_(*a, **k).nan_to_num(nan=-1.0))
    assert losses.lt(0).tolist() == [True, True, False]


def test_padded_rows_and_rows_of_a_larger_matrix():
    """What lies between the rows is neither read nor written."""
    student, teacher = rows(4, 300, torch.float16, device=DEVICE)
    space = torch.full((4, 320), float("nan"), dtype=torch.float16, device=DEVICE)
    space[:, :300] = student
    losses = kl_divergence_(space[:, :300], teacher.T.contiguous().T)
    assert torch.equal(losses, both(student, teacher)[0]) and space[:, 300:].isnan().all()
    assert torch.equal(space[:, :300], both(student, teacher)[1])


def test_runs_are_bitwise_equal():
    student, teacher = rows(6, 1025, torch.float32, device=DEVICE)
    first, second = (both(student, teacher) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def top(teacher, k, temperature):
    log_p = (teacher.double() / temperature).log_softmax(-1)
    kept, ids = log_p.topk(k, dim=-1)
    rest = log_p.scatter(-1, ids, -INF).logsumexp(-1, keepdim=True)
    return ids, torch.cat([kept, rest], -1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocabulary,k", [(2, 1), (300, 1), (300, 299), (1025, 16)])
def test_the_top_and_a_bucket(vocabulary, k, dtype):
    student, teacher = rows(4, vocabulary, dtype, device=DEVICE)
    ids, log_p = top(teacher, k, 1.0)
    log_p = log_p if dtype == torch.float64 else log_p.float()
    want = plain_top(student, ids, log_p, None, 1.0, 1.0)
    check(both(student, ids.int(), log_p, call=top_kl_divergence_), want, dtype)


def test_the_top_at_a_temperature_with_weights():
    student, teacher = rows(4, 300, torch.float32, device=DEVICE)
    ids, log_p = top(teacher, 8, 2.0)
    options = {"weight": torch.tensor([0.5, 0.0, 2.0, 0.0], device=DEVICE), "temperature": 2.0, "scale": 0.3}
    want = plain_top(student, ids, log_p, *options.values())
    student[1] = INF
    buffer = student.clone()
    check((top_kl_divergence_(buffer, ids, log_p.float(), **options), buffer), want, torch.float32)


def test_measuring_alone_leaves_the_logits():
    student, teacher = rows(3, 300, torch.float32, device=DEVICE)
    before = student.clone()
    kl_divergence_(student, teacher, gradient=False)
    top_kl_divergence_(student, *top(teacher, 8, 1.0), gradient=False)
    assert torch.equal(student, before)


def test_a_student_whose_tail_is_beyond_float32():
    student = torch.tensor([[0.0, -150.0, -151.0, -152.0]], device=DEVICE)
    ids, log_p = torch.tensor([[0]], device=DEVICE), torch.tensor([[0.5, 0.5]], device=DEVICE).log()
    check(both(student, ids, log_p, call=top_kl_divergence_), plain_top(student, ids, log_p, None, 1, 1), torch.float32)
    student[0, 1:] = -INF  # nothing left for the bucket
    losses, gradient = both(student, ids, log_p, call=top_kl_divergence_)
    assert losses == INF and gradient.isfinite().all()


if INSIDE:
    import interpreter  # noqa: F401
    from linearize_kernels.divergence import kl_, top_kl_

    from linearize import kl

    def test_offsets_beyond_32_bits():
        space = torch.empty(2**31 + 2**26, dtype=torch.float16)  # untouched but for three rows
        student, teacher = rows(3, 40, torch.float16)
        far = space.as_strided((3, 40), (2**30 + 2**20, 1))
        far.copy_(student)
        losses, gradient = both(student, teacher)
        assert torch.equal(kl_divergence_(far, teacher), losses) and torch.equal(far, gradient)

    def test_the_operators_are_registered_soundly():
        student, teacher = rows(3, 40, torch.float32)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(kl_, (student, teacher, torch.ones(3), 1.0, 1.0, True), test_utils=tests)
        torch.library.opcheck(top_kl_, (student, *top(teacher, 4, 1.0), None, 1.0, 1.0, True), test_utils=tests)

    class Linear(torch.nn.Module):
        """A head that ends in a function whose gradient needs what it returned, and one that does not."""

        def __init__(self, last):
            super().__init__()
            self.config, self.model = type("Config", (), {"vocab_size": 300}), torch.nn.Identity()
            self.lm_head, self.last = torch.nn.Linear(8, 300).double(), last

        def forward(self, inputs_embeds, use_cache):
            logits = self.last(self.lm_head(self.model(inputs_embeds).last_hidden_state))
            return type("Output", (), {"logits": logits})

    @pytest.mark.parametrize("k", [0, 5])
    @pytest.mark.parametrize("last", [torch.tanh, lambda x: x, lambda x: 3 * torch.tanh(x / 3)])
    def test_the_loss_of_distillation(last, k, monkeypatch):
        """Value and gradients with kernels are those without."""
        torch.manual_seed(0)
        student, teacher = Linear(last), Linear(last).requires_grad_(False)
        hidden, theirs = torch.randn(2, 7, 8, dtype=torch.float64)
        hidden.requires_grad_()
        results = []
        for form in ("triton", "reference"):
            monkeypatch.setenv("LINEARIZE_KERNELS", form)
            target = kl.FullTarget(theirs, kl.Head(teacher), 1.5)
            target = kl.TopTarget.of(target, k) if k else target
            options = {"weight": 0.3, "temperature": 1.5, "chunk": 3 * 300}
            value = kl.chunked_kl(kl.Head(student), hidden, target, **options)
            results.append([value, *torch.autograd.grad(1.7 * value, [hidden, *student.parameters()])])
        for got, want in zip(*results, strict=True):
            assert_close("with kernels", got, want, TOLERANCE["float64"][1])

    def test_chunks_are_whole_tiles(monkeypatch):
        monkeypatch.setattr(kl, "KERNEL_CHUNK", 1000 * 100)
        for tokens, wanted in ((16384, [1024] * 16), (2000, [1024, 976]), (300, [300]), (2050, [768, 768, 514])):
            hidden = torch.empty(tokens, 1)
            parts = kl.chunks(tokens, 100, kl.chunk_size(hidden, 100))
            assert [min(part.stop, tokens) - part.start for part in parts] == wanted

else:

    def test_kernels_in_the_interpreter():
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

    @pytest.mark.parametrize(
        "change,message",
        [
            ({"student": torch.zeros(2, 3, 4)}, "student must be"),
            ({"student": torch.zeros(4, 3).T}, "dense in V"),
            ({"student": torch.zeros(3, 4, requires_grad=True)}, "would be overwritten"),
            ({"teacher": torch.zeros(3, 5)}, "teacher must be"),
            ({"weight": torch.ones(4)}, "weight must have shape"),
            ({"temperature": 0.0}, "temperature must be positive"),
        ],
    )
    def test_what_does_not_fit(change, message):
        with pytest.raises(ValueError, match=message):
            kl_divergence_(**{"student": torch.zeros(3, 4), "teacher": torch.zeros(3, 4)} | change)

    def test_a_top_that_does_not_fit():
        for ids, log_p, message in ((4, 5, "ids must be"), (2, 2, "bucket's")):
            with pytest.raises(ValueError, match=message):
                top_kl_divergence_(torch.zeros(3, 4), torch.zeros(3, ids, dtype=torch.int32), torch.zeros(3, log_p))
