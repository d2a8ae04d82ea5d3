"""Sequences cut into pieces give what uncut ones give: the identities in torch, the kernels in the interpreter.

As in test_interpreted.py, the cases for the interpreter run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"

if not INSIDE:
    from linearize_kernels import reference

    def test_split_kernels_in_the_interpreter():
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "LINEARIZE_KERNELS": "triton"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

    def test_the_map_of_a_piece():
        """S_out = M S_in + L, its transpose for cotangents, and maps that do not grow at beta |k|^2 = 2."""
        make = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 200, 2, 16, dtype=torch.float64, generator=make) for _ in range(3))
        k = torch.nn.functional.normalize(k + 2 * k[:, :1], dim=-1)
        decay = -0.01 * torch.rand(1, 200, 2, dtype=torch.float64, generator=make)
        beta = torch.full_like(decay, 2.0)
        state = torch.randn(1, 2, 16, 16, dtype=torch.float64, generator=make, requires_grad=True)
        identity = torch.eye(16, dtype=torch.float64).expand(1, 2, 16, 16)

        def leave(values, initial):
            return reference.chunk_gated_delta(q, k, values, decay, beta, beta, 1.0, initial)[1]

        own, maps = leave(v, None), leave(torch.zeros_like(v), identity)
        want = leave(v, state)
        torch.testing.assert_close(maps @ state + own, want, rtol=1e-12, atol=1e-12)
        slope = torch.randn(want.shape, dtype=torch.float64, generator=make)
        (got,) = torch.autograd.grad(want, state, slope)
        torch.testing.assert_close(maps.mT @ slope, got, rtol=1e-12, atol=1e-12)
        assert torch.linalg.matrix_norm(maps, 2).max() <= 1

    @pytest.mark.parametrize(
        "rows, tokens, dim, length",
        [
            ((1, 16), 32768, 128, 4096),
            ((1, 8), 32768, 128, 2048),
            ((1, 16), 65536, 64, 8192),
            ((1, 8), 65536, 64, 4096),
            ((1, 9), 32768, 64, 2368),
            ((2, 8), 8192, 128, 1024),
            ((1, 8), 8192, 128, 1024),
            ((1, 16), 4096, 128, 1024),
            ((1, 1), 4096, 64, 1024),
            ((1, 16), 2048, 128, 0),
            ((1, 16), 4095, 128, 0),
            # Cut in two where the pieces run at once: with 128 dims a narrower tile of values does that by itself.
            ((1, 32), 16384, 64, 8192),
            ((2, 16), 16384, 64, 8192),
            ((1, 32), 16384, 128, 0),
            ((1, 33), 4100, 64, 2112),
            ((1, 34), 16384, 64, 0),
            ((1, 48), 65536, 128, 0),
            ((8, 16), 4096, 128, 0),
        ],
    )
    def test_the_rule(rows, tokens, dim, length):
        pytest.importorskip("triton")
        from linearize_kernels.split import piece_length

        sequences, heads = rows
        got = piece_length(sequences, sequences * tokens, heads, dim, dim)
        assert got == length and got % 64 == 0

    def test_narrow_tiles_where_all_programs_run_at_once():
        pytest.importorskip("triton")
        from linearize_kernels import scan, selfcheck

        for lines, tile, stages, count in ((16, 32, 3, 64), (33, 32, 3, 132), (34, 64, 2, 68), (128, 64, 2, 256)):
            assert scan.programs(scan.SCAN, 128, 128, lines) == (count, (tile, 4, stages))
        assert scan.programs(scan.SCAN, 96, 40, 30) == (60, (32, 4, 3))
        assert scan.programs(scan.REVERSE, 128, 16, 30) == (30, (16, 4, 3))
        # Both are what the self-check runs.
        assert [scan.programs(scan.STORE, 128, 128, 2 * n)[1][0] for n in selfcheck._copies(128, 128)] == [32, 64]
        assert selfcheck._copies(64, 64) == [1]

else:
    import interpreter  # noqa: F401
    from linearize_kernels import gated_delta, linear_attn, split
    from tolerances import TOLERANCE, assert_close, error

    NAMES = ("q", "k", "v", "log_decay", "beta", "gain", "initial_state", "add_to")

    @pytest.fixture(autouse=True)
    def length(monkeypatch):
        """Sets how long the pieces are; the rule itself has a test of its own."""

        def set_length(tokens):
            monkeypatch.setattr(split, "piece_length", lambda *_: tokens)

        return set_length

    def inputs(
        tokens, dims, dtype, *, heads=2, batch=1, groups=(1, 1, 1), sequences=None, decay=0.02, beta=2.0, seed=0
    ):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=make)

        dim = dims[0], dims[0], dims[1]
        q, k, v = (normal(batch, tokens, heads // g, d) for g, d in zip(groups, dim, strict=True))
        k = torch.nn.functional.normalize(k, dim=-1)
        log_decay = -decay * torch.nn.functional.softplus(normal(batch, tokens, heads))
        erase, gain = (torch.rand(batch, tokens, heads, dtype=torch.float64, generator=make) for _ in range(2))
        erase = beta * erase * (erase > 0.1)
        state, add_to = normal(sequences or batch, heads, *dims), normal(batch, tokens, heads, dims[1])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        types = (dtype, dtype, dtype, wide, wide, wide, wide, dtype)
        tensors = (q, k, v, log_decay, erase, gain, state, add_to)
        return {name: x.to(t) for name, x, t in zip(NAMES, tensors, types, strict=True)}

    def call(x, linear, cu=None):
        shared = {"scale": 0.3, "output_final_state": True, "cu_seqlens": cu}
        shared |= {name: x[name] for name in ("initial_state", "add_to") if name in x}
        if linear:
            return linear_attn(x["q"], x["k"], x["v"], x.get("log_decay"), x["gain"], **shared)
        return gated_delta(x["q"], x["k"], x["v"], x.get("log_decay"), x["beta"], gain=x["gain"], **shared)

    def run(x, linear, cu=None, final=True):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items() if not (linear and n == "beta")}
        outputs = call(leaves, linear, cu)
        make = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, dtype=torch.float64, generator=make).to(t.dtype) for t in outputs]
        total = sum((t * w).sum() for t, w in zip(outputs[: 1 + final], weights, strict=False))
        slopes = torch.autograd.grad(total, list(leaves.values()))
        return dict(zip(("o", "final state"), outputs, strict=True)), dict(zip(leaves, slopes, strict=True))

    def check(x, length, piece, limits, linear=False, cu=None, final=True):
        """Outputs, final state and all gradients against those of the uncut sequence in float64."""
        exact = {name: t.double() for name, t in x.items()}
        length(0)
        want, want_slopes = run(exact, linear, cu, final)
        length(piece)
        got, got_slopes = run(x, linear, cu, final)
        for name in want:
            assert_close(name, got[name], want[name], limits[0])
        for name, slope in want_slopes.items():
            scalar = name in ("log_decay", "beta", "gain")
            assert_close(f"gradient of {name}", got_slopes[name], slope, limits[2 if scalar else 1])

    @pytest.mark.parametrize(
        "tokens,piece,linear",
        [(64, 64, False), (65, 64, False), (65, 64, True), (193, 128, False), (200, 64, False), (200, 64, True)],
    )
    def test_lengths(tokens, piece, linear, length):
        check(inputs(tokens, (32, 32), torch.float32, heads=1), length, piece, TOLERANCE["float32"], linear)

    @pytest.mark.parametrize("linear", [False, True])
    def test_rows_of_a_batch(linear, length):
        x = inputs(130, (16, 24), torch.float64, heads=2, batch=2, groups=(2, 1, 2))
        check(x, length, 64, TOLERANCE["float64"], linear)

    @pytest.mark.parametrize("linear", [False, True])
    def test_packed_sequences(linear, length):
        """A sequence of one token, an empty one, one shorter than a piece and one of three pieces."""
        cu = torch.tensor([0, 1, 1, 41, 220], dtype=torch.int32)
        x = inputs(220, (16, 16), torch.float64, heads=1, sequences=4)
        check(x, length, 64, TOLERANCE["float64"], linear, cu)

    def test_without_optional_arguments(length):
        x = inputs(200, (16, 16), torch.float64, heads=1)
        for name in ("log_decay", "initial_state", "add_to"):
            del x[name]
        check(x, length, 64, TOLERANCE["float64"], final=False)

    @pytest.mark.parametrize("decay,linear", [(0.0, False), (20.0, False), (20.0, True)])
    def test_gates(decay, linear, length):
        x = inputs(150, (32, 32), torch.float32, heads=1, decay=decay)
        check(x, length, 64, TOLERANCE["float32"], linear)

    def test_correlated_keys_erased_twice_over_lose_nothing_by_the_split(length):
        """Such systems amplify rounding; the pieces must not add to what the uncut form loses, over several draws."""
        pairs = {}
        for seed in range(4):
            x = inputs(200, (16, 16), torch.float32, heads=1, decay=0.0, seed=seed)
            x["k"] = torch.nn.functional.normalize(x["k"] + 3 * x["k"][:, :1], dim=-1)
            x["beta"] = torch.full_like(x["beta"], 1.9)
            length(0)
            exact = run({name: t.double() for name, t in x.items()}, False)
            uncut = run(x, False)
            length(64)
            for got, plain, want in zip(run(x, False), uncut, exact, strict=True):
                for name in want:
                    pairs.setdefault(name, []).append((error(got[name], want[name]), error(plain[name], want[name])))
        for name, found in pairs.items():
            cut, whole = torch.tensor(found, dtype=torch.float64).square().mean(0).sqrt()
            assert cut <= 1.5 * whole, f"{name}: {cut:.2e} > 1.5 x {whole:.2e}"

    @pytest.mark.parametrize("dims", [(100, 48), (256, 16)])
    def test_head_dims(dims, length):
        check(inputs(140, dims, torch.float64, heads=1), length, 64, TOLERANCE["float64"])

    def test_sixteen_bits(length):
        check(inputs(200, (32, 32), torch.float16, heads=1), length, 64, TOLERANCE["float16"])

    def test_runs_are_bitwise_equal(length):
        length(64)
        first, second = (run(inputs(130, (16, 16), torch.float32), False) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)

    def test_the_operator_is_registered_soundly():
        from linearize_kernels.ops import delta_fwd

        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        x = inputs(130, (16, 16), torch.float32, heads=1)
        leaves = [x[name].requires_grad_() for name in NAMES[:7]]
        torch.library.opcheck(delta_fwd, (*leaves, None, x["add_to"], 0.3, True, 64), test_utils=tests)
        cu = torch.tensor([0, 5, 130], dtype=torch.int32)
        packed = (*leaves[:4], None, leaves[5], None, cu, None, 0.3, False, 64)
        torch.library.opcheck(delta_fwd, packed, test_utils=tests[:3])

    def test_a_compiled_call_has_no_graph_break(length):
        length(64)
        x = inputs(130, (16, 16), torch.float32, heads=1)
        leaves = [t.requires_grad_() for t in x.values()]

        def summed(*tensors):
            o, state = call(dict(zip(x, tensors, strict=True)), False)
            return o.sum() + state.sum()

        compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
        results = [(y := f(*leaves), *torch.autograd.grad(y, leaves)) for f in (summed, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_the_self_check_passes_here():
        from linearize_kernels import selfcheck

        errors = selfcheck.measure(32, 32, torch.float32, True, torch.device("cpu"), None, 64)
        assert selfcheck.passes(errors, torch.float32)

    def test_the_self_check_takes_few_and_many_sequences(monkeypatch):
        from linearize_kernels import scan, selfcheck

        monkeypatch.setattr(scan, "NARROW", {32: (16, 4, 1)})
        monkeypatch.setattr(scan, "AT_ONCE", 4)
        assert selfcheck._copies(32, 32) == [1, 3]
        errors = selfcheck.measure(32, 32, torch.float32, False, torch.device("cpu"), None)
        assert selfcheck.passes(errors, torch.float32)

    def test_queries_that_are_not_fetched_ahead(monkeypatch):
        from linearize_kernels import scan, selfcheck

        monkeypatch.setattr(scan, "AT_ONCE", 0)
        monkeypatch.setattr(scan, "LATE_SCAN", {32})
        monkeypatch.setattr(scan, "LATE_REVERSE", {32})
        errors = selfcheck.measure(32, 32, torch.float32, True, torch.device("cpu"), None)
        assert selfcheck.passes(errors, torch.float32)
