"""Keys, precedence, typed values, layer choices and the YAML round trip."""

import dataclasses
import random

import pytest
import yaml

from linearize import recipe as recipes
from linearize.errors import UsageError
from linearize.recipe import OPTIONS, Recipe, parse_size, resolve_keep, resolve_mixers


def refused(call, *words):
    """The call raises a one-line UsageError that contains every word."""
    with pytest.raises(UsageError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    return text


# ---- precedence and types -------------------------------------------------------------------------------------------


def test_later_wins(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("align: {tokens: 1k, lr: 3e-4, warmup: 7}\nrun: {seed: 1}\n")
    made = Recipe.resolve(str(path), ["align.tokens=2k", "run.seed=2"], {"run.seed": "3", "align.lr": None})
    assert (made.align.warmup, made.align.lr, made.align.tokens, made.run.seed) == (7, 3e-4, 2000, 3)
    assert made.align.batch_tokens == Recipe().align.batch_tokens


def test_values_have_the_type_of_their_field():
    made = Recipe.resolve(None, ["model.revision=0123456", "model.trust_remote_code=yes", "run.max_shard_size=2GiB"])
    assert made.model.revision == "0123456"
    assert made.model.trust_remote_code is True
    assert made.run.max_shard_size == 2**31
    assert Recipe.resolve(None, ["model.revision=null"]).model.revision is None


def test_yaml_does_not_guess_types():
    """Plain YAML reads 0123 as octal 83, 1e-3 as text and no as false."""
    made = Recipe.from_yaml(
        "model: {revision: 0123}\nalign: {lr: 1e-3}\ndata: {source: no}\nconvert: {keep_softmax: [3, 7]}"
    )
    assert (made.model.revision, made.align.lr, made.data.source) == ("0123", 1e-3, "no")
    assert made.convert.keep_softmax == "3,7"


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("16k", "count", 16_000),
        ("300M", "count", 300_000_000),
        ("1.5B", "count", 1_500_000_000),
        ("16_384", "count", 16_384),
        ("5GB", "bytes", 5 * 10**9),
        ("512MiB", "bytes", 2**29),
        ("0.5 kB", "bytes", 500),
        ("7", "bytes", 7),
    ],
)
def test_sizes(text, kind, value):
    assert parse_size(text, kind) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "5GB", "25%", "1.0001k", "inf", "1k k"])
def test_bad_counts(text):
    refused(lambda: parse_size(text, "count"), repr(text))


@pytest.mark.parametrize(
    "setting, words",
    [
        ("align.tokns=3", ["align.tokns", "align.tokens"]),
        ("tokens=3", ["align.tokens"]),
        ("mixer=gdn", ["convert.mixer"]),
        ("keep-softmax=3", ["convert.keep_softmax"]),
        ("zzz.qqq=3", ["keys start with model, convert"]),
        ("align.tokens", ["key=value"]),
        ("align.tokens=", ["align.tokens has no value"]),
        ("align.lr=fast", ["align.lr", "'fast'"]),
        ("align.lr=nan", ["align.lr"]),
        ("align.lr=-1", ["align.lr", "at least 0"]),
        ("align.warmup=1.5", ["align.warmup", "whole"]),
        ("align.tokens=12 apples", ["align.tokens", "300M"]),
        ("run.dtype=fp8", ["run.dtype", "float32, bfloat16"]),
        ("run.overwrite=maybe", ["run.overwrite", "true or false"]),
        ("run.device=gpu", ["run.device", "cuda:N"]),
        ("align.lr_min=1", ["align.lr_min", "align.lr"]),
        ("align.batch_tokens=64", ["align.batch_tokens", "512"]),
        ("calibrate.tokens=100", ["calibrate.tokens", "512"]),
        ("distill.tokens=100", ["distill.tokens", "2048"]),
        ("distill.long_tokens=100k", ["distill.long_tokens", "--distill-tokens"]),
        ("calibrate.taps=0", ["calibrate.taps", "at least 1"]),
        ("convert.mixer=gnd", ["gnd", "did you mean gdn"]),
        ("convert.keep_softmax=some", ["'some'", "25%"]),
    ],
)
def test_bad_settings(setting, words):
    refused(lambda: Recipe.resolve(None, [setting]), *words)


@pytest.mark.parametrize(
    "settings, words",
    [
        (["distill.batch_tokens=1k"], ["distill.batch_tokens", "at least distill.context, 2048"]),
        (["distill.long_tokens=1M", "distill.batch_tokens=8k"], ["distill.batch_tokens", "long_context, 16384"]),
        (["distill.ema=1"], ["distill.ema", "below 1"]),
        (["distill.lr_end=2"], ["distill.lr_end"]),
        (["distill.cache=x"], ["distill.cache", "distill.top_k"]),
        (["distill.train=heads"], ["all, attention, mixers"]),
    ],
)
def test_distillation_that_does_not_add_up(settings, words):
    refused(lambda: Recipe.resolve(None, ["distill.tokens=1M", *settings]), *words)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_round_trip_of_every_key():
    """Every key that a file may hold is written and read back, each with a value that is not its default."""
    rng = random.Random(0)
    values = {}
    for option in OPTIONS.values():
        if not option.in_file:
            continue
        if option.choices:
            values[option.name] = option.choices[-1]
        elif option.kind == "bool":
            values[option.name] = not option.default
        elif option.kind in ("int", "count", "bytes"):
            values[option.name] = (option.default or 0) + rng.randrange(1, 1000)
        elif option.kind == "float":
            values[option.name] = option.default / 3
    values |= {"model.revision": "0123", "convert.mixer": "0-3=gdn,rest=gdn-standard", "convert.keep_softmax": "last:2"}
    values |= {"data.source": "a: b #c,'d'", "run.device": "cuda:1", "data.sample": "Why? #1"}
    values |= {"data.column": "body text"}
    values |= {"distill.tokens": 300_007, "distill.long_tokens": 200_001, "distill.cache": "some where"}
    made = Recipe.from_values(values)
    text = made.to_yaml("title\nmore")
    assert Recipe.from_yaml(text) == made
    assert text.startswith("# title\n# more\n")
    assert {name for name, option in OPTIONS.items() if option.in_file} == set(values)
    assert sum(map(len, yaml.safe_load(text).values())) == len(values)


def test_every_key_is_explained():
    text = Recipe().to_yaml()
    lines = text.splitlines()
    for option in OPTIONS.values():
        assert option.help.endswith(".") and len(option.help) < 120, option.name
        if option.in_file:
            at = next(i for i, line in enumerate(lines) if line.startswith(f"  {option.name.split('.')[1]}:"))
            assert lines[at - 1].startswith("  # ")
    assert Recipe.from_yaml(text) == Recipe()
    assert Recipe.from_yaml("") == Recipe()


@pytest.mark.parametrize(
    "text, words",
    [
        ("align: {tokns: 3}", ["here.yaml:1", "align.tokens"]),
        ("\nalgn: {tokens: 3}", ["here.yaml:2", "algn", "did you mean align"]),
        ("align: 3", ["align", "keys and values"]),
        ("- 3", ["keys and values"]),
        ("align: {lr: {a: 1}}", ["align.lr", "one value"]),
        ("align:\n  lr: x", ["here.yaml:2", "align.lr", "'x'"]),
        ("align:\n  lr:", ["here.yaml:2", "align.lr has no value"]),
        ("align:\n  lr: 1\n  lr: 2", ["twice", "'lr'", "line 3"]),
        ("run: {overwrite: true}", ["run.overwrite", "--overwrite"]),
        ("align: [", ["here.yaml", "not YAML"]),
        ("? [a]\n: 3", ["one word"]),
    ],
)
def test_bad_files(text, words):
    refused(lambda: Recipe.from_yaml(text, "here.yaml"), *words)


def test_recipe_lookup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = recipes.recipes_dir()
    assert recipes.find_recipe("smollm2-135m-cpu-demo") == shipped / "smollm2-135m-cpu-demo" / "recipe.yaml"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("run: {seed: 5}")
    assert Recipe.resolve("mine").run.seed == Recipe.resolve("mine/recipe.yaml").run.seed == 5
    refused(lambda: recipes.find_recipe("smollm2-135m-cpudemo"), "did you mean smollm2-135m-cpu-demo")
    refused(lambda: recipes.find_recipe(""), "no such recipe")
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    refused(lambda: Recipe.resolve("bin.yaml"), "bin.yaml")


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_shipped_recipes(name):
    """Each one parses, names every key with a comment above it, and says in its header how to run it."""
    path = recipes.find_recipe(name)
    text = path.read_text()
    made = Recipe.resolve(name)
    assert f"-r {name}" in text.split("\n\n")[0]
    body = [line for line in text.splitlines() if line.strip()]
    keys = 0
    for before, line in zip(body, body[1:], strict=False):
        if line.startswith("  ") and not line.strip().startswith("#"):
            keys += 1
            assert before.strip().startswith("#"), line
    assert keys == sum(option.in_file for option in OPTIONS.values())
    assert Recipe.from_yaml(made.to_yaml()) == made


@pytest.mark.parametrize("key, context", [("tokens", "select.context"), ("align_tokens", "align.context")])
def test_text_for_choosing_layers_is_a_row_at_least(key, context):
    Recipe.resolve(sets=[f"select.{key}=100"])  # not used
    with pytest.raises(UsageError, match=f"select.{key} is less than one row .got 100.: at least {context}, 512"):
        Recipe.resolve(sets=[f"select.{key}=100", "convert.keep_softmax=auto:2"])


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, n, kept",
    [
        ("25%", 30, (2, 6, 10, 14, 17, 21, 25, 29)),  # 7.5 rounds up
        ("25%", 4, (3,)),
        ("50%", 4, (1, 3)),
        ("12.5%", 32, (7, 15, 23, 31)),
        ("0%", 4, ()),
        ("none", 4, ()),
        (" None ", 4, ()),
        ("uniform:3", 12, (3, 7, 11)),
        ("every:4", 12, (3, 7, 11)),
        ("every:4", 10, (3, 7)),
        ("last:2", 4, (2, 3)),
        ("first:1", 4, (0,)),
        ("7, 3,11", 12, (3, 7, 11)),
        ("0-2,5", 8, (0, 1, 2, 5)),
        ("3", 8, (3,)),
    ],
)
def test_keep(spec, n, kept):
    assert resolve_keep(spec, n) == kept


@pytest.mark.parametrize("n", [2, 5, 24, 30, 61])
def test_uniform_spacing(n):
    """Groups differ by at most one layer, and the last layer of each is the one kept."""
    for count in range(1, n):
        kept = resolve_keep(f"uniform:{count}", n)
        sizes = [b - a for a, b in zip((-1, *kept), kept, strict=False)]
        assert len(kept) == count and kept[-1] == n - 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "spec, words",
    [
        ("12", ["no layer 12", "0 to 11"]),
        ("-1", ["'-1'"]),
        ("3,7,3", ["layer 3 twice"]),
        ("0-3,2", ["layer 2 twice"]),
        ("5-3", ["'5-3'"]),
        ("0-11", ["all 12 layers", "nothing to convert"]),
        ("100%", ["all 12 layers"]),
        ("99%", ["all 12 layers"]),
        ("101%", ["over 100%"]),
        ("1%", ["keeps no layer of 12"]),
        ("every:1", ["all 12 layers"]),
        ("every:13", ["12 layers"]),
        ("last:13", ["12 layers"]),
        ("last:12", ["all 12 layers"]),
        ("last:0", ["1 or more"]),
        ("uniform:13", ["12 layers"]),
        ("auto:13", ["12 layers"]),
        ("auto:0", ["1 or more"]),
        ("", ["''"]),
        (",", ["','"]),
        ("0.25", ["'0.25'", "25%"]),
        ("last", ["'last'"]),
        ("a,b", ["'a,b'"]),
    ],
)
def test_bad_keep(spec, words):
    refused(lambda: resolve_keep(spec, 12), "convert.keep_softmax", *words)


def test_mixers():
    assert resolve_mixers("gdn", 4, (3,)) == {0: "gdn", 1: "gdn", 2: "gdn"}
    assert resolve_mixers("0-1=gdn, rest=gdn-standard", 4, (1,)) == {0: "gdn", 2: "gdn-standard", 3: "gdn-standard"}
    assert resolve_mixers("0=gdn,2=gdn-standard", 4, (1, 3)) == {0: "gdn", 2: "gdn-standard"}


@pytest.mark.parametrize(
    "spec, words",
    [
        ("", ["no such mixer"]),
        ("gla", ["'gla'", "gdn, deltanet"]),
        ("0=gdn", ["layer 1", "rest=gdn"]),
        ("0-4=gdn", ["no layer 4", "0 to 3"]),
        ("0-1=gdn,1=gdn,rest=gdn", ["layer 1 twice"]),
        ("rest=gdn,rest=gdn-standard", ["rest twice"]),
        ("gdn,gdn-standard", ["rest twice"]),
        ("x=gdn", ["'x=gdn'"]),
        ("2-1=gdn", ["'2-1=gdn'"]),
    ],
)
def test_bad_mixers(spec, words):
    refused(lambda: resolve_mixers(spec, 4, ()), "convert.mixer", *words)


def test_mixer_specs_are_what_the_mixers_take():
    from linearize.mixers import MIXERS, HeadShape

    ours = {kind for kind, mixer in MIXERS.items() if mixer.__module__.startswith("linearize.")}
    assert set(recipes.MIXER_KINDS) == ours
    made = Recipe.resolve(None, ["convert.mixer=0=gdn,rest=gdn-standard", "convert.keep_softmax=3", "calibrate.taps=2"])
    specs = made.mixer_specs(4)
    assert specs[0] == {"kind": "gdn", "taps": 2, "time_scales": 3} and specs[1] == {"kind": "gdn-standard"}
    for spec in (dict(spec) for spec in specs.values()):
        mixer = MIXERS[spec.pop("kind")]
        mixer(HeadShape(32, 4, 2, 8, 8), **spec)
        assert mixer.state_bytes(HeadShape(32, 4, 2, 8, 8), **spec) > 0


# ---- what decides the weights ---------------------------------------------------------------------------------------


def test_fingerprint():
    base = Recipe()
    same = Recipe.resolve(None, ["run.quiet=1", "run.device=cpu", "run.max_shard_size=1MB", "run.overwrite=1"])
    assert same.fingerprint() == base.fingerprint()
    for change in (
        "align.tokens=2k",
        "run.seed=1",
        "convert.keep_softmax=none",
        "data.source=self",
        "run.dtype=float32",
    ):
        name = change.split("=")[0]
        other = Recipe.resolve(None, [change]).fingerprint()
        assert {key for key in other if other[key] != base.fingerprint()[key]} == {name}


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().align.tokens = 3
