"""recipes/costs: the measurements run on a tiny shape, the tables follow their formulas, and README takes them in."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from linearize.families import FAMILIES

RECIPES = Path(__file__).parents[1] / "recipes"
if not (RECIPES / "costs").is_dir():
    pytest.skip("recipes/ is not here", allow_module_level=True)


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"costs_{name}", RECIPES / "costs" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measure, table = script("measure"), script("table")


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict:
    """results.json of a dry run."""
    out = tmp_path_factory.mktemp("costs") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["--tiny", "--device", "cpu", "--models", "Qwen3-8B", "--out", str(out)]
        patch.setattr(sys, "argv", ["measure.py", *arguments])
        measure.main()
    return json.loads(out.read_text())


def results() -> dict:
    """As measure.py would write it on a GPU, with round numbers."""
    models = {}
    for name, layer, converted, rest, kept in (
        ("Qwen3-8B", 193_000_000, 194_000_000, 622_000_000, 17_000),
        ("Llama-3.1-70B", 856_000_000, 858_000_000, 1_050_000_000, 33_000),
    ):
        model = measure.MODELS[name]
        models[name] = {
            "shape": {
                "config": model["config"],
                "recipe": model["recipe"],
                "layers": model["config"]["num_hidden_layers"],
                "softmax_layers": model["config"]["num_hidden_layers"] // 4,
                "parameters": {
                    "softmax_layer": layer,
                    "converted_layer": converted,
                    "converted_attention": layer // 5,
                    "embeddings": rest,
                    "head": rest,
                    "norm": 0,
                },
            },
            "stage0": {
                "move_softmax": 1e-5,
                "move_converted": 2e-5,
                "calibrate_seconds": 4.0,
                "calibrate_bytes": 10**9,
            },
            "stage1": {"align": 4e-6, "align_bytes": 5 * 10**9, "move": 3e-6},
            "stage2": {
                "teacher": 1e-6,
                "converted": 5e-6,
                "softmax": 4e-6,
                "head": 1e-5,
                "whole": 2e-5,
                "sum": 2.1e-5,
                "update_per_parameter": 1e-11,
                "graph": {
                    "teacher": 1e-6,
                    "converted": 4e-6,
                    "softmax": None,
                    "head": 1e-5,
                    "whole": 2e-5,
                    "sum": None,
                },
            },
            "memory": {
                "converted_peak": 2 * 10**9,
                "softmax_peak": 10**9,
                "head_peak": 3 * 10**9,
                "converted_kept": kept,
                "softmax_kept": kept,
                "converted_copies": 0.0,
                "softmax_copies": 0.0,
            },
        }
    return {
        "device": "a GPU",
        "device_bytes": 150 * 10**9,
        "torch": "2",
        "tiny": False,
        "context": 2048,
        "documents_per_row": 2,
        "micro_tokens": 8192,
        "align_batch_tokens": 32768,
        "calibrate_tokens": 32768,
        "select_tokens": 8192,
        "models": models,
    }


def arguments(**changes) -> argparse.Namespace:
    given = {"gpus": "1,8,64", "dollars_per_gpu_hour": 3.0, "nvlink": 350.0, "network": 50.0, "disk": 5.0}
    return argparse.Namespace(**given | changes)


def cost(name: str, found: dict | None = None, **speeds) -> "table.Cost":
    found = found or results()
    return table.Cost(found["models"][name], found, **speeds)


# ---- measure.py -----------------------------------------------------------------------------------------------------


def test_a_dry_run_measures_every_part(dry):
    [found] = dry["models"].values()
    assert table.missing(found) == []
    for stage, keys in {
        "stage0": ("move_softmax", "move_converted", "calibrate_seconds"),
        "stage1": ("align", "move"),
        "stage2": ("teacher", "converted", "softmax", "head", "whole", "sum", "update_per_parameter"),
    }.items():
        assert all(found[stage][key] > 0 for key in keys), stage


def test_results_and_tables_agree_on_their_keys(dry):
    [found] = dry["models"].values()
    for part, values in results()["models"]["Qwen3-8B"].items():
        assert set(values) == set(found[part]), part
    assert set(results()) <= set(dry)


def test_a_dry_run_makes_no_table(dry):
    with pytest.raises(SystemExit, match="dry run"):
        table.report(dry, arguments(), None)


def test_a_part_that_fails_leaves_its_error_and_the_others(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA out of memory.\nmore")

    out = tmp_path / "results.json"
    for part in ("stage0", "stage1", "memory"):
        monkeypatch.setattr(measure.Bench, part, lambda self: {"ran": 1})
    monkeypatch.setattr(measure.Bench, "stage2", fail)
    monkeypatch.setattr(
        sys, "argv", ["measure.py", "--tiny", "--device", "cpu", "--models", "Qwen3-8B", "--out", str(out)]
    )
    measure.main()
    found = json.loads(out.read_text())["models"]["Qwen3-8B"]
    assert found["stage2"] == {"error": "CUDA out of memory."} and found["stage0"] == {"ran": 1}
    assert table.missing(found) == ["stage2 (CUDA out of memory.)"]


def test_no_part_begins_after_the_budget(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    command = ["measure.py", "--tiny", "--device", "cpu", "--budget-seconds", "-1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(measure, "Bench", None)
    measure.main()
    assert not out.exists()


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-8B", 8_190_735_360), ("Llama-3.1-70B", 70_553_706_496)])
def test_shapes_are_the_models(name, parameters):
    model = measure.MODELS[name]
    family = FAMILIES[model["model_type"]]
    with torch.device("meta"):
        whole = family.causal_lm_class()(family.config_class()(**model["config"]))
    assert measure.count(whole) == parameters


# ---- table.py -------------------------------------------------------------------------------------------------------


def test_what_fits_where():
    small, large = cost("Qwen3-8B"), cost("Llama-3.1-70B")
    assert [small.fits(n) for n in (1, 8, 64)] == [False, True, True] and small.fewest() == 2
    assert [large.fits(n) for n in (1, 8, 64)] == [False, False, True] and large.fewest() == 16
    assert all(c.align_bytes(n) < 150e9 for c in (small, large) for n in (1, 8, 64))
    assert large.distill_bytes(1)["state"] == 16 * (60 * 858e6 + 20 * 856e6 + 2.1e9)
    assert "gathered" not in large.distill_bytes(1)


def test_copies_of_weights_are_not_split():
    found = results()
    found["models"]["Llama-3.1-70B"]["memory"] |= {"converted_copies": 2.0, "softmax_copies": 2.0}
    large = cost("Llama-3.1-70B", found)
    assert (
        large.distill_bytes(8)["autocast's copies"]
        == large.distill_bytes(512)["autocast's copies"]
        == 2 * (60 * 858e6 + 20 * 856e6)
    )
    assert large.fewest() is None and large.fewest(copies=False) == 16
    text = table.report(found, arguments(), None)
    assert "stage 2 needs more than 1024 GPUs; without autocast's copies of the weights 16 GPUs" in text


MUCH = {"align.tokens": 20_000_000, "align.cache_bytes": 64 * 10**9}  # text whose states need files


def test_time_of_stage_1():
    small = cost("Qwen3-8B", nvlink=300.0, network=25.0)
    small.recipe = small.recipe.replace(MUCH)
    alone, shared = small.align_seconds(8)
    # 64k tokens of calibration are twice what was measured; teacher and student of 36 layers move.
    assert alone == pytest.approx(27 * 8.0 + 131072 * (36 * 1e-5 + 27 * 2e-5 + 9 * 1e-5))
    # 611 batches of 32768 tokens, 77 for who has most of them; 27 layers in groups of 8; 7 others send their share.
    assert shared == pytest.approx(77 * 32768 * 36 * 3e-6 + 4 * 20e6 * 4e-6 + 27 * 7 * 163.84 / 8 / 300)
    assert small.align_seconds(1)[1] == pytest.approx(20e6 * (36 * 3e-6 + 27 * 4e-6))
    far = 10 * 32768 * 36 * 3e-6 + 20e6 * 4e-6 + 27 * 163.84 / 64 * (7 / 300 + 56 / 25)
    assert small.align_seconds(64) == pytest.approx((alone, far))


def test_time_of_hidden_states_in_files():
    small = cost("Qwen3-8B", disk=2.0)
    small.recipe = small.recipe.replace(MUCH)
    # 164 GB are beyond align.cache_bytes: the copies of all rows always, the shares of two processes as well.
    assert small.disk_seconds(1) == pytest.approx((72 + 27) * 163.84 / 2)
    assert small.disk_seconds(2) == pytest.approx((2 * (72 + 27) / 2 + 27 + 27) * 163.84 / 2)
    assert small.disk_seconds(8) == pytest.approx((27 + 27) * 163.84 / 2)
    assert small.disk_seconds(16) == pytest.approx((27 + 8 + 8) * 163.84 / 2)  # 16 and 11 layers, 8 of each in a node
    assert small.disk_seconds(64) == pytest.approx((27 + 8) * 163.84 / 2)
    small.recipe = small.recipe.replace({"align.tokens": 5_000_000})
    assert small.disk_seconds(8) == 0


def test_the_report_says_when_the_disk_bounds_stage_1():
    text = table.report(results(), arguments(), None)
    [line] = [line for line in text.splitlines() if line.startswith("* Llama-3.1-70B: **the disk bounds")]
    assert "164 GB for each process, up to 1.3 TB on a node" in line
    large = cost("Llama-3.1-70B")
    disk = large.disk_seconds(8)
    assert f"{100 * disk / (disk + sum(large.align_seconds(8))):.0f} % on 8 GPUs" in line
    # With what it says, the states are in memory and a GPU holds them; with a quarter more tokens it does not.
    size = int(line.split("align.cache_bytes=")[1].split("GB")[0])
    most = int(line.split("M on 8 GPUs")[0].split()[-1])
    recipe = large.recipe.replace({"align.tokens": most * 10**6, "align.cache_bytes": size * 10**9})
    large.recipe = recipe
    assert large.disk_seconds(8) == 0 and large.align_bytes(8) <= 0.95 * 150e9
    large.recipe = recipe.replace({"align.tokens": most * 5 * 10**6 // 4})
    assert large.disk_seconds(8) > 0
    quick = table.report(results(), arguments(disk=500.0), None)
    assert "**the disk slows" in quick and "**the disk bounds" not in quick


def test_a_copy_of_all_rows_is_counted_beside_the_share():
    small = cost("Qwen3-8B")
    small.recipe = small.recipe.replace({"align.tokens": 4_000_000})
    whole = 4_000_000 * 4096 * 2
    assert small.align_bytes(8) == pytest.approx(small.without_states() + whole + whole / 8)
    # One process holds the states of calibration and held-out text beside them, of teacher and student.
    assert small.align_bytes(1) == pytest.approx(small.without_states() + whole + 4 * 65536 * 4096 * 2)


def test_time_of_stage_2():
    small = cost("Qwen3-8B", nvlink=300.0, network=25.0)
    weights, layers = 27 * 194e6 + 9 * 193e6 + 2 * 622e6, 27 * 194e6 + 9 * 193e6
    steps = 500e6 / 524288
    arithmetic, sent = small.distill_seconds(8)
    assert arithmetic == pytest.approx(steps * (65536 * (36e-6 + 27 * 5e-6 + 9 * 4e-6 + 1e-5) + 1e-11 * weights / 8))
    bytes_each = 4 * (weights + layers) + 4 * weights + 2 * 36 * 193e6
    assert sent == pytest.approx(steps * 8 * 7 / 8 * bytes_each / 300e9)
    _, sent = small.distill_seconds(64)  # one micro batch; 8 cards of 25 GB/s a node
    assert sent == pytest.approx(steps * 63 / 64 * bytes_each / 200e9)
    arithmetic, sent = small.distill_seconds(1)  # the graph's times where there are some
    assert arithmetic == pytest.approx(steps * (524288 * (36e-6 + 27 * 4e-6 + 9 * 4e-6 + 1e-5) + 1e-11 * weights))
    assert sent == 0


def test_the_report_says_what_does_not_fit_and_what_it_costs():
    text = table.report(results(), arguments(), None)
    one = next(line for line in text.splitlines() if line.startswith("| Llama-3.1-70B | 1 |") and "$" in line)
    large = cost("Llama-3.1-70B")
    assert f"does not fit ({sum(large.distill_bytes(1).values()) / 1e9:.0f} GB a GPU)" in one
    first = (sum(large.align_seconds(1)) + large.disk_seconds(1)) / 3600
    assert f"{first:,.0f} h, ${3 * first:,.0f}, stages 0 and 1 only" in one
    dear = table.report(results(), arguments(dollars_per_gpu_hour=6.0), None)
    assert f"${6 * first:,.0f}, stages 0 and 1 only" in dear
    assert "| Llama-3.1-70B | 16 |" in text  # the fewest that suffice
    many = next(line for line in text.splitlines() if line.startswith("| Llama-3.1-70B | 64 |") and "$" in line)
    spread, second = sum(large.align_seconds(64)) + large.disk_seconds(64), sum(large.distill_seconds(64))
    both = [64 * (spread + second) / 3600, first + 64 * second / 3600]
    assert many.endswith(" | " + " | ".join(f"{h:,.0f} h, ${3 * h:,.0f}" for h in both) + " |")
    assert text.count("**Measured**") == 1 and text.count("**Computed**") == 2 and "**assumed**" in text


def test_a_model_that_was_not_measured_is_left_out():
    found = results()
    found["models"]["Llama-3.1-70B"]["stage2"] = {"error": "no memory"}
    del found["models"]["Llama-3.1-70B"]["stage0"]
    text = table.report(found, arguments(), None)
    assert "Llama-3.1-70B is left out: not measured are stage0, stage2 (no memory)." in text
    assert "| Qwen3-8B | 8 |" in text and "| Llama-3.1-70B | 8 |" not in text


def test_measured_scaling():
    runs = [
        {"stage": "distill-full", "processes": 1, "tokens_per_second": 100},
        {"stage": "distill-none", "processes": 2, "tokens_per_second": 200},
        {"stage": "distill-full", "processes": 2, "tokens_per_second": 150},
        {"stage": "distill-full", "processes": 4, "error": ["no"]},
    ]
    scaling = {"model": "M", "device": "D", "runs": runs}
    assert table.efficiency(scaling, 8) == (0.75, 2)
    assert table.efficiency({"runs": runs[:2]}, 8) is None
    small = cost("Qwen3-8B")
    text = table.report(results(), arguments(), scaling)
    assert f"| {small.distill_seconds(8)[0] / 0.75 / 3600:.3g} (2 GPUs) |" in text and "M on D" in text


def test_rates_count_operations_as_plan_does():
    from linearize.plan import HeadShape, work
    from linearize.recipe import Recipe

    found = results()
    model = measure.MODELS["Qwen3-8B"]
    family = FAMILIES["qwen3"]
    config = family.config_class()(**model["config"])
    with torch.device("meta"):
        whole = family.causal_lm_class()(config)
    tokens = {"calibrate.tokens": 32768, "calibrate.select_tokens": 8192, "align.tokens": 1000}
    flags = tokens | {"distill.tokens": 4096, "data.heldout_tokens": 0}
    flops = work(config, whole, HeadShape.from_config(config), Recipe.resolve(flags=flags), 1)
    got = table.rates(found["models"]["Qwen3-8B"], found)
    # plan counts QK-norm's few weights as well.
    assert got["align"] == pytest.approx(flops["align"] / 1000 / 4e-6, rel=1e-2)
    assert got["calibrate"] == pytest.approx(flops["calibrate"] / 4.0, rel=1e-2)
    assert got["forward_bf16"] == pytest.approx(flops["forward_bf16"] / (1000 * 36 * 3e-6), rel=1e-2)
    assert got["forward_fp32"] == pytest.approx(flops["forward_fp32"] / (2 * 32768 * 36 * 1e-5), rel=1e-2)
    step = 36 * 1e-6 + 27 * 5e-6 + 9 * 4e-6 + 1e-5  # without the graphs' times
    assert got["distill"] == pytest.approx(flops["distill"] / (4096 * step), rel=1e-2)


def test_plan_has_the_rates_that_were_measured():
    from linearize.plan import RATES

    found = json.loads((RECIPES / "costs" / "results.json").read_text())
    assert "H200" in found["device"]
    points = {point.model: point for point in RATES["one H200"]}
    for name, model in found["models"].items():
        assert points[name].hidden == model["shape"]["config"]["hidden_size"]
        assert points[name].rates == pytest.approx(table.rates(model, found), rel=0.01)


def test_the_page_is_what_the_results_give():
    found = json.loads((RECIPES / "costs" / "results.json").read_text())
    measured = RECIPES / "smollm2-135m-throughput" / "scaling.json"
    scaling = json.loads(measured.read_text()) if measured.exists() else None
    page = (RECIPES / "README.md").read_text()
    assert table.replaced(page, table.report(found, arguments(), scaling)) == page, "run table.py with --write"


# ---- README ---------------------------------------------------------------------------------------------------------


def test_exactly_the_part_between_the_markers_is_replaced(tmp_path, monkeypatch):
    page = (RECIPES / "README.md").read_text()
    before, after = page.split(table.BEGIN)[0], page.split(table.END)[1]
    copy, source = tmp_path / "README.md", tmp_path / "results.json"
    copy.write_text(page)
    source.write_text(json.dumps(results()))
    monkeypatch.setattr(sys, "argv", ["table.py", str(source), "--write", str(copy)])
    table.main()
    once = copy.read_text()
    assert once.startswith(before + table.BEGIN) and once.endswith(table.END + after)
    assert "| Llama-3.1-70B | 64 |" in once and "not measured yet" not in once
    table.main()
    assert copy.read_text() == once


@pytest.mark.parametrize(
    "page", ["no markers", f"{table.END}\n{table.BEGIN}", f"{table.BEGIN}\n{table.BEGIN}\n{table.END}"]
)
def test_a_page_without_the_two_markers_is_refused(page):
    with pytest.raises(SystemExit, match="the page needs"):
        table.replaced(page, "x")


def test_the_readme_names_every_folder():
    page = (RECIPES / "README.md").read_text()
    folders = [folder.name for folder in RECIPES.iterdir() if folder.is_dir() and folder.name != "__pycache__"]
    assert [name for name in folders if f"[{name}]({name})" not in page] == []
