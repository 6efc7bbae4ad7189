"""Settings of the server from flags and the environment."""

import pytest

from warpfit_server.config import Config, parse_bytes


def test_flags_win_over_variables_over_defaults():
    environment = {"WARPFIT_PORT": "1", "WARPFIT_HOST": "::1", "WARPFIT_MAX_TOKENS": "17"}
    config = Config.from_arguments(["--port", "2"], environment)
    assert (config.port, config.host, config.max_tokens) == (2, "::1", 17)
    assert config.limits().tokens == 17
    assert Config.from_arguments([], {}) == Config()


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
        *((["--chunk-bytes", text], {}) for text in ("1 furlong", "0", "-1", f"{10**20}GB")),
        (["--log-level", "loud"], {}),
        *((["--threads", text], {}) for text in ("0", "-1", "1.5", "nan", str(10**20))),
        *((["--grace", text], {}) for text in ("-0.1", "nan", "inf", "1e300", "soon")),
        *((["--port", text], {}) for text in ("-1", "65536", "1.0")),
        ([], {"WARPFIT_FRONT_ENDS": "-1"}),
        (["--parent", "-5"], {}),
        (["--max-rate=-1"], {}),
    ],
)
def test_wrong_settings_are_refused(arguments, environment, capsys):
    with pytest.raises(SystemExit) as caught:
        Config.from_arguments(arguments, environment)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


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
