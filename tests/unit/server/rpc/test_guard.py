"""Tokens, tenants, exposure and error details, without processes."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from support.servers.secret_files import write_secret
from warpfit.codec import error_to_detail
from warpfit.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ProgramError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from warpfit.server_info import Limits
from warpfit.transport.security import Security, TlsConfig, is_local, new_token, token_digest
from warpfit_server.config import Config
from warpfit_server.rpc.error_details import STATUS_METADATA_KEY, status_details
from warpfit_server.rpc.tls import check_exposure
from warpfit_server.tenancy.authentication import Authenticator, TokenFile
from warpfit_server.tenancy.tenants import (
    ANONYMOUS,
    TenantBook,
    assign_tenant,
    key_of,
    tenant_of,
)


class Context:
    """As much of a call's context as authentication looks at."""

    def __init__(self, peer="ipv4:127.0.0.1:5", names=None, **metadata):
        self._peer, self._names, self._metadata = peer, names, metadata

    def peer(self):
        return self._peer

    def auth_context(self):
        return {} if self._names is None else {"x509_common_name": self._names}

    def invocation_metadata(self):
        return tuple((key.replace("_", "-"), value) for key, value in self._metadata.items())


class TestTokens:
    def _file(self, tmp_path, text):
        return write_secret(tmp_path / "tokens", text)

    def test_a_file_has_no_token(self):
        token, line = new_token("alice", days=30)
        assert token not in line
        assert token_digest(token).hex() in line

    def test_every_line_counts(self, tmp_path):
        made = [new_token(name, days) for name, days in [("a", None), ("b", 1), ("a", None)]]
        tokens = TokenFile(self._file(tmp_path, "\n".join(f"{x}  # note" for _, x in made)))
        assert [tokens.tenant(token) for token, _ in made] == ["a", "b", "a"]

    @pytest.mark.parametrize("until", ["2020-01-01", "2020-01-01T00:00:00+02:00"])
    def test_expired(self, tmp_path, until):
        token, line = new_token("a")
        tokens = TokenFile(self._file(tmp_path, f"{line} {until}"))
        with pytest.raises(UnauthenticatedError) as caught:
            tokens.tenant(token)
        assert caught.value.reason == "TOKEN_EXPIRED"

    @pytest.mark.parametrize(
        "text",
        [
            *("alice", "alice zz", "alice abcd", f"alice {'ab' * 32} never", "a b c d", "\xff"),
            f"{'a' * 129} {'ab' * 32}",
        ],
    )
    def test_a_wrong_file_is_refused_with_its_line(self, tmp_path, text):
        path = tmp_path / "tokens"
        write_secret(path, b"# comment\n" + text.encode("latin-1"))
        with pytest.raises(InvalidArgumentError) as caught:
            TokenFile(path)
        assert caught.value.reason == "BAD_TOKEN_FILE"
        assert "line 2" in str(caught.value) or text == "\xff"

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620])
    def test_a_file_that_is_open_to_others_is_refused(self, tmp_path, mode):
        path = self._file(tmp_path, new_token("alice")[1])
        path.chmod(mode)
        with pytest.raises(InvalidArgumentError, match="chmod 600") as caught:
            TokenFile(path)
        assert caught.value.reason == "FILE_NOT_SECRET"

    @pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
    def test_a_file_may_be_open_to_its_group_as_kubernetes_mounts_it(self, tmp_path, mode):
        token, line = new_token("alice")
        path = self._file(tmp_path, line)
        path.chmod(mode)
        assert TokenFile(path).tenant(token) == "alice"

    def test_opening_the_file_to_others_leaves_the_old_tokens_in_force(self, tmp_path, caplog):
        made = [new_token("a"), new_token("b")]
        path = self._file(tmp_path, made[0][1])
        tokens = TokenFile(path)
        path.write_text(made[1][1])
        path.chmod(0o666)
        time.sleep(1.05)
        assert tokens.tenant(made[0][0]) == "a"
        assert "chmod 600" in caplog.text

    def test_all_entries_are_compared(self, tmp_path, monkeypatch):
        made = [new_token(f"t{index}") for index in range(20)]
        tokens = TokenFile(self._file(tmp_path, "\n".join(line for _, line in made)))
        compared = []
        monkeypatch.setattr(
            "hmac.compare_digest", lambda a, b: bool(compared.append(a)) or bytes(a) == bytes(b)
        )
        assert tokens.tenant(made[3][0]) == "t3"
        assert len(compared) == len(made)
        for _ in range(2):  # a wrong one is never remembered
            with pytest.raises(UnauthenticatedError):
                tokens.tenant("wrong")
        assert len(compared) == 3 * len(made)

    def test_a_withdrawn_token_is_forgotten(self, tmp_path):
        made = [new_token("a"), new_token("b")]
        path = self._file(tmp_path, "\n".join(line for _, line in made))
        tokens = TokenFile(path)
        assert [tokens.tenant(token) for token, _ in made * 2] == ["a", "b"] * 2
        path.write_text(made[1][1])
        time.sleep(1.05)
        assert tokens.tenant(made[1][0]) == "b"
        with pytest.raises(UnauthenticatedError):
            tokens.tenant(made[0][0])

    def test_a_remembered_token_expires(self, tmp_path):
        token, line = new_token("a")
        until = datetime.now(UTC) + timedelta(seconds=0.5)
        tokens = TokenFile(self._file(tmp_path, f"{line} {until.isoformat()}"))
        assert tokens.tenant(token) == "a"
        time.sleep(0.6)
        with pytest.raises(UnauthenticatedError) as caught:
            tokens.tenant(token)
        assert caught.value.reason == "TOKEN_EXPIRED"


class TestAuthenticator:
    def _caller(self, authenticator, context):
        return authenticator.caller(context, dict(context.invocation_metadata()))

    def test_nobody_is_asked(self):
        authenticator = Authenticator(None, certificates=False)
        assert self._caller(authenticator, Context()) == (ANONYMOUS, False)

    def test_certificates_name_the_tenant(self):
        authenticator = Authenticator(None, certificates=True)
        assert self._caller(authenticator, Context(names=[b"alice"])) == ("alice", False)
        for names in (None, [], [b""], [b"a" * 129], [b"\xff" * 100]):
            with pytest.raises(UnauthenticatedError):
                self._caller(authenticator, Context(names=names))

    def test_a_token_wins_over_a_certificate(self, tmp_path):
        token, line = new_token("alice")
        path = write_secret(tmp_path / "tokens", line)
        authenticator = Authenticator(TokenFile(path), certificates=True)
        with pytest.raises(UnauthenticatedError):
            self._caller(authenticator, Context(names=[b"bob"]))
        call = Context(names=[b"bob"], authorization=f"bearer {token}")
        assert self._caller(authenticator, call) == ("alice", False)

    def test_only_the_front_door_trusts_only_its_doors(self):
        forwarded = {"warpfit_tenant_bin": "zoë".encode()}
        door = Authenticator(None, certificates=False)
        front_door = Authenticator(None, certificates=False, trusts_doors=True)
        assert self._caller(front_door, Context("unix:", **forwarded)) == ("zoë", True)
        assert self._caller(front_door, Context(**forwarded)) == (ANONYMOUS, False)
        assert self._caller(door, Context("unix:", **forwarded)) == (ANONYMOUS, False)

    def test_the_tenant_of_a_call_is_known_afterwards(self):
        context = Context()
        assert tenant_of(context) == ANONYMOUS
        assign_tenant(context, "alice")
        assert tenant_of(context) == "alice"


class TestTenantBook:
    def _book(self, tmp_path, text, **options):
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return TenantBook(Limits(), path, shared=options.pop("shared", True))

    def test_sections_narrow_the_defaults_which_narrow_the_server(self, tmp_path):
        book = self._book(
            tmp_path,
            '[default]\nrows = 10\nrate = 3.5\n[tenants.a]\nresident_bytes = "1MiB"\nrows = 20\n'
            "requests = 1000\n[tenants.b]\nsuspended = true\n",
        )
        a, other = book.limits("a"), book.limits("c")
        assert (a.rows, a.resident_bytes, a.rate, a.requests) == (20, 1 << 20, 3.5, 64)
        assert (other.rows, other.rate, other.requests) == (10, 3.5, 48)
        with pytest.raises(PermissionDeniedError):
            book.limits("b")

    def test_a_rate_of_the_server_holds_for_all(self, tmp_path):
        path = tmp_path / "tenants.toml"
        path.write_text("[tenants.a]\nrate = 500\n[tenants.b]\nrate = 2\n")
        book = TenantBook(Limits(rate=10.0), path, shared=True)
        assert [book.limits(name).rate for name in "abc"] == [10.0, 2.0, 10.0]

    def test_one_tenant_has_the_whole_server(self, tmp_path):
        assert TenantBook(Limits(), None, shared=False).limits(ANONYMOUS) == Limits()

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
            "nonsense",
        ],
    )
    def test_wrong_files_are_refused(self, tmp_path, text):
        with pytest.raises(InvalidArgumentError) as caught:
            self._book(tmp_path, text)
        assert caught.value.reason == "BAD_TENANTS_FILE"

    def test_a_changed_file_is_read_again_and_a_broken_one_is_not(self, tmp_path):
        book = self._book(tmp_path, "[default]\nrows = 1\n")
        for text, rows in (("broken", 1), ("[default]\nrows = 2\n", 2)):
            (tmp_path / "tenants.toml").write_text(text)
            time.sleep(1.05)
            assert book.limits("a").rows == rows

    @given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=32, max_size=32))
    def test_keys_of_tenants_differ(self, one, other, content_id):
        assert (key_of(one, content_id) == key_of(other, content_id)) == (one == other)
        assert len(key_of(one, content_id)) == 32


class Failed:
    """A failed call as `grpc_status` wants it."""

    def __init__(self, error):
        self._error = error

    def code(self):
        return grpc.StatusCode[self._error.status]

    def details(self):
        return str(self._error)

    def trailing_metadata(self):
        return ((STATUS_METADATA_KEY, status_details(self._error)),)


def unpacked(error, kind):
    status = rpc_status.from_call(Failed(error))
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


def grpc_message(text):
    """How gRPC writes the message of a status down."""
    return quote(text, safe="".join(chr(c) for c in range(32, 127) if chr(c) != "%"))


class TestDetails:
    def test_a_bad_token(self):
        error = ProgramError("what", "STACK_UNDERFLOW", "mend", "programs", 3, 4)
        violation = unpacked(error, error_details_pb2.BadRequest).field_violations[0]
        assert (violation.field, violation.description) == ("programs[3].tokens[4]", "what")
        info = unpacked(error, error_details_pb2.ErrorInfo)
        assert (info.reason, info.domain, info.metadata["remedy"]) == (
            *("STACK_UNDERFLOW", "warpfit"),
            "mend",
        )
        assert info.metadata["token"] == "4"

    def test_a_quota(self):
        error = ResourceExhaustedError("what", "QUEUE_FULL", needed=5, available=3, retry_after=1.5)
        delay = unpacked(error, error_details_pb2.RetryInfo).retry_delay
        assert delay.ToNanoseconds() == 1_500_000_000
        assert unpacked(error, error_details_pb2.QuotaFailure).violations[0].subject == "QUEUE_FULL"
        assert unpacked(error, error_details_pb2.ErrorInfo).metadata["needed"] == "5"
        assert unpacked(error, error_details_pb2.BadRequest) is None

    @pytest.mark.parametrize("character", ["x", "\u20ac", "\n"])
    def test_all_of_an_error_that_quotes_much_fits_the_metadata_of_a_call(self, character):
        much = character * 100_000
        error = InvalidArgumentError(much, much, much, much, 1 << 70, 1 << 70, 1 << 70, 1 << 70)
        message = grpc_message(str(error))
        entries = (error_to_detail(error), status_details(error))
        encoded = [4 * -(-len(entry) // 3) for entry in entries]
        assert len(message) + sum(encoded) < 7_500
        assert error.message.endswith("...")

    def test_what_does_not_apply_is_left_out(self):
        error = UnavailableError("what", "ENGINE_RESTARTING")
        for kind in (error_details_pb2.RetryInfo, error_details_pb2.QuotaFailure):
            assert unpacked(error, kind) is None


class TestExposure:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
    def test_loopback(self, host):
        check_exposure(Config(host=host))

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
    def test_networks(self, host):
        with pytest.raises(InvalidArgumentError) as caught:
            check_exposure(Config(host=host))
        assert caught.value.reason == "INSECURE"
        check_exposure(Config(host=host, insecure=True))
        check_exposure(Config(host=host, tls_cert="a", tls_key="b"))

    @pytest.mark.parametrize(
        "settings", [{"tls_cert": "a"}, {"tls_key": "b"}, {"tls_client_ca": "c"}]
    )
    def test_half(self, settings):
        with pytest.raises(InvalidArgumentError) as caught:
            check_exposure(Config(insecure=True, **settings))
        assert caught.value.reason == "INCOMPLETE_CERTIFICATE"

    @pytest.mark.parametrize(
        ("arguments", "environment", "insecure"),
        [
            ([], {}, False),
            (["--insecure"], {}, True),
            (["--insecure", "no"], {"WARPFIT_INSECURE": "1"}, False),
            ([], {"WARPFIT_INSECURE": "yes"}, True),
        ],
    )
    def test_the_switch(self, arguments, environment, insecure):
        assert Config.from_arguments(arguments, environment).insecure is insecure


class TestClientSecurity:
    @pytest.mark.parametrize(
        ("address", "local"),
        [
            ("127.0.0.1:1", True),
            ("localhost:1", True),
            ("[::1]:1", True),
            ("unix:/x", True),
            ("ipv4:127.0.0.1:1", False),
            ("dns:///localhost:1", True),
            ("example.org:1", False),
            ("127.0.0.1.example.org:1", False),
            ("10.1.2.3:1", False),
        ],
    )
    def test_addresses(self, address, local):
        assert is_local(address) is local

    def test_a_token_leaves_the_machine_only_in_tls_or_if_that_is_wanted(self):
        with pytest.raises(InvalidArgumentError) as caught:
            Security.of("example.org:1", "secret", None, {})
        assert caught.value.reason == "PLAIN_TOKEN"
        assert "secret" not in str(caught.value)
        assert Security.of("example.org:1", "secret", tls=True, environment={}).tls == TlsConfig()
        assert Security.of("example.org:1", "secret", tls=False, environment={}).tls is None
        assert Security.of("127.0.0.1:1", "secret", None, {}).token == "secret"

    def test_the_environment(self):
        environment = {"WARPFIT_TOKEN": "t\n", "WARPFIT_CA": "ca", "WARPFIT_SERVER_NAME": "n"}
        security = Security.of("example.org:1", None, None, environment)
        assert security == Security("t", TlsConfig(ca="ca", server_name="n"))
        assert Security.of("h:1", None, None, {"WARPFIT_TLS": "1"}).tls == TlsConfig()
        assert Security.of("h:1", None, None, {"WARPFIT_TLS": "0"}) == Security()
        assert Security.of("127.0.0.1:1", "u", tls=False, environment=environment).tls is None

    def test_half_a_certificate(self, tmp_path):
        with pytest.raises(InvalidArgumentError, match="only one"):
            TlsConfig(certificate=tmp_path / "x").credentials()
        with pytest.raises(InvalidArgumentError, match="cannot read"):
            TlsConfig(ca=tmp_path / "x").credentials()
