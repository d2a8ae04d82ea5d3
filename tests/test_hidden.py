"""Hidden states in memory and in a file: the same values, and a file that takes no memory and leaves no trace."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import generator
from test_convert import FAST, run_convert, weight_bytes
from test_convert import one_thread as one_thread

from linearize import layerwise
from linearize.errors import UserError
from linearize.hidden import HiddenStates, states_budget
from linearize.teacher import BlockRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 10**9])
def test_rows_come_back(tmp_path, dtype, budget):
    states = HiddenStates((6, 4, 8), dtype, CPU, budget, tmp_path)
    assert states.in_file == (budget == 0) and len(states) == 6 and not list(tmp_path.iterdir())
    values = torch.randn(6, 4, 8, generator=generator(0))
    for start in (0, 2, 4):
        states[start : start + 2] = values[start : start + 2]
    kept = values.to(dtype).float()
    picked = torch.tensor([5, 0, 3])
    assert torch.equal(states[:], kept) and torch.equal(states[picked], kept[picked])
    assert states[1:3].dtype == torch.float32
    states[1:3] = torch.zeros(2, 4, 8)
    assert torch.equal(states[:3], torch.cat([kept[:1], torch.zeros(2, 4, 8)]))


def test_the_budget_is_in_bytes(tmp_path):
    assert not HiddenStates((2, 4, 8), torch.float32, CPU, 256, tmp_path).in_file
    assert HiddenStates((2, 4, 8), torch.float32, CPU, 255, tmp_path).in_file
    assert not HiddenStates((2, 4, 8), torch.bfloat16, CPU, 128, tmp_path).in_file


def anonymous() -> int:
    return 1024 * int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_states_in_a_file_take_no_memory(tmp_path):
    """256 MB of them, written and read in parts of 2 MB, four times over; in memory they would be all there."""
    rows, size = 1024, 256 * 2**20
    shape = (rows, 64, 1024)
    before = peak = anonymous()
    states = HiddenStates(shape, torch.float32, CPU, size - 1, tmp_path)
    for round_ in range(4):
        for start in range(0, rows, 8):
            part = slice(start, start + 8)
            states[part] = (states[part] if round_ else torch.zeros(8, 64, 1024)) + 1
            peak = max(peak, anonymous())
    assert states[torch.tensor([0, rows - 1])].eq(4).all()
    assert peak - before < size // 8, f"{(peak - before) / 1e6:.0f} MB"
    kept = HiddenStates(shape, torch.float32, CPU, size, tmp_path)
    kept[:] = torch.ones(1)
    assert anonymous() - before > size // 2


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="no space left for 1.02 kB at"):
        HiddenStates((2, 16, 8), torch.float32, CPU, 0, tmp_path)
    assert not list(tmp_path.iterdir())


def test_states_are_compared_a_row_at_a_time(teacher_folder, tmp_path, monkeypatch):
    """Not all at once: they may be in a file because memory has no room for them."""
    read, get = [], HiddenStates.__getitem__

    def spied(self, rows):
        found = get(self, rows)
        read.append(found.shape[0] * found.shape[1])
        return found

    monkeypatch.setattr(HiddenStates, "__getitem__", spied)
    for limit in (layerwise.BATCH_TOKENS, layerwise.MOVED_TOKENS):
        monkeypatch.setitem(limit, "cpu", 96)
    run_convert(teacher_folder("llama"), tmp_path / "out", align_cache_bytes=0)
    assert max(read) == 96 < FAST["data.heldout_tokens"]


def test_no_layer_is_read_that_nothing_asks_for(teacher_folder, tmp_path, monkeypatch):
    """Behind the last converted layer there is only the comparison, if there is one."""
    read, block = [], BlockRunner.block

    def spied(self, i):
        read.append(i)
        return block(self, i)

    monkeypatch.setattr(BlockRunner, "block", spied)
    run_convert(teacher_folder("llama"), tmp_path / "out", data_heldout_tokens=0)
    assert read == [0, 1, 2]


def test_a_conversion_is_the_same_with_all_states_in_files(teacher_folder, tmp_path, monkeypatch):
    made, init = [], HiddenStates.__init__

    def recording(self, *args):
        init(self, *args)
        made.append(self.in_file)

    monkeypatch.setattr(HiddenStates, "__init__", recording)
    folder, changes = teacher_folder("llama"), {"convert_keep_softmax": "0-1", "align_tokens": FAST["align.tokens"]}
    run_convert(folder, tmp_path / "memory", **changes)
    assert made and not any(made)
    made.clear()
    run_convert(folder, tmp_path / "files", **changes, align_cache_bytes=0)
    assert made and all(made)
    assert weight_bytes(tmp_path / "files") == weight_bytes(tmp_path / "memory")
    run_convert(folder, tmp_path / "half", **changes, align_cache_bytes=0, align_cache_dtype="bfloat16")
    assert weight_bytes(tmp_path / "half") != weight_bytes(tmp_path / "memory")


def test_other_heldout_text_is_measured_on_by_a_run_that_goes_on(teacher_folder, tmp_path, monkeypatch):
    from linearize import convert as module

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "distil", stop)
        with pytest.raises(KeyboardInterrupt):
            run_convert(teacher_folder("llama"), tmp_path / "out")
    record = run_convert(teacher_folder("llama"), tmp_path / "out", data_heldout_tokens=240)
    assert record["text"]["heldout"]["tokens"] == 240 and 200 < record["heldout"]["tokens"] < 240


def test_the_budget_of_a_device(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 10**9, 80 * 10**9) if device == gpu else None)
    assert states_budget(None, cpu) == 8 * 10**9 and states_budget(None, gpu) == 20 * 10**9
    assert states_budget(0, gpu) == 0 and states_budget(5, cpu) == 5
