"""Some of the seeded requests of ``tests/bench/service/fuzz.py``, which sends a million."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc

from support.load.fuzz import FLAGS, Fuzzer, is_fine, outcomes
from support.servers.rpcs import OWN_CONNECTION, Caller
from support.servers.server import ServerProcess, eventually, private_bytes
from warpfit_server.tenancy.quotas import Amounts

REQUESTS = 400
THREADS = 4
GROWTH_BYTES = 32 << 20


def test_wrong_requests_get_answers_that_say_why():
    flags = ("--threads", "2", "--front-ends", "1", *FLAGS)
    with ServerProcess(*flags) as server:
        family = [server.process.pid, server.engine().pid]

        def send(seed, count):
            counts = Counter()
            requests = itertools.islice(Fuzzer(seed).requests(), count)
            with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
                found = [
                    (request, one)
                    for request in requests
                    for one in outcomes(Caller(channel), request, counts)
                ]
            return found, counts

        send(0, 100)  # imports and compiles what is used later
        before = sum(map(private_bytes, family))
        with ThreadPoolExecutor(THREADS) as pool:
            parts = pool.map(send, range(1, THREADS + 1), [REQUESTS // THREADS] * THREADS)
            parts, counts = zip(*parts, strict=True)
        seen = [one for part in parts for one in part]
        wrong = [(request, found) for request, found in seen if not is_fine(found)]
        assert not wrong[:3]
        statuses = Counter(status for _, (status, _) in seen)
        assert statuses["OK"] > REQUESTS / 10, "some of them are right"
        assert statuses["INVALID_ARGUMENT"] > REQUESTS / 4, "many are not"
        counts = sum(counts, Counter())
        assert counts["answers_compared"] > REQUESTS / 10, "some of them share a call"
        eventually(lambda: server.in_flight() == Amounts())
        assert server.process.poll() is None
        assert server.engine().pid == family[1]
        assert sum(map(private_bytes, family)) - before < GROWTH_BYTES
