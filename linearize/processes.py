"""The processes of a run that `accelerate launch` or `torchrun` started, and how a model is spread over them."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from linearize.errors import UsageError

T = TypeVar("T")
# Others wait while one process calibrates or writes; the default of ten minutes would end a run that is well.
PATIENCE = timedelta(days=7)
BUCKET = 2**25  # elements that are sent together


@dataclass(frozen=True)
class Processes:
    """This process among `world` of them; the first has rank 0 and does what is done once."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the other processes; nothing here can be asked of them afterwards."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over all processes, in double precision, the same in each."""
        if self.world == 1:
            return list(values)
        # Gathered and added in one order: a reduction's order, and with it the last bit, is the back end's choice.
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(all_of_them, mine)
        return torch.stack(all_of_them).sum(0).tolist()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes, which have tensors of the same shapes."""
        if self.world == 1:
            return
        buckets: list[list[Tensor]] = [[]]
        for tensor in tensors:
            if buckets[-1] and sum(t.numel() for t in buckets[-1]) + tensor.numel() > BUCKET:
                buckets.append([])
            buckets[-1].append(tensor)
        for bucket in filter(None, buckets):
            whole = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(whole)
            parts = whole.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])

    def agree(self, value: T) -> T:
        """What the first process gives, in all of them."""
        if self.world == 1:
            return value
        values = [value if self.first else None]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def shares(self, count: int, step: int) -> list[slice]:
        """`count` rows cut into a run of rows for each process, at multiples of `step`; some may be empty."""
        steps = -(-count // step)
        ends = [min(count, steps * (rank + 1) // self.world * step) for rank in range(self.world)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def gather(self, piece: Tensor, owner: int) -> list[Tensor]:
        """The pieces of all processes by rank, in the process `owner`; an empty list in the others.

        piece: on this process's device, of one shape and dtype in all. Every process must call it.
        """
        if self.world == 1:
            return [piece]
        mine = piece.contiguous().view(torch.uint8)  # bytes: every back end can send them
        pieces = [torch.empty_like(mine) for _ in range(self.world)] if self.rank == owner else None
        dist.gather(mine, pieces, dst=owner)
        return [found.view(piece.dtype) for found in pieces or ()]


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that is on this machine; UsageError for any other."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError("no such device", value=name, fix="auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise UsageError("no such device", value=name, fix=f"this machine has {found} CUDA devices; --device cpu")
    return device


def device_name(device: torch.device) -> str:
    """What a measurement names: the GPU, or the processor where Python knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def half_precision(device: torch.device) -> AbstractContextManager:
    """bf16 autocast on a GPU, nothing elsewhere; weights, gradients, moments and the mixers' gates stay fp32.

    Without autocast's cache: it would keep the bf16 copies of all layers' weights until the end of the student's
    forward, whole ones even where FSDP2 splits the weights.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def join(device: str) -> Processes:
    """Join the other processes if a launcher started some; else this process is alone. device: run.device."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    found = pick_device(device)
    if world == 1:
        return Processes(found)
    if found.index is not None:
        raise UsageError("run.device names one GPU for several processes", value=device, fix="--device cuda")
    from accelerate import PartialState

    state = PartialState(cpu=found.type == "cpu", timeout=PATIENCE)
    return Processes(state.device, state.process_index, state.num_processes)


def one_after_the_first(here: Processes, work: Callable[[], T]) -> T:
    """What `work` returns; the first process does it before the others, which find its downloads in the cache."""
    if not here.first:
        here.wait()
    result = work()
    if here.first:
        here.wait()
    return result


def sharded_by_launcher() -> bool:
    """Whether accelerate's configuration asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shard(model: nn.Module, layers: nn.ModuleList, here: Processes, keep: set[nn.Parameter] = frozenset()) -> None:
    """Split a model's weights over the processes (FSDP2): a unit for each decoder layer, and one for the rest.

    Every process must have built the same model on the CPU; a unit goes to the device as it is split, so that the
    device never holds more than one whole unit. Weights in `keep` stay whole.
    """
    mesh = init_device_mesh(here.device.type, (here.world,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(keep))
    for weight in keep:
        weight.data = weight.data.to(here.device)


@torch.no_grad()
def set_weight(weight: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a weight, or this process's part of it into a split one; nothing is sent."""
    if isinstance(weight, DTensor):
        value = value.to(weight.device, weight.dtype)
        value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.to_local().copy_(value.to_local())
    else:
        weight.copy_(value)


def whole(weight: Tensor) -> Tensor:
    """A weight in one piece; every process must ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
