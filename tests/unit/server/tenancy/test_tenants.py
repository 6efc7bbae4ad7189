"""Limits of tenants, and the keys of their data sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.errors import InvalidArgumentError, PermissionDeniedError
from warpfit.server_info import Limits
from warpfit_server.tenancy.tenants import ANONYMOUS, TenantLimits, key_of


@pytest.fixture
def tenants(tmp_path):
    """Make the limits that a tenants file with some text gives to several tenants."""

    def make(text, server=None):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return TenantLimits(server or Limits(), path, shared=True)

    return make


def test_sections_narrow_the_default_which_narrows_the_server(tenants):
    book = tenants(
        '[default]\nrows = 10\nrate = 3.5\n[tenants.a]\nresident_bytes = "1MiB"\nrows = 20\n'
        "requests = 1000\n[tenants.b]\nsuspended = true\n",
    )
    a, other = book.limits("a"), book.limits("c")
    assert (a.rows, a.resident_bytes, a.rate, a.requests) == (20, 1 << 20, 3.5, 32)
    assert (other.rows, other.rate, other.requests) == (10, 3.5, 32)
    with pytest.raises(PermissionDeniedError):
        book.limits("b")


def test_the_rate_of_the_server_bounds_every_tenant(tenants):
    book = tenants("[tenants.a]\nrate = 500\n[tenants.b]\nrate = 2\n", Limits(rate=10.0))
    assert [book.limits(name).rate for name in "abc"] == [10.0, 2.0, 10.0]


def test_a_single_tenant_may_use_the_whole_server():
    assert TenantLimits(Limits(), None, shared=False).limits(ANONYMOUS) == Limits()


@pytest.mark.parametrize(
    "text",
    [
        "[default]\nspeed = 3\n",
        "[default]\nrows = -1\n",
        "[default]\nrows = true\n",
        '[default]\nrows = "many"\n',
        "[tenants.a]\nsuspended = 1\n",
        "[tenant.a]\nrows = 3\n",
        "tenants = 3\n",
        "default = 3\n",
        "nonsense",
    ],
)
def test_wrong_files_are_refused(tenants, text):
    with pytest.raises(InvalidArgumentError) as caught:
        tenants(text)
    assert caught.value.reason == "BAD_TENANTS_FILE"


def test_a_changed_file_is_read_again_unless_it_is_wrong(tenants, tmp_path):
    book = tenants("[default]\nrows = 1\n")
    for text, rows in (("broken", 1), ("[default]\nrows = 2\n", 2)):
        (tmp_path / "tenants.toml").write_text(text)
        book._sections._next = 0.0  # it looks again
        assert book.limits("a").rows == rows


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=32, max_size=32))
def test_keys_of_tenants_differ(one, other, content_id):
    assert (key_of(one, content_id) == key_of(other, content_id)) == (one == other)
    assert len(key_of(one, content_id)) == 32
