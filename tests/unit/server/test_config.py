"""Settings of the server from flags and the environment."""

import json
from dataclasses import fields

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from warpfit.errors import InvalidArgumentError
from warpfit.variables import (
    CLIENT_VARIABLES,
    SERVER_VARIABLES,
    unknown_variables,
    warn_of_unknown_variables,
)
from warpfit_server.config import Config, parse_bytes
from warpfit_server.system.machine import available_memory


def test_flags_win_over_variables_over_defaults():
    environment = {"WARPFIT_PORT": "1", "WARPFIT_HOST": "::1", "WARPFIT_MAX_REQUESTS": "17"}
    config = Config.from_arguments(["--port", "2"], environment)
    assert (config.port, config.host, config.max_requests) == (2, "::1", 17)
    assert config.limits().requests == 17
    assert Config.from_arguments([], {}) == Config()


def test_variables_are_those_of_the_settings():
    assert {f"WARPFIT_{field.name.upper()}" for field in fields(Config)} == SERVER_VARIABLES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WARPFIT_MAX_REQUSTS", "WARPFIT_MAX_REQUESTS"),
        ("WARPFIT_TOKENFILE", "WARPFIT_TOKEN_FILE"),
        ("WARPFIT_TOKENS_FILE", "WARPFIT_TOKEN_FILE"),
        ("WARPFIT_max_rows", ""),
        ("WARPFIT_ANYTHING_ELSE", ""),
    ],
)
def test_a_variable_that_nobody_knows_stops_a_server_and_warns_a_client(name, meant, capsys):
    with pytest.raises(SystemExit):
        Config.from_arguments([], {name: "3", "PATH": "/bin"})
    told = capsys.readouterr().err
    assert name in told
    assert meant in told
    with pytest.warns(UserWarning, match=f"{name} is not known.*{meant}"):
        warn_of_unknown_variables({name: "3"})


@settings(max_examples=25)
@given(st.sampled_from(sorted(SERVER_VARIABLES)), st.integers(0, 40), st.sampled_from("AEIOU_X"))
def test_a_slip_in_a_name_is_noticed(name, place, letter):
    place = len("WARPFIT_") + place % (len(name) - len("WARPFIT_"))
    slip = name[:place] + letter + name[place:]
    known = CLIENT_VARIABLES | SERVER_VARIABLES
    assume(slip not in known)
    (sentence,) = unknown_variables({slip: ""}, known)
    assert slip in sentence


def test_variables_of_clients_and_orchestrators_do_not_matter():
    environment = dict.fromkeys(sorted(CLIENT_VARIABLES), "x")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_50551_TCP"):
        environment |= {f"WARPFIT_{name}": "10.0.0.1", f"WARPFIT_TEST_{name}": "10.0.0.1"}
    environment["WARPFIT_TEST_PORT"] = environment["WARPFIT_PORT_50551_TCP_ADDR"] = "tcp://10.0.0.1"
    assert Config.from_arguments([], environment) == Config()


@pytest.mark.parametrize("name", ["max_resident_bytes", "max_pending_bytes"])
def test_limits_above_the_memory_are_refused(name):
    Config(**{name: available_memory()}).check_memory()
    with pytest.raises(InvalidArgumentError, match="GiB") as caught:
        Config(**{name: available_memory() + 1}).check_memory()
    assert (caught.value.reason, caught.value.field) == ("OVER_MEMORY", name)


def test_json_keeps_every_setting():
    config = Config.from_arguments(["--threads", "3", "--cache-dir", "somewhere"], {})
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--devices", "tpu"], {}),
        (["--devices", "cpu:65"], {}),
        ([], {"WARPFIT_DEVICES": "0,,1"}),
        ([], {"WARPFIT_PORT": "many"}),
        *((["--max-result-bytes", text], {}) for text in ("1 furlong", "-1", f"{10**20}GB")),
        (["--log-level", "loud"], {}),
        *((["--threads", text], {}) for text in ("0", "-1", "1.5", "nan", str(10**20))),
        *((["--grace", text], {}) for text in ("-0.1", "nan", "inf", "1e300", "soon")),
        *((["--port", text], {}) for text in ("-1", "65536", "1.0")),
        ([], {"WARPFIT_FRONT_ENDS": "-1"}),
        (["--parent", "-5"], {}),
        (["--lease-seconds=-1"], {}),
        (["--health-port", "localhost:"], {}),
        (["--metrics-port", "::1"], {}),
        (["--max-tokens", "5000"], {}),
        ([], {"WARPFIT_PROBE_SECONDS": "1"}),
    ],
)
def test_wrong_settings_are_refused(arguments, environment, capsys):
    with pytest.raises(SystemExit) as caught:
        Config.from_arguments(arguments, environment)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--log-format", "json", "--port", "many"], {}),
        (["--threads", "0", "--log-format=JSON"], {}),
        (["--no-such-flag", "--log-f", "json"], {}),
        (["--port"], {"WARPFIT_LOG_FORMAT": "json"}),
        ([], {"WARPFIT_LOG_FORMAT": "json", "WARPFIT_DEVICES": "0,,1"}),
        ([], {"WARPFIT_LOG_FORMAT": "json", "WARPFIT_THREDS": "3"}),
    ],
)
def test_wrong_settings_are_refused_in_the_form_of_the_log(arguments, environment, capsys):
    with pytest.raises(SystemExit) as caught:
        Config.from_arguments(arguments, environment)
    assert caught.value.code == 2
    written = capsys.readouterr()
    (line,) = written.err.splitlines()
    assert json.loads(line)["level"] == "error"
    assert json.loads(line)["reason"] == "BAD_OPTION"
    assert json.loads(line)["message"]
    assert not written.out


@pytest.mark.parametrize("arguments", [["--log-format"], ["--log-format", "xml"]])
def test_a_form_of_the_log_that_is_none_is_refused_as_text(arguments, capsys):
    with pytest.raises(SystemExit):
        Config.from_arguments(arguments, {})
    assert "error: argument --log-format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("3mib", 3 << 20)]
)
def test_sizes_may_have_units(text, size):
    assert parse_bytes(text) == size
    assert Config.from_arguments(["--device-memory", text], {}).device_memory == size


@pytest.mark.parametrize(
    ("arguments", "environment", "insecure"),
    [
        ([], {}, False),
        (["--insecure"], {}, True),
        (["--insecure", "no"], {"WARPFIT_INSECURE": "1"}, False),
        ([], {"WARPFIT_INSECURE": "yes"}, True),
    ],
)
def test_switches_need_no_value(arguments, environment, insecure):
    assert Config.from_arguments(arguments, environment).insecure is insecure


@pytest.mark.parametrize(("cores", "front_ends"), [(1, 1), (2, 1), (3, 2), (16, 15), (64, 16)])
def test_one_front_end_for_each_core_but_one(monkeypatch, cores, front_ends):
    monkeypatch.setattr("warpfit_server.config.available_cores", lambda: cores)
    assert Config().processes == front_ends
    assert Config(front_ends=5).processes == 5


def test_data_sets_may_take_half_of_the_memory(monkeypatch):
    monkeypatch.setattr("warpfit_server.config.available_memory", lambda: 8 << 30)
    assert Config().limits().resident_bytes == 4 << 30
