"""Workers that upload the same content share a data set, and take it from nobody.

Whatever the order of uploads, calls, releases, evictions and restarts, no block fails.
"""

from __future__ import annotations

import pickle
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import warpfit
from support.load.processes import in_threads

WORKERS = 16
ROWS = 400
RETRY = warpfit.RetryPolicy(total_seconds=200)
RNG = np.random.default_rng(0)
CONTENTS = [RNG.normal(size=(ROWS, 3)) for _ in range(16)]


def blocks(seed: int, address: str, count: int, contents: int, *, rude: bool = False) -> Counter:
    """Upload, evaluate and release at random; count how the blocks end."""
    draw, seen = random.Random(seed), Counter()
    with warpfit.connect(address, retry=RETRY) as client:
        for _ in range(count):
            number = draw.randrange(contents)
            X = CONTENTS[number]
            try:
                with client.upload(X, X[:, 0], dtype="float64") as data:
                    for _ in range(draw.randrange(4)):
                        offset = draw.random()
                        loss = client.evaluate(
                            data, ["x1 + p1"], [[offset]], loss="mse", timeout=200
                        )
                        assert loss[0] == pytest.approx(offset**2), number
                        if draw.random() < 0.1:
                            client.release(data, everywhere=rude)
                seen["ok"] += 1
            except warpfit.WarpfitError as error:
                seen[f"{type(error).__name__} {error.reason}: {error}"] += 1
    return seen


def run(address: str, count: int, contents: int, *, rude: bool = False) -> Counter:
    with ThreadPoolExecutor(WORKERS) as pool:
        given = address, count, contents
        parts = [pool.submit(blocks, seed, *given, rude=rude) for seed in range(WORKERS)]
        return sum((part.result() for part in parts), Counter())


def test_blocks_of_workers_with_the_same_content_do_not_end_each_others(server):
    assert run(server.address, 10, contents=1) == {"ok": 10 * WORKERS}


def test_a_data_set_that_is_removed_for_all_is_uploaded_again_by_all(server):
    assert run(server.address, 6, contents=2, rude=True) == {"ok": 6 * WORKERS}


@pytest.mark.thorough
def test_an_engine_that_is_killed_costs_no_block(server):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, server.address, 15, 2, rude=True)
        time.sleep(0.5)
        server.kill_engine()
        assert running.result() == {"ok": 15 * WORKERS}


def test_threads_that_share_a_handle_may_end_its_block_in_any_order(client):
    X = CONTENTS[0]
    data = client.upload(X, X[:, 0], dtype="float64")
    losses = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            with data:
                losses.append(client.evaluate(data, ["x1 + p1"], [[2.0]], loss="mse")[0])
                time.sleep(0.002 * draw.random())

    with in_threads(work, range(8)):
        pass
    np.testing.assert_allclose(losses, [4.0] * 160)


def test_a_handle_without_numbers_outlives_the_block_of_another_one(client):
    X = np.arange(30.0).reshape(10, 3) + 0.25
    with client.upload(X, dtype="float64") as data:
        copy = pickle.loads(pickle.dumps(data))
        assert not copy.has_numbers
    np.testing.assert_array_equal(client.evaluate(copy, ["x3"])[:, 0], X[:, 2])
    client.release(data, everywhere=True)
    with pytest.raises(warpfit.DatasetNotFoundError):
        client.evaluate(copy, ["x3"])
