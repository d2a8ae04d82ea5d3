"""What `linearize plan` says against models that are really built, and that it exits 0 only if convert would run."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from linearize import cli, plan
from linearize.checkpoint import TensorIndex
from linearize.console import Console
from linearize.data import Rows
from linearize.errors import UserError
from linearize.layerwise import Layerwise
from linearize.mixers import MIXERS, HeadShape
from linearize.processes import Processes
from linearize.recipe import OPTIONS, Recipe, recipes_dir
from linearize.student import build_student

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden / heads
}
KEEP_LAST = ["convert.keep_softmax=3"]


def save(folder, config, **settings):
    """Write a random model of the config and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, **settings)
    return model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = save(folder, LlamaConfig(**SIZES, tie_word_embeddings=True), max_shard_size="40kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return SimpleNamespace(folder=folder, model=model)


def plan_json(capsys, *argv):
    assert cli.run(["plan", *map(str, argv), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return json.loads(out)


def test_numbers_are_the_models(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--mixer", "0=gdn,rest=gdn-standard", "--keep-softmax", "3")
    shape = HeadShape.from_config(teacher.model.config)
    mixers = [MIXERS["gdn"](shape, taps=4, time_scales=3), MIXERS["gdn-standard"](shape), MIXERS["gdn-standard"](shape)]
    new = [sum(p.numel() for p in mixer.parameters()) for mixer in mixers]
    states = [MIXERS["gdn"].state_bytes(shape, taps=4, time_scales=3), *[MIXERS["gdn-standard"].state_bytes(shape)] * 2]

    assert said["parameters"] == teacher.model.num_parameters()
    assert said["converted_layers"] == [0, 1, 2] and said["dtype"] == "bfloat16"
    assert [layer["becomes"] for layer in said["layers"]] == ["gdn", "gdn-standard", "gdn-standard", "softmax"]
    assert [layer["mixer_parameters"] for layer in said["layers"]] == [*new, 0]
    assert [layer["state_bytes"] for layer in said["layers"]] == [*states, 0]
    attention = sum(p.numel() for p in teacher.model.model.layers[0].self_attn.parameters())
    assert {layer["parameters"] for layer in said["layers"]} == {attention}
    per_token = 2 * 2 * (24 + 24)  # bf16 bytes, KV heads, keys and values
    assert {layer["kv_bytes_per_token"] for layer in said["layers"]} == {per_token}
    for at in said["cache"]:
        assert at["teacher"] == 4 * per_token * at["tokens"]
        assert at["student"] == per_token * at["tokens"] + sum(states)
    assert [at["tokens"] for at in said["cache"]] == [1024, 8192, 32768]
    assert said["disk"]["checkpoint"] == 2 * said["parameters"] + 4 * sum(new)
    assert said["disk_bytes"] == sum(said["disk"].values()) and said["memory_bytes"] == sum(said["memory"].values())


def test_a_state_that_grows(teacher, capsys):
    """A cache of keys beside softmax layers and states of one size."""
    said = plan_json(capsys, teacher.folder, "--mixer", "0=k-cache,rest=vala", "--keep-softmax", "3")
    shape = replace(HeadShape.from_config(teacher.model.config), itemsize=2)  # bf16
    options = {"taps": 4, "time_scales": 3}
    grows, fixed = MIXERS["k-cache"], MIXERS["vala"].state_bytes(shape, **options)
    for at in said["cache"]:
        softmax = 2 * 2 * (24 + 24) * at["tokens"]
        assert at["student"] == grows.state_bytes(shape, at["tokens"], **options) + 2 * fixed + softmax
    layer = said["layers"][0]
    growth = grows.state_bytes(shape, 1001, **options) - grows.state_bytes(shape, 1000, **options)
    assert layer["state_bytes_per_token"] == growth > 0
    assert said["layers"][1]["state_bytes_per_token"] == said["layers"][3]["state_bytes_per_token"] == 0


def test_kv_bytes_are_those_of_a_real_cache(teacher, capsys):
    with torch.no_grad():
        cache = teacher.model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).cache
    held = cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes
    assert plan_json(capsys, teacher.folder)["layers"][0]["kv_bytes_per_token"] * 7 == held


def test_a_cache_of_keys_grows_by_half(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--mixer", "k-cache", "--keep-softmax", "none")
    keys = 2 * 2 * 24 + 1  # bf16 bytes, KV heads, key; whether the token is real
    state = said["layers"][0]["state_bytes"]
    assert {layer["state_bytes_per_token"] for layer in said["layers"]} == {keys}
    for at in said["cache"]:
        assert at["student"] == 4 * (state + keys * at["tokens"])


def test_token_budget(teacher, capsys):
    said = plan_json(
        capsys, teacher.folder, "--align-tokens", "100k", "--align-batch-tokens", "4096", *("-s", *KEEP_LAST)
    )
    assert said["align_tokens_per_layer"] == 100_000 and said["align_steps_per_layer"] == 24
    assert said["align_tokens"] == 300_000 and said["calibrate_tokens"] == Recipe().calibrate.tokens
    untrained = plan_json(capsys, teacher.folder, "--align-tokens", "0")
    assert untrained["align_steps_per_layer"] == 0 and untrained["memory_bytes"] < said["memory_bytes"]


def test_table_has_the_numbers_of_the_object(teacher, capsys):
    said = plan_json(capsys, teacher.folder)
    assert cli.run(["plan", str(teacher.folder)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    for layer in said["layers"]:
        row = next(row for row in rows if row[:1] == [str(layer["layer"])])
        assert row[2] == layer["becomes"] and str(layer["parameters"]) in row
    assert plan.format_bytes(said["memory_bytes"]) in out and plan.format_bytes(said["disk_bytes"]) in out


def test_projections_that_a_mixer_replaces_are_not_counted(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--mixer", "gdn-native", "--keep-softmax", "3", "--dtype", "float32")
    specs = {i: {"kind": "gdn-native"} for i in range(3)}
    student = build_student(teacher.model.config, {"mixers": specs}, device="meta")
    assert said["disk"]["checkpoint"] == 4 * student.num_parameters()
    assert said["export"]["qwen3_5"].startswith("no QK-norm")


def test_lengths_and_numbers_of_sequences(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--context", "100,2k", "--batch", "1,16")
    at = {(c["batch"], c["tokens"]): c for c in said["cache"]}
    assert list(at) == [(1, 100), (1, 2000), (16, 100), (16, 2000)]
    assert all(at[16, n][who] == 16 * at[1, n][who] for n in (100, 2000) for who in ("teacher", "student"))
    assert cli.run(["plan", str(teacher.folder), "--context", "0"]) == 2
    assert cli.run(["plan", str(teacher.folder), "--batch", "many"]) == 2


def test_end_to_end_training_needs_the_whole_model(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--distill-tokens", "1M", "--device", "cpu")
    student = said["parameters"] + said["mixer_parameters"]
    assert said["distill_memory"]["student"] == 4 * student
    assert said["distill_memory"]["teacher"] == 4 * said["parameters"]  # on a CPU in fp32, whatever the file holds
    assert said["distill_memory"]["gradients_and_moments"] == 12 * student
    mixers = plan_json(capsys, teacher.folder, "--distill-tokens", "1M", "-s", "distill.train=mixers")
    assert mixers["distill_memory"]["gradients_and_moments"] == 12 * said["mixer_parameters"]
    assert plan_json(capsys, teacher.folder)["distill_memory"] == {}


def test_hidden_states_beyond_the_budget_are_on_disk(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--align-tokens", "1M")
    small = plan_json(capsys, teacher.folder, "--align-tokens", "1M", "-s", "align.cache_bytes=10MB")
    recipe, width = Recipe(), 4 * SIZES["hidden_size"]
    both = 2 * (recipe.calibrate.tokens + recipe.data.heldout_tokens)  # of teacher and student
    assert said["memory"]["hidden_states"] == (both + 1_000_000) * width and "hidden_states" not in said["disk"]
    assert all("without files" not in basis for basis in said["seconds_from"].values())
    assert small["memory"]["hidden_states"] == both * width and small["disk"]["hidden_states"] == 1_000_000 * width


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 6, 7, 8, 9, 100])
def test_hidden_states_of_several_processes_are_those_of_the_run(tmp_path, world, budget):
    """Share and copy are where Layerwise puts them, for budgets in quarters of the text's states."""
    rows = Rows(torch.zeros(24, 32, dtype=torch.long), torch.arange(32).repeat(24, 1))
    hidden, whole = 16, 24 * 32 * 16 * 4
    budget = budget * whole // 4
    recipe = Recipe().replace({"align.tokens": rows.tokens, "align.context": 32, "align.cache_bytes": budget})
    said = plan.hidden_states(recipe, hidden, converted=9, world=world)

    class Here(Processes):
        def gather(self, piece, owner):
            return [piece] * self.world

        def agree(self, value):
            return value

    run = Layerwise.__new__(Layerwise)
    run.here, run.recipe, run.kept, run.batch = Here(torch.device("cpu"), 0, world), recipe, torch.float32, 32
    run.budget, run.moved = budget, 32
    run.text, run.run = SimpleNamespace(alignment=rows), SimpleNamespace(folder=tmp_path)
    run.runner = SimpleNamespace(
        config=SimpleNamespace(hidden_size=hidden), embed=lambda ids: torch.zeros(*ids.shape, hidden)
    )
    own = run._own_rows(rows)
    assert said.own_in_file == own.teacher.in_file and said.own == whole // world
    if world == 1:
        assert said.copy == 0 and not said.copy_in_file
        return
    copy = run._gathered(own, 0).teacher
    assert said.copy_in_file == copy.in_file and said.copy == whole
    calibration = 2 * recipe.calibrate.tokens * hidden * 4
    if budget > calibration:
        assert said.memory == max(calibration, own.teacher.in_memory + copy.in_memory)


def test_hidden_states_by_order(teacher, capsys, monkeypatch):
    few = ("--align-tokens", "1M", "-s", "align.cache_bytes=100MB")
    width, text = 4 * SIZES["hidden_size"], 1_000_000 * 4 * SIZES["hidden_size"]
    recipe = Recipe()
    # One text after the other: what is largest.
    first = plan_json(capsys, teacher.folder, *few, "--align-order", "calibrate-first")
    assert first["memory"]["hidden_states"] == 2 * max(recipe.calibrate.tokens, recipe.data.heldout_tokens) * width
    assert first["disk"]["hidden_states"] == text
    # Shares of 64 MB are in memory; each of the three converted layers has a copy, whatever the number of processes.
    monkeypatch.setenv("WORLD_SIZE", "4")
    several = plan_json(capsys, teacher.folder, *few, "-s", *KEEP_LAST)
    assert several["memory"]["hidden_states"] == text // 4 and several["disk"]["hidden_states"] == 3 * text
    # Interleaved, the first process works alone.
    alone = plan_json(capsys, teacher.folder, *few, "--align-order", "interleaved")
    assert alone["disk"]["hidden_states"] == text
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = plan_json(capsys, teacher.folder, *few, "-s", *KEEP_LAST)
    assert two["disk"]["hidden_states"] == text + 2 * text  # shares of 128 MB are in files too


def test_text_of_less_than_a_step_is_one_step(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--align-tokens", "4096", "--align-batch-tokens", "8192")
    assert said["align_steps_per_layer"] == 1


def test_starts_and_states_are_on_disk_too(teacher, capsys, monkeypatch):
    plain = plan_json(capsys, teacher.folder)
    starts = plan_json(capsys, teacher.folder, "--align-order", "calibrate-first")
    assert starts["disk"]["finished_layers"] == 2 * plain["disk"]["finished_layers"]
    whole = plan_json(capsys, teacher.folder, "--distill-tokens", "1M")
    state = 12 * (whole["parameters"] + whole["mixer_parameters"])
    assert whole["disk"]["checkpoint"] + whole["disk"]["distillation"] == 2 * state
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plan_json(capsys, teacher.folder)["disk"] == starts["disk"]


def test_layers_that_are_measured_later(teacher, capsys):
    said = plan_json(capsys, teacher.folder, "--keep-softmax", "auto:2", "--device", "cpu")
    assert len(said["converted_layers"]) == 2 and "measures which 2 layers" in said["notes"]
    plain = plan_json(capsys, teacher.folder)
    assert plain["notes"] == "" and plain["select_memory"] == {}
    # Every layer is converted and kept while they are chosen; two models are in memory.
    attention, new = (sum(at[name] for at in plain["layers"]) for name in ("parameters", "mixer_parameters"))
    new = new // len(plain["converted_layers"]) * len(plain["layers"])
    assert said["disk"]["choosing_layers"] == 4 * (attention + new)
    assert said["select_memory_bytes"] == 4 * (2 * said["parameters"] + new + attention)
    assert said["seconds"] == {} and set(said["seconds_from"].values()) == {"choosing layers was not measured"}
    assert cli.run(["plan", str(teacher.folder), "--keep-softmax", "auto:4"]) == 2


def test_export_is_foreseen(teacher, tmp_path, capsys):
    assert "gdn mixer" in plan_json(capsys, teacher.folder)["export"]["qwen3_5"]
    save(tmp_path, Qwen3Config(**SIZES))
    assert plan_json(capsys, tmp_path, "--mixer", "gdn-native")["export"] == {"qwen3_5": None}


def test_time_is_scaled_from_the_measured_demo():
    """The rates are those of the committed figures: stage by stage, what was done over the seconds that it took."""
    name = "smollm2-135m-cpu-demo"
    measured = json.loads((recipes_dir() / name / "results.json").read_text())
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    values = {key: value for key, value in measured["recipe"].items() if key in OPTIONS}
    flops = plan.work(config, model, HeadShape.from_config(config), Recipe.from_values(values), len(measured["layers"]))
    seconds = {
        "calibrate": sum(layer["calibrate_seconds"] for layer in measured["layers"]),
        "align": sum(layer["align_seconds"] for layer in measured["layers"]),
    }
    seconds["forward_fp32"] = measured["seconds"] - sum(seconds.values())
    flops["forward_fp32"] += flops["forward_bf16"]  # which a CPU computes in fp32 as well
    [point] = plan.RATES["two CPU cores"]
    assert point.hidden == config.hidden_size and point.rates["forward_bf16"] == point.rates["forward_fp32"]
    for stage, took in seconds.items():
        assert point.rates[stage] == pytest.approx(flops[stage] / took, rel=0.2), stage

    measured = json.loads((recipes_dir() / "smollm2-135m-start" / "results.json").read_text())
    seconds = {arm["arm"]: arm.get("seconds") for arm in measured["arms"] if arm["keep"] == "8 of 30 kept"}
    recipe = Recipe.resolve(sets=["calibrate.tokens=32k", "align.tokens=0", "data.heldout_tokens=0"])
    flops = plan.work(config, model, HeadShape.from_config(config), recipe, 22)
    point = plan.RATES["one H200"][0]
    assert point.hidden == config.hidden_size
    # The control is not calibrated: all of its time is the forward passes.
    assert point.rates["forward_fp32"] == pytest.approx(flops["forward_fp32"] / seconds["gdn-standard"], rel=0.1)
    took = seconds["gdn"] - seconds["gdn-standard"]
    assert point.rates["calibrate"] == pytest.approx(flops["calibrate"] / took, rel=0.1)
    recipe = Recipe.resolve(sets=["align.tokens=1M"])
    flops = plan.work(config, model, HeadShape.from_config(config), recipe, 1)
    # 1.97M tokens a second and layer; a layer's text in bf16 moves at least as fast.
    assert point.rates["align"] == pytest.approx(flops["align"] * 1.97, rel=0.02)
    assert point.rates["forward_bf16"] == pytest.approx(flops["forward_bf16"] / 30 * 1.97, rel=0.02)


MEASURED = [
    plan.Measured("narrow", 512, {"align": 1e12}),
    plan.Measured("middle", 2048, {"align": 4e12, "distill": 8e12}),
    plan.Measured("wide", 8192, {"align": 4e12, "distill": 32e12}),
]


@pytest.mark.parametrize(
    ("stage", "hidden", "expected"),
    [
        ("align", 512, (1e12, ["narrow"])),
        ("align", 1024, (2e12, ["narrow", "middle"])),  # halfway, in both logarithms
        ("align", 300, (1e12, ["narrow"])),
        ("align", 255, None),
        ("distill", 4096, (16e12, ["middle", "wide"])),
        ("distill", 1024, (8e12, ["middle"])),
        ("distill", 1023, None),
        ("distill", 16384, (32e12, ["wide"])),
        ("calibrate", 2048, None),
    ],
)
def test_rates_between_measured_sizes(stage, hidden, expected):
    found = plan.rate(stage, hidden, MEASURED)
    assert found == (expected and (pytest.approx(expected[0]), expected[1]))


def sized(hidden, layers=2):
    """A source of a model of this width; its weights are nowhere."""
    config = LlamaConfig(**SIZES | {"hidden_size": hidden, "num_hidden_layers": layers, "head_dim": 16})
    return plan.Source("sized", config, torch.bfloat16)


def test_what_an_estimate_of_time_rests_on():
    room = "align.cache_bytes=20GB"
    both = plan.make_plan(sized(2048), Recipe.resolve(sets=["distill.tokens=1M", room]))
    assert list(both.seconds) == ["one H200"]
    assert both.seconds_from == {
        "two CPU cores": "distillation was not measured",
        "one H200": "at rates of the layers of SmolLM2-135M and Qwen3-8B",
    }
    apart = plan.make_plan(sized(2048), Recipe.resolve(sets=[room]))
    speed, _ = plan.rate("distill", 2048, plan.RATES["one H200"])
    config = sized(2048).config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    layers, head = 2 * sum(p.numel() for p in model.model.layers.parameters()), 2 * 2048 * config.vocab_size
    more = both.seconds["one H200"] - apart.seconds["one H200"]
    assert more == pytest.approx(1e6 * (5 * layers + 4 * head) / speed, rel=1e-2)
    files = plan.make_plan(sized(2048), Recipe.resolve(sets=["align.cache_bytes=1GB"]))
    assert files.seconds == apart.seconds
    assert files.seconds_from["one H200"].endswith("Qwen3-8B, without files of hidden states")
    narrow = plan.make_plan(sized(1024), Recipe.resolve(sets=["distill.tokens=1M"]))
    assert narrow.seconds == {}
    assert narrow.seconds_from["one H200"] == "distillation was not measured with much narrower layers than Qwen3-8B's"
    assert set(plan.make_plan(sized(1024), Recipe()).seconds) == {"two CPU cores", "one H200"}
    tiny = plan.make_plan(sized(64), Recipe())
    assert tiny.seconds == {} and "a conversion was not measured" in tiny.seconds_from["two CPU cores"]


def test_a_distillation_that_one_gpu_does_not_hold(monkeypatch):
    source, recipe = sized(4096), Recipe.resolve(sets=["distill.tokens=1M"])
    said = plan.make_plan(source, recipe)
    assert "hold" not in said.seconds_from["one H200"]
    monkeypatch.setattr(plan, "H200_BYTES", sum(said.distill_memory.values()) - 1)
    more = plan.make_plan(source, recipe)
    assert "one does not hold the distillation" in more.seconds_from["one H200"] and more.seconds == said.seconds
    assert "hold" not in plan.make_plan(source, Recipe()).seconds_from["one H200"]


def test_training_less_is_less_work():
    config = sized(576).config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def of(*sets):
        recipe = Recipe.resolve(sets=["distill.tokens=10k", *sets])
        return plan.work(config, model, HeadShape.from_config(config), recipe, 1)["distill"] / 10_000

    layers, head = 2 * sum(p.numel() for p in model.model.layers.parameters()), 2 * 576 * config.vocab_size
    attention = 2 * sum(p.numel() for p in model.model.layers[0].self_attn.parameters())
    assert of() == pytest.approx(5 * layers + 4 * head, rel=1e-3)  # but for the norms
    assert of() - of("distill.checkpointing=false") == pytest.approx(layers, rel=1e-3)
    assert of("distill.train=attention") - of("distill.train=mixers") == attention
    assert of("distill.train=mixers") == pytest.approx(4 * layers + 3 * head, rel=1e-3)


def test_the_table_says_what_the_time_rests_on(capsys):
    plan.make_plan(sized(2048), Recipe.resolve(sets=["distill.tokens=1M"])).show(Console())
    out = capsys.readouterr().out
    assert "no estimate: distillation was not measured" in out and "SmolLM2-135M and Qwen3-8B" in out


def test_only_the_chosen_experts_count():
    sizes = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    few, many = (Qwen3MoeConfig(**sizes | {"num_experts": n}) for n in (8, 16))
    with torch.device("meta"):
        models = [Qwen3MoeForCausalLM(config) for config in (few, many)]
    done = [
        plan.work(config, model, HeadShape.from_config(config), Recipe(), 3)["forward_bf16"]
        for config, model in zip((few, many), models, strict=True)
    ]
    assert done[0] < done[1] < 1.1 * done[0]  # the router alone grows


def test_summary_is_one_line(teacher):
    line = plan.plan_model(str(teacher.folder), Recipe.resolve(None, KEEP_LAST)).summary()
    assert "\n" not in line and "3 of 4 layers become gdn, softmax stays in 3" in line
    line = plan.plan_model(str(teacher.folder), Recipe.resolve(None, ["convert.keep_softmax=auto:2"])).summary()
    assert "softmax stays in 2, measured first;" in line


def test_no_weight_is_read(teacher, capsys, monkeypatch):
    monkeypatch.setattr(TensorIndex, "get", lambda *a: pytest.fail("read a tensor"))
    assert plan_json(capsys, teacher.folder)["family"] == "llama"


def test_window_bounds_the_teachers_cache(tmp_path, capsys):
    save(tmp_path, MistralConfig(**SIZES, sliding_window=16))
    said = plan_json(capsys, tmp_path, "--keep-softmax", "3")
    assert {layer["window"] for layer in said["layers"]} == {16}
    assert {at["teacher"] for at in said["cache"]} == {4 * 16 * 192}
    assert said["notes"]


def test_gguf_reads_its_header(tmp_path, capsys):
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(4)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(100)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = plan_json(capsys, path)
    assert cli.run(["plan", str(path), "--revision", "main"]) == 2
    path.with_name("cut.gguf").write_bytes(path.read_bytes()[:50])
    assert cli.run(["plan", str(path.with_name("cut.gguf"))]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
    assert (said["family"], said["dtype"], len(said["layers"])) == ("llama", "float32", 4)
    assert said["disk"]["dequantised_copy"] == 4 * said["parameters"]


@pytest.fixture
def hub(teacher, monkeypatch):
    """The two calls for config and headers answer from the folder; tests are offline, so that any other call fails."""
    weights = {name: t for file in teacher.folder.glob("*.safetensors") for name, t in load_file(file).items()}
    infos = {
        name: SimpleNamespace(shape=list(t.shape), dtype="BF16", data_offsets=(0, t.nbytes))
        for name, t in weights.items()
    }
    asked = []

    def download(repo, file, revision):
        asked.append((repo, file, revision))
        return str(teacher.folder / file)

    def headers(repo, revision):
        asked.append((repo, "headers", revision))
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=infos)})

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", headers)
    return SimpleNamespace(asked=asked, infos=infos)


def test_hub_reads_config_and_headers_only(teacher, hub, capsys):
    said = plan_json(capsys, "someone/model", "--revision", "abc")
    assert hub.asked == [("someone/model", "config.json", "abc"), ("someone/model", "headers", "abc")]
    local = plan_json(capsys, teacher.folder)
    assert said["disk"].pop("download") == 2 * said["parameters"]
    for name in ("layers", "cache", "dtype", "memory", "disk"):
        assert said[name] == local[name]


@pytest.mark.parametrize("damage", ["missing", "shape", "integers"])
def test_hub_headers_are_checked(hub, capsys, damage):
    name = "model.layers.2.mlp.up_proj.weight"
    if damage == "missing":
        del hub.infos[name]
    elif damage == "shape":
        hub.infos[name].shape = [95, 64]
    else:
        for info in hub.infos.values():
            info.dtype, name = "I32", "I32"
    assert cli.run(["plan", "someone/model"]) == 1
    err = capsys.readouterr().err
    assert name in err and len(err.strip().splitlines()) == 1


def test_unreachable_hub_is_one_line(capsys, monkeypatch):
    def offline(*args, **options):
        raise OSError("We couldn't connect\nto the Hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    assert cli.run(["plan", "someone/model"]) == 1
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert "no such model (got 'someone/model'): no file or folder /" in err and "We couldn't connect to the Hub" in err


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--keep-softmax", "0-3"], 2, "nothing to convert"),
        (["--keep-softmax", "4"], 2, "no layer 4"),
        (["--mixer", "0=gdn"], 2, "rest=gdn"),
        (["--device", f"cuda:{torch.cuda.device_count()}"], 2, "no such device"),
        (["--data", "nowhere.txt"], 1, "nowhere.txt"),
        (["--revision", "main"], 2, "drop --revision"),
    ],
)
def test_what_convert_would_refuse(teacher, capsys, argv, code, words):
    assert cli.run(["plan", str(teacher.folder), *argv]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.strip().splitlines()) == 1


def test_unsupported_family_says_why(tmp_path, capsys):
    save(tmp_path, GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50))
    assert cli.run(["plan", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "'gpt2'" in err and "Supported: llama" in err


@pytest.mark.parametrize("damage", ["missing", "shape", "no config"])
def test_incomplete_checkpoint(tmp_path, capsys, damage):
    save(tmp_path, LlamaConfig(**SIZES))
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    if damage == "missing":
        del weights[name]
    elif damage == "shape":
        weights[name] = weights[name][:-1].clone()
    else:
        (tmp_path / "config.json").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()  # saving drew a bar
    assert cli.run(["plan", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert (name if damage != "no config" else "config") in err and len(err.strip().splitlines()) == 1


def test_memory_warning(teacher):
    small = plan.plan_model(str(teacher.folder), Recipe.resolve(None, ["align.tokens=10k"]))
    assert plan.memory_warning(small) is None
    steps = plan.plan_model(str(teacher.folder), Recipe.resolve(None, ["align.batch_tokens=100M", "align.tokens=1B"]))
    assert "--align-batch-tokens" in plan.memory_warning(steps)
    whole = dataclasses.replace(small, distill_memory={"student": 10**15})
    assert "--distill-train" in plan.memory_warning(whole)


def test_bytes():
    assert [plan.format_bytes(n) for n in (950, 1200, 34_500_000, 2_070_000_000)] == [
        "950 B",
        "1.2 kB",
        "34.5 MB",
        "2.07 GB",
    ]


def test_errors_are_user_errors(teacher):
    with pytest.raises(UserError):
        plan.plan_model(str(teacher.folder / "nothing"), Recipe())
