"""Documents of the training text at other positions than 0."""

import pytest
import torch
from test_convert import recipe

from linearize.checkpoint import RunState
from linearize.console import Console
from linearize.corpus import Text, prepare_text, training_streams
from linearize.data import Rows, followed, moved
from linearize.data.rows import document_starts
from linearize.layerwise import Layerwise, Stream
from linearize.metrics import Metrics
from linearize.processes import Processes
from linearize.teacher import open_teacher


def rows(count=64, context=48, seed=0):
    """Ids of `count` rows of two or three documents, and their positions from 0."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, (count, context), generator=make)
    cut = torch.randint(1, context, (count, 2), generator=make).sort(1).values
    index = torch.arange(context).expand(count, -1)
    start = torch.where(index >= cut[:, 1:], cut[:, 1:], torch.where(index >= cut[:, :1], cut[:, :1], 0))
    return ids, index - start


def test_documents_move_whole_and_stay_apart():
    ids, positions = rows()
    found = moved(ids, positions, 4096, 0)
    assert torch.equal(document_starts(found), document_starts(positions))
    assert torch.equal(followed(found), followed(positions))
    assert int(found.max()) < 4096 and int(found.min()) == 0
    first = found[document_starts(found)]
    assert 0.4 < float((first == 0).float().mean()) < 0.6
    assert float(first[first > 0].float().mean()) > 1500


def test_what_moves_where_depends_on_the_tokens_and_the_seed_alone():
    ids, positions = rows()
    found = moved(ids, positions, 4096, 0)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    assert torch.equal(moved(ids[order], positions[order], 4096, 0), found[order])
    assert torch.equal(moved(ids, found, 4096, 0), found)
    assert not torch.equal(moved(ids, positions, 4096, 1), found)
    other = ids.clone()
    other[:, -1] += 1
    assert not torch.equal(moved(other, positions, 4096, 0), found)


def test_neighbours_are_never_joined():
    """With little room many documents would begin where the one before them ends."""
    ids, positions = rows(count=2000, context=6)
    found = moved(ids, positions, 9, 0)
    assert torch.equal(document_starts(found), document_starts(positions)) and int(found.max()) < 9
    assert len(found[document_starts(found)].unique()) == 4


def test_rows_without_room_or_tokens_stay():
    ids, positions = rows()
    assert torch.equal(moved(ids, positions, 48, 0), positions)
    assert torch.equal(moved(ids, positions, 0, 0), positions)
    empty = Rows(ids[:0], positions[:0])
    assert moved(empty.ids, empty.positions, 4096, 0).shape == (0, 48)


def layerwise_on(teacher_folder, tmp_path, rows):
    (tmp_path / ".linearize").mkdir()
    run, metrics = RunState.join(tmp_path), Metrics(tmp_path, writes=False)
    here, console = Processes(torch.device("cpu")), Console(quiet=True)
    teacher = open_teacher(str(teacher_folder("llama")))
    return Layerwise(teacher, {}, recipe(), Text(rows, rows, None), here, run, metrics, console, torch.float32)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_teacher_sees_no_difference(teacher_folder, tmp_path, packed):
    ids, positions = rows(count=6)
    if not packed:
        positions = torch.arange(48).expand(6, -1)
    elsewhere = moved(ids, positions, 128, 0)
    assert not torch.equal(elsewhere, positions)
    job = layerwise_on(teacher_folder, tmp_path, Rows(ids, elsewhere))
    hidden = job.runner.embed(ids)
    with job.runner.block(1) as layer:
        _, told, _ = job._given(1, Stream(Rows(ids, elsewhere), hidden), slice(None))
        _, before, _ = job._given(1, Stream(Rows(ids, positions), hidden), slice(None))
        torch.testing.assert_close(layer(hidden, **told), layer(hidden, **before), rtol=1e-4, atol=1e-5)
        assert not torch.equal(told["position_embeddings"][0], before["position_embeddings"][0])


def test_a_conversion_trains_on_moved_text_and_measures_where_it_is(teacher_folder, tmp_path):
    kept, chosen = Console(quiet=True), recipe(data_positions=128, data_heldout_tokens=192)
    teacher, run = open_teacher(str(teacher_folder("llama"))), RunState.join(tmp_path)
    text = prepare_text(teacher, chosen, Processes(torch.device("cpu")), run, kept)
    for moving in (text.calibration, text.alignment):
        assert int(moving.positions.max()) >= moving.context
    assert int(text.heldout.positions.max()) < text.heldout.context
    loader = training_streams(teacher, chosen, Processes(torch.device("cpu")), run, kept)(48, 4)
    assert max(int(next(loader).positions.max()) for _ in range(4)) >= 48
    still = recipe(data_positions=0)
    text = prepare_text(teacher, still, Processes(torch.device("cpu")), run, kept)
    assert int(text.calibration.positions.max()) < text.calibration.context
