import errno
import json
import os
import random
import re
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from linearize import checkpoint
from linearize.checkpoint import (
    RunState,
    ShardWriter,
    TensorIndex,
    atomic_write_bytes,
    atomic_write_text,
    format_bytes,
    output_status,
    recipe_difference,
    write_safetensors,
)
from linearize.errors import UserError

CONFIG = {"model_type": "linearize_llama"}
RECIPE = {"mixer": "gdn", "align": {"tokens": 16000, "lr": 0.1}}


def some_tensors(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}.weight": torch.randn(8, 4 + i, generator=generator) for i in range(count)}
    tensors["half"] = torch.randn(3, 5, generator=generator).bfloat16()
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["flags"] = torch.tensor([True, False, True])
    tensors["ids"] = torch.arange(7)
    return tensors


def same(index, tensors):
    assert sorted(index.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        got = index.get(name)
        assert got.dtype == tensor.dtype == index.dtype(name), name
        assert got.shape == tensor.shape == index.shape(name), name
        assert torch.equal(got, tensor), name


def write_checkpoint(out, tensors, max_shard_size=200):
    writer = ShardWriter(out, max_shard_size)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()


@pytest.fixture
def sharded(tmp_path):
    """A folder of several shards with an index."""
    write_checkpoint(tmp_path / "model", some_tensors())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


# ---- reading ----


def test_reads_what_the_safetensors_library_wrote(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = TensorIndex.open(tmp_path)
    same(index, tensors)
    assert index.nbytes == sum(t.nbytes for t in tensors.values())
    assert "half" in index and "nothing" not in index
    assert index.file("half") == tmp_path / "model.safetensors"


def test_without_drops_names(sharded):
    index = TensorIndex.open(sharded).without({"half"})
    assert "half" not in index
    assert len(index) == len(some_tensors()) - 1


def test_opening_reads_headers_only(sharded, monkeypatch):
    monkeypatch.setattr(checkpoint, "read_tensor", lambda entry: pytest.fail("data was read"))
    assert TensorIndex.open(sharded).shape("half") == (3, 5)


def test_every_cut_of_a_file_is_seen(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(4), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            TensorIndex.open(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="1 bytes longer than its header says"):
        TensorIndex.open(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"cut short: it needs {len(whole)} bytes and has {len(whole) - 1}"):
        TensorIndex.open(tmp_path)


def test_a_file_that_shrinks_after_opening_is_seen(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    index = TensorIndex.open(tmp_path)
    with open(path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(UserError, match="became shorter"):
        index.get("a")


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "header, data, said",
    [
        (b"not json", b"", "damaged header"),
        (b"[1, 2]", b"", "damaged header"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "damaged header"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"\0" * 8, "damaged header"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"\0" * 8, "place of tensor 'a' is wrong"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12, "place of tensor 'a' is wrong"),
        ({"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}, b"\0" * 6, "'a' has a dtype"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"\0",
            "tensor a twice",
        ),
    ],
)
def test_damaged_headers_are_one_line(tmp_path, header, data, said):
    raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(UserError, match=said) as error:
        TensorIndex.open(tmp_path)
    assert "\n" not in str(error.value)


def test_something_else_than_safetensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="not a safetensors file"):
        TensorIndex.open(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no safetensors weights"):
        TensorIndex.open(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        TensorIndex.open(tmp_path)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=f"lacks 1 of the .* shards .*{gone.name}"):
        TensorIndex.open(sharded)


def test_index_and_shards_must_agree(sharded):
    edit_index(sharded, lambda m: m.update({"ghost": m["half"]}))
    with pytest.raises(UserError, match="names tensors that their shards do not hold: ghost"):
        TensorIndex.open(sharded)
    edit_index(sharded, lambda m: (m.pop("ghost"), m.pop("half")))
    with pytest.raises(UserError, match="does not name: half"):
        TensorIndex.open(sharded)


def test_index_naming_the_wrong_shard(sharded):
    def swap(weight_map):
        other = next(f for f in weight_map.values() if f != weight_map["half"])
        weight_map["half"] = other

    edit_index(sharded, swap)
    with pytest.raises(UserError, match="do not hold: half"):
        TensorIndex.open(sharded)


def test_a_tensor_in_two_shards(sharded):
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    save_file({**load_file(second), next(iter(load_file(first))): torch.ones(1)}, second)
    with pytest.raises(UserError, match="twice"):
        TensorIndex.open(sharded)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "pytorch.bin", 3]
)
def test_index_cannot_leave_the_folder(sharded, name):
    save_file({"half": torch.ones(1)}, sharded.parent / "model.safetensors")
    edit_index(sharded, lambda m: m.update(half=name))
    with pytest.raises(UserError, match="not a plain .safetensors file name"):
        TensorIndex.open(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "x", "a": "y"}}'])
def test_damaged_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError):
        TensorIndex.open(sharded)


def test_snapshot_of_symlinks_as_in_the_hub_cache(sharded, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
    same(TensorIndex.open(snapshot), some_tensors())


# ---- writing ----


def test_file_is_byte_for_byte_that_of_the_safetensors_library(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_shards_index_and_sizes(tmp_path):
    tensors = some_tensors()
    write_checkpoint(tmp_path, tensors, max_shard_size=300)
    files = sorted(tmp_path.glob("*.safetensors"))
    for number, path in enumerate(files, 1):
        assert path.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        held = load_file(path)
        assert sum(t.nbytes for t in held.values()) <= 300 or len(held) == 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {n: index["weight_map"][n] for n in load_file(files[0])} == dict.fromkeys(load_file(files[0]), files[0].name)
    same(TensorIndex.open(tmp_path), tensors)
    assert not list(tmp_path.glob("*.partial"))


def test_one_shard_is_model_safetensors_without_an_index(tmp_path):
    write_checkpoint(tmp_path, some_tensors(), max_shard_size=10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    same(TensorIndex.open(tmp_path), some_tensors())


def test_views_and_later_changes_do_not_matter(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    writer = ShardWriter(tmp_path, 10**9)
    writer.add("transposed", base.T)
    writer.add("row", base[1])
    writer.add("parameter", torch.nn.Parameter(base))
    base.zero_()
    writer.finish()
    expected = torch.arange(12.0).reshape(3, 4)
    same(TensorIndex.open(tmp_path), {"transposed": expected.T, "row": expected[1], "parameter": expected})


def test_a_name_is_written_once(tmp_path):
    writer = ShardWriter(tmp_path, 8)
    writer.add("a", torch.ones(4))
    writer.add("b", torch.ones(4))
    with pytest.raises(ValueError, match="'a'"):
        writer.add("a", torch.ones(4))


def test_old_shards_and_leftovers_are_removed(tmp_path):
    write_checkpoint(tmp_path, some_tensors(), max_shard_size=200)
    (tmp_path / "model-00009.safetensors.partial").write_bytes(b"x")
    write_checkpoint(tmp_path, {"a": torch.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_writer_refuses_a_folder_with_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RuntimeError):
        ShardWriter(tmp_path, 100)


def fail_with(number):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "number, said",
    [
        (errno.ENOSPC, r"no space left for \d+ B at .*: free some space .*--dtype"),
        (errno.EDQUOT, "no space left"),
        (errno.EFBIG, "--max-shard-size"),
        (errno.EACCES, "cannot write to .*: Permission denied: name an OUT"),
        (errno.EROFS, "cannot write to .*: Read-only file system: name an OUT"),
        (errno.EIO, "cannot write to .*: Input/output error"),
    ],
)
def test_disk_trouble_is_one_line_and_leaves_no_half_file(tmp_path, monkeypatch, number, said):
    writer = ShardWriter(tmp_path, 10**9)
    writer.add("a", torch.ones(8))
    monkeypatch.setattr(os, "fsync", fail_with(number))
    with pytest.raises(UserError, match=said) as error:
        writer.finish()
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=said):
        atomic_write_bytes(tmp_path / "x.json", b"12345678")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_real(tmp_path):
    """Past the limit on file sizes the kernel refuses the write itself, half way through."""

    def child():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        writer = ShardWriter(tmp_path, 10**9)
        writer.add("a", torch.ones(10_000))
        try:
            writer.finish()
        except UserError as error:
            os._exit(0 if "--max-shard-size" in str(error) and not list(tmp_path.iterdir()) else 2)
        os._exit(1)

    assert in_child(child) == 0


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    atomic_write_text(path, "old é")
    monkeypatch.setattr(os, "replace", fail_with(errno.ENOSPC))
    with pytest.raises(UserError):
        atomic_write_text(path, "new")
    assert path.read_text() == "old é"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_out_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        ShardWriter(tmp_path / "file" / "out", 100)


# ---- the run ----


def finish_run(run, tensors):
    writer = run.writer(200)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    run.finish(CONFIG)


def test_life_of_a_run(tmp_path):
    out = tmp_path / "out"
    assert output_status(out) == "absent"
    with RunState(out, RECIPE) as run:
        assert not run.finished
        assert run.load_layer(0) is None
        run.save_layer(0, {"w": torch.ones(2, 3).T}, {"error": 0.25})
        run.save_layer(11, {}, {})
        run.save("rows", {"ids": torch.arange(4)})
        assert output_status(out) == "unfinished"
    with RunState(out, RECIPE) as run:
        assert run.finished_layers() == [0, 11]
        tensors, info = run.load_layer(0)
        assert torch.equal(tensors["w"], torch.ones(3, 2)) and info == {"error": 0.25}
        assert run.load_layer(11) == ({}, {})
        assert torch.equal(run.load("rows")[0]["ids"], torch.arange(4))
        finish_run(run, some_tensors())
        assert run.finished
    assert output_status(out) == "finished"
    assert not (out / ".linearize").exists()
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    with RunState(out, {"another": "recipe"}) as run:
        assert run.finished
        with pytest.raises(RuntimeError):
            run.save_layer(0, {}, {})
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before


def test_finish_needs_whole_weights(tmp_path):
    with RunState(tmp_path, RECIPE) as run:
        with pytest.raises(UserError):
            run.finish(CONFIG)
        assert output_status(tmp_path) == "unfinished"


def test_damaged_layer_is_redone_and_said(tmp_path):
    said = []
    with RunState(tmp_path, RECIPE, say=said.append) as run:
        for i in range(4):
            run.save_layer(i, {"w": torch.ones(64)}, {})
        layer = tmp_path / ".linearize" / "layer-00001.safetensors"
        data = bytearray(layer.read_bytes())
        data[-3] ^= 1
        layer.write_bytes(data)
        (tmp_path / ".linearize" / "layer-00002.safetensors").unlink()
        (tmp_path / ".linearize" / "layer-00003.json").write_text("{")
        assert run.load_layer(0) is not None
        assert [run.load_layer(i) for i in (1, 2, 3)] == [None, None, None]
        assert run.finished_layers() == [0]
        assert len(said) == 3 and re.search("layer-00001.* is damaged.*done again", said[0])
        run.save_layer(1, {"w": torch.ones(64)}, {})
        assert run.load_layer(1) is not None


def test_damage_that_two_processes_find_is_said_and_redone_by_both(tmp_path, monkeypatch):
    with RunState(tmp_path, RECIPE, say=lambda text: None) as run:
        run.save_layer(0, {"w": torch.ones(4)}, {})
        (run.folder / "layer-00000.safetensors").write_bytes(b"")
        other, digest = RunState.join(tmp_path), checkpoint.hashlib.file_digest

        def meanwhile(*args):
            monkeypatch.setattr(checkpoint.hashlib, "file_digest", digest)
            assert other.load_layer(0) is None
            return digest(*args)

        monkeypatch.setattr(checkpoint.hashlib, "file_digest", meanwhile)
        assert run.load_layer(0) is None


def test_another_recipe_is_refused_when_only_a_part_has_saved_anything(tmp_path):
    with RunState(tmp_path, RECIPE) as run:
        run.part("select").save_layer(0, {"w": torch.ones(4)}, {})
    with pytest.raises(UserError, match="begun with another recipe: mixer was"):
        RunState(tmp_path, {**RECIPE, "mixer": "vala"})
    with RunState(tmp_path, RECIPE) as run:
        assert run.part("select").load_layer(0) is not None


def test_another_recipe_is_refused_with_the_difference(tmp_path):
    with RunState(tmp_path, RECIPE) as run:
        run.save_layer(0, {}, {})
    other = {"mixer": "gdn", "align": {"tokens": 32000, "lr": 0.1, "warmup": 10}}
    with pytest.raises(UserError) as error:
        RunState(tmp_path, other)
    assert "align.tokens was 16000 and is 32000; align.warmup was not set and is 10" in str(error.value)
    assert "--overwrite" in str(error.value)
    with RunState(tmp_path, RECIPE) as run:
        assert run.finished_layers() == [0]
    with RunState(tmp_path, other, overwrite=True) as run:
        assert run.finished_layers() == []


def test_tuples_and_lists_are_the_same_recipe(tmp_path):
    with RunState(tmp_path, {"layers": (1, 2), "name": None}):
        pass
    with RunState(tmp_path, {"layers": [1, 2], "name": None}):
        pass


def test_recipe_difference():
    assert recipe_difference({"a": {"b": 1}}, {"a": {"b": 1}}) == ""
    assert recipe_difference({"a": "x", "b": {}}, {"b": {}}) == 'a was "x" and is not set'
    assert recipe_difference({"a": None}, {}) == "a was null and is not set"
    many = recipe_difference({}, {str(i): i for i in range(8)})
    assert many.endswith("and 3 more") and many.count("was not set") == 5


def test_second_process_gets_one_line(tmp_path):
    def second():
        try:
            RunState(tmp_path, RECIPE)
        except UserError as error:
            os._exit(0 if f"another process ({os.getppid()}) is working in" in str(error) else 2)
        os._exit(1)

    with RunState(tmp_path, RECIPE):
        assert in_child(second) == 0
        with pytest.raises(UserError, match="another process"):
            RunState(tmp_path, RECIPE, overwrite=True)
    with RunState(tmp_path, RECIPE):
        pass


def test_lock_on_a_removed_file_is_not_believed(tmp_path):
    with RunState(tmp_path, RECIPE) as first:
        (tmp_path / ".linearize" / "lock").unlink()
        with RunState(tmp_path, RECIPE) as second:
            assert os.fstat(second._lock).st_ino != os.fstat(first._lock).st_ino
            with pytest.raises(UserError, match="another process"):
                RunState(tmp_path, RECIPE)


@pytest.mark.parametrize(
    "files, said",
    [
        ({"notes.txt": "mine"}, "files that linearize did not write"),
        ({"config.json": '{"model_type": "llama"}'}, "a model that linearize did not write"),
        ({"config.json": "{"}, "a model that linearize did not write"),
    ],
)
def test_folders_of_others_are_never_touched(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert output_status(tmp_path) == "foreign"
    for overwrite in (False, True):
        with pytest.raises(UserError, match=said):
            RunState(tmp_path, RECIPE, overwrite=overwrite)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == files


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunState(tmp_path / "out", RECIPE)


def test_overwrite_of_a_finished_checkpoint(tmp_path):
    with RunState(tmp_path, RECIPE) as run:
        finish_run(run, some_tensors())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with RunState(tmp_path, {"another": "recipe"}, overwrite=True) as run:
        assert not run.finished
        assert [p.name for p in tmp_path.iterdir()] == [".linearize"]
        finish_run(run, {"a": torch.ones(2)})
    same(TensorIndex.open(tmp_path), {"a": torch.ones(2)})


def test_space_is_checked_at_the_start(tmp_path):
    with pytest.raises(UserError, match="and the run needs 1e\\+03 TB"):
        RunState(tmp_path, RECIPE, needed=10**15)
    with RunState(tmp_path, RECIPE, needed=1):
        pass


def test_what_a_stopped_run_has_saved_is_not_needed_again(tmp_path, monkeypatch):
    with RunState(tmp_path, RECIPE, needed=4_000_000) as run:
        run.save_layer(0, {"w": torch.ones(500_000)}, {})
        run.part("select").save_layer(0, {"w": torch.ones(250_000)}, {})
    usage = checkpoint.shutil._ntuple_diskusage(10**9, 0, 1_100_000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with RunState(tmp_path, RECIPE, needed=4_000_000) as run:
        assert run.finished_layers() == [0]
    with pytest.raises(UserError, match="free and the run needs"):
        RunState(tmp_path, RECIPE, needed=5_000_000)


def test_state_left_by_a_kill_after_the_last_file_is_removed(tmp_path):
    with RunState(tmp_path, RECIPE) as run:
        run.save_layer(0, {}, {})
        write_checkpoint(tmp_path, some_tensors())
        atomic_write_text(tmp_path / "config.json", json.dumps(CONFIG))
    with RunState(tmp_path, {}) as run:
        assert run.finished
    assert not (tmp_path / ".linearize").exists()
    same(TensorIndex.open(tmp_path), some_tensors())


# ---- kill -9 ----


def in_child(action):
    """Run action in a forked child; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def whole_run(out, overwrite=False, seed=0):
    """What convert does, in small: layers, shards, side files, config."""
    with RunState(out, RECIPE, overwrite=overwrite, say=lambda text: None) as run:
        if run.finished:
            return
        for i in range(2):
            if run.load_layer(i) is None:
                run.save_layer(i, {"w": torch.full((16,), float(i + seed))}, {"i": i})
        writer = run.writer(200)
        for name, tensor in some_tensors(4, seed).items():
            writer.add(name, tensor)
        writer.finish()
        atomic_write_text(out / "linearize.json", "{}")
        run.finish(CONFIG)


def check_after_kill(out, seeds=(0,)):
    """Either no library can load the folder and the run resumes, or the checkpoint is whole."""
    if (out / "config.json").exists():
        index = TensorIndex.open(out)
        wanted = [some_tensors(4, seed) for seed in seeds]
        assert any(all(torch.equal(index.get(n), t[n]) for n in t) and len(index) == len(t) for t in wanted)
        return "whole"
    assert output_status(out) in ("absent", "unfinished")
    whole_run(out, seed=seeds[-1])
    same(TensorIndex.open(out), some_tensors(4, seeds[-1]))
    assert output_status(out) == "finished" and not (out / ".linearize").exists()
    assert not list(out.rglob("*.partial"))
    return "resumed"


STEPS = ("fsync", "replace", "unlink", "open", "rmdir", "mkdir")


def killed_at_step(action, step):
    """Run action in a child that kills itself just before its step-th call of the file system; its exit status."""

    def child():
        count = 0

        def counted(call):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapper

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        action()

    return in_child(child)


@pytest.fixture
def quick_sync(monkeypatch):
    """A kill, unlike a power cut, loses nothing that was written: fsync need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize("before", ["nothing", "finished"])
def test_kill_at_every_step(tmp_path, quick_sync, before):
    outcomes = []
    for step in range(1, 1000):
        out = tmp_path / str(step)
        if before == "finished":
            whole_run(out, seed=1)
            status = killed_at_step(lambda out=out: whole_run(out, overwrite=True, seed=0), step)
            outcomes.append(check_after_kill(out, seeds=(1, 0)) if status else "done")
        else:
            status = killed_at_step(lambda out=out: whole_run(out), step)
            outcomes.append(check_after_kill(out) if status else "done")
        assert status in (0, -signal.SIGKILL), f"step {step}"
        if status == 0:
            break
    assert outcomes[-1] == "done"
    assert outcomes.count("resumed") > 20 and outcomes.count("whole") >= 2


def test_kill_at_random_moments(tmp_path, quick_sync):
    seed = random.randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    start = time.monotonic()
    assert in_child(lambda: whole_run(tmp_path / "timed")) == 0
    duration = time.monotonic() - start
    for number in range(25):
        out = tmp_path / str(number)
        pid = os.fork()
        if pid == 0:
            try:
                whole_run(out)
            finally:
                os._exit(0)
        time.sleep(generator.uniform(0, 1.2 * duration))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check_after_kill(out)


# ---- memory ----


def rss_anon():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def test_streaming_rewrite_holds_one_shard(tmp_path):
    """48 MB through shards of 1 MB: anonymous memory may grow by a few shards, not by the checkpoint."""
    source, out, shard = tmp_path / "source", tmp_path / "out", 2**20
    writer = ShardWriter(source, shard)
    for i in range(96):
        writer.add(f"t{i:03d}", torch.full((2**17,), float(i)))
    writer.finish()
    assert len(list(source.glob("*.safetensors"))) == 48

    def child():
        index = TensorIndex.open(source)
        base, peak = rss_anon(), 0
        rewriter = ShardWriter(out, shard)
        for name in index.names():
            rewriter.add(name, index.get(name))
            peak = max(peak, rss_anon() - base)
        rewriter.finish()
        os._exit(0 if peak < 8 * shard else 1)

    assert in_child(child) == 0
    assert TensorIndex.open(out).nbytes == 48 * shard
    assert torch.equal(TensorIndex.open(out).get("t095"), torch.full((2**17,), 95.0))


@pytest.mark.parametrize("n, text", [(512, "512 B"), (1300, "1.3 kB"), (4_920_000_000, "4.92 GB"), (2e12, "2 TB")])
def test_format_bytes(n, text):
    assert format_bytes(n) == text
