"""The process pool of the GPU check: one case that breaks its process costs that case alone."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

import gpu_check  # noqa: E402


def answer(job: dict) -> int:
    if job["do"] == "raise":
        raise ValueError("broken")
    if job["do"] == "die":
        os._exit(3)
    if job["do"] == "hang":
        time.sleep(600)
    return 2 * job["x"]


def test_others_go_on():
    kinds = ["work", "raise", "die", "work", "work", "work"]
    jobs = [{"do": kind, "x": i} for i, kind in enumerate(kinds)]
    results = {job["x"]: (good, found) for job, good, found in gpu_check.side_by_side(answer, jobs, 2, 300.0)}
    assert results == {
        **{i: (True, 2 * i) for i in (0, 3, 4, 5)},
        1: (False, "ValueError: broken"),
        2: (False, "the process died"),
    }


def test_what_hangs_is_left_behind():
    jobs = [{"do": "hang", "x": 0}, *({"do": "work", "x": i} for i in range(1, 4))]
    done = {job["x"] for job, good, _ in gpu_check.side_by_side(answer, jobs, 2, 25.0) if good}
    assert done == {1, 2, 3}


def times(job: dict) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(0.3)
    return began, time.monotonic()


def test_one_of_a_kind_runs_alone_at_first():
    jobs = [{"kind": kind, "x": i} for i, kind in enumerate("aaabb")]
    found = list(gpu_check.side_by_side(times, jobs, 4, 300.0, lambda job: job["kind"]))
    assert len(found) == 5 and all(good for _, good, _ in found)
    for kind in "ab":
        own = sorted(answer for job, _, answer in found if job["kind"] == kind)
        assert all(began >= own[0][1] for began, _ in own[1:])
