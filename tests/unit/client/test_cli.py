"""The command line, against a server on loopback."""

import argparse
import gzip
import io
import math
import os
import pickle
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from datetime import UTC, datetime
from importlib import metadata

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import warpfit
from support.refusals import refused
from support.repository.readmes import ROOT
from support.servers.loopback import serve
from support.servers.server import eventually, write_secret
from warpfit import embedded, testing
from warpfit.cli import main as cli
from warpfit.cli import search, table
from warpfit.cli.table import ColumnChoice, add_table_flags, read_table
from warpfit.cli.top import Change, Scrape
from warpfit.errors import UnavailableError
from warpfit.ops import OPERATORS
from warpfit.sklearn import estimator
from warpfit.transport.connection import TlsConfig, token_digest
from warpfit_server.logs import BUCKET_BOUNDS, MetricsDelta

CSV = "x1,x2,y\n1,2,5\n2,3,9\n3,4,13\n4,5,17\n"
RUN = [sys.executable, "-c", "import sys; from warpfit.cli.main import main; sys.exit(main())"]


@pytest.fixture
def address():
    with serve(testing.InProcessServer()) as (address, _):
        yield address


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text(CSV)
    return "data.csv"


@pytest.fixture
def run(capsys):
    def run(*words):
        status = cli.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fails(run):
    """Runs a command that must end with one message, which is returned."""

    def fails(*words):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert err.startswith("warpfit: error: ") and "Traceback" not in err
        return err

    return fails


def test_eval_prints_the_loss_and_a_few_values(run, capsys, data, address):
    words = ["eval", data, "--address", address, "--target", "y"]
    status, out, err = run(*words, "x1*p1 + x2", "--params", "3", "--head", "2")
    assert (status, err) == (0, "")
    wanted = "mse  0|row  value  target|  0      5       5|  1      9       9|... and 2 more rows"
    assert out.splitlines() == wanted.split("|")
    status, out, _ = run(*words, "--rows", "1:3", "--loss", "sse", "--profile", "--", "-x1")
    lines = out.splitlines()
    assert (status, lines[0]) == (0, f"sse  {11**2 + 16**2}")
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert "compute" in out and "tier interpreter" in out
    status, out, _ = run(*words[:4], "--rows", "-2:", "y - x1")  # without a target, from the end
    assert out.split() == ["row", "value", "2", "10", "3", "13"]
    with pytest.raises(SystemExit, match="2"):
        run(*words, "--rows", "a:b", "x1")
    assert "'a:b' is not START:STOP" in capsys.readouterr().err


def test_fit_prints_losses_and_parameters(run, data, address):
    words = ["fit", data, "--target", "y", "--address", address]
    status, out, err = run(*words, "p1*x1 + p2*x2", "--params", "1", "0", "--loss", "sse")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert re.fullmatch(r"\S+ \* x1 \+ \S+ \* x2", lines[0])
    assert lines[1].startswith("sse  334 -> ") and lines[2] == "R2  1"
    assert lines[3].startswith("ended after ")
    assert [line.split()[0] for line in lines[4:]] == ["parameter", "p1", "p2"]
    fitted = [float(line.split()[1]) for line in lines[5:]]
    np.testing.assert_allclose(fitted, [3.0, 1.0], rtol=1e-4)
    status, out, _ = run(*words, "p1", "--loss", "abs(d)")
    assert (status, out.splitlines()[1].startswith("abs(d)  ")) == (0, True)
    assert "standard error" not in out and "R2" not in out


@pytest.mark.parametrize("number", ["-3e-5", "-1E5", "-.5e+3", "-2.", "-inf", "-nan"])
def test_negative_numbers_are_values_and_no_flags(run, data, address, number):
    words = ["eval", data, "p1 + p2", "--params", "1", number, "--head", "1", "--address", address]
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    np.testing.assert_allclose(float(out.split()[3]), 1.0 + float(number), rtol=1e-6)


def test_formulas_may_begin_with_a_minus(run, capsys, data, address):
    for text in ("-x1/x2", "-(x1)", "-sin(x1)", "-2*x1", "-x1^2 + x2"):
        assert run("eval", data, text, "--address", address)[0] == 0
    with pytest.raises(SystemExit):
        run("eval", data, "-x1", "--address", address)
    assert "behind --" in capsys.readouterr().err


FILES = {"holed.csv": "a,b,y\n1,nan,2\n2,1,nan\n3,1,6\n", "inf.csv": "a,y\n1,2\n-inf,3\n"}
MISTAKES = [
    ("eval data.csv 'x1 + z'", "unknown name 'z'"),
    ("eval data.csv p1", "p1 is used, and 0 parameters were given"),
    ("eval data.csv x1 --target z", "data.csv. The columns are: x1, x2, y"),
    ("eval data.csv x1 --ignore z", "there is no column 'z'"),
    ("eval data.csv x1 --columns x1,x1", "a column is used twice"),
    ("eval data.csv x1 --ignore x1,x2,y", "no column of "),
    ("eval data.csv x1 --ignore x2 --target x1 --weights y", "x1 is the target, y is the weights"),
    ("eval data.csv x1 --loss mse", "needs a target"),
    *((f"eval data.csv x1 --rows {rows}", "which has 4 rows") for rows in ("4:9", "2:2", ":-4")),
    ("fit data.csv 'p1*exp(1000*x1) + p2' --target y", "begin at p1 = 1, p2 = 1: mse is inf"),
    ("fit data.csv p99999999 --target y", "p99999999"),  # so many start from given numbers
    ("fit holed.csv p1*a --target y", "line 3, column 'y': nan is no finite number. Remove the"),
    ("search inf.csv --target y", "inf.csv, line 3, column 'a': -inf is no finite number"),
    *(
        (f"{command} {name} --target y", "")
        for command in ("eval x1", "fit x1", "search")
        for name in ("zero\0byte.csv", "missing.csv", ".")
    ),
    ("search data.csv --target y --json no/folder/o.json", "No such file or directory"),
    ("search data.csv --target y --json data.csv", "meant for the data and for --json"),
    ("search data.csv --target y --json o --checkpoint ./o", "meant for --json and for --check"),
    ("search data.csv --target y --plot o.xyz", "o.xyz cannot be drawn"),
    *(
        (f"search data.csv --target y --{flag} /proc/o.png", "/proc/o.png cannot be written")
        for flag in ("json", "checkpoint", "plot")
    ),
    *((f"token -- {name}", "no name of a tenant") for name in ("'bad name!'", "''", "x" * 64, "ü")),
    *((f"token alice --days {days}", "cannot be valid for") for days in ("1e12", "nan", "0")),
    ("token eve --append no/file", "cannot be written"),
    ("info here:1 --token-file nothing", "cannot read"),
    ("info here:1 --ca nothing", "cannot read"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_message_and_changes_no_file(
    fails, data, tmp_path, monkeypatch, address, words, message
):
    monkeypatch.setenv("WARPFIT_ADDRESS", address)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    assert fails(*shlex.split(words)).count(message) == 1 or not message
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / data).read_text() == CSV


def test_packages_that_are_missing_are_named(fails, monkeypatch):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert "pip install 'warpfit[server]'" in fails("serve")
    assert "pip install 'warpfit[mcp]'" in fails("mcp", "--root", "nosuch")


def test_a_command_without_words_and_one_with_too_many_say_how_it_is_used(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "search formulas for a column" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["eval", "data.csv", "a", "+", "b"])
    said = capsys.readouterr().err
    assert "usage: warpfit eval" in said and "+ b. Quote an expression" in said


#: Of each flag with a number: a command line, and numbers that it does not take.
RANGES = {
    "--timeout": (["info", "127.0.0.1:1"], "0 -1 nan inf 1e300 1_0 soon"),
    " --timeout": (["health", "127.0.0.1:1"], "0 -1 nan inf 1e300"),
    "  --timeout": (["eval", "t.csv", "x1"], "0 -1 nan inf 1e300"),
    "--interval": (["top", "127.0.0.1:1"], "0 -1 nan inf 1e300"),
    "--head": (["eval", "t.csv", "x1"], "-1 1.5 nan 1e20"),
    "--max-iterations": (["fit", "t.csv", "p1", "--target", "y"], "-1 0.5 inf 9e9"),
    "--max-seconds": (["search", "t.csv", "--target", "y"], "0 -1 nan inf 1e300"),
    "--max-size": (["search", "t.csv", "--target", "y"], "0 -1 2.5 nan"),
    "--cpus": (["ray", "up"], "-1 nan inf"),
    "--random-state": (["search", "t.csv", "--target", "y"], "-1 1.5 4294967296"),
}


@pytest.mark.parametrize("flag", RANGES)
def test_numbers_of_flags_have_ranges(capsys, flag):
    words, numbers = RANGES[flag]
    for number in numbers.split():
        with pytest.raises(SystemExit, match="2"):
            cli.main([*words, flag.strip(), number])
        assert f"argument {flag.strip()}: {number!r} is no " in capsys.readouterr().err


@pytest.mark.parametrize("words", ["info ADDRESS", "serve --help"])
def test_a_reader_that_has_seen_enough_is_no_error(address, words):
    """As in ``warpfit info HOST:PORT | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RUN, *words.replace("ADDRESS", address).split()]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ran.returncode == 141 or (ran.returncode == 0 and "--help" in words)
    assert "Traceback" not in ran.stderr and "BrokenPipe" not in ran.stderr


INTERRUPTED = """
import os, signal, sys
from importlib import import_module

class Finder:
    def find_spec(self, name, *_):
        if name == imported:
            os.kill(os.getpid(), signal.SIGINT)

imported, script = sys.argv[1:]
sys.meta_path.insert(0, Finder())
module, function = script.split(":")
sys.argv[1:] = ["--version"]
sys.exit(getattr(import_module(module), function)())
"""


@pytest.mark.parametrize("imported", ["warpfit", "importlib.metadata"])
def test_an_interrupt_is_quiet_from_the_first_import_on(imported):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-c", INTERRUPTED, imported, project["scripts"]["warpfit"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_commands_import_only_what_they_need():
    heavy = ("grpc", "pandas", "numba", "warpfit_server")
    code = "import sys, warpfit.cli.main\ntry: warpfit.cli.main.main(['--version'])\n"
    code += f"finally: print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_data_may_come_from_a_pipe_and_characters_that_the_output_lacks_are_escaped(address):
    piped = parquet(温度=[1, 2, 3], y=[3, 5, 7])
    words = ["fit", "-", "p1*温度 + p2", "--target", "y", "--address", address]
    own = {**os.environ, "PYTHONIOENCODING": "ascii:surrogateescape", "PYTHONUTF8": "0"}
    done = subprocess.run([*RUN, *words], input=piped, capture_output=True, env=own, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u6e29\u5ea6" in done.stdout and b"\nR2  1\n" in done.stdout


def test_a_token_is_appended_to_a_file_of_its_owner(run, fails, tmp_path):
    path, old = tmp_path / "tokens", os.umask(0)
    path.write_text("# without an end of line")
    path.chmod(0o600)
    try:
        tokens = [
            run("token", name, "--append", tmp_path / file)[1].strip()
            for name, file in (("eve", "tokens"), ("alice", "new"), ("bob", "new"))
        ]
    finally:
        os.umask(old)
    named = zip(("eve", "alice", "bob"), tokens, strict=True)
    lines = [f"{name} {token_digest(token).hex()}" for name, token in named]
    assert path.read_text().splitlines()[1] == lines[0]
    assert (tmp_path / "new").read_text().split("\n") == [*lines[1:], ""]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert "chmod 600" in fails("token", "eve", "--append", path)
    status, out, err = run("token", "alice", "--days", "7")
    tenant, digest, until = err.splitlines()[-1].split()
    assert (status, tenant, digest) == (0, "alice", token_digest(out.strip()).hex())
    assert 6.9 < (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds() / 86400 < 7.1


def test_info_describes_the_server(run, fails, address, tmp_path):
    path = write_secret(tmp_path / "token", "secret")
    status, out, _ = run("info", address, "--token-file", path)
    assert status == 0 and re.search(r"\n +rate +none\n", out)
    assert f"warpfit {metadata.version('warpfit')}, engine reference" in out
    assert "NumPy reference: 1 threads" in out and "resident_bytes" in out
    assert {f"{name}/{row.arity}" for name, row in OPERATORS.items()} <= {*out.split()}
    path.chmod(0o644)  # others can read it
    assert "chmod 600" in fails("info", address, "--token-file", path)


@pytest.fixture
def fake_server(tmp_path, monkeypatch):
    def install(script):
        (tmp_path / "warpfit_server.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_a_server_that_does_not_start_or_get_ready_is_told(fake_server, monkeypatch, caplog):
    with pytest.raises(UnavailableError, match="unrecognized arguments: --no-such-flag"):
        embedded.embedded_server(["--no-such-flag"]).__enter__()
    monkeypatch.setattr(embedded, "_SAID", set())
    fake_server("import time\ntime.sleep(60)")
    for compiles in (False, True, True):  # of which it tells a user once
        if compiles:
            line = "compiling values-0 into /cache (first start only)"
            fake_server(f"import time\nprint({line!r}, flush=True)\ntime.sleep(60)")
        with pytest.raises(UnavailableError, match="did not get ready in time"):
            embedded.embedded_server(start_seconds=0.5).__enter__()
        assert ("compiles its code" in caplog.text) == compiles
    assert caplog.text.count("compiles its code") == 1


def test_an_embedded_server_that_dies_is_not_waited_for(fake_server):
    """Clients wait for 20 s for a server that somebody else may start again."""
    script = "import time\nprint('warpfit listening on 127.0.0.1:9', flush=True)\ntime.sleep(0.5)\n"
    fake_server(f"{script}print('out of memory')\nraise SystemExit(7)")
    with embedded.embedded_server() as address:
        copied = pickle.loads(pickle.dumps(address))
    assert (type(copied), copied) == (str, "127.0.0.1:9"), "other processes get a text"
    with warpfit.local() as client:
        find_end = client._failover.connection.target.find_end
        eventually(find_end)
        client._failover.servers.has_answered = True
        with pytest.raises(UnavailableError, match=r"status 7[\s\S]*out of memory") as caught:
            client.info()
    assert caught.value.reason == "SERVER_ENDED"
    assert "out of memory" not in str(find_end()), "the log is closed with the block"


def test_a_search_has_the_credentials_of_its_flags(monkeypatch, tmp_path):
    """They are of a server that is named; one that is started for a command speaks plain text."""
    token, table = write_secret(tmp_path / "token", "secret"), tmp_path / "t.csv"
    table.write_text("x1,y\n1,1\n2,2\n")
    words = [str(table), "--target", "y", "--token-file", str(token), "--ca", "ca.pem"]
    given = []

    def connect(address, **security):
        given.append((address, security["token"], security["tls"]))
        raise UnavailableError("no server")

    monkeypatch.setattr(estimator, "connect", connect)
    monkeypatch.setattr(estimator, "server_at", lambda *_: nullcontext("here:1"))
    monkeypatch.delenv("WARPFIT_ADDRESS", raising=False)
    for address in (["--address", "there:1"], []):
        with pytest.raises(UnavailableError):
            search.main([*words, *address])
    assert given == [("here:1", "secret", TlsConfig(ca="ca.pem")), ("here:1", "secret", False)]


def table_of(tmp_path, text, *flags, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    parser = argparse.ArgumentParser()
    add_table_flags(parser, needs_target=False)
    return read_table(parser.parse_args([str(path), *flags]))


@pytest.mark.parametrize(
    ("delimiter", "bom", "end"), [(",", "\ufeff", "\n"), (";", "", "\r\n"), ("\t", "", "\r")]
)
def test_delimiters_blank_lines_and_spaces(tmp_path, delimiter, bom, end):
    text = bom + end.join(["", "a, b c", "1, 2.5", "", " 3 , nan ", "-inf,4e3", ""])
    table = table_of(tmp_path, text.replace(",", delimiter))
    assert table.names == ("a", "b c")
    np.testing.assert_array_equal(table.columns, [[1, 2.5], [3, np.nan], [-np.inf, 4000]])
    assert table.places == ("line 3", "line 5", "line 6")


def test_files_of_all_kinds(tmp_path, capsys):
    for text, flags, names, rows in (
        ("1,5;2,5\n3;4\n", "", "x1 x2", [[1.5, 2.5], [3, 4]]),
        ("a;b\n1,5e3;-,25\n", "", "a b", [[1500, -0.25]]),
        ('a,b\n"1,5","2"\n', "", "a b", [[1.5, 2]]),
        ("a;b\n1,234;0,5\n", "", "a b", [[1.234, 0.5]]),
        ("a;b\n1,234;5\n", "--decimal comma", "a b", [[1.234, 5]]),
        ("d,a,s\n2024-01-01,1,ok\n", "--ignore d --ignore 3", "a", [[1]]),
        ("d,a,b\nx,1,2\n", "--columns b,a", "b a", [[2, 1]]),
        ("d;a,b;c\nx;1;2\n", "--columns a,b --columns c", "a,b c", [[1, 2]]),
        ("t (s; local),a\n1,2\n", "", "t@(s;@local) a", [[1, 2]]),
        ("a,b\n1,\n2,NA\n3,nan\n,\n4,5\n", "--missing drop", "a b", [[4, 5]]),
        ("a,b\n1,\n4,5\n", "--missing drop --columns a", "a", [[1], [4]]),
        ("# measured by hand\na,b\n1,2\n3,4\n", "", "a b", [[1, 2], [3, 4]]),
        ("# a b\n1 2\n3 4\n", "", "a b", [[1, 2], [3, 4]]),  # as np.savetxt writes it
        ("#N/A,b\n#N/A,2\n3,4\n", "--missing drop", "#N/A b", [[3, 4]]),
        ("a  b\n 1   2\n3\t 4\n", "", "a b", [[1, 2], [3, 4]]),
        ("#id,b\n1,2\n3,4\n", "", "id b", [[1, 2], [3, 4]]),
        ("flow rate\n1\n2\n", "", "flow@rate", [[1], [2]]),
        (",a\n0,1\n1,2\n", "--columns a", "a", [[1], [2]]),
        *(("ä\n1\n".encode(n), f"--encoding {n}", "ä", [[1]]) for n in ("latin-1", "utf-16")),
        *((f"a\n{cell}\n", "", "a", [[float(cell)]]) for cell in ("-0.0", ".0E-9", "1e-320")),
        (gzip.compress(b"a,b\n" + b"1,2\n" * 2_000, mtime=0), "", "a b", [[1, 2]] * 2_000),
    ):
        table = table_of(tmp_path, text, *flags.split())
        assert table.names == tuple(name.replace("@", " ") for name in names.split())
        np.testing.assert_array_equal(table.columns, rows)
        is_said = "drop" in flags and "--columns" not in flags  # of rows that lack a column in use
        assert ("rows lack a value" in capsys.readouterr().err) == is_said


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["csv", "gz", "parquet"])
def test_target_and_weights_are_columns(tmp_path, kind):
    text = b"a,y,w,s\n1,2,3,x\n4,,6,x\n7,8,9,x\n"
    if kind == "gz":
        text = gzip.compress(text)
    elif kind == "parquet":
        text = parquet(a=[1, 4, 7], y=[2.0, None, 8.0], w=[3, 6, 9], s=["x"] * 3)
    flags = ["--target", "y", "--weights", "w", "--ignore", "s"]
    table = table_of(tmp_path, text, *flags, "--missing", "drop", name="any")
    assert (table.names, table.columns.tolist()) == (("a",), [[1], [7]])
    assert (table.target.tolist(), table.weights.tolist()) == ([2, 8], [3, 9])
    place = "row 2" if kind == "parquet" else "line 3"
    given = tmp_path, text, *flags
    refused(rf"any, {place}, column 2 \(y\): there is no v", table_of, *given, name="any")
    refused(r"column 4 \(s\).*--ignore s", table_of, *given[:-2], name="any")


def test_bad_files_name_the_place(tmp_path):
    for text, message in (
        ("a,b\n1,2\n3,x\n", r"table\.csv, line 3, column 2 \(b\): 'x' is no number.*--ignore b"),
        ("a,b\n1,\n", r"line 2, column 2 \(b\): there is no value.*--missing drop"),
        ("a;b\n1,234;5\n", r"line 2, column 1 \(a\): '1,234' is no .*--decimal comma"),
        ("a;b\n1,5;5\n2;1.5\n", r"line 3, column 2 \(b\): '1\.5' is no .*decimal sign"),
        ("1,2\n\n3,4,5\n", r"line 3: 3 cells where the first line has 2"),
        (b"a,b\n1,2\n1,\xff\n", r"line 3, column 2: the text is not in UTF-8"),
        (",b\n1,2\n", r"column 1 of \S+ has no name.*--ignore 1"),
        ("b,b\n1,2\n", r"column 1 of \S+ is another 'b'"),
        (gzip.compress(b"a\n" + b"1\n" * 99, mtime=0)[:-12], r"cannot be read: "),
        ("a,b\n", "holds no rows of numbers. Give a file with a line of names"),
        *(
            ("# c\n# d\n", "no rows"),
            (b"\xff\xfe\x00a", "UTF-8"),
            (b"PAR1 and no more", "cannot be read: "),
        ),
        ("a;b\n1.836,342;2\n", r"1836\.342 or 1\.836342"),
        *(("a,b\nm,s\n1,2\n", "line 2.*units"), ("a;b\n1,836.342;2\n", r"1836\.342 or 1\.836342")),
        ("t\u00e4,b\n1,2\n".encode("latin-1"), "--encoding latin-1"),
        ("a,b\n1,2\n".encode("utf-16"), "encoding"),
        ("# c\na,b\n1,2\n3,x\n", "line 4.*'x' is no number"),
        ("1," * 10_000_000, "million characters"),
        # What Python reads as a number.
        *((f"a;b\n1;2\n{n};3\n", "line 3, col") for n in ("1_000", "-1E+400", "2e-400", "\u0661")),
    ):
        refused(message, table_of, tmp_path, text)


def test_wide_tables_take_time_in_proportion():
    """A way that compares each name with each other one would take an hour."""
    names = [f"column{n}" for n in range(200_000)]
    own = {"target": names[-1], "weights": names[-2], "columns": None}
    options = argparse.Namespace(**own, ignore=[",".join(names[:1000])])
    chosen = ColumnChoice.of("wide.csv", names, options)
    assert chosen.variables == list(range(1000, 199_998))
    refused("is another 'column7000'", ColumnChoice.of, "wide.csv", [*names, "column7000"], options)


@pytest.mark.parametrize("text", ["1" * 60_000_000, "1\n" * 30_000_000], ids=["line", "rows"])
def test_a_small_file_that_unpacks_to_very_much_is_refused_early(tmp_path, monkeypatch, text):
    packed = gzip.compress(text.encode(), 9)
    assert len(packed) < 100_000
    numbers = []
    monkeypatch.setattr(table, "cell_number", numbers.append)
    refused("times its size", table_of, tmp_path, packed)
    assert not numbers, "before a row of it is read"


@pytest.mark.parametrize(("after", "rate"), [(110.0, 5.0), (8.0, 4.0)], ids=["same", "restarted"])
def test_rates_survive_a_restart_of_the_server(after, rate):
    calls = ("calls", frozenset())
    change = Change(Scrape(10.0, {calls: 100.0}), Scrape(12.0, {calls: after}))
    assert change.rate("calls") == rate


@given(st.lists(st.floats(1e-5, 90), min_size=1, max_size=200), st.floats(0.01, 1))
@example([1.0], 1.0)
def test_quantiles_are_in_the_right_bucket(values, share):
    delta = MetricsDelta()
    delta.observe("time", (), values)
    (histogram,) = delta.histograms.values()
    labels = [*map(str, BUCKET_BOUNDS), "+Inf"]
    names = [("time_bucket", frozenset({("le", label)})) for label in labels]
    after = dict(zip(names, np.cumsum(histogram.buckets), strict=True))
    before = dict.fromkeys(after, 0.0)
    got = Change(Scrape(0.0, before), Scrape(1.0, after)).quantile(share, "time")
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    index = np.searchsorted(BUCKET_BOUNDS, exact)
    assert (BUCKET_BOUNDS[index - 1] if index else 0) <= got <= BUCKET_BOUNDS[index]
    nothing = Change(Scrape(0.0, {}), Scrape(0.0, {}))
    assert nothing.quantile(0.5, "time") is nothing.mean("time") is None


@pytest.fixture
def top(run, monkeypatch):
    def top(page):
        monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(page.encode()))
        return run("top", "127.0.0.1:1", "--once", "--interval", "0.01")

    return top


@pytest.mark.parametrize("label", ["[/x]", "[bold red]a", "\x1b]0;owned\x07", "a\\", ":smile:"])
def test_top_shows_texts_of_a_page_as_they_are(top, label):
    escaped = label.replace("\\", "\\\\")
    page = (
        f'warpfit_build_info{{version="{escaped}",engine="cpu"}} 1.0\n'
        f'warpfit_requests_total{{method="{escaped}",tenant="{escaped}",status="OK"}} 1.0\n'
        'warpfit_process_resident_bytes{process="a"} NaN\n'
        'warpfit_process_open_files{process="a"} +Inf\n'
        "warpfit_gpu_memory_used_bytes 1.0\n"
    )
    status, out, _ = top(page)
    assert status == 0 and "\x1b" not in out
    assert label.encode("unicode_escape").decode().replace("\\\\", "\\") in out


@pytest.mark.parametrize(
    "page", ['warpfit_request_seconds_bucket{le="x"} 1.0\n', "warpfit_x_bucket 1.0\n", "{", "a{b"]
)
def test_top_refuses_a_page_that_is_none(top, page):
    status, _, err = top(page)
    assert (status, "has no metrics of warpfit" in err) == (2, True)
