"""The zeroth-order readout: its torch form token by token, and its kernels, in the interpreter, against the torch form.

Triton's interpreter has to be switched on before Triton is imported, so the cases of the kernels run in a process of
their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from linearize_kernels import log_norm, readout, reference
from saved import taken_once
from tolerances import TOLERANCE, assert_close

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("v", "log_write", "log_forget", "start", "scales", "taps", "sink", "add_to", "add_scale", "initial_mean")
NAMES += ("tail", "first")
SCALARS = {"log_write", "log_forget", "start", "scales", "taps", "sink", "add_scale"}


def inputs(tokens, *, batch=1, heads=2, group=2, scales=2, taps=3, dim=16, dtype=torch.float64, sequences=None, seed=0):
    """All arguments at random; some tokens are not written, one time scale forgets nearly all."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=make)

    kv_heads, wide = heads // group, heads * scales
    count = sequences or batch
    write = 2 * normal(batch, tokens, wide)
    write[torch.rand(write.shape, generator=make) < 0.2] = -torch.inf
    forget = -torch.nn.functional.softplus(normal(batch, tokens, wide) - 2)
    forget[..., -1:] *= 20
    x = {
        "v": 2 + normal(batch, tokens, kv_heads, dim),
        "log_write": write,
        "log_forget": forget,
        "start": normal(count, wide),
        "scales": normal(heads, scales),
        "taps": normal(taps, heads),
        "sink": normal(heads),
        "add_to": normal(batch, tokens, heads, dim),
        "add_scale": normal(heads),
        "initial_mean": 2 + normal(count, wide, dim),
        "tail": normal(count, taps - 1, kv_heads, dim),
        "first": normal(count, kv_heads, dim),
    }
    rows = {"v", "add_to", "tail", "first"}
    wide_type = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(dtype if name in rows else wide_type) for name, t in x.items()}


def constant(x):
    """`x` with one forgetting per time scale."""
    return x | {"log_forget": x["log_forget"][0, 0].contiguous()}


def run(x, cu=None, function=readout):
    """(o, final means): log Z is made of its arguments, so that its gradients take part."""
    x = dict(x)
    start, log_z = x.pop("start", None), None
    if "log_write" in x:
        forget = x["log_forget"].expand_as(x["log_write"])
        norm = log_norm if function is readout else reference.chunk_log_norm
        if function is readout:
            log_z = norm(x["log_write"], forget, initial_log_z=start, cu_seqlens=cu)
        else:
            log_z = norm(x["log_write"], forget, start, cu)
    if function is readout:
        given = [x.pop(name, None) for name in NAMES[:3]]
        return readout(*given, log_z, x.pop("scales"), cu_seqlens=cu, **x)
    order = [x.get(name) for name in NAMES if name != "start"]
    return reference.readout(*order[:3], log_z, *order[3:], cu)


def by_token(x, bounds=None):
    """The definition, a token and a head at a time."""
    v, scales, taps = x["v"], x["scales"], x.get("taps", torch.zeros(1, x["scales"].shape[0]))
    batch, tokens, kv_heads, dim = v.shape
    heads, count = scales.shape
    runs = [(b, b, 0, tokens) for b in range(batch)]
    if bounds is not None:
        runs = [(i, 0, a, b) for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))]
    o, final = torch.zeros(batch, tokens, heads, dim, dtype=v.dtype), torch.zeros(len(runs), heads * count, dim).to(v)
    for i, row, a, b in runs:
        for h in range(heads):
            values = v[row, a:b, h * kv_heads // heads]
            before = torch.zeros(len(taps) - 1, dim).to(v)
            if "tail" in x:
                before = x["tail"][i, :, h * kv_heads // heads]
            line = torch.cat([before, values])
            top = x["first"][i, h * kv_heads // heads] if "first" in x else values[0] if b > a else None
            for m in range(count):
                slot = h * count + m
                z = x["start"][i, slot].exp() if "start" in x else 0.0
                mean = x["initial_mean"][i, slot] if "initial_mean" in x else torch.zeros(dim).to(v)
                for t in range(a, b):
                    w = x["log_write"][row, t, slot].exp()
                    z = z * x["log_forget"].expand_as(x["log_write"])[row, t, slot].exp() + w
                    if z > 0:
                        mean = mean + w / z * (values[t - a] - mean)
                    o[row, t, h] += scales[h, m] * mean
                final[i, slot] = mean
            for t in range(a, b):
                for j in range(len(taps)):
                    o[row, t, h] += taps[j, h] * line[t - a + len(taps) - 1 - j]
                o[row, t, h] += x["sink"][h] * top if "sink" in x else 0.0
                if "add_to" in x:
                    o[row, t, h] += (x["add_scale"][h] if "add_scale" in x else 1.0) * x["add_to"][row, t, h]
    return o, final


def check(x, limits, cu=None, without=()):
    """Outputs and all gradients of the kernels against the torch form in float64."""
    x = {name: t for name, t in x.items() if name not in without}
    sides = []
    for exact in (False, True):
        leaves = {n: (t.double() if exact else t).detach().requires_grad_() for n, t in x.items()}
        with taken_once():
            outputs = run(leaves, cu, reference.readout if exact else readout)
        make = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, dtype=torch.float64, generator=make) for t in outputs]
        total = sum((t.double() * w.to(x["v"].dtype)).sum() for t, w in zip(outputs, weights, strict=True))
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        sides.append((outputs, dict(zip(leaves, slopes, strict=True))))
    (got, got_slopes), (want, want_slopes) = sides
    for name, a, b in zip(("o", "final means"), got, want, strict=True):
        assert_close(name, a, b, limits[0])
    for name in x:
        if want_slopes[name] is not None:
            assert_close(
                f"gradient of {name}", got_slopes[name], want_slopes[name], limits[2 if name in SCALARS else 1]
            )


if not INSIDE:

    @pytest.mark.parametrize("bounds", [None, [0, 1, 40, 40, 70]])
    def test_torch_form_is_the_definition(bounds):
        x = inputs(70, heads=4, dim=3, sequences=None if bounds is None else 4)
        o, final = run(x, None if bounds is None else torch.tensor(bounds))
        want, last = by_token(x, bounds)
        assert_close("o", o, want, 1e-12)
        assert_close("final means", final, last, 1e-12)

    @pytest.mark.parametrize("absent", [("initial_mean", "start", "tail", "first"), ("add_scale",), ("add_to", "sink")])
    def test_torch_form_without_arguments(absent):
        x = {name: t for name, t in constant(inputs(66, batch=2, dim=3, group=1)).items() if name not in absent}
        o, final = run(x)
        want, last = by_token(x)
        assert_close("o", o, want, 1e-12)
        assert_close("final means", final, last, 1e-12)

    def test_without_time_scales():
        x = {n: t for n, t in inputs(9, scales=0).items() if n in ("v", "scales", "taps", "sink")}
        o, final = run(x)
        assert_close("o", o, by_token(x)[0], 1e-12)
        assert final.shape == (1, 0, 16)

    def test_gradients_of_the_torch_form():
        x = inputs(5, dim=2)
        x["log_write"] = x["log_write"].clamp(min=-3)
        leaves = [t.requires_grad_() for t in x.values()]
        assert torch.autograd.gradcheck(lambda *rows: run(dict(zip(x, rows, strict=True))), leaves, fast_mode=True)

    @pytest.mark.parametrize(
        "change",
        [
            {"taps": torch.zeros(3, 4)},
            {"log_forget": torch.zeros(3)},
            {"tail": torch.zeros(1, 3, 1, 16)},
            {"initial_mean": torch.zeros(1, 4, 15)},
            {"sink": torch.zeros(3)},
            {"log_write": None},
        ],
    )
    def test_refuses_what_does_not_fit(change):
        x = inputs(5) | change
        x.pop("start")
        given = [x.pop(name) for name in NAMES[:3]]
        with pytest.raises(ValueError):
            readout(*given, torch.zeros(1, 5, 4), x.pop("scales"), **x)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @pytest.mark.parametrize("dim,dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (96, torch.float16)])
    def test_kernels_on_a_gpu(dim, dtype):
        from linearize_kernels import selfcheck

        outputs, rows, scalars = TOLERANCE[str(dtype).removeprefix("torch.")]
        limits = {"o": outputs, "final": outputs, "dv": rows, "dk": rows, "dstate": rows}
        errors = selfcheck.measure_readout(dim, dtype, torch.device("cuda"), None)
        assert not {name: e for name, e in errors.items() if not e <= limits.get(name.split()[0], scalars)}

    def test_kernels_in_the_interpreter():
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "LINEARIZE_KERNELS": "triton"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

else:
    import interpreter  # noqa: F401

    EXACT = (1e-11, 1e-10, 1e-10)

    @pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
    def test_lengths(tokens):
        check(inputs(tokens), EXACT)

    @pytest.mark.parametrize("heads,group,batch,dim", [(2, 1, 2, 20), (6, 3, 1, 16)])
    def test_grouped_heads_and_widths(heads, group, batch, dim):
        check(constant(inputs(66, heads=heads, group=group, batch=batch, scales=1, dim=dim)), EXACT)

    def test_packed_sequences():
        bounds = torch.tensor([0, 1, 66, 66, 100, 130])
        check(inputs(130, sequences=5), EXACT, bounds)
        without = ("tail", "first", "initial_mean", "start", "add_scale")
        check(constant(inputs(130, sequences=5)), EXACT, bounds, without)

    def test_without_a_state():
        check(constant(inputs(66)), EXACT, without=("tail", "first", "initial_mean", "start"))

    def test_padding_in_front():
        x = inputs(140)
        x["log_write"][:, :70] = -torch.inf
        x["log_forget"][:, :70] = 0
        check(x, EXACT)
        check(x, EXACT, without=("initial_mean", "start"))

    @pytest.mark.parametrize("absent", [("taps", "tail", "sink", "first"), ("add_to", "add_scale"), ("sink", "tail")])
    def test_parts(absent):
        check(inputs(66, taps=1 if "tail" in absent else 2), EXACT, without=absent)

    def test_without_time_scales():
        x = {n: t for n, t in inputs(66, scales=0).items() if n in ("v", "scales", "taps", "sink", "tail", "add_to")}
        check(x, EXACT)

    def test_float32():
        check(inputs(130, scales=3, taps=4, dtype=torch.float32), TOLERANCE["float32 strong decay"])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_sixteen_bits(dtype):
        name = str(dtype).removeprefix("torch.")
        check(inputs(100, dtype=dtype, dim=32), TOLERANCE[name + " interpreted" * (dtype == torch.bfloat16)])

    def test_a_split_sequence_is_one_sequence():
        x = {n: t for n, t in inputs(100).items() if n not in ("start", "initial_mean", "tail", "first")}
        whole, last = run(x)
        cut = 70
        rows = ("v", "log_write", "log_forget", "add_to")
        early, late = ({n: t[:, s] if n in rows else t for n, t in x.items()} for s in (slice(cut), slice(cut, None)))
        left, mean = run(early)
        log_z = log_norm(early["log_write"], early["log_forget"])[:, -1]
        right, final = run(
            late | {"start": log_z, "initial_mean": mean, "tail": x["v"][:, cut - 2 : cut], "first": x["v"][:, 0]}
        )
        assert_close("o", torch.cat([left, right], 1), whole, 1e-12)
        assert_close("final means", final, last, 1e-12)

    def test_the_first_use_check():
        from linearize_kernels import selfcheck

        errors = selfcheck.measure_readout(16, torch.float32, torch.device("cpu"), None)
        assert selfcheck.passes(errors, torch.float32), errors
        assert not selfcheck.passes({**errors, "dforget constant": 1e-3}, torch.float32)

    def test_the_operator_is_registered_soundly():
        from linearize_kernels.ops import readout_fwd

        x = inputs(5, dtype=torch.float32)
        x["log_write"] = x["log_write"].clamp(min=-3)
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        log_z = log_norm(x["log_write"], x["log_forget"]).detach().requires_grad_()
        order = [leaves[n] for n in NAMES if n != "start"]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(readout_fwd, (*order[:3], log_z, *order[3:], None), test_utils=tests)
