"""Settings of the server from flags and the environment, devices and addresses."""

import ctypes
import errno
import json
import socket
import subprocess
from dataclasses import fields
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.refusals import refused
from warpfit.errors import UnavailableError
from warpfit.transport import connection
from warpfit.transport.connection import CLIENT_VARIABLES, SERVER_VARIABLES
from warpfit_server import machine
from warpfit_server.config import Config


def test_flags_win_over_variables_over_defaults():
    environment = {"WARPFIT_PORT": "1", "WARPFIT_HOST": "::1", "WARPFIT_MAX_REQUESTS": "17"}
    config = Config.from_arguments(["--port", "2"], environment)
    assert (config.port, config.host, config.max_requests) == (2, "::1", 17)
    assert config.limits().requests == 17
    assert Config.from_json(config.to_json()) == config
    assert Config.from_arguments([], {}) == Config()
    assert {f"WARPFIT_{field.name.upper()}" for field in fields(Config)} == SERVER_VARIABLES


@pytest.mark.parametrize(
    ("name", "meant"), [("WARPFIT_TOKENFILE", "WARPFIT_TOKEN_FILE"), ("WARPFIT_max_rows", "")]
)
def test_a_variable_that_nobody_knows_stops_a_server_and_warns_a_client(name, meant, capsys):
    with pytest.raises(SystemExit):
        Config.from_arguments([], {name: "3", "PATH": "/bin"})
    told = capsys.readouterr().err
    assert name in told
    assert meant in told
    with pytest.warns(UserWarning, match=f"{name} is not known.*{meant}"):
        connection.warn_of_unknown_variables({name: "3"})


@settings(max_examples=25)
@given(st.sampled_from(sorted(SERVER_VARIABLES)), st.integers(0, 40), st.sampled_from("AEIOU_X"))
def test_a_slip_in_a_name_is_noticed(name, place, letter):
    place = len("WARPFIT_") + place % (len(name) - len("WARPFIT_"))
    slip = name[:place] + letter + name[place:]
    known = CLIENT_VARIABLES | SERVER_VARIABLES
    assume(slip not in known)
    (sentence,) = connection.unknown_variables({slip: ""}, known)
    assert slip in sentence


def test_variables_of_clients_and_orchestrators_do_not_matter():
    environment = dict.fromkeys(sorted(CLIENT_VARIABLES), "x")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_50551_TCP"):
        environment |= {f"WARPFIT_{name}": "10.0.0.1", f"WARPFIT_TEST_{name}": "10.0.0.1"}
    environment["WARPFIT_TEST_PORT"] = environment["WARPFIT_PORT_50551_TCP_ADDR"] = "tcp://10.0.0.1"
    assert Config.from_arguments([], environment) == Config()


@pytest.mark.parametrize("name", ["max_resident_bytes", "max_pending_bytes"])
def test_limits_above_the_memory_are_refused(name):
    Config(**{name: machine.available_memory()}).check_memory()
    over = Config(**{name: machine.available_memory() + 1})
    assert refused("OVER_MEMORY.*GiB", over.check_memory).field == name


#: Flags, and variables without their prefix.
WRONG = """
DEVICES=0,,1 PORT=many FRONT_ENDS=-1 PROBE_SECONDS=1
--devices=tpu --log-level=loud --parent=-5 --lease-seconds=-1 --max-tokens=5000 --port
--port=-1 --port=65536 --port=1.0 --health-port=localhost: --metrics-port=::1
--max-result-bytes=1furlong --max-result-bytes=-1 --max-result-bytes=100000000000000000000GB
--threads=0 --threads=1.5 --threads=nan --threads=100000000000000000000
--grace=-0.1 --grace=nan --grace=inf --grace=1e300 --grace=soon
"""


@pytest.mark.parametrize("wrong", WRONG.split())
def test_wrong_settings_are_refused_in_the_form_of_the_log(wrong, capsys):
    name, _, value = wrong.partition("=")
    flags, variables = ([wrong], {}) if name < "A" else ([], {f"WARPFIT_{name}": value})
    for tried in (
        (flags, variables),
        (flags, variables | {"WARPFIT_LOG_FORMAT": "json"}),
        (["--log-f", "json", *flags], variables),
        (["--no-such-flag", "--log-format=JSON", *flags], variables),
    ):
        with pytest.raises(SystemExit) as caught:
            Config.from_arguments(*tried)
        assert caught.value.code == 2
        written = capsys.readouterr()
        assert not written.out
        if tried == (flags, variables):
            assert "error:" in written.err
        else:
            (line,) = map(json.loads, written.err.splitlines())
            assert (line["level"], line["reason"]) == ("error", "BAD_OPTION")
            assert line["message"]


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("3mib", 3 << 20)]
)
def test_sizes_may_have_units(text, size):
    assert Config.from_arguments(["--device-memory", text], {}).device_memory == size


@pytest.mark.parametrize(("cores", "front_ends"), [(1, 1), (2, 1), (3, 2), (16, 15), (64, 16)])
def test_one_front_end_for_each_core_but_one(monkeypatch, cores, front_ends):
    monkeypatch.setattr("warpfit_server.config.available_cores", lambda: cores)
    assert Config().processes == front_ends
    assert Config(front_ends=5).processes == 5


@pytest.mark.parametrize(
    ("text", "labels", "shares"),
    [
        ("cpu", ["cpu:0"], [1.0]),
        ("CPU:3", ["cpu:0", "cpu:1", "cpu:2"], [1.0] * 3),
        ("0", ["cuda:0"], [1.0]),
        ("3, 1", ["cuda:3", "cuda:1"], [1.0] * 2),
        ("0,0,1,0", ["cuda:0", "cuda:0#1", "cuda:1", "cuda:0#2"], [1 / 3, 1 / 3, 1.0, 1 / 3]),
    ],
)
def test_every_engine_has_a_label_of_its_own_and_a_share_of_its_gpu(text, labels, shares):
    found = machine.engine_devices(machine.check_devices(text))
    assert [device.label for device in found] == labels
    assert [device.share for device in found] == pytest.approx(shares)


@pytest.mark.parametrize("text", ["", "cpu:0", "cpu:65", "-1", "0,", "cpu,0", "1000"])
def test_what_names_no_devices_is_refused(text):
    with pytest.raises(ValueError, match="names no devices"):
        machine.check_devices(text)


def driver_of(*sizes):
    def tell(place, value):
        place._obj.value = value
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: tell(count, len(sizes)),
        cuDeviceGet=tell,
        cuDeviceTotalMem_v2=lambda size, device: tell(size, sizes[device.value]),
    )


def test_a_limit_above_the_memory_of_a_gpu_is_refused_with_the_amount(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_of(80 << 30, 24 << 30))
    text = " ".join(map(str, machine._ask_driver()))
    run = SimpleNamespace(returncode=0, stdout=text, stderr="")
    monkeypatch.setattr(machine, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: run)
    machine.check_device_memory("0,1", 24 << 30)
    machine.check_device_memory("0,7", 80 << 30)  # the engine says that there is no GPU 7
    told = "OVER_MEMORY.*25.0 GiB, and cuda:1 has 24.0"
    assert refused(told, machine.check_device_memory, "0,1", 25 << 30).field == "device_memory"


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["2", "0"]), ("7, 5,GPU-ab", ["GPU-ab", "7"]), ("4", ["", "4"])]
)
def test_an_engine_sees_its_own_gpu_only(visible, seen):
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [device.environment(given) for device in machine.engine_devices("2,0")]
    assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in seen]
    assert machine.engine_devices("cpu")[0].environment(given) == {}


@pytest.mark.parametrize(
    ("returned", "meaning", "told"),
    [
        ((0, "9 9\n", ""), "0,1", None),
        ((0, "\n", ""), "cpu", "reports none"),
        ((1, "", "no driver\n"), "cpu", "no driver"),
        (None, "cpu", "CuPy is not installed"),
    ],
)
def test_auto_takes_all_gpus_and_else_the_cpu(monkeypatch, returned, meaning, told):
    status, output, errors = returned or (1, "", "")
    run = SimpleNamespace(returncode=status, stdout=output, stderr=errors)
    monkeypatch.setattr(machine, "find_spec", lambda name: returned)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: run)
    assert machine.resolve_devices("auto") == meaning
    assert machine.resolve_devices("1,2") == "1,2"
    if told is None:
        assert machine.resolve_devices("all") == meaning
    else:
        with pytest.raises(UnavailableError, match=told):
            machine.resolve_devices("all")


def test_a_port_of_another_program_or_for_root_only_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnavailableError, match="another program listens there") as caught:
            machine.reserve_port("127.0.0.1", port, "--port")
    assert caught.value.reason == "PORT_IN_USE"
    error = machine.cannot_listen("127.0.0.1", 80, "--port", OSError(errno.EACCES, "it is denied"))
    assert error.reason == "PORT_FORBIDDEN"
    assert "1024" in error.remedy


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 300])
def test_a_host_that_is_not_this_machine_is_named_with_the_systems_words(host):
    with pytest.raises(UnavailableError) as caught:
        machine.reserve_port(host, 0, "--host")
    assert caught.value.reason == "NO_SUCH_HOST"
    assert len(caught.value.message) > len(f"cannot listen on {host}:0: ")


@pytest.mark.parametrize("host", ["no-such-host.invalid", ""])
def test_an_unknown_host_is_not_called_plain_text(host):
    with pytest.raises(UnavailableError, check=lambda error: error.reason == "NO_SUCH_HOST"):
        Config(host=host).check_exposure()


def test_brackets_of_an_address_do_not_matter():
    flags = ["--host", "[::1]", "--health-port", "[::1]:7", "--metrics-port", "[::1]:0"]
    config = Config.from_arguments(flags, {})
    assert config.host == Config(host="::1").host
    assert machine.split_address(config.health_port) == ("::1", 7)
    assert machine.split_address(config.metrics_port) == ("::1", 0)
    config.check_exposure()
    config = Config.from_arguments(["--metrics-port", "0", "--health-port=7"], {})
    assert (config.metrics_port, config.health_port) == ("127.0.0.1:0", "127.0.0.1:7")


def test_threads_are_divided():
    config = Config(devices="cpu:3", threads=8)
    assert [config.engine_threads(number) for number in range(3)] == [3, 3, 2]
    assert Config(devices="cpu:3", threads=1).engine_threads(2) == 1
    assert Config(devices="cpu").engine_threads(0) is None


def test_switches_need_no_value():
    variable = {"WARPFIT_INSECURE": "yes"}
    assert Config.from_arguments(["--insecure"], {}).insecure is True
    assert Config.from_arguments(["--insecure", "no"], variable).insecure is False
    assert Config.from_arguments([], variable).insecure is True
