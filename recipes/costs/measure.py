"""The constants from which the cost of converting a large model is worked out, on one GPU and without its weights.

    LINEARIZE_KERNELS_CHECK=0 python recipes/costs/measure.py --out recipes/costs/results.json --device cuda

For the shapes of Qwen3-8B and Llama-3.1-70B, with random weights: a student of one converted and one softmax layer, a
teacher of two layers, and their real embeddings and heads. Text is random hidden states, in rows of --context tokens
that hold two documents each, as packed text does. All times are medians after a warm-up, with the device drained, in
seconds a token unless a key says otherwise; "graph" is the same work as a CUDA graph, which is how alignment always
runs and distillation in one process.

    stage0    fp32: a layer's calibration (seconds for --calibrate-tokens), and moving text through a softmax and a
              converted layer
    stage1    bf16 autocast: a step of alignment as `align_layer` makes it, the teacher's output included, and moving
              text through a layer
    stage2    a micro batch: teacher's layer (bf16), student's layers forward and backward with checkpointing (fp32
              weights, bf16 autocast), head and KL; clipping, AdamW and clearing gradients, in seconds a parameter; and
              `whole`, the trainer's own micro batch on the two layers, beside `sum`, what its parts add up to
    memory    bytes: `kept` by a layer from forward to backward, a token; `copies` of weights that stay until the
              student's forward ends, a parameter; and the most that a layer or head and KL hold during a micro batch

The file is written after every part. A part that fails leaves its error, one that --budget-seconds is over for nothing.
table.py makes the tables.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from linearize.align import Step, align_layer
from linearize.calibrate import calibrate_layer
from linearize.distill import Trainer
from linearize.errors import UserError
from linearize.families import FAMILIES
from linearize.kl import FullTarget, Head, chunked_kl
from linearize.layerwise import BATCH_TOKENS
from linearize.mixers import HeadShape, MixedAttention, Sample, Segments, build_mixer
from linearize.models import free_memory
from linearize.observe import observe
from linearize.processes import Processes, device_name, half_precision, pick_device
from linearize.recipe import Align, Distill, Recipe
from linearize.replay import WARM, Replay
from linearize.student import build_student, packed_documents

HERE = Path(__file__).parent

# By model: transformers' model_type, the arguments of its config, and the recipe whose mixer and steps are measured.
MODELS = {
    "Qwen3-8B": {
        "model_type": "qwen3",
        "recipe": "qwen3-8b",
        "config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
        },
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "recipe": "llama-3.1-8b",
        "config": {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
}
CONVERTED, SOFTMAX = 0, 1  # the student's two layers
ALIGN_STEPS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--micro-tokens", type=int, default=8192, help="of distillation")
    parser.add_argument("--align-batch-tokens", type=int, default=32768)
    parser.add_argument("--calibrate-tokens", type=int, default=32768)
    parser.add_argument("--select-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no part after this long")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to see that everything runs")
    args = parser.parse_args()
    if args.tiny:
        args.context, args.micro_tokens, args.align_batch_tokens = 32, 64, 64
        args.calibrate_tokens, args.select_tokens, args.repeats = 128, 128, 1
    device = pick_device(args.device)
    gpu = device.type == "cuda"
    results = {
        "command": f"measure.py --device {args.device}" + " --tiny" * args.tiny,
        "device": device_name(device),
        "device_bytes": torch.cuda.mem_get_info()[1] if gpu else None,
        "torch": torch.__version__,
        "tiny": args.tiny,
        "context": args.context,
        "documents_per_row": 2,
        "micro_tokens": args.micro_tokens,
        "align_batch_tokens": args.align_batch_tokens,
        "calibrate_tokens": args.calibrate_tokens,
        "select_tokens": args.select_tokens,
        "models": {},
    }
    began = time.monotonic()
    for name in args.models.split(","):
        found = results["models"][name] = {}

        def keep(part: str, run: Callable[[], dict], name: str = name, found: dict = found) -> None:
            if time.monotonic() - began > args.budget_seconds:
                return
            try:
                found[part] = run()
            except (RuntimeError, ValueError, UserError) as error:
                found[part] = {"error": (str(error).splitlines() or [type(error).__name__])[0]}
            results["seconds"] = round(time.monotonic() - began, 1)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, part, json.dumps(found[part]), flush=True)

        if time.monotonic() - began > args.budget_seconds:
            break
        bench = Bench(MODELS[name], args, device)
        for part in ("shape", "stage1", "stage2", "memory", "stage0"):
            keep(part, getattr(bench, part))
            bench.rest()
        del bench
        free_memory(device)


class Stub(nn.Module):
    """Stands in for a decoder layer and keeps what it is called with."""

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        self.kwargs = kwargs
        return hidden


class Bench:
    """One model's student and teacher with random weights, and the measurements on them."""

    def __init__(self, model: dict, args: argparse.Namespace, device: torch.device) -> None:
        self.model, self.args, self.device = model, args, device
        family, recipe = FAMILIES[model["model_type"]], Recipe.resolve(model["recipe"])
        specs = recipe.mixer_specs(model["config"]["num_hidden_layers"])
        self.spec, self.kept = next(iter(specs.values())), model["config"]["num_hidden_layers"] - len(specs)
        size = model["config"] | (TINY if args.tiny else {})
        self.config = family.config_class()(**size | {"num_hidden_layers": 2})
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.student = build_student(
            self.config, {"mixers": {CONVERTED: self.spec}}, device=device, dtype=torch.float32
        )
        with torch.device(device):
            self.teacher = family.causal_lm_class()._from_config(self.config, dtype=dtype).eval().requires_grad_(False)
        self.student.requires_grad_(False)

    def rest(self) -> None:
        """The student as it was at first: in evaluation, without gradients."""
        self.student.zero_grad(set_to_none=True)
        self.student.requires_grad_(False).eval()
        free_memory(self.device)

    def shape(self) -> dict:
        """Sizes of the whole model: layers, those that stay softmax, and parameters by what holds them."""
        layers = self.student.model.layers
        return {
            "config": self.model["config"] | (TINY if self.args.tiny else {}),
            "recipe": self.model["recipe"],
            "layers": self.model["config"]["num_hidden_layers"],
            "softmax_layers": self.kept,
            "parameters": {
                "softmax_layer": count(layers[SOFTMAX]),
                "converted_layer": count(layers[CONVERTED]),
                "converted_attention": count(layers[CONVERTED].self_attn),
                "embeddings": count(self.student.model.embed_tokens),
                "head": count(self.student.lm_head),
                "norm": count(self.student.model.norm),
            },
        }

    # -- what a layer is called with

    def text(self, tokens: int) -> tuple[Tensor, Tensor]:
        """ids, positions [rows, context] on the CPU, two documents a row."""
        context = self.args.context
        rows = max(1, tokens // context)
        ids = torch.randint(self.config.vocab_size, (rows, context), generator=torch.Generator().manual_seed(0))
        return ids, (torch.arange(context) % (context // 2)).expand(rows, -1)

    @torch.no_grad()
    def given(self, model: nn.Module, tokens: int) -> tuple[Tensor, list[dict]]:
        """Random hidden states [rows, context, hidden] and what the model gives its layers beside them."""
        ids, positions = self.text(tokens)
        packed, layers = {}, model.model.layers
        if model is self.student:
            reset, documents = packed_documents(positions, len(ids))
            packed = {"mixer_reset": reset.to(self.device), "mixer_documents": documents}
        model.model.layers = nn.ModuleList(Stub() for _ in layers)
        ids, positions = ids.to(self.device), positions.to(self.device)
        model.model(input_ids=ids, position_ids=positions, use_cache=False, **packed)
        seen = [stub.kwargs for stub in model.model.layers]
        model.model.layers = layers
        hidden = torch.randn(*ids.shape, self.config.hidden_size, device=self.device)
        return hidden.to(next(model.parameters()).dtype), seen

    def mixed(self) -> MixedAttention:
        """A converted attention, not calibrated, around a copy of the softmax layer's."""
        attention = copy.deepcopy(self.student.model.layers[SOFTMAX].self_attn)
        mixed = build_mixer(attention, self.spec, CONVERTED, HeadShape.from_config(self.config))
        mixed.mixer.reset_parameters()
        return mixed.to(self.device)

    # -- stages

    @torch.no_grad()
    def stage0(self) -> dict:
        layers, args = self.student.model.layers, self.args
        batch = max(args.context, min(BATCH_TOKENS[self.device.type], args.select_tokens // 2))
        hidden, kwargs = self.given(self.student, batch)
        moved = {
            name: per_token(lambda i=i: layers[i](hidden, **kwargs[i]), hidden, self.device, args)
            for name, i in (("move_softmax", SOFTMAX), ("move_converted", CONVERTED))
        }
        free_memory(self.device)
        batches, select = args.calibrate_tokens // batch, max(2, args.select_tokens // batch)
        self.calibrate(hidden, kwargs[SOFTMAX], 2, 2)  # compiles
        before = allocated(self.device, reset=True)
        began = time.perf_counter()
        self.calibrate(hidden, kwargs[SOFTMAX], batches, select)
        drain(self.device)
        seconds = time.perf_counter() - began
        return moved | {"calibrate_seconds": short(seconds), "calibrate_bytes": peak(self.device) - before}

    def calibrate(self, like: Tensor, kwargs: dict, batches: int, select: int) -> None:
        """A layer's calibration as Layerwise does it, the text's q, k and v of teacher and student included."""
        layer, mixed, samples = self.student.model.layers[SOFTMAX], self.mixed(), []
        for _ in range(batches):
            hidden = torch.randn_like(like)
            _, theirs = observe(layer, hidden, kwargs, attention_only=True)
            _, own = observe(layer, hidden, kwargs, attention_only=True)
            segments = Segments(reset=kwargs["mixer_reset"], documents=kwargs["mixer_documents"])
            samples.append(Sample(own.x, own.q, own.k, own.v, theirs.heads, theirs.output, segments))
        calibrate_layer(mixed, samples, layer.self_attn.scaling, select)

    def stage1(self) -> dict:
        layer, mixed = self.student.model.layers[SOFTMAX], self.mixed()
        hidden, kwargs = self.given(self.student, self.args.align_batch_tokens)
        before = allocated(self.device, reset=True)
        times = []
        align_layer(
            mixed,
            self.steps(layer, hidden, kwargs[SOFTMAX]),
            ALIGN_STEPS,
            Align(),
            name="a layer with random weights",
            progress=lambda tokens, loss: times.append(time.perf_counter()),
        )
        steps = [end - start for start, end in zip(times, times[1:], strict=False)]
        tokens = hidden.shape[0] * hidden.shape[1]
        found = {
            # Of the steps between ends of steps the first are the plain run and the capture.
            "align": short(statistics.median(steps[WARM:]) / tokens),
            "align_bytes": peak(self.device) - before,
        }
        del mixed
        free_memory(self.device)
        hidden, kwargs = self.given(self.student, min(BATCH_TOKENS[self.device.type], self.args.align_batch_tokens))

        @torch.no_grad()
        def move():
            with half_precision(self.device):
                layer(hidden, **kwargs[SOFTMAX])

        found["move"] = per_token(move, hidden, self.device, self.args)
        free_memory(self.device)
        return found

    def steps(self, layer: nn.Module, hidden: Tensor, kwargs: dict) -> Iterator[Step]:
        """The same batch again and again, with the teacher's side of it made anew, as Layerwise makes it."""
        packed = {name: value for name, value in kwargs.items() if name.startswith("mixer_")}
        kwargs = {name: value for name, value in kwargs.items() if name not in packed}

        @Replay
        def look(hidden: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
            with half_precision(self.device):
                _, seen = observe(layer, hidden, kwargs, attention_only=True)
            return seen.x, seen.output

        while True:
            x, target = look(hidden, kwargs)
            yield Step(x, target, {k: v for k, v in kwargs.items() if k != "attention_mask"} | packed)

    def stage2(self) -> dict:
        args = self.args
        trainer = self.trainer()
        tokens = trainer.tokens
        ids, positions = self.text(tokens)
        found: dict = {"graph": {}}

        def whole():
            trainer.gradients(ids, positions, tokens)

        # Graphs first: compiled code may belong to the stream that it first ran on.
        graph = median_seconds(whole, self.device, args.repeats, warm=WARM + 1)
        captured = bool(trainer.descend.graphs)
        trainer.descend.forget()
        trainer.descend.enabled = False
        free_memory(self.device)
        found["whole"] = short(median_seconds(whole, self.device, args.repeats) / tokens)
        found["graph"]["whole"] = short(graph / tokens) if captured else None

        def update():
            trainer.clip()
            trainer.update(trainer.passes[0])
            trainer.optimizer.zero_grad(set_to_none=False)

        trained = sum(p.numel() for p in trainer.weights.values())
        found["update_per_parameter"] = short(median_seconds(update, self.device, args.repeats) / trained)
        trainer.optimizer.state.clear()
        free_memory(self.device)
        for name, (run, given) in self.micro_batch(trainer).items():
            replay = Replay(run)
            graph = median_seconds(lambda r=replay, g=given: r(*g), self.device, args.repeats, warm=WARM + 1)
            found["graph"][name] = short(graph / tokens) if replay.graphs else None
            replay.forget()
            free_memory(self.device)
            plain = median_seconds(lambda r=run, g=given: r(*g), self.device, args.repeats)
            found[name] = short(plain / tokens)
        for kind in (found, found["graph"]):
            parts = [kind[name] for name in ("teacher", "teacher", "converted", "softmax", "head")]
            kind["sum"] = short(sum(parts)) if None not in parts else None
        return found

    def trainer(self) -> Trainer:
        tokens = max(1, self.args.micro_tokens // self.args.context) * self.args.context
        options = Distill(
            tokens=tokens, context=self.args.context, batch_tokens=tokens, micro_tokens=self.args.micro_tokens
        )
        return Trainer(self.student, self.teacher, options, lambda context, rows: iter(()), Processes(self.device))

    def micro_batch(self, trainer: Trainer) -> dict[str, tuple[Callable, tuple]]:
        """The parts of a micro batch: functions and their arguments. Gradients add up in the student's weights."""
        tokens = trainer.tokens
        own, own_kwargs = self.given(self.student, tokens)
        theirs, their_kwargs = self.given(self.teacher, tokens)
        head, teachers = Head(self.student), Head(self.teacher)
        layers = self.student.model.layers

        @torch.no_grad()
        def of_teacher(hidden: Tensor, kwargs: dict):
            return self.teacher.model.layers[SOFTMAX](hidden, **kwargs)

        def of_student(layer: nn.Module):
            def run(hidden: Tensor, gradient: Tensor, kwargs: dict):
                with half_precision(self.device):
                    out = layer(hidden.detach().requires_grad_(), **kwargs)
                out.backward(gradient)

            return run

        def of_head(hidden: Tensor, other: Tensor):
            with half_precision(self.device):
                given = hidden.detach().requires_grad_()
                value = chunked_kl(head, given, FullTarget(other, teachers), weight=1.0 / tokens)
            value.backward()

        return {
            "teacher": (of_teacher, (theirs, their_kwargs[SOFTMAX])),
            "converted": (of_student(layers[CONVERTED]), (own, torch.randn_like(own), own_kwargs[CONVERTED])),
            "softmax": (of_student(layers[SOFTMAX]), (own, torch.randn_like(own), own_kwargs[SOFTMAX])),
            "head": (of_head, (own.flatten(0, 1), theirs.flatten(0, 1))),
        }

    def memory(self) -> dict:
        trainer = self.trainer()
        found = {}
        parts = self.micro_batch(trainer)
        for name in ("converted", "softmax", "head"):
            run, given = parts[name]
            run(*given)  # allocates the gradients
            before = allocated(self.device, reset=True)
            run(*given)
            found[f"{name}_peak"] = peak(self.device) - before
            free_memory(self.device)
        del parts, run, given
        for name, i in (("converted", CONVERTED), ("softmax", SOFTMAX)):
            most, half = self.after_forward(i, trainer.tokens), self.after_forward(i, trainer.tokens // 2)
            kept = (most - half) / (trainer.tokens - trainer.tokens // 2)
            found[f"{name}_kept"] = short(kept)
            copies = max(0.0, most - kept * trainer.tokens) / count(self.student.model.layers[i])
            found[f"{name}_copies"] = round(copies, 2)
        return found

    def after_forward(self, i: int, tokens: int) -> int:
        """Bytes that a layer of the student has left behind when its forward is over and autocast is not."""
        hidden, kwargs = self.given(self.student, tokens)
        hidden.requires_grad_()
        before = allocated(self.device)
        with half_precision(self.device):
            out = self.student.model.layers[i](hidden, **kwargs[i])
            found = allocated(self.device) - before
        del out
        return found


# ---- clocks and memory ----------------------------------------------------------------------------------------------


def per_token(run: Callable[[], object], hidden: Tensor, device: torch.device, args: argparse.Namespace) -> float:
    return short(median_seconds(run, device, args.repeats) / (hidden.shape[0] * hidden.shape[1]))


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int, warm: int = 2) -> float:
    times = []
    for _ in range(warm + repeats):
        drain(device)
        began = time.perf_counter()
        run()
        drain(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm:])


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device, reset: bool = False) -> int:
    """Bytes in use on the GPU now (0 on a CPU); with `reset` the peak is counted from here."""
    if device.type != "cuda":
        return 0
    drain(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    drain(device)
    return torch.cuda.max_memory_allocated(device)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
