"""The Triton kernels in the interpreter, against the float64 torch forms.

The interpreter has to be switched on before Triton is imported, so the cases below and those of interpreted_*.py run in
processes of their own, started by the tests that an ordinary run collects.
"""

import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"

if not INSIDE:

    CASES = [Path(__file__), *sorted(Path(__file__).parent.glob("interpreted_*.py"))]

    @pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
    def test_kernels_in_the_interpreter(cases):
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "LINEARIZE_KERNELS": "triton"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cases.parent)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

else:
    import interpreter  # noqa: F401
    import torch
    from linearize_kernels import (
        centre,
        gated_delta,
        gated_delta_step,
        linear_attn,
        linear_attn_step,
        log_norm,
        reference,
        running_mean,
    )
    from saved import taken_once
    from tolerances import TOLERANCE, assert_close

    NAMES = ("q", "k", "v", "log_decay", "beta", "gain", "initial_state", "add_to")

    def inputs(tokens, dims, dtype, *, heads=2, batch=1, groups=(1, 1, 1), sequences=None, decay=1.0, seed=0):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=make)

        q, k, v = (
            normal(batch, tokens, heads // g, d) for g, d in zip(groups, (dims[0], dims[0], dims[1]), strict=True)
        )
        k = k / math.sqrt(dims[0])
        log_decay = -decay * torch.nn.functional.softplus(normal(batch, tokens, heads))
        beta, gain = (2 * torch.rand(batch, tokens, heads, dtype=torch.float64, generator=make) for _ in range(2))
        beta = beta * (beta > 0.2)
        state = normal(sequences or batch, heads, *dims)
        add_to = normal(batch, tokens, heads, dims[1])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        types = (dtype, dtype, dtype, wide, wide, wide, wide, dtype)
        tensors = (q, k, v, log_decay, beta, gain, state, add_to)
        return {name: x.to(t) for name, x, t in zip(NAMES, tensors, types, strict=True)}

    def call(x, linear, cu=None, force_reference=False):
        shared = {"scale": 0.3, "output_final_state": True, "cu_seqlens": cu}
        shared |= {name: x[name] for name in ("initial_state", "add_to") if name in x}
        decay = x.get("log_decay")
        if force_reference:
            beta = None if linear else x["beta"]
            rest = x.get("initial_state"), cu, x.get("add_to")
            return reference.chunk_gated_delta(x["q"], x["k"], x["v"], decay, beta, x["gain"], 0.3, *rest)
        if linear:
            return linear_attn(x["q"], x["k"], x["v"], decay, x["gain"], **shared)
        return gated_delta(x["q"], x["k"], x["v"], decay, x["beta"], gain=x["gain"], **shared)

    def check(x, limits, linear=False, cu=None):
        """Outputs, final state and all gradients against float64."""
        if linear:
            x = {name: value for name, value in x.items() if name != "beta"}
        sides = []
        for exact in (False, True):
            leaves = {n: (t.double() if exact else t).detach().requires_grad_() for n, t in x.items()}
            with taken_once():
                outputs = call(leaves, linear, cu, force_reference=exact)
            make = torch.Generator().manual_seed(1)
            weights = [torch.randn(t.shape, dtype=torch.float64, generator=make) for t in outputs]
            total = sum((t.double() * w.to(x["q"].dtype)).sum() for t, w in zip(outputs, weights, strict=True))
            slopes = torch.autograd.grad(total, list(leaves.values()))
            sides.append((outputs, dict(zip(leaves, slopes, strict=True))))
        (got, got_slopes), (want, want_slopes) = sides
        for name, a, b in zip(("o", "final state"), got, want, strict=True):
            assert_close(name, a, b, limits[0])
        for name in x:
            scalar = name in ("log_decay", "beta", "gain")
            assert_close(f"gradient of {name}", got_slopes[name], want_slopes[name], limits[2 if scalar else 1])

    @pytest.mark.parametrize(
        "tokens,linear", [(1, False), (1, True), (64, False), (65, False), (130, False), (65, True)]
    )
    def test_lengths(tokens, linear):
        check(inputs(tokens, (32, 32), torch.float32), TOLERANCE["float32"], linear)

    @pytest.mark.parametrize("dims", [(64, 64), (128, 32), (32, 100), (50, 48), (256, 16)])
    def test_head_dims(dims):
        check(inputs(70, dims, torch.float64, heads=1), TOLERANCE["float64"])

    @pytest.mark.parametrize("heads,groups", [(2, (2, 2, 1)), (4, (1, 2, 4))])
    def test_grouped_heads(heads, groups):
        check(inputs(66, (32, 32), torch.float64, heads=heads, groups=groups), TOLERANCE["float64"])

    @pytest.mark.parametrize("linear", [False, True])
    def test_packed_sequences(linear):
        bounds = [0, 1, 66, 66, 100, 130]
        x = inputs(130, (32, 32), torch.float64, sequences=5)
        check(x, TOLERANCE["float64"], linear, torch.tensor(bounds, dtype=torch.int32))

    @pytest.mark.parametrize("decay", [0.0, 20.0])
    def test_gates(decay):
        check(inputs(100, (32, 32), torch.float32, decay=decay), TOLERANCE["float32"])

    def test_strong_decay_in_float64():
        check(inputs(100, (32, 32), torch.float64, heads=1, decay=20.0), TOLERANCE["float64"])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_sixteen_bits(dtype):
        name = str(dtype).removeprefix("torch.")
        check(inputs(100, (64, 64), dtype), TOLERANCE[name + " interpreted" * (dtype == torch.bfloat16)])

    def test_without_optional_arguments():
        x = inputs(70, (32, 32), torch.float64, heads=1, batch=2)
        for name in ("log_decay", "initial_state", "add_to"):
            del x[name]
        check(x, TOLERANCE["float64"])

    def test_correlated_keys():
        x = inputs(128, (32, 32), torch.float64)
        x["k"] = torch.nn.functional.normalize(x["k"] + 3 * x["k"][:, :1], dim=-1)
        x["beta"] = torch.full_like(x["beta"], 1.9)
        x["log_decay"] *= 0
        check(x, (1e-10, 1e-10, 1e-10))

    def test_offsets_beyond_32_bits():
        """Rows 2^24 numbers apart, heads over 2^31: an untouched mapping, of which only the rows become real memory."""
        tokens, token, head = 130, 2**24, 2**31 + 2**23
        size = tokens * token + head
        space = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
        line = torch.frombuffer(space, dtype=torch.float16)
        x = inputs(tokens, (32, 32), torch.float16)
        names = ("q", "k", "v", "add_to")
        far = {n: line[64 * i :].as_strided((1, tokens, 2, 32), (0, token, head, 1)) for i, n in enumerate(names)}
        for name, rows in far.items():
            rows.copy_(x[name])
        results = []
        for case in (x, x | far):
            leaves = {n: t.detach().requires_grad_() for n, t in case.items()}
            outputs = call(leaves, False)
            results.append([*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), list(leaves.values()))])
            k, v = leaves["k"], leaves["v"]
            gates = leaves["gain"], leaves["log_decay"]
            results[-1] += centre(k, v, *gates, log_norm(*gates))[:4]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize("width,in_place", [(1, True), (3, False)])
    @pytest.mark.parametrize("linear", [False, True])
    def test_decode(width, linear, in_place):
        x = inputs(6, (32, 48), torch.float64, groups=(1, 2, 2), batch=2)
        want, last = call(x, linear, force_reference=True)
        state = x["initial_state"].mT.contiguous().mT if in_place else x["initial_state"]
        outs = []
        for a in range(0, 6, width):
            rows = {name: t[:, a : a + width] for name, t in x.items() if name != "initial_state"}
            shared = {"state": state, "scale": 0.3, "add_to": rows["add_to"], "in_place": in_place}
            before = state.clone()
            q, k, v, decay = (rows[name] for name in NAMES[:4])
            if linear:
                o, new = linear_attn_step(q, k, v, decay, rows["gain"], **shared)
            else:
                o, new = gated_delta_step(q, k, v, decay, rows["beta"], gain=rows["gain"], **shared)
            assert (new is state) == in_place and (in_place or torch.equal(state, before))
            state = new
            outs.append(o)
        assert_close("o", torch.cat(outs, 1), want, TOLERANCE["float64"][0])
        assert_close("state", state, last, TOLERANCE["float64"][0])

    def statistics(tokens, dims, dtype, *, heads=2, groups=(1, 1), sequences=None, forget=None, shift=3.0, left=0):
        """k, v, log_write, log_forget, initial means and log Z; `left` tokens of padding, some more unwritten."""
        make = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=make)

        k, v = (shift + normal(1, tokens, heads // g, d) for g, d in zip(groups, dims, strict=True))
        log_write = 3 * normal(1, tokens, heads)
        log_write[torch.rand(log_write.shape, generator=make) < 0.2] = -torch.inf
        log_write[:, :left] = -torch.inf
        log_forget = -torch.nn.functional.softplus(3 * normal(1, tokens, heads) - 3)
        if forget is not None:
            log_forget = torch.full_like(log_forget, forget)
        count = sequences or 1
        tensors = [log_write, log_forget, normal(count, heads, dims[0]), normal(count, heads, dims[1])]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return [x.to(dtype) for x in (k, v)] + [x.to(wide) for x in (*tensors, normal(count, heads))]

    def check_statistics(tensors, limits, initial=True, cu=None):
        sides = []
        for exact in (False, True):
            leaves = [(x.double() if exact else x).detach().requires_grad_() for x in tensors]
            k, v, write, forget, kbar, vbar, log_z = leaves
            means = (kbar, vbar) if initial else None
            log_z = log_z if initial else None
            if exact:
                lZ = reference.chunk_log_norm(write, forget, log_z, cu)
                kd, vd, mean, rho2, last = reference.chunk_centre(k, v, write, forget, lZ, means, cu)
                other, end = reference.chunk_running_mean(v, write, forget, lZ, means and means[1], cu)
            else:
                lZ = log_norm(write, forget, initial_log_z=log_z, cu_seqlens=cu)
                kd, vd, mean, rho2, last = centre(k, v, write, forget, lZ, initial_mean=means, cu_seqlens=cu)
                start = means and means[1]
                other, end = running_mean(v, write, forget, lZ, initial_mean=start, cu_seqlens=cu)
            outputs = [torch.where(lZ > -torch.inf, lZ, 0.0), kd, vd, mean, rho2, *last, other, end]
            make = torch.Generator().manual_seed(1)
            weights = [torch.randn(t.shape, dtype=torch.float64, generator=make) for t in outputs]
            total = sum(
                (t.double() * w.to(k.dtype).to(tensors[0].dtype)).sum() for t, w in zip(outputs, weights, strict=True)
            )
            sides.append((outputs, torch.autograd.grad(total, leaves if initial else leaves[:4])))
        for i, (a, b) in enumerate(zip(sides[0][0], sides[1][0], strict=True)):
            assert_close(f"output {i}", a, b, limits[0])
        for i, (a, b) in enumerate(zip(sides[0][1], sides[1][1], strict=True)):
            assert_close(f"gradient {i}", a, b, limits[1 if i in (0, 1, 4, 5) else 2])

    @pytest.mark.parametrize("tokens,left,initial", [(1, 0, False), (65, 0, True), (130, 70, False), (130, 70, True)])
    def test_statistics(tokens, left, initial):
        check_statistics(statistics(tokens, (16, 24), torch.float64, left=left), (1e-12, 1e-11, 1e-11), initial)

    def test_statistics_of_grouped_heads_and_wide_rows():
        tensors = statistics(66, (100, 48), torch.float64, heads=4, groups=(2, 4))
        check_statistics(tensors, (1e-12, 1e-11, 1e-11))

    @pytest.mark.parametrize("initial", [False, True])
    def test_statistics_of_packed_sequences(initial):
        tensors = statistics(100, (16, 16), torch.float64, sequences=4)
        check_statistics(tensors, (1e-12, 1e-11, 1e-11), initial, torch.tensor([0, 1, 66, 66, 100]))

    def test_statistics_in_float32():
        check_statistics(statistics(130, (32, 32), torch.float32, shift=20.0), TOLERANCE["float32"])
        # Where each token forgets all others, the gradient of log_write is a difference that nearly vanishes.
        tensors = statistics(130, (32, 32), torch.float32, forget=-10.0)
        check_statistics(tensors, TOLERANCE["float32 strong decay"])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_statistics_in_sixteen_bits_survive_a_common_mean(dtype):
        name = str(dtype).removeprefix("torch.")
        limits = TOLERANCE[name + " interpreted" * (dtype == torch.bfloat16)]
        check_statistics(statistics(100, (32, 32), dtype, shift=20.0), limits, initial=False)

    def test_gradcheck():
        """Once; elsewhere gradients are compared with those of the torch forms, which test_reference.py checks so."""
        x = inputs(70, (16, 16), torch.float64, heads=1)
        names = [name for name in x if name != "beta"]
        leaves = [x[name].requires_grad_() for name in names]

        def run(*tensors):
            return call(dict(zip(names, tensors, strict=True)), True)

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)

    def test_operators_are_registered_soundly():
        from linearize_kernels.ops import centre_fwd, delta_fwd, delta_step, log_norm_fwd

        x = inputs(5, (32, 32), torch.float32)
        leaves = [x[name].requires_grad_() for name in NAMES[:7]]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        torch.library.opcheck(delta_fwd, (*leaves, None, x["add_to"], 0.3, True), test_utils=tests)
        packed = [*leaves[:6], None, cu, None, 0.3, False]
        torch.library.opcheck(delta_fwd, tuple(packed), test_utils=tests[:3])
        flat = [t.detach() for t in leaves]
        step = (*flat[:6], 0.3, flat[6], flat[6].clone(), None)
        torch.library.opcheck(delta_step, step, test_utils=("test_schema", "test_faketensor"))
        k, v, write, forget, *means, log_z = (t.requires_grad_() for t in statistics(5, (16, 16), torch.float32))
        torch.library.opcheck(log_norm_fwd, (write, forget, log_z, None), test_utils=tests)
        norm = log_norm(write, forget, initial_log_z=log_z).detach().requires_grad_()
        both = torch.cat(means, -1).detach().requires_grad_()
        for keys, start in ((k, both), (None, means[1])):
            torch.library.opcheck(centre_fwd, (keys, v, write, norm, start, None), test_utils=tests)

    def test_a_compiled_mixer_has_no_graph_break():
        def mixer(q, k, v, decay, beta, write, forget):
            kd, vd, vbar, rho2, _ = centre(k, v, write, forget, log_norm(write, forget))
            o, _ = gated_delta(q, kd, vd, decay, beta, add_to=vbar)
            return o.sum() + rho2.sum()

        k, v, write, forget, *_ = statistics(66, (16, 16), torch.float32)
        x = inputs(66, (16, 16), torch.float32)
        leaves = [t.requires_grad_() for t in (x["q"], k, v, x["log_decay"], 0.02 * x["beta"], write, forget)]
        compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
        results = [(y := call(*leaves), torch.autograd.grad(y, leaves)) for call in (mixer, compiled)]
        assert torch.equal(results[0][0], results[1][0])
        # Gradients that meet are added in another order.
        for a, b in zip(results[0][1], results[1][1], strict=True):
            assert_close("gradient", a, b, TOLERANCE["float32"][2])

    def test_second_derivatives_raise():
        x = inputs(5, (32, 32), torch.float32)
        q = x["q"].requires_grad_()
        (slope,) = torch.autograd.grad(call(x, False)[0].square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError):
            slope.sum().backward()

    def test_the_self_check_passes_here_and_notices_errors():
        from linearize_kernels import selfcheck

        cpu = torch.device("cpu")
        errors = selfcheck.measure(32, 32, torch.float32, True, cpu, None)
        assert selfcheck.passes(errors, torch.float32)
        assert not selfcheck.passes({**errors, "dbeta": 1e-3}, torch.float32)
        assert not selfcheck.passes({**errors, "dk": float("inf")}, torch.float32)
