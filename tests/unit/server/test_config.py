"""Limits and settings of the server."""

from __future__ import annotations

import pytest

from support.servers.requests import DATA, an_evaluation
from warpfit.errors import (
    ResourceExhaustedError,
)
from warpfit.server_info import Limits
from warpfit_server.config import Config, parse_bytes
from warpfit_server.limits import check_batch, check_dataset, check_result


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "reason", "flag"),
        [
            (Limits(programs=6), "TOO_MANY_PROGRAMS", "--max-programs"),
            (Limits(tokens=50), "TOO_MANY_TOKENS", "--max-tokens"),
            (Limits(program_tokens=9), "PROGRAM_TOO_LONG", "--max-program-tokens"),
            (Limits(vectors=0), "TOO_MANY_VECTORS", "--max-vectors"),
        ],
    )
    def test_batch(self, limits, reason, flag):
        with pytest.raises(ResourceExhaustedError) as caught:
            check_batch(an_evaluation().batch, limits)
        assert caught.value.reason == reason
        assert flag in str(caught.value)
        check_batch(an_evaluation().batch, Limits())

    def test_result(self):
        size = 7 * 10 * 4 + 7 * 8
        check_result(an_evaluation(), DATA.layout, Limits(result_bytes=size))
        with pytest.raises(ResourceExhaustedError, match="--max-result-bytes"):
            check_result(an_evaluation(), DATA.layout, Limits(result_bytes=size - 1))

    def test_dataset(self):
        check_dataset(DATA.layout, Limits(dataset_bytes=200))
        with pytest.raises(ResourceExhaustedError, match="--max-dataset-bytes"):
            check_dataset(DATA.layout, Limits(dataset_bytes=199))


class TestConfig:
    def test_flags_win_over_variables_over_defaults(self):
        environment = {"WARPFIT_PORT": "1", "WARPFIT_HOST": "::1", "WARPFIT_MAX_TOKENS": "17"}
        config = Config.from_arguments(["--port", "2"], environment)
        assert (config.port, config.host, config.max_tokens) == (2, "::1", 17)
        assert config.limits().tokens == 17
        assert Config.from_arguments([], {}) == Config()

    def test_crosses_to_the_engine_process(self):
        config = Config.from_arguments(["--threads", "3", "--cache-dir", "somewhere"], {})
        assert Config.from_json(config.to_json()) == config

    @pytest.mark.parametrize(
        ("arguments", "environment"),
        [
            (["--engine", "tpu"], {}),
            ([], {"WARPFIT_ENGINE": "tpu"}),
            ([], {"WARPFIT_PORT": "many"}),
            (["--chunk-bytes", "1 furlong"], {}),
            (["--log-level", "loud"], {}),
        ],
    )
    def test_wrong_settings_are_refused(self, arguments, environment, capsys):
        with pytest.raises(SystemExit) as caught:
            Config.from_arguments(arguments, environment)
        assert caught.value.code == 2
        assert "error:" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "size"), [("4096", 4096), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("3mib", 3 << 20)]
    )
    def test_sizes(self, text, size):
        assert parse_bytes(text) == size

    def test_help_names_every_flag(self, capsys):
        with pytest.raises(SystemExit):
            Config.from_arguments(["--help"], {})
        text = capsys.readouterr().out
        for flag in ("--host", "--port", "--max-resident-bytes", "--log-format", "--grace"):
            assert flag in text
