"""Hidden states of a text as they move up the layers: in memory, or in a file when they are too many."""

import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from linearize.checkpoint import PARTIAL, writing

WITHOUT_GPU = 8 * 10**9


def states_budget(chosen: int | None, device: torch.device) -> int:
    """Bytes of hidden states that are kept in memory: align.cache_bytes, or what its help says for none."""
    if chosen is not None:
        return chosen
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else WITHOUT_GPU


class HiddenStates:
    """[N, T, d] states that can be read and written by rows: `states[rows]`, `states[rows] = new`.

    Up to `budget` bytes they lie on `device`; beyond it in a file of `folder` that is mapped into memory, so that the
    system keeps what it has room for. The file has no name any more once it is open: it is gone when the process ends,
    however it ends. dtype: of what is kept; rows are read as fp32. in_memory: bytes of the budget that are taken.

    Raises UserError when the disk has no room for the file.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: int, folder: Path
    ) -> None:
        self.device = device
        count = shape[0] * shape[1] * shape[2]
        size = count * dtype.itemsize
        self.in_file = size > budget
        self.in_memory = 0 if self.in_file else size
        if not self.in_file:
            self._kept = torch.empty(shape, dtype=dtype, device=device)
            return
        # Not the process's id: processes of two machines, with one folder between them, may have the same.
        path = folder / f"hidden-{secrets.token_hex(8)}{PARTIAL}"
        try:
            with writing(path, size), open(path, "wb") as file:
                # All of it now: a full disk is an error here, and a crash when a mapped page is written.
                os.posix_fallocate(file.fileno(), 0, size)
            self._kept = torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)
        finally:
            path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            rows = rows.to(self._kept.device)
        return self._kept[rows].to(self.device).float()  # a GPU's bus carries them as they are kept

    def __setitem__(self, rows: slice, states: Tensor) -> None:
        self._kept[rows] = states.to(self._kept.device, self._kept.dtype)
