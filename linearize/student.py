"""The converted model: the teacher's own transformers class with mixers in some of its layers.

For every family there is a ``Linearize<Family>Config`` (the teacher's configuration plus a ``linearize`` section) and a
``Linearized<Family>ForCausalLM``. Importing this module registers them with transformers, so that
``AutoModelForCausalLM.from_pretrained`` loads a checkpoint; without the import, ``trust_remote_code=True`` loads it
through the few lines of :data:`SHIM` that lie in its folder.

With no layer converted the model is the teacher, bit for bit.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from linearize.errors import UserError
from linearize.families import FAMILIES, Family, family_of
from linearize.mixers import MIXERS, HeadShape, Mixer, build_mixer

FORMAT = 1  # of the `linearize` section

# The range in which the cache argument is called `cache` and the old name is still understood. Outside it a model can
# run without its state and raise nothing, so the range is checked, not only declared.
TRANSFORMERS = ((5, 24), (5, 40))
# Rows of so few tokens cost little in a packed row's attention, which has a mask, and seldom hold a single document.
SHORT_ROWS = 4096

SHIM_FILE = "modeling_linearize.py"
SHIM = '''"""Loads this checkpoint through the package `linearize`."""

try:
    from linearize import student
except ImportError as error:
    raise ImportError(f"this checkpoint needs the package: pip install linearize ({error})") from error


def __getattr__(name):
    return getattr(student, name)
'''


class MixerState(CacheLayerMixin, DummyLayer):
    """What a mixer carries from token to token: named tensors, batch first, and the number of tokens seen.

    A layer of any transformers ``Cache``. It counts, so that a cache without a softmax layer knows its length; and it
    is a ``DummyLayer``, so that masks take their sizes from a softmax layer where there is one.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.seen = 0

    def states(self) -> dict[str, Tensor] | None:
        """The tensors after the last token, or None before the first."""
        return self.tensors if self.is_initialized else None

    def advance(self, tokens: int, **tensors: Tensor) -> None:
        """Keep the tensors after `tokens` more tokens (padding counts: this is the length of the mask)."""
        self.tensors = tensors
        self.seen += tokens
        self.is_initialized = True

    def reset(self) -> None:
        self.tensors = {}
        self.seen = 0
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _map(self, change) -> None:
        """Replace every tensor by its `change`, keeping matrices that lie transposed in memory like that."""

        def changed(tensor: Tensor) -> Tensor:
            turned = tensor.dim() == 4 and tensor.mT.is_contiguous() and not tensor.is_contiguous()
            return change(tensor.mT).mT if turned else change(tensor)

        self.tensors = {name: changed(tensor) for name, tensor in self.tensors.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states is None and value_states is None:
            return None, None
        raise NotImplementedError("this layer keeps a recurrent state: it has no keys and values to update")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a recurrent state cannot be rolled back: a linearized model's cache cannot be cropped")

    def lazy_initialization(self, key_states, value_states) -> None: ...

    # States stay where they are: all but k-cache's, whose keys grow, are as large as a few tokens' keys and values.
    def offload(self) -> None: ...

    def prefetch(self) -> None: ...


def ensure_cache(cache: Any, layers: Container[int], count: int) -> None:
    """Give the layers in `layers` of a `count`-layer cache, whoever made it, a :class:`MixerState`; in place."""
    if not isinstance(cache, Cache):
        raise TypeError(f"a linearized model needs a transformers Cache, not {type(cache).__name__}")
    if cache.layer_class_to_replicate is not None:  # DynamicCache() grows lazily
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(count - len(cache.layers)))
    for i in range(count):
        if i in layers and not isinstance(cache.layers[i], MixerState):
            if cache.layers[i].get_seq_length() > 0:
                raise ValueError(f"cache layer {i} was filled by another model: its mixer has no state to go on from")
            cache.layers[i] = MixerState()


def packed_starts(positions: Tensor, batch: int) -> Tensor | None:
    """First tokens of packed documents: where a position is not its predecessor's plus one (transformers' own rule).

    positions: [B or 1, T] long. Returns [batch, T] bool, the first column True, or None when no row is packed.
    """
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    if not breaks.any():
        return None
    first = torch.ones_like(breaks[:, :1])
    return torch.cat([first, breaks], dim=1).expand(batch, -1)


def packed_documents(positions: Tensor, batch: int, *, always: bool = False) -> tuple[Tensor | None, int]:
    """``mixer_reset`` and ``mixer_documents`` of rows with these positions [B or 1, T] on the CPU.

    The number is a power of two that is not below that of the documents, nor below four for each of several short rows:
    few numbers occur, mostly one, for each of which graphs are captured and layers compiled. always: short rows that
    are one document each count as packed as well, for the same reason.
    """
    starts, short = packed_starts(positions, batch), positions.shape[1] <= SHORT_ROWS
    if starts is None:
        if not (always and short):
            return None, batch
        starts = torch.zeros(batch, positions.shape[1], dtype=torch.bool)
        starts[:, 0] = True
    # One long row is cut into pieces where its documents are few, and a higher number would hide that they are.
    least = 4 * batch if short and batch > 1 else 1
    return starts, 1 << (max(int(starts.sum()), least) - 1).bit_length()


def padded_positions(real: Tensor, length: int) -> Tensor:
    """Positions of the last `length` tokens, counted over real tokens; padding before the first gets 0.

    real: [B, past + length] bool. The mixers' write weights depend on absolute positions, so that a left-padded row
    must start at 0 as it does alone; softmax layers only see differences.
    """
    return (real.long().cumsum(1) - 1).clamp(min=0)[:, -length:]


def by_name(module: PreTrainedModel, args: tuple, kwargs: dict) -> dict:
    """Positional arguments of a base model's forward as keyword arguments, the cache under its present name."""
    if args:
        bound = inspect.signature(module.forward).bind_partial(*args).arguments
        kwargs = bound | kwargs
    kwargs = dict(kwargs)
    if "past_key_values" in kwargs:
        old = kwargs.pop("past_key_values")
        kwargs["cache"] = kwargs.get("cache") if old is None else old
    return kwargs


def caches(module: PreTrainedModel, use_cache: bool | None) -> bool:
    """Whether the base model would make a cache of its own: the argument, else the configuration."""
    if getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled():
        return False
    return bool(module.config.use_cache if use_cache is None else use_cache)


def refuse_sharded_sequence(positions: Tensor | None) -> None:
    """Stop where each process holds a part of every sequence: the state would restart at 0 in each of them.

    Under context or sequence parallelism the first token of all processes but the first has a position above 0.
    """
    if positions is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size() > 1 and bool((positions[:, 0] > 0).all()):
        raise ValueError(
            "rows that start at a position above 0 without a cache: context and sequence parallelism are not "
            "supported by linearized models, whose state is not passed between processes"
        )


def prepare_inputs(module: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of the base model: what the mixers need and the teacher's code does not give.

    Makes or adapts the cache, and adds ``mixer_mask`` and ``mixer_reset`` (:class:`linearize.mixers.Segments`), which
    the base model hands on to every layer; softmax layers ignore them. Derives ``position_ids`` from a padding mask.
    A caller who knows the packed documents gives ``mixer_reset`` and ``mixer_documents`` (:func:`packed_documents`):
    nothing then waits for the GPU.
    """
    kwargs = by_name(module, args, kwargs)
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        return (), kwargs  # the base model says what is missing
    batch, length = tokens.shape[:2]
    mask, positions, cache = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cache"))
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError("a linearized model needs the 2-D padding mask [batch, tokens], or none, as attention_mask")
    if kwargs.get("cu_seq_lens_q") is not None and positions is None:
        raise ValueError("packed documents need position_ids that restart at every document, not only cu_seq_lens_q")

    wanted = caches(module, kwargs.get("use_cache"))
    if (documents := kwargs.get("mixer_documents")) is not None:
        starts = kwargs.get("mixer_reset")  # the caller has looked
    else:
        starts = packed_starts(positions, batch) if positions is not None and length > 1 else None
    if mask is None and starts is not None:
        if cache is not None or (wanted and kwargs.get("use_cache")):
            raise ValueError("packed documents (position_ids that restart) need use_cache=False and no cache")
        kwargs["use_cache"] = wanted = False
    if mask is None and cache is None and documents is None:
        refuse_sharded_sequence(positions)

    if cache is None and wanted:
        cache = kwargs["cache"] = DynamicCache(config=module.config)
    past = 0
    if cache is not None:
        ensure_cache(cache, module.mixer_layers, module.config.num_hidden_layers)
        past = cache.layers[module.mixer_layers[0]].get_seq_length()

    kwargs["mixer_mask"] = None
    kwargs["mixer_reset"] = starts if mask is None else None
    kwargs["mixer_documents"] = documents if mask is None else None
    if mask is not None:
        if mask.shape[1] != past + length:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns: with {past} tokens in the cache and {length} new ones it "
                f"needs {past + length}"
            )
        real = mask.to(device=tokens.device, dtype=torch.bool)
        recent = real[:, past:]
        if starts is not None and bool((starts[:, 1:] & recent[:, 1:] & recent[:, :-1]).any()):
            raise ValueError("packed documents (position_ids that restart) need attention_mask=None")
        if not real.all():
            if positions is None:
                kwargs["position_ids"] = padded_positions(real, length)
            if not recent.all():
                kwargs["mixer_mask"] = recent
    return (), kwargs


def mixer_specs(config: PreTrainedConfig) -> dict[int, dict]:
    """Mixer of every converted layer, ``{"kind": ..., **options}`` by layer, in order; checked.

    Raises UserError for a section of another format, a layer that does not exist or an unknown kind of mixer.
    """
    section = getattr(config, "linearize", None)
    if not section:
        return {}
    if section.get("format") != FORMAT:
        raise UserError(
            "the checkpoint's format is unknown", value=section.get("format"), fix="pip install --upgrade linearize"
        )
    specs = {int(i): dict(spec) for i, spec in section["mixers"].items()}
    for i, spec in specs.items():
        if not 0 <= i < config.num_hidden_layers:
            raise UserError(
                "a mixer for a layer that does not exist", value=i, fix=f"layers 0 to {config.num_hidden_layers - 1}"
            )
        if spec.get("kind") not in MIXERS:
            raise UserError("unknown kind of mixer", value=spec.get("kind"), fix=f"one of {', '.join(MIXERS)}")
    return dict(sorted(specs.items()))


def some(names: list[str], limit: int = 12) -> str:
    """The names for a message, at most `limit` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class SwapMixin:
    """Turns a family's ``...ForCausalLM`` into a student; comes before it among the bases."""

    _is_stateful = True  # transformers then refuses assisted decoding, which would have to roll the state back
    _can_compile_fullgraph = False
    _supports_context_parallel = False
    _keep_in_fp32_modules_strict = [r"self_attn\.mixer\."]

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        specs = mixer_specs(config)
        shape = HeadShape.from_config(config)
        for i, spec in specs.items():
            layer = self.model.layers[i]
            layer.self_attn = build_mixer(layer.self_attn, spec, i, shape)
            layer.self_attn.mixer.reset_parameters()  # what it adopted is not yet a teacher's
        # The mixers lie below the base model, a PreTrainedModel of its own, which would never ask this class.
        self.model._init_weights = self._init_weights
        self.model.mixer_layers = tuple(specs)
        if specs:
            # A hook on the base model, so that calling it alone is right too.
            self.model.register_forward_pre_hook(prepare_inputs, with_kwargs=True)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Mixer):
            module.reset_parameters()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        # Before the first forward: a compileable cache would make `generate` build 4-D masks.
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if model_kwargs.get("cache") is not None and self.model.mixer_layers:
            ensure_cache(model_kwargs["cache"], self.model.mixer_layers, self.config.num_hidden_layers)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but strict: a missing, unexpected or mismatched tensor is a UserError that names it."""
        kwargs["ignore_mismatched_sizes"] = True  # reported below, by name
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        mismatched = [f"{name} {tuple(found)} for {tuple(needed)}" for name, found, needed in info["mismatched_keys"]]
        problems = [
            f"{what} {some(sorted(names))}"
            for what, names in (
                ("missing", info["missing_keys"]),
                ("unexpected", info["unexpected_keys"]),
                ("of the wrong shape", mismatched),
            )
            if names
        ]
        if problems:
            raise UserError(
                f"the tensors of {pretrained_model_name_or_path} do not fit its config.json: {'; '.join(problems)}",
                fix="the checkpoint is damaged or from another version: convert or download it again",
            )
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModelForCausalLM") -> None:
        """Nothing: transformers would copy this package's source into every saved folder. The shim is enough."""


class ConfigMixin:
    """Turns a family's config class into a student's; comes before it among the bases."""

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        shim = Path(SHIM_FILE).stem
        fields["auto_map"] = {
            "AutoConfig": f"{shim}.{type(self).__name__}",
            "AutoModelForCausalLM": f"{shim}.{MODELS[type(self).model_type].__name__}",
        }
        return fields

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs) -> None:
        """As in transformers; writes the shim that ``auto_map`` names beside config.json."""
        write_shim(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Nothing; see :meth:`SwapMixin.register_for_auto_class`."""


def write_shim(out: Path) -> None:
    """Write the file that lets ``trust_remote_code=True`` load the checkpoint in `out` through this package."""
    out.mkdir(parents=True, exist_ok=True)
    (out / SHIM_FILE).write_text(SHIM, encoding="utf-8")


CONFIGS: dict[str, type[PreTrainedConfig]] = {}  # by the student's model_type
MODELS: dict[str, type[PreTrainedModel]] = {}


def make_classes(family: Family) -> None:
    """Define a family's two classes in this module, where pickle and the shim look for them."""
    teacher_config, teacher = family.config_class(), family.causal_lm_class()
    config = type(
        f"Linearize{family.config}",
        (ConfigMixin, teacher_config),
        {
            "__module__": __name__,
            "__annotations__": {"linearize": dict | None},
            "model_type": family.student_type,
            "linearize": None,
        },
    )
    model = type(
        f"Linearized{family.causal_lm}", (SwapMixin, teacher), {"__module__": __name__, "config_class": config}
    )
    for cls in (config, model):
        globals()[cls.__name__] = cls
    CONFIGS[family.student_type] = config
    MODELS[family.student_type] = model


def check_transformers(version: str) -> None:
    """Raise UserError for a version of transformers outside the declared range."""
    low, high = TRANSFORMERS
    if not low <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < high:
        wanted = f"transformers>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        raise UserError("this version of transformers is not supported", value=version, fix=f"pip install '{wanted}'")


def register() -> None:
    """Make transformers' Auto classes know the students; called when this module is imported."""
    check_transformers(importlib.metadata.version("transformers"))
    for family in FAMILIES.values():
        # How transformers puts together the experts that a checkpoint holds apart goes by model_type.
        if mapping := get_checkpoint_conversion_mapping(family.model_type):
            register_checkpoint_conversion_mapping(family.student_type, mapping, overwrite=True)
    for model_type, config in CONFIGS.items():
        AutoConfig.register(model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, MODELS[model_type], exist_ok=True)


def student_config(
    teacher_config: PreTrainedConfig, mixers: Mapping[int, Mapping], teacher: Mapping | None = None
) -> PreTrainedConfig:
    """The student's configuration: every field of the teacher's, plus the ``linearize`` section.

    mixers: ``{"kind": ..., **options}`` by layer; layers not named stay softmax. teacher: ``{"source", "revision"}``.
    Raises UserError for a teacher that cannot be converted, an unknown kind or a layer that does not exist.
    """
    family = family_of(teacher_config)
    fields = teacher_config.to_dict()
    for name in ("model_type", "architectures", "auto_map", "transformers_version"):
        fields.pop(name, None)
    section = {
        "format": FORMAT,
        "teacher": dict(teacher or {}),
        "mixers": {str(i): dict(mixers[i]) for i in sorted(mixers)},
    }
    model_type = family.student_type
    config = CONFIGS[model_type](**fields, linearize=section, architectures=[MODELS[model_type].__name__])
    mixer_specs(config)
    return config


def build_student(
    teacher_config: PreTrainedConfig,
    linearize: Mapping,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A student with fresh weights, in evaluation mode.

    linearize: a ``linearize`` section (its "mixers" and "teacher"). device: "meta" for names and shapes alone. dtype:
    of everything but the mixers, which are fp32; None for the teacher's.
    """
    mixers = {int(i): spec for i, spec in linearize["mixers"].items()}
    config = student_config(teacher_config, mixers, linearize.get("teacher"))
    kwargs = {} if dtype is None else {"dtype": dtype}
    with torch.device(device):
        return MODELS[config.model_type]._from_config(config, **kwargs).eval()


ATTENTION_NAME = re.compile(r"(model\.layers\.(\d+)\.self_attn\.)(.+)")


def student_name(teacher_name: str, mixers: Mapping[int, Mapping]) -> str | None:
    """Name in the student of a teacher's tensor: ``self_attn.X`` becomes ``self_attn.attn.X`` in converted layers.

    mixers: ``{"kind": ...}`` by layer. None for a tensor that the student does not have, because a mixer with
    projections of its own has taken its place; every other tensor of the teacher is in the student, under this name.
    """
    match = ATTENTION_NAME.fullmatch(teacher_name)
    if match is None or int(match[2]) not in mixers:
        return teacher_name
    if MIXERS[mixers[int(match[2])]["kind"]].own_projections and not match[3].startswith("o_proj."):
        return None
    return f"{match[1]}attn.{match[3]}"


def mixer_tensors(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Names and shapes of exactly the tensors that a student has beyond its teacher's; all of them fp32."""
    shape = HeadShape.from_config(config)
    tensors = {}
    for i, spec in mixer_specs(config).items():
        options = {name: value for name, value in spec.items() if name != "kind"}
        with torch.device("meta"):
            mixer = MIXERS[spec["kind"]](shape, **options)
        prefix = f"model.layers.{i}.self_attn.mixer."
        tensors |= {prefix + name: tensor.shape for name, tensor in mixer.state_dict().items()}
    return tensors


for _family in FAMILIES.values():
    make_classes(_family)
register()
