"""Workers that upload the same content share a data set, and take it from nobody.

Whatever the order of uploads, calls, releases, evictions and restarts, no block fails.
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess

WORKERS = 16
ROWS = 400
RETRY = warpfit.RetryPolicy(total_seconds=200)
RNG = np.random.default_rng(0)
CONTENTS = [RNG.normal(size=(ROWS, 3)) for _ in range(16)]
SET_BYTES = ROWS * 4 * 8


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


@pytest.fixture(scope="module")
def small():
    """A server with room for the probe's data and some two of the workers' data sets."""
    flags = ("--max-resident-bytes", str(int(2.9 * SET_BYTES)), "--front-ends", "2")
    with ServerProcess("--threads", "2", *flags) as process:
        yield process


def test_blocks_of_workers_with_the_same_content_do_not_end_each_others(server):
    assert run(server.address, 10, contents=1) == {"ok": 10 * WORKERS}


def test_a_data_set_that_is_removed_for_all_is_uploaded_again_by_all(server):
    assert run(server.address, 6, contents=2, rude=True) == {"ok": 6 * WORKERS}


@pytest.mark.thorough
def test_workers_that_share_too_little_memory_wait_for_each_other(small):
    assert run(small.address, 8, contents=16) == {"ok": 8 * WORKERS}


@pytest.mark.thorough
def test_workers_in_processes(server):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        parts = [pool.submit(blocks, n, server.address, 20, 1) for n in range(4)]
        assert sum((part.result() for part in parts), Counter()) == {"ok": 20 * 4}


@pytest.mark.thorough
def test_an_engine_that_is_killed_costs_no_block(server):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, server.address, 15, 2, rude=True)
        time.sleep(0.5)
        server.kill_engine()
        assert running.result() == {"ok": 15 * WORKERS}


@pytest.mark.thorough
def test_a_server_that_starts_anew_costs_no_block():
    with ServerProcess("--threads", "2") as first:
        port = first.address.rpartition(":")[2]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, first.address, 15, 2)
            time.sleep(0.5)
            first.kill()
            with ServerProcess("--threads", "2", "--port", port):
                assert running.result() == {"ok": 15 * WORKERS}


def test_threads_that_share_a_handle_may_end_its_block_in_any_order(server):
    with warpfit.connect(server.address, retry=RETRY) as client:
        X = CONTENTS[0]
        data = client.upload(X, X[:, 0], dtype="float64")
        losses = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(20):
                with data:
                    losses.append(client.evaluate(data, ["x1 + p1"], [[2.0]], loss="mse")[0])
                    time.sleep(0.002 * draw.random())

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        np.testing.assert_allclose(losses, [4.0] * 160)


def test_a_handle_without_numbers_outlives_the_block_of_another_one(server):
    with warpfit.connect(server.address) as client:
        X = np.arange(30.0).reshape(10, 3) + 0.25
        with client.upload(X, dtype="float64") as data:
            copy = pickle.loads(pickle.dumps(data))
            assert not copy.has_numbers
        np.testing.assert_array_equal(client.evaluate(copy, ["x3"])[:, 0], X[:, 2])
        client.release(data, everywhere=True)
        with pytest.raises(warpfit.DatasetNotFoundError):
            client.evaluate(copy, ["x3"])


@pytest.mark.thorough
def test_what_was_given_back_does_not_count_and_makes_room_first(small):
    with warpfit.connect(small.address) as client:
        before = client.info().datasets
        kept, first, second = (np.full((ROWS, 4), float(number)) for number in (1, 2, 3))
        data = client.upload(kept, dtype="float64")
        with client.upload(first, dtype="float64"):
            assert client.info().datasets == before + 2
        assert client.info().datasets == before + 1
        copy = pickle.loads(pickle.dumps(data))
        client.evaluate(copy, ["x1"])
        for _ in range(3):
            with client.upload(second, dtype="float64") as other:
                second = second + 1.0
                client.evaluate(other, ["x1"])
            client.evaluate(copy, ["x1"])  # it cannot be uploaded again, so it was not evicted
        client.release(data, everywhere=True)


@pytest.mark.thorough
def test_what_never_fits_is_refused_at_once(small):
    with warpfit.connect(small.address, retry=RETRY) as client:
        started = time.monotonic()
        with pytest.raises(warpfit.ResourceExhaustedError):
            client.upload(np.ones((ROWS * 4, 4)), dtype="float64")
        assert time.monotonic() - started < 30


def test_folds_of_a_grid_search(server):
    # Imported here, as each of the processes above would import them, too.
    import joblib
    from sklearn.model_selection import GridSearchCV

    from warpfit.sklearn import ParameterOptimizer

    X = np.random.default_rng(2).normal(size=(120, 2))
    y = 1.5 * X[:, 0] + 0.5
    estimator = ParameterOptimizer("p1*x1 + p2", address=server.address)
    search = GridSearchCV(estimator, {"max_iterations": [5, 10, 20, 30]}, cv=3, n_jobs=8)
    with joblib.parallel_config("threading"):
        search.fit(X, y)
    assert search.best_score_ == pytest.approx(1.0)
