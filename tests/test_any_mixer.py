"""From `--mixer` to a folder that loads, for every mixer of the package and for one that is made up here."""

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, generator
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import initialization as init

from linearize import recipe as recipes
from linearize.console import Console
from linearize.convert import convert
from linearize.mixers import MIXERS, Mixer
from linearize.recipe import Recipe

FAST = {
    "calibrate.tokens": 288,
    "calibrate.select_tokens": 192,
    "calibrate.context": 48,
    "align.tokens": 192,
    "align.context": 48,
    "align.batch_tokens": 96,
    "align.warmup": 1,
    "data.heldout_tokens": 240,
    "run.device": "cpu",
}


class Fading(Mixer):
    """An exponential running mean of the values, read where query and key agree: all that a mixer has to be."""

    kind = "fading"

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.log_odds = nn.Parameter(torch.empty(shape.q_heads))
        self.reset_parameters()

    def reset_parameters(self):
        init.constant_(self.log_odds, 2.0)

    def start(self, samples, scale, select):
        errors = []
        for odds in (0.0, 1.0, 2.0, 4.0):
            self.log_odds.fill_(odds)
            gaps = [self(s.x, s.q, s.k, s.v, scale, segments=s.segments)[0] - s.heads for s in samples[1:select:2]]
            errors.append(sum(gap.square().sum((0, 1, 3)) for gap in gaps))
        self.log_odds.copy_(torch.tensor([0.0, 1.0, 2.0, 4.0])[torch.stack(errors).argmin(0)])
        power = sum(s.heads.square().sum((0, 1, 3)) for s in samples[1:select:2])
        return {"full": (torch.stack(errors).amin(0) / power).sqrt().tolist()}

    @classmethod
    def state_bytes(cls, shape, tokens=0):
        return 4 * shape.q_heads * shape.value_dim

    def forward(self, x, q, k, v, scale, *, segments, state=None, output_state=False):
        keep = self.log_odds.sigmoid()[:, None]
        k, values = (rows.repeat_interleave(self.shape.group, 2).to(keep.dtype) for rows in (k, v))
        agree = 2 * (scale * (q.to(keep.dtype) * k).sum(-1, keepdim=True)).sigmoid()
        mean, out = torch.zeros_like(values[:, 0]) if state is None else state["mean"], []
        for t in range(x.shape[1]):
            here = keep if segments.reset is None else torch.where(segments.reset[:, t, None, None], 0.0, keep)
            new = here * mean + (1 - here) * values[:, t]
            mean = new if segments.mask is None else torch.where(segments.mask[:, t, None, None], new, mean)
            out.append(mean)
        return (agree * torch.stack(out, 1)).to(q.dtype), {"mean": mean} if output_state else None


@pytest.fixture
def fading(monkeypatch):
    monkeypatch.setitem(MIXERS, "fading", Fading)
    monkeypatch.setitem(recipes.MIXER_OPTIONS, "fading", ())
    monkeypatch.setattr(recipes, "MIXER_KINDS", tuple(recipes.MIXER_OPTIONS))


def run(folder, out: Path, mixer: str, **changes) -> dict:
    values = FAST | {"convert.mixer": mixer, "convert.keep_softmax": "3"} | changes
    return convert(str(folder), out, Recipe.from_values(values), Console(quiet=True))


@torch.no_grad()
def check_it_loads_and_decodes(out: Path, kinds: list[str]) -> None:
    """In a model whose layers are what the recipe says, token by token as in one piece."""
    student = AutoModelForCausalLM.from_pretrained(out).eval()
    assert [layer.self_attn.mixer.kind for layer in student.model.layers[:3]] == kinds
    ids = torch.randint(4, VOCAB, (2, 12), generator=generator(0))
    want = student(ids).logits
    assert want.isfinite().all()
    cache, got = None, []
    for t in range(12):
        step = student(ids[:, t : t + 1], cache=cache, use_cache=True)
        cache = step.cache
        got.append(step.logits)
    torch.testing.assert_close(torch.cat(got, 1), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", [kind for kind, cls in MIXERS.items() if cls.__module__.startswith("linearize.")])
def test_every_kind_from_the_command_to_a_model(teacher_folder, tmp_path, kind):
    record = run(teacher_folder("qwen2"), tmp_path / "out", kind)
    assert [layer["kind"] for layer in record["layers"]] == [kind] * 3
    for layer in record["layers"]:
        assert len(layer["losses"]) == 2 and all(loss > 0 for loss in layer["losses"])
        assert ("ladder" in layer) == MIXERS[kind].calibrated
        if "ladder" in layer:
            assert list(layer["ladder"]) == [*layer["heads"], "output"] and 0 < layer["ladder"]["output"] < 1
    assert record["heldout"]["student_perplexity"] > 0
    check_it_loads_and_decodes(tmp_path / "out", [kind] * 3)


def test_a_kind_for_every_layer(teacher_folder, tmp_path):
    spec = "0=mesanet,2=vala,rest=deltanet"
    record = run(teacher_folder("llama"), tmp_path / "out", spec, **{"calibrate.taps": 2, "align.tokens": 0})
    kinds = ["mesanet", "deltanet", "vala"]
    assert [layer["kind"] for layer in record["layers"]] == kinds
    section = json.loads((tmp_path / "out" / "config.json").read_text())["linearize"]["mixers"]
    assert section == {str(i): {"kind": kind, "taps": 2, "time_scales": 3} for i, kind in enumerate(kinds)}
    check_it_loads_and_decodes(tmp_path / "out", kinds)


def test_a_mixer_of_ones_own(teacher_folder, tmp_path, fading):
    record = run(teacher_folder("llama"), tmp_path / "out", "1=gdn,rest=fading")
    first = record["layers"][0]
    assert first["kind"] == "fading" and len(first["heads"]["full"]) == 4 and first["ladder"]["full"] > 0
    check_it_loads_and_decodes(tmp_path / "out", ["fading", "gdn", "fading"])
    rates = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].self_attn.mixer.log_odds
    assert rates.dtype == torch.float32 and not torch.equal(rates, torch.full((4,), 2.0))
