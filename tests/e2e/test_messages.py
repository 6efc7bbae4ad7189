"""Messages between the server's processes: their length, and connections that are lost."""

import resource
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

import warpfit
from support.load.faults import FATAL
from support.servers import health
from support.servers.rpcs import OWN_CONNECTION, SERVICE, detail_of
from support.servers.server import ServerProcess
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.losses import LossFunction
from warpfit.v1 import evaluator_pb2 as pb

X = np.random.default_rng(0).normal(size=(50, 2))
CUT = FATAL + 1
NO_RETRY = warpfit.RetryPolicy(total_seconds=0)


def long_loss(tokens):
    """A loss of an odd number of tokens."""
    return LossFunction.parse("+".join(["f"] * (tokens // 2 + 1)))


@pytest.fixture(scope="module")
def lenient(tmp_path_factory):
    """A server of one front end that allows long losses."""
    limits = tmp_path_factory.mktemp("lenient") / "tenants.toml"
    limits.write_text("[default]\nloss_tokens = 20000\n")
    flags = ("--tenants-file", str(limits), "--threads", "1", "--health-port", "0")
    with ServerProcess(*flags, "--front-ends", "1") as process:
        yield process


def test_a_long_loss_is_refused_and_nothing_else_is(harmed):
    with warpfit.connect(harmed.address, retry=NO_RETRY) as client:
        data = client.upload(X, X[:, 0])
        limit = client.info().limits.loss_tokens
        tokens = limit + 1 + limit % 2
        for call, text in ((client.evaluate, "x1"), (client.optimize, "x1 + p1")):
            with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                call(data, [text], loss=long_loss(tokens))
            assert (caught.value.reason, caught.value.needed) == ("LOSS_TOO_LONG", tokens)
            assert caught.value.available == limit
            assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0


@pytest.mark.thorough
def test_a_server_that_allows_long_losses_computes_them(lenient):
    with warpfit.connect(lenient.address) as client:
        data = client.upload(X, X[:, 0])
        got = client.evaluate(data, ["x1 + 1"], loss=long_loss(15_001))
        np.testing.assert_allclose(got, [7501 * (X[:, 0] + 1).mean()], rtol=1e-5)
        fit = client.optimize(data, ["x1*p1"], [[0.5]], loss=long_loss(9_001), max_iterations=1)
        assert np.isfinite(fit.loss).all()
        assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0
        assert health.check(lenient.facts["health"], "readiness") == "SERVING"


def test_many_names_are_kept_and_engines_need_none(harmed):
    names = tuple(f"variable{number:07d}" for number in range(20_000))
    wide = np.random.default_rng(3).normal(size=(3, len(names)))
    with warpfit.connect(harmed.address) as client:
        engine = harmed.engine().pid
        data = client.upload(wide, wide[:, 0], names=names)
        assert client.evaluate(data, ["variable0000000"], loss="mse")[0] == 0.0
        request = pb.GetVariablesRequest(content_id=data.content_id).SerializeToString()
        with grpc.insecure_channel(harmed.address, OWN_CONNECTION) as channel:
            answer = channel.unary_unary(SERVICE + "GetVariables")(request)
        assert tuple(pb.DatasetInfo.FromString(answer).layout.names) == names
        assert harmed.engine().pid == engine


@pytest.mark.parametrize(
    ("names", "reason"),
    [([f"x{n}" for n in range(70_000)], "TOO_MANY_NAMES"), (["x" * 2_000_000], "NAMES_TOO_LONG")],
)
def test_names_have_limits(harmed, names, reason):
    wide = np.ones((1, len(names)))
    with warpfit.connect(harmed.address) as client:
        with pytest.raises(warpfit.ResourceExhaustedError) as caught:
            client.upload(wide, names=names)
        assert caught.value.reason == reason
        assert caught.value.needed > caught.value.available


def test_a_connection_lost_to_a_live_engine_comes_back(harmed):
    with warpfit.connect(harmed.address, retry=NO_RETRY) as client:
        data = client.upload(X, X[:, 0])
        engine = harmed.engine().pid
        for _ in range(3):
            with pytest.raises(warpfit.UnavailableError):
                client.evaluate(data, [f"x1 + {CUT}"], loss="mse")
            end = time.monotonic() + 5
            while True:
                try:
                    assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0
                    break
                except warpfit.UnavailableError:
                    assert time.monotonic() < end, "it never comes back"
        assert harmed.engine().pid == engine
    health.wait_for(harmed.facts["health"], "SERVING")


@pytest.mark.thorough
def test_a_new_engine_gets_any_number_of_data_sets(lenient):
    """The kernel passes no more than 253 descriptors with a message."""
    with warpfit.connect(lenient.address) as client:
        sets = [client.upload(np.full((1, 1), float(n)), np.ones(1)) for n in range(300)]
        lenient.kill_engine()
        assert client.evaluate(sets[3], ["x1"], loss="mse", timeout=20)[0] == 4.0
        health.wait_for(lenient.facts["health"], "SERVING")


@contextmanager
def full(pid):
    """Let a process open no more files."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lowest_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_can_open_no_more_files_says_so_and_recovers(lenient):
    wide = np.random.default_rng(1).normal(size=(100_000, 2))
    with warpfit.connect(lenient.address, retry=NO_RETRY) as client:
        data = client.upload(wide, wide[:, 0])
        client.evaluate(data, ["x1"], loss="mse")
        engine = lenient.engine().pid
        for pid, count in ((lenient.process.pid, 40), (engine, 100)):
            with full(pid):
                with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                    for number in range(30):  # the first ones get the files of idle memory
                        client.upload(wide[:, :1] + number, dtype="float64")
                assert (caught.value.reason, caught.value.retry_after) == ("TOO_MANY_FILES", 1.0)
                if pid == engine:
                    with pytest.raises(warpfit.ResourceExhaustedError) as caught:
                        client.evaluate(data, ["x1"] * count)  # its answer needs a segment
                    assert caught.value.reason == "TOO_MANY_FILES"
                assert client.info().engine == "cpu"
            np.testing.assert_array_equal(
                client.evaluate(data, ["x1"] * count)[:, 7], wide[:, 0].astype(np.float32)
            )
        assert lenient.engine().pid == engine
        health.wait_for(lenient.facts["health"], "SERVING")


@pytest.mark.parametrize(
    ("programs", "values", "options"),
    [
        (8192, None, {"loss": "mse"}),
        (8193, None, {"loss": "mse"}),
        (9000, None, {"loss": "mse", "gradient": True}),
        (300, True, {"loss": "mse"}),
        (100, True, {"jacobian": True}),
        (4000, None, {"loss": "mse", "reductions": True, "linear_scaling": True}),
    ],
)
def test_an_answer_below_4_mb_is_one_message(server, programs, values, options):
    """So a unary call, which reads one message and hangs after another one, has the whole of it."""
    with (
        warpfit.connect(server.address) as client,
        grpc.insecure_channel(server.address, OWN_CONNECTION) as channel,
    ):
        data = client.upload(np.tile(X, (20, 1)), np.tile(X[:, 0], 20))
        texts, parameters = [f"p1*x1 + {n}" for n in range(programs)], [[2.0]] * programs
        evaluation, _ = build_evaluation(data, texts, parameters, values, options)
        unary = channel.unary_unary(SERVICE + "Evaluate")
        message = unary(codec.evaluation_to_bytes(evaluation), timeout=20)
        found = codec.read_result(evaluation, data.layout, [codec.answer_from_bytes(message)])
        in_pieces = channel.unary_stream(SERVICE + "Evaluate", None, codec.answer_from_bytes)
        parts = in_pieces(codec.evaluation_to_bytes(evaluation, pieces=True), timeout=20)
        wanted = codec.read_result(evaluation, data.layout, parts)
    for name in ("values", "jacobian", "losses", "gradients", "reductions", "scaling"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_a_longer_answer_is_refused_at_once_unless_its_caller_reads_pieces(server):
    with (
        warpfit.connect(server.address) as client,
        grpc.insecure_channel(server.address, OWN_CONNECTION) as channel,
    ):
        data = client.upload(np.tile(X, (20, 1)), np.tile(X[:, 0], 20))
        asked, _ = build_evaluation(data, ["x1"] * 1001, None, True, {})
        message = codec.evaluation_to_bytes(asked)
        for way in (channel.unary_unary, channel.unary_stream):
            with pytest.raises(grpc.RpcError) as caught:
                list(way(SERVICE + "Evaluate")(message, timeout=20))
            detail = detail_of(caught.value)
            assert caught.value.code().name == "INVALID_ARGUMENT"
            assert (detail.reason, detail.field) == ("ANSWER_TOO_LONG", "pieces")
            assert (detail.needed, detail.available) == (1001 * 1000 * 4, 4_000_000)
            assert "as a stream" in detail.remedy
        answer = channel.unary_stream(SERVICE + "Evaluate", None, codec.answer_from_bytes)
        parts = list(answer(codec.evaluation_to_bytes(asked, pieces=True), timeout=20))
        assert len(parts) > 1
        values = codec.read_result(asked, data.layout, parts).values
        np.testing.assert_array_equal(values[:, 0, :], np.tile(X[:, 0], (1001, 20)).astype("f4"))
