"""The tools of `warpfit mcp`, called by the SDK's own client over stdio, HTTP and in process."""

import asyncio
import base64
import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mcp.server.mcpserver")
pytest.importorskip("sklearn")

from mcp import Client, StdioServerParameters

from warpfit import CancelledError, mcp_server

pytestmark = pytest.mark.thorough
NAMES = ("a", "b", "y")
COMMAND = ["-c", "import sys; from warpfit.cli.main import main; sys.exit(main())", "mcp"]
LAW = "p1*exp(p2*a) + p3*b"
DATA = {"path": "law.csv", "target": "y"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of data, with links that lead out of it."""
    folder = tmp_path_factory.mktemp("root") / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 2.0, (200, 2))
    y = 2.0 * np.exp(0.5 * X[:, 0]) + X[:, 1] + rng.normal(0.0, 0.01, 200)
    text = "\n".join([",".join(NAMES), *(f"{a},{b},{c}" for (a, b), c in zip(X, y, strict=True))])
    (folder / "law.csv").write_text(text)
    packed = gzip.compress(b"a,y\n" + b"1,2\n" * 100_000)
    (folder / "packed.csv").write_bytes(packed)
    (folder / "twice.csv").write_bytes(gzip.compress(packed))
    (folder.parent / "secret.csv").write_text(text)
    (folder / "link.csv").symlink_to(folder.parent / "secret.csv")
    (folder / "out").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.csv")
    return folder


def settings(server, root, **changed):
    given = {"root": root, "most_bytes": 100_000, "most_seconds": 30.0, **changed}
    return mcp_server.Settings(server.address, {"tls": False}, **given)


def answer(result):
    assert not result.is_error, result.content
    return result.structured_content


def test_an_agent_finds_a_law_over_stdio(server, root):
    """The way that `client/examples/SKILL.md` describes."""
    args, told = [*COMMAND, "--root", str(root), "--address", server.address], []
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = {"command": sys.executable, "args": args, "env": environment}

    async def progress(done, total, _):
        told.append(done / total)

    async def work():
        async with Client(StdioServerParameters(**command)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            seen = answer(await client.call_tool("describe_data", {"data": DATA}))
            given = {"data": DATA, "skeletons": [LAW, "p1*a +", None, "p1*a + p2"]}
            found = answer(await client.call_tool("propose", given, progress_callback=progress))
            again = answer(await client.call_tool("propose", given | {"skeletons": [LAW]}))
            best = found["answers"][0]["simplified"]
            given = {"data": DATA, "expressions": [best], "tolerance": 0.1}
            short = answer(await client.call_tool("simplify", given))
            given = {"data": DATA, "expression": short["formulas"][0]["expression"]}
            values = answer(await client.call_tool("predict", given | {"rows": 3}))
            drawn = await client.call_tool("plot", given | {"over": "a"})
            given = {"data": DATA, "max_seconds": 1.0, "max_size": 5}
            searched = answer(await client.call_tool("search", given))
            return tools, seen, found, again, short, values, drawn, searched

    tools, seen, found, again, short, values, drawn, searched = asyncio.run(work())
    assert set(tools) == {"describe_data", "propose", "search", "simplify", "predict", "plot"}
    assert (seen["rows"], [column["name"] for column in seen["columns"]]) == (200, ["a", "b"])
    law, line = found["answers"]
    cut, nothing = found["errors"]
    assert [each["index"] for each in (law, cut, nothing, line)] == [0, 1, 2, 3]
    assert found["best"] == 0
    assert law["held_out_loss"] < 4e-4 < line["held_out_loss"]
    assert cut["error"]["position"] == 6
    assert nothing["error"]["reason"] == "UNKNOWN_EXPRESSION_TYPE"
    assert (law["tried"], again["answers"][0]["tried"]) == (0, 1)
    assert short["formulas"][0]["expression"] == "b + 2 * exp(0.5 * a)"
    assert len(values["values"]) == 3
    assert values["mse"] < 4e-4
    assert base64.b64decode(drawn.content[0].data).startswith(b"\x89PNG")
    assert searched["front"]
    assert told == sorted(told) and told[-1] == 1.0


def in_process(server, root, calls, **changed):
    """Return the text of each answer."""

    async def work():
        async with Client(mcp_server.make_server(settings(server, root, **changed))) as client:
            return [await client.call_tool(name, given) for name, given in calls]

    return [(r.is_error, r.content[0].text) for r in asyncio.run(work())]


def test_no_path_leads_out_of_the_root(server, root):
    paths = ["../secret.csv", "link.csv", "out/secret.csv", "pipe.csv", "", "law.csv/x"]
    paths += [str(root.parent / "secret.csv"), "law.csv\0"]
    calls = [("describe_data", {"data": {"path": each}}) for each in paths]
    for is_error, text in in_process(server, root, calls):
        assert is_error
        assert "BAD_FILE" in text
        assert re.search(r"Did you mean|law\.csv", text)


def test_data_are_limited_and_checked(server, root):
    inline = {"columns": {"a": [1.0, 2.0, 3.0, 5.0], "y": [2.0, 4.0, 6.0, 10.0]}, "target": "y"}
    gaps = {"columns": {"a": [1.0, None, 3.0], "y": [2.0, 4.0, 5.0]}, "missing": "drop"}
    wrong = {
        "larger": {"path": "packed.csv"},
        "twice": {"path": "twice.csv"},
        "larger than": {"columns": {"a": [0.0] * 20_000}},
        "length": {"columns": {"a": [1.0], "b": [1.0, 2.0]}},
        "value": {"columns": {"a": [1.0, None], "b": [1.0, 2.0]}},
        "either": {"columns": {"a": [1.0]}, "path": "law.csv"},
        "nosuch": {"path": "law.csv", "target": "nosuch"},
        "weight": inline | {"weight": "a"},  # a slip would change what is asked for without a word
        "column": {"columns": {}},
    }
    calls = [(word, "describe_data", data, {}) for word, data in wrong.items()]
    calls += [
        ("rows", "predict", inline, {"expression": "a", "start": 9}),
        ("max_seconds", "search", inline, {"max_seconds": 1e6}),
        ("nosuch", "plot", inline, {"expression": "a", "over": "nosuch"}),
        ("parameter", "simplify", inline, {"expressions": ["p1*a"]}),
        ("below", "search", inline, {"seed": -1}),
        ("rows", "describe_data", gaps, {}),
        ("answers", "propose", inline, {"skeletons": ["p1*a"], "held_out": 0.0}),
    ]
    sent = [(tool, {"data": data, **given}) for _, tool, data, given in calls]
    found = in_process(server, root, sent)
    for (word, *_), (is_error, text) in zip(calls[:-2], found, strict=False):
        assert is_error
        assert word.split()[0] in text
    kept, good = (json.loads(text) for _, text in found[-2:])
    assert kept["rows"] == 2
    assert good["answers"][0]["parameters"] == pytest.approx([2.0])
    ((is_error, text),) = in_process(server, None, [("describe_data", {"data": {"path": "x"}})])
    assert is_error
    assert "--root" not in text
    assert "NO_DATA_ROOT" in text


def test_a_cancelled_call_is_cancelled_on_the_server(server, root, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def endless(client, table, *_, **__):
        data = client.upload(table.columns, table.target)
        begun.set()
        try:
            while True:
                client.evaluate(data, ["x1"], loss="mse")
        except CancelledError:
            ended.set()
            raise

    async def work():
        async with Client(mcp_server.make_server(settings(server, root))) as client:
            task = asyncio.create_task(client.call_tool("search", {"data": DATA}))
            assert await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(ended.wait, 30)

    monkeypatch.setattr(mcp_server, "_search", endless)
    asyncio.run(work())


def test_a_caller_over_http_is_the_tenant_of_its_own_token(server, root, monkeypatch):
    given, real = [], mcp_server.connect

    def connect(address, **options):
        given.append(options["token"])
        return real(address, tls=False, token="")

    monkeypatch.setattr(mcp_server, "connect", connect)
    monkeypatch.setattr(mcp_server, "_MOST_CALLERS", 2)

    async def work():
        own = mcp_server.Settings(server.address, {"token": "own"}, root, 1 << 20, 1.0)
        tools = mcp_server.Tools(own)
        headers = [None, {}, {"authorization": "Bearer theirs"}, {"authorization": "bearer theirs"}]
        for each in headers:
            context = SimpleNamespace(headers=each)
            await tools.describe_data(context, mcp_server.Data(path="law.csv"))

    asyncio.run(work())
    assert given == ["own", "", "theirs"]


def test_http_listens_on_loopback_checks_host_and_origin_and_keeps_no_sessions(server, root):
    flags = ["--root", str(root), "--address", server.address, "--http", "--port", "0"]
    command = [sys.executable, *COMMAND, *flags, "--allow-origin", "http://good.example"]
    usual = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", process.stderr.readline())

            async def work():
                async with Client(url[0]) as client:
                    given = {"data": DATA, "skeletons": [LAW]}
                    return answer(await client.call_tool("propose", given))

            assert asyncio.run(work())["answers"][0]["held_out_loss"] < 4e-4

            def ask(method="ping", params=None, **headers):
                connection = http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=30)
                body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
                connection.request("POST", "/mcp", json.dumps(body), {**usual, **headers})
                return connection.getresponse()

            assert ask(Host="evil.example").status == 421
            assert ask(Origin="http://evil.example").status == 403
            assert ask(Origin="http://good.example").status not in (403, 421)
            own = {"name": "x", "version": "1"}
            begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": own}
            begun = ask("initialize", begin)
            assert (begun.status, begun.getheader("mcp-session-id")) == (200, None)
        finally:
            process.terminate()
    refused = [sys.executable, *COMMAND, "--http", "--host", "0.0.0.0", "--address", "x:1"]
    done = subprocess.run(refused, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--allow-host" in done.stderr


def test_many_skeletons_have_a_short_answer_with_the_best_in_full(server, root):
    """Best first; what is wrong with others; a line for each of the rest; few digits."""
    wrong = ["p1*nosuch", "p1*(a", *["p1*missing"] * 30]
    skeletons = [*wrong, *[f"p1*a^{n} + p2*b + p3*exp(a/{n + 2})" for n in range(1, 250)], LAW]
    calls = [("propose", {"data": DATA, "skeletons": skeletons, "restarts": 1})]
    calls.append(("propose", {**calls[0][1], "details": 0}))
    (_, text), (_, short) = in_process(server, root, calls)
    found = json.loads(text)
    assert len(text) < 60_000
    assert (len(found["answers"]), found["best"]) == (10, found["answers"][0]["index"])
    losses = [answer["held_out_loss"] for answer in found["answers"]]
    assert losses == sorted(losses)
    assert [error["index"] for error in found["errors"]] == list(range(20))
    named = {each["index"] for each in (*found["answers"], *found["errors"])}
    named |= {int(line.split(":")[0]) for line in found["others"]}
    assert named == set(range(len(skeletons)))
    assert "UNKNOWN_NAME" in found["others"][-1]
    assert json.loads(short)["answers"] == []
    assert json.loads(short)["best"] == found["best"]


def test_wrong_arguments_are_explained_in_words_of_the_tools(server, root):
    wrong = {
        "skeletons is 'p1*a'": ("propose", {"skeletons": "p1*a"}),
        "skeletons is missing": ("propose", {}),
        "data.path": ("propose", {"skeletons": ["a"], "data": {"path": 7}}),
        "expressions.0 is 1": ("simplify", {"expressions": [1]}),
        "data={..., target: ...}": ("propose", {"skeletons": ["a"], "data": {"path": "law.csv"}}),
        "in parameters": ("predict", {"expression": "p1*a + p2", "parameters": [1.0]}),
    }
    calls = [(tool, {"data": DATA} | given) for tool, given in wrong.values()]
    for words, (is_error, text) in zip(wrong, in_process(server, root, calls), strict=True):
        assert is_error
        assert words in text
        for odd in ("pydantic", "validation error", "client.upload", "Program", "--"):
            assert odd not in text


def test_searches_of_a_caller_stop_nobody_else(server, root, monkeypatch):
    """Two are under way, others are refused at once, and short calls are answered meanwhile."""
    begun, stop = threading.Semaphore(0), threading.Event()

    def endless(client, table, *_, **__):
        begun.release()
        stop.wait(60)
        return {}

    async def work():
        async with Client(mcp_server.make_server(settings(server, root))) as client:
            given = {"data": DATA}
            running = [asyncio.create_task(client.call_tool("search", given)) for _ in range(2)]
            for _ in running:
                assert await asyncio.to_thread(begun.acquire, True, 30)
            refused = [await client.call_tool("search", given) for _ in range(6)]
            calls = [client.call_tool("describe_data", given) for _ in range(20)]
            short = await asyncio.gather(*calls)
            stop.set()
            ended = await asyncio.gather(*running)
            again = await client.call_tool("search", given)
            return refused, short, ended, again

    monkeypatch.setattr(mcp_server, "_search", endless)
    refused, short, ended, again = asyncio.run(work())
    assert all("BUSY" in each.content[0].text for each in refused)
    assert not any(each.is_error for each in (*short, *ended, again))


def test_callers_over_http_share_the_time_of_the_process(monkeypatch):
    now, slept, served, known = [0.0], [], [], set()

    async def app(scope, receive, send):
        served.append((await receive())["body"])

    async def asleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(mcp_server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(mcp_server, "asyncio", SimpleNamespace(sleep=asleep))
    shares = mcp_server._FairShares(app, known.__contains__)

    def call(token, body=b"x", address="10.0.0.1"):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message.get("status"))

        own = [(b"authorization", b"Bearer " + token)]
        scope = {"type": "http", "headers": own, "client": (address, 1)}
        asyncio.run(shares(scope, receive, send))
        return sent[0] if sent else None

    known.update(mcp_server.token_digest(token) for token in ("greedy", "modest"))
    for _ in range(1000):
        assert call(b"greedy") is None
    assert not slept, "nobody else has called"
    now[0] += 60.0
    call(b"modest")
    for _ in range(200):
        call(b"greedy")
        call(b"modest", address="10.0.0.2") if now[0] % 1.0 > 0.5 else None
    greedy = now[0] - 60.0
    assert greedy == pytest.approx(200 * 0.006 / 0.25 - 1.0, abs=0.6), "a quarter of the time"
    now[0] += 60.0
    del slept[:]
    call(b"greedy", bytes(30 << 20))
    call(b"modest")
    assert call(b"greedy") == 429, "it would wait for longer than anybody should"
    call(b"modest")
    assert not slept
    assert not shares._waiting
    now[0] += 60.0
    for number in range(300):  # tokens that nobody has accepted
        call(f"made up {number}".encode(), address="10.0.0.9")
        call(b"modest") if number % 50 == 0 else None
    assert slept
    assert len(shares._paid) < 10
