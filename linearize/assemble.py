"""Student and teacher as whole models for distillation, and the student's weights on their way to the checkpoint."""

import copy
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from linearize.causal import attention
from linearize.checkpoint import RunState
from linearize.errors import UserError
from linearize.processes import Processes, set_weight, whole
from linearize.student import MODELS, student_config, student_name
from linearize.teacher import Teacher


def assemble(teacher: Teacher, specs: dict[int, dict], here: Processes) -> tuple[nn.Module, nn.Module]:
    """Student (fp32) and teacher (bf16 for a GPU) as whole models on the CPU whose weights are still to be set.

    No memory is touched yet: it is only asked for.
    """
    config, own = student_config(teacher.config, specs), copy.deepcopy(teacher.config)
    config.attention_dropout = 0.0
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    softmax = attention(teacher.family.softmax)
    with no_init_weights():
        student = MODELS[config.model_type]._from_config(config, dtype=torch.float32, attn_implementation=softmax)
        model = teacher.family.causal_lm_class()._from_config(own, dtype=dtype, attn_implementation=softmax)
    for made in (student, model):
        pairs = made.all_tied_weights_keys.items()
        # Both stored and different: like transformers, believe the weights rather than the config.
        if not any(_differ(teacher, name, other) for name, other in pairs):
            made.tie_weights()
    return student, model


def _differ(teacher: Teacher, name: str, other: str) -> bool:
    tensors = teacher.tensors
    return name in tensors and other in tensors and not torch.equal(tensors.get(name), tensors.get(other))


def fill(student: nn.Module, model: nn.Module, teacher: Teacher, specs: dict[int, dict], run: RunState) -> None:
    """Set the weights that `assemble` left open, a tensor at a time: the teacher's and those of the aligned layers."""
    for name, weight in model.named_parameters():
        set_weight(weight, _stored(teacher, name, weight.shape, model))
    left = dict(student.named_parameters())
    for i in specs:
        prefix = f"{teacher.family.layers_prefix.format(i=i)}self_attn."
        saved = run.load_layer(i)
        if saved is None:
            raise UserError(f"layer {i} is not on disk any more", fix="run the same command again: it is redone")
        for name, value in saved[0].items():
            set_weight(left.pop(prefix + name), value)
    for name, weight in left.items():
        set_weight(weight, _stored(teacher, name, weight.shape, model))


def _stored(teacher: Teacher, name: str, shape: torch.Size, model: nn.Module) -> Tensor:
    """A weight of the teacher, put together where the checkpoint holds it in parts or under a tied name."""
    tied = model.all_tied_weights_keys
    partners = {**{source: target for target, source in tied.items()}, **tied}
    parts = list(teacher.family.stored(name, shape))
    if parts == [name]:
        return teacher.tensors.get(name if name in teacher.tensors else partners[name])
    return torch.cat([teacher.tensors.get(part) for part in parts]).view(shape)


def save_distilled(run: RunState, student: nn.Module, written: torch.dtype, here: Processes, done: dict) -> None:
    """Keep the trained weights as they will be written, a decoder layer a file, and last `done`, which names them."""
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, weight in student.named_parameters():
        match = re.match(r"model\.layers\.(\d+)\.", name)
        parts.setdefault(f"distilled-{int(match[1]):05d}" if match else "distilled-rest", {})[name] = weight
    for part, weights in parts.items():
        tensors = {}
        for name, weight in weights.items():
            value = whole(weight.detach())  # every process takes part in putting it together
            if here.first:
                tensors[name] = value if ".mixer." in name else value.to(written)
        if here.first:
            run.save(part, tensors)
    done["parts"] = list(parts)
    if here.first:
        run.save("distilled", {}, done)


def holds_distilled(run: RunState, done: dict) -> bool:
    """Whether everything that `save_distilled` kept is there; `distilled_weights` checks it."""
    return all(run.holds(part) for part in done["parts"])


def distilled_weights(teacher: Teacher, done: dict, run: RunState) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a distilled student by its name in the checkpoint, one after the other."""
    for part in done["parts"]:
        saved = run.load(part)
        if saved is None:
            raise UserError(f"{part} is not on disk any more", fix="run the same command again: it is redone")
        for name, tensor in saved[0].items():
            start, rows = 0, tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 2 else tensor
            stored = {name: tensor.shape} if ".mixer." in name else teacher.family.stored(name, tensor.shape)
            for piece, shape in stored.items():
                yield piece, tensor if piece == name else rows[start : start + shape[0]]
                start += shape[0] if shape else 0


def aligned_weights(
    teacher: Teacher, specs: dict[int, dict], chosen: torch.dtype | None, run: RunState
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a student of aligned layers, in the format `chosen`, or (None) each in its teacher's."""
    prefixes = {i: teacher.family.layers_prefix.format(i=i) + "self_attn." for i in specs}
    for name in teacher.tensors.names():
        if student_name(name, specs) == name:
            tensor = teacher.tensors.get(name)
            yield name, tensor.to(chosen or tensor.dtype)
    for i, prefix in prefixes.items():
        saved = run.load_layer(i)
        if saved is None:
            raise UserError(f"layer {i} is not on disk any more", fix="run the same command again: it is redone")
        for key, tensor in saved[0].items():
            own = key.startswith("mixer.")
            dtype = tensor.dtype if own else chosen or teacher.tensors.dtype(prefix + key.removeprefix("attn."))
            yield prefix + key, tensor.to(dtype)
