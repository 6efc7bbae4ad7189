"""Settings that would expose the server to a network are refused."""

import pytest

from warpfit.errors import InvalidArgumentError
from warpfit_server.config import Config

TENANTS = {"token_file": "tokens"}
PUBLIC = {"metrics_port": 9464, "metrics_host": "0.0.0.0"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_need_no_tls(host):
    Config(host=host).check_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_other_addresses_need_tls_or_consent(host):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(host=host).check_exposure()
    assert caught.value.reason == "INSECURE"
    Config(host=host, insecure=True).check_exposure()
    Config(host=host, tls_cert="a", tls_key="b").check_exposure()


@pytest.mark.parametrize("settings", [{"tls_cert": "a"}, {"tls_key": "b"}, {"tls_client_ca": "c"}])
def test_half_configured_tls_is_refused(settings):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(insecure=True, **settings).check_exposure()
    assert caught.value.reason == "INCOMPLETE_CERTIFICATE"


def test_metrics_and_health_listen_on_loopback_by_default():
    config = Config.from_arguments(["--host", "0.0.0.0", "--insecure"], {})
    assert (config.metrics_host, config.health_host) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    "settings",
    [
        TENANTS | PUBLIC,
        {"tls_cert": "x", "tls_key": "x", "tls_client_ca": "x"} | PUBLIC,
        TENANTS | PUBLIC | {"insecure": True},
        TENANTS | PUBLIC | {"metrics_host": "::"},
    ],
)
def test_metrics_that_name_tenants_need_consent_on_a_network(settings):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(**settings).check_exposure()
    assert caught.value.reason == "TENANTS_EXPOSED"
    assert "--metrics-host 127.0.0.1" in str(caught.value)
    Config(**settings, expose_tenants=True).check_exposure()


@pytest.mark.parametrize(
    "settings",
    [TENANTS, PUBLIC, TENANTS | {"metrics_host": "0.0.0.0"}, TENANTS | {"metrics_port": 9464}],
)
def test_other_metrics_need_no_consent(settings):
    Config(**settings).check_exposure()
