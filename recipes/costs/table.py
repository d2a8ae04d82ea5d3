"""What converting a large model takes on 1, 8 and 64 GPUs, worked out from what measure.py measured on one.

    python recipes/costs/table.py recipes/costs/results.json [--scaling scaling.json] [--write recipes/README.md]

Prints Markdown, or puts it between the two markers of the file that --write names. Tokens of every stage are those of
the recipe that results.json names beside the model. With n GPUs, L layers of which C are converted, all in bytes and
seconds, x the recipe's tokens of a kind, and every constant measured for the model's own layers and vocabulary:

Stages 0 and 1. One process calibrates. Then each moves its share of the rows, M tokens at most, up the teacher's
layers; what enters a layer to align is gathered by its owner, and n owners train at the same time. S is the size of the
alignment text's hidden states:

    C calibrate + (calibrate tokens + held-out tokens) sum over layers (teacher's + student's move)        fp32, alone
    + M L move + ceil(C / n) align tokens align
    + C S (GPUs of a node - 1) / n / bandwidth of a node + C S (GPUs of other nodes) / n / one network card
    + disk

A process keeps its share and, while it trains, a copy of all rows. What is beyond align.cache_bytes is in a file, and
the busiest node's processes take their disk, over --disk,

    share    (2 L + C) S / n each: read and written as it moves, read to be gathered (or trained on, by one process)
    copies   C S to write all of them, as gathers follow one another, and S for each that this node reads

which is the most, as the system keeps in memory what it has room for.

calibrate is scaled to the recipe's tokens in proportion, although a part of it does not grow. Not counted: downloads,
reading and writing weights, packing text, the head on held-out text, start-up.

Stage 2. A step has m = ceil(step tokens / n / micro tokens) micro batches on every GPU, and FSDP2 splits P weights:

    arithmetic       step tokens / n (L teacher + C converted + (L - C) softmax + head and KL) + P / n update
    communication    m (n - 1) / n (4 P + 4 layers' P + 4 P + 2 teacher's layers' P) / bandwidth

for all weights gathered in fp32, those of layers again in the backward, fp32 gradients reduced after every micro batch,
and the teacher's layers gathered in bf16. The bandwidth inside a node is --nvlink. Across nodes the network cards of a
node carry each byte once for all its GPUs, so that it is the lower of --nvlink and GPUs of a node times --network. The
true time is between arithmetic alone (all communication hidden) and the sum (nothing hidden); GPU-hours and cost are
the sum's. One GPU runs CUDA graphs and communicates nothing. With --scaling, what scaling.py measured of distill-full
on the nearest number of GPUs that is not larger gives a third figure, arithmetic over that efficiency.

Memory of stage 2, a GPU: 16 bytes a trained weight and 2 of the teacher, split over n; for n > 1 what FSDP2 gathers
(embeddings and head of the student with gradients, of the teacher, two layers' weights and a layer's gradients); what
all layers keep of a micro batch; and the larger of a layer's backward and the loss, with the copies of weights that
autocast keeps of all layers until the forward is over. Of stages 0 and 1: a block, its mixer, embeddings and head in
fp32, the hidden states that fit align.cache_bytes, and the larger measured peak, of calibration or of alignment.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from linearize.errors import UserError
from linearize.layerwise import MOVED_TOKENS
from linearize.plan import CHUNK, SEARCHED, States, hidden_states
from linearize.recipe import Recipe

BEGIN, END = "<!-- costs: written by recipes/costs/table.py -->", "<!-- costs: end -->"
PARTS = ("shape", "stage0", "stage1", "stage2", "memory")
HEADROOM = 0.95  # of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
NODE = 8  # GPUs
COUNTS = [2**i for i in range(11)]  # of GPUs, among which the fewest that suffice are looked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--gpus", default="1,8,64")
    parser.add_argument("--dollars-per-gpu-hour", type=float, default=3.0, help="an assumption")
    parser.add_argument("--nvlink", type=float, default=350.0, help="GB/s that a GPU receives inside a node")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s that a GPU's network card receives")
    parser.add_argument("--disk", type=float, default=5.0, help="GB/s that the disk of a node reads or writes")
    parser.add_argument("--scaling", type=Path, help="scaling.json of recipes/smollm2-135m-throughput")
    parser.add_argument("--write", type=Path, help="file whose part between the markers is replaced")
    parser.add_argument("--rates", action="store_true", help="print the rates that linearize.plan needs instead")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    scaling = json.loads(args.scaling.read_text()) if args.scaling else None
    if args.rates:
        for name, found in results["models"].items():
            print(name, json.dumps(rates(found, results)))
        return
    text = report(results, args, scaling)
    if args.write:
        args.write.write_text(replaced(args.write.read_text(), text))
    else:
        print(text)


def replaced(page: str, text: str) -> str:
    """The page with `text` in place of what is between the markers, which stay; nothing else changes."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise SystemExit(f"the page needs one line {BEGIN} and one {END} after it")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


# ---- a model on n GPUs ----------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """One model with its recipe and constants; see the module's docstring for every formula."""

    found: dict  # of this model in results.json
    results: dict
    nvlink: float = 350.0  # GB/s, as the two below
    network: float = 50.0
    disk: float = 5.0

    def __post_init__(self) -> None:
        shape, self.recipe = self.found["shape"], Recipe.resolve(self.found["shape"]["recipe"])
        self.weights = shape["parameters"]
        self.layers, self.softmax = shape["layers"], shape["softmax_layers"]
        self.converted = self.layers - self.softmax
        self.hidden = shape["config"]["hidden_size"]
        self.rest = sum(self.weights[name] for name in ("embeddings", "head", "norm"))
        self.of_layers = self.of_all("converted_layer", "softmax_layer", self.weights)
        self.student = self.of_layers + self.rest
        self.teacher = self.layers * self.weights["softmax_layer"] + self.rest

    def of_all(self, converted: str, softmax: str, values: dict) -> float:
        """The sum over all layers of a value that converted and softmax layers have."""
        return self.converted * values[converted] + self.softmax * values[softmax]

    # -- stages 0 and 1

    def states(self, gpus: int) -> States:
        return hidden_states(self.recipe, self.hidden, self.converted, gpus)

    def without_states(self) -> float:
        """Bytes a GPU of stages 0 and 1 but for hidden states."""
        scale = self.recipe.calibrate.tokens / self.results["calibrate_tokens"]
        peak = max(self.found["stage1"]["align_bytes"], self.found["stage0"]["calibrate_bytes"] * scale)
        return 4 * (self.weights["softmax_layer"] + self.weights["converted_attention"] + self.rest) + peak

    def align_bytes(self, gpus: int) -> float:
        return self.without_states() + self.states(gpus).memory

    def align_seconds(self, gpus: int) -> tuple[float, float]:
        """(alone in one process, shared) seconds of stages 0 and 1, without the disk's."""
        recipe, zero, one = self.recipe, self.found["stage0"], self.found["stage1"]
        calibrate = zero["calibrate_seconds"] * recipe.calibrate.tokens / self.results["calibrate_tokens"]
        move = self.layers * zero["move_softmax"] + self.of_all("move_converted", "move_softmax", zero)
        alone = self.converted * calibrate + (recipe.calibrate.tokens + recipe.data.heldout_tokens) * move
        tokens = recipe.align.tokens
        share = min(tokens, math.ceil(math.ceil(tokens / MOVED_TOKENS["cuda"]) / gpus) * MOVED_TOKENS["cuda"])
        trained = math.ceil(self.converted / gpus) * tokens
        sent = self.states(gpus).copy / gpus * 1e-9  # by each of the others, for each layer
        gather = sent * ((min(gpus, NODE) - 1) / self.nvlink + max(0, gpus - NODE) / self.network)
        return alone, share * self.layers * one["move"] + trained * one["align"] + self.converted * gather

    def disk_seconds(self, gpus: int) -> float:
        """Seconds that hidden states in files add to stages 0 and 1, on the node that reads most."""
        states, through = self.states(gpus), 0.0
        if states.own_in_file:
            through += min(gpus, NODE) * (2 * self.layers + self.converted) * states.own
        if states.copy_in_file:
            groups, rest = divmod(self.converted, gpus)
            through += (self.converted + groups * min(gpus, NODE) + min(rest, NODE)) * states.copy
        return through / (1e9 * self.disk)

    def room(self, gpus: int) -> float:
        """Bytes that a GPU has for the alignment's hidden states."""
        states = self.states(gpus)
        others = states.memory - states.own * (not states.own_in_file) if gpus == 1 else 0
        return HEADROOM * self.results["device_bytes"] - self.without_states() - others

    # -- stage 2

    def distill_bytes(self, gpus: int) -> dict[str, float]:
        """Bytes a GPU, by what they are for."""
        memory, weights = self.found["memory"], self.weights
        copies = self.converted * weights["converted_layer"] * memory["converted_copies"]
        copies += self.softmax * weights["softmax_layer"] * memory["softmax_copies"]
        kept = self.results["micro_tokens"] * self.of_all("converted_kept", "softmax_kept", memory)
        backward = max(memory["converted_peak"], memory["softmax_peak"])
        found = {"state": 16 * self.student / gpus, "teacher": 2 * self.teacher}
        if gpus > 1:
            found["teacher"] = 2 * (self.teacher - weights["head"]) / gpus + 2 * self.rest
            found["gathered"] = 8 * self.rest + 12 * weights["converted_layer"]
        return found | {
            "kept activations": kept,
            "autocast's copies": copies,
            "loss or backward": max(memory["head_peak"], backward - copies),
        }

    def fits(self, gpus: int, copies: bool = True) -> bool:
        """Whether stage 2 does, with autocast's copies of weights or as it would be without them."""
        parts = self.distill_bytes(gpus)
        needed = sum(size for name, size in parts.items() if copies or name != "autocast's copies")
        return needed <= HEADROOM * self.results["device_bytes"]

    def fewest(self, copies: bool = True) -> int | None:
        """The smallest power of two of GPUs on which stage 2 fits, up to 1024."""
        return next((n for n in COUNTS if self.fits(n, copies)), None)

    def distill_seconds(self, gpus: int) -> tuple[float, float]:
        """(arithmetic, communication) seconds of stage 2."""
        options, found = self.recipe.distill, self.found["stage2"]
        graph = found["graph"] if gpus == 1 else {}
        rate = {name: graph.get(name) or found[name] for name in ("teacher", "converted", "softmax", "head")}
        mine = options.batch_tokens / gpus
        step = mine * (self.layers * rate["teacher"] + self.of_all("converted", "softmax", rate) + rate["head"])
        step += found["update_per_parameter"] * self.student / gpus
        sent = 4 * (self.student + self.of_layers) + 4 * self.student + 2 * (self.teacher - self.rest)
        micro = math.ceil(mine / options.micro_tokens)
        speed = 1e9 * (self.nvlink if gpus <= NODE else min(self.nvlink, NODE * self.network))
        steps = options.tokens / options.batch_tokens
        return steps * step, steps * micro * (gpus - 1) / gpus * sent / speed


def efficiency(scaling: dict, gpus: int) -> tuple[float, int] | None:
    """(share of perfect scaling, number of GPUs it was measured on): the largest number that is not above `gpus`."""
    speed = {
        run["processes"]: run["tokens_per_second"]
        for run in scaling["runs"]
        if run["stage"] == "distill-full" and "tokens_per_second" in run
    }
    counts = [n for n in speed if 1 < n <= gpus]
    if 1 not in speed or not counts:
        return None
    return speed[max(counts)] / speed[1] / max(counts), max(counts)


# ---- tables ---------------------------------------------------------------------------------------------------------


def missing(found: dict) -> list[str]:
    """Parts of a model that were not measured, each with its error if there is one."""
    lacks = [part for part in PARTS if part not in found]
    return lacks + [f"{part} ({found[part]['error']})" for part in PARTS if "error" in found.get(part, {})]


def report(results: dict, args: argparse.Namespace, scaling: dict | None) -> str:
    if not results["device_bytes"] or results["tiny"]:
        raise SystemExit("these results are of a dry run: run measure.py on a GPU, without --tiny")
    lines, costs = [], {}
    for name, found in results["models"].items():
        if lacks := missing(found):
            lines.append(f"{name} is left out: not measured are {', '.join(lacks)}.\n")
        else:
            costs[name] = Cost(found, results, args.nvlink, args.network, args.disk)
    counts = [int(n) for n in args.gpus.split(",")]
    return "\n".join(
        [
            *lines,
            *measured_part(costs, results),
            "",
            *memory_part(costs, counts),
            "",
            *time_part(costs, counts, args, scaling),
        ]
    )


def measured_part(costs: dict[str, Cost], results: dict) -> list[str]:
    lines = [
        f"**Measured** on one {results['device']} (torch {results['torch']}, rows of {results['context']} tokens with "
        f"{results['documents_per_row']} documents, micro batches of {results['micro_tokens']} tokens, random weights, "
        f"layers of the true size): microseconds a token, and in brackets Tflop/s of the products with weights.",
        "",
        "| | " + " | ".join(costs) + " |",
        "|---|" + "---|" * len(costs),
    ]

    def row(label: str, cell) -> None:
        lines.append(f"| {label} | " + " | ".join(cell(cost) for cost in costs.values()) + " |")

    def speed(stage: str, key: str, flops: str | None = None, times: int = 0):
        def cell(cost: Cost) -> str:
            value = cost.found[stage][key]
            reached = f" ({times * cost.weights[flops] / value / 1e12:.0f})" if flops else ""
            graph = cost.found[stage].get("graph", {}).get(key)
            return f"{1e6 * value:.3g}{reached}" + (f"; graph {1e6 * graph:.3g}" if graph else "")

        return cell

    row("one layer calibrated, s", lambda c: f"{c.found['stage0']['calibrate_seconds']:.3g}")
    row("text moved through a layer, fp32", speed("stage0", "move_softmax", "softmax_layer", 2))
    row("the same, a converted layer", speed("stage0", "move_converted", "converted_layer", 2))
    row("text moved through a layer, bf16", speed("stage1", "move", "softmax_layer", 2))
    row("one layer aligned", speed("stage1", "align", "converted_attention", 8))
    row("stage 2: teacher's layer", speed("stage2", "teacher", "softmax_layer", 2))
    row("stage 2: converted layer, forward, again, backward", speed("stage2", "converted", "converted_layer", 8))
    row("stage 2: softmax layer, the same", speed("stage2", "softmax", "softmax_layer", 8))
    row("stage 2: both heads and KL", speed("stage2", "head", "head", 8))
    row("stage 2: two layers and the head as the trainer runs them", speed("stage2", "whole"))
    row("the sum of their parts", speed("stage2", "sum"))
    row("update, ps a weight", lambda c: f"{1e12 * c.found['stage2']['update_per_parameter']:.3g}")
    row("kept by a layer to the backward, kB a token", lambda c: f"{c.found['memory']['converted_kept'] / 1e3:.3g}")
    row("weights' copies kept by autocast, bytes a weight", lambda c: f"{c.found['memory']['converted_copies']:.2g}")
    tokens = f"{results['calibrate_tokens']} tokens of which {results['select_tokens']} choose"
    return [*lines, "", f"Calibration was measured on {tokens}; alignment in steps of {results['align_batch_tokens']}."]


def memory_part(costs: dict[str, Cost], counts: list[int]) -> list[str]:
    lines = [
        "**Computed**: gigabytes a GPU. Stage 2 is split over the GPUs with FSDP2; stages 0 and 1 hold one block in "
        "every process.",
        "",
        "| model | GPUs | stages 0 and 1 | stage 2 | of that: weights, gradients, moments | teacher | gathered | "
        "activations | autocast's copies | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cost in costs.items():
        capacity = HEADROOM * cost.results["device_bytes"]
        for gpus in rows(cost, counts):
            parts = cost.distill_bytes(gpus)
            one = cost.align_bytes(gpus)
            activations = parts["kept activations"] + parts["loss or backward"]
            cells = [one, sum(parts.values()), parts["state"], parts["teacher"], parts.get("gathered", 0.0)]
            cells += [activations, parts["autocast's copies"]]
            fits = "yes" if cost.fits(gpus) else "stage 2 does not fit"
            if one > capacity:
                fits = "does not fit" if not cost.fits(gpus) else "stages 0 and 1 do not fit"
            lines.append(f"| {name} | {gpus} | " + " | ".join(f"{x / 1e9:.0f}" for x in cells) + f" | {fits} |")
    lines.append("")
    for name, cost in costs.items():
        with_copies, without = cost.fewest(), cost.fewest(copies=False)
        line = f"* {name}: stage 2 needs {at_least(with_copies)}"
        if without != with_copies:
            line += f"; without autocast's copies of the weights {at_least(without)}"
        size = cost.results["device_bytes"] / 1e9
        lines.append(f"{line}. A GPU has {size:.0f} GB, of which {100 * HEADROOM:.0f} % are counted on.")
    return lines


def at_least(gpus: int | None) -> str:
    return f"more than {COUNTS[-1]} GPUs" if gpus is None else "one GPU" if gpus == 1 else f"{gpus} GPUs"


def rows(cost: Cost, counts: list[int]) -> list[int]:
    """The numbers of GPUs asked for, and the smallest power of two on which stage 2 fits."""
    return sorted({*counts, *filter(None, [cost.fewest()])})


def time_part(costs: dict[str, Cost], counts: list[int], args: argparse.Namespace, scaling: dict | None) -> list[str]:
    across = min(args.nvlink, NODE * args.network)
    lines = [
        f"**Computed** from the measured constants; **assumed**: ${args.dollars_per_gpu_hour:g} a GPU-hour, "
        f"{args.nvlink:g} GB/s inside a node of {NODE}, {args.network:g} GB/s a network card (so {across:g} GB/s "
        f"across nodes), {args.disk:g} GB/s a node's disk. Hours; for stage 2 with all communication "
        "hidden, and with none.",
        "",
        "| model | GPUs | stages 0 and 1 | of that: one process alone | the disk | stage 2, arithmetic | "
        "with communication |" + (" at measured scaling |" if scaling else "") + " GPU-hours, cost | "
        "with stages 0 and 1 on one GPU |",
        "|---|---|---|---|---|---|---|---|---|" + "---|" * bool(scaling),
    ]
    for name, cost in costs.items():
        for gpus in rows(cost, counts):
            alone, shared = cost.align_seconds(gpus)
            disk = cost.disk_seconds(gpus)
            first = alone + shared + disk
            cells = [hours(first), hours(alone), hours(disk)]
            if cost.fits(gpus):
                arithmetic, sent = cost.distill_seconds(gpus)
                second = gpus * (arithmetic + sent)
                cells += [hours(arithmetic), hours(arithmetic + sent)]
                if scaling:
                    share = efficiency(scaling, gpus) if gpus > 1 else (1.0, 1)
                    cells.append(f"{hours(arithmetic / share[0])} ({share[1]} GPUs)" if share else "-")
                single = sum(cost.align_seconds(1)) + cost.disk_seconds(1)
                cells += [price(gpus * first + second, args), price(single + second, args)]
            else:
                size = sum(cost.distill_bytes(gpus).values())
                cells += [f"does not fit ({size / 1e9:.0f} GB a GPU)", *["-"] * (1 + bool(scaling))]
                cells += [price(gpus * first, args) + ", stages 0 and 1 only", "-"]
            lines.append(f"| {name} | {gpus} | " + " | ".join(cells) + " |")
    lines.append("")
    for name, cost in costs.items():
        recipe = cost.recipe
        tokens = (recipe.calibrate.tokens, recipe.align.tokens, recipe.distill.tokens, recipe.distill.batch_tokens)
        calibrate, align, distill, step = (f"{count:,}" for count in tokens)
        lines.append(
            f"* {name}: tokens of `recipes/{cost.found['shape']['recipe']}`, {calibrate} for calibration, {align} for "
            f"alignment and {distill} for distillation in steps of {step}; {cost.converted} of {cost.layers} layers "
            "converted."
        )
        lines += disk_lines(name, cost, rows(cost, counts))
    if scaling:
        lines.append(
            f"* The scaling was measured with {scaling['model']} on {scaling['device']}; in brackets on how many GPUs."
        )
    return lines


def disk_lines(name: str, cost: Cost, counts: list[int]) -> list[str]:
    """What hidden states in files do to stages 0 and 1, and which settings keep them out of files."""
    align = cost.recipe.align
    seconds = {gpus: cost.disk_seconds(gpus) for gpus in counts}
    counts = [gpus for gpus in counts if seconds[gpus]]
    if not counts:
        return []
    share = {gpus: 100 * seconds[gpus] / (seconds[gpus] + sum(cost.align_seconds(gpus))) for gpus in counts}
    verb = "bounds" if max(share.values()) > 50 else "slows"
    taken = ", ".join(f"{share[gpus]:.0f} % on {at_least(gpus)}" for gpus in counts)
    whole, room = cost.states(1).own, math.floor(min(cost.room(gpus) for gpus in counts) / 1e9)  # room in GB
    fewer = []
    for gpus in counts:
        states = cost.states(gpus)
        tokens = align.tokens * 1e9 * room / (states.own + states.copy)
        fewer.append(f"{math.floor(tokens / 1e6)}M on {at_least(gpus)}")
    line = (
        f"* {name}: **the disk {verb} stages 0 and 1**. At most, it takes {taken} of their time. The hidden "
        f"states of {align.tokens:,} tokens in {align.cache_dtype} are {whole / 1e9:.0f} GB, `align.cache_bytes` is "
        f"{align.cache_bytes / 1e9:.0f} GB, and so they lie in files: {whole / 1e9:.0f} GB for each process, up to "
        f"{min(max(counts), NODE) * whole / 1e12:.1f} TB on a node. With fewer `align.tokens` and "
        f"`align.cache_bytes={room}GB` they stay in a GPU's memory: up to {', '.join(fewer)}."
    )
    if align.cache_dtype == "float32":
        line += " `align.cache_dtype=bfloat16` halves them."
    return [line]


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g}"


def price(seconds: float, args: argparse.Namespace) -> str:
    """seconds: of all GPUs together."""
    return f"{seconds / 3600:,.0f} h, ${seconds / 3600 * args.dollars_per_gpu_hour:,.0f}"


# ---- for linearize plan ---------------------------------------------------------------------------------------------


def rates(found: dict, results: dict) -> dict[str, float] | str:
    """Operations a second of every stage as `linearize.plan.work` counts them; of stage 2 without CUDA graphs."""
    if lacks := missing(found):
        return f"not measured: {', '.join(lacks)}"
    config, weights = found["shape"]["config"], found["shape"]["parameters"]
    heads, dim, hidden = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    memory = heads * (6 * dim * dim + 2 * CHUNK * 4 * dim)
    attention = 2 * dim * hidden * 2 * (heads + config["num_key_value_heads"])
    calibrate = results["select_tokens"] * SEARCHED * memory
    calibrate += results["calibrate_tokens"] * (2 * attention + memory + 2 * (heads * dim) ** 2)
    cost = Cost(found, results)
    distill = 8 * cost.of_layers + 2 * (cost.teacher - cost.rest) + 8 * weights["head"]
    arithmetic, _ = cost.distill_seconds(2)
    values = {
        "forward_bf16": 2 * weights["softmax_layer"] / found["stage1"]["move"],
        "forward_fp32": 2 * weights["softmax_layer"] / found["stage0"]["move_softmax"],
        "calibrate": calibrate / found["stage0"]["calibrate_seconds"],
        "align": (4 * attention + 3 * memory) / found["stage1"]["align"],
        "distill": distill * cost.recipe.distill.tokens / (2 * arithmetic),
    }
    return {name: float(f"{value:.3g}") for name, value in values.items()}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from error
