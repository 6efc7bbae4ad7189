"""Authentication by tokens, client certificates and the server's own front ends."""

import os
import time
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest

from support.refusals import refused
from support.servers.server import write_secret
from warpfit.errors import UnauthenticatedError
from warpfit.transport.connection import new_token, token_digest
from warpfit_server import tenants
from warpfit_server.tenants import Authenticator, TokenFile


class TestTokens:
    @pytest.fixture(autouse=True)
    def settled(self, monkeypatch):
        monkeypatch.setattr(tenants, "_SETTLE_SECONDS", 0.0)

    def _file(self, tmp_path, text):
        return write_secret(tmp_path / "tokens", text)

    @staticmethod
    def look(tokens, token):
        tokens._tokens._next = 0.0
        return tokens.tenant(token)

    def test_a_file_that_is_being_rewritten_is_read_when_it_is_whole(self, tmp_path, monkeypatch):
        (token, line), (other, others_line) = new_token("a"), new_token("b")
        path = self._file(tmp_path, line)
        tokens = TokenFile(path)
        monkeypatch.setattr(tenants, "_SETTLE_SECONDS", 30.0)
        for text in ("", "# the first line\n", f"{line}\n{others_line}"):
            path.write_text(text)
            assert self.look(tokens, token) == "a"
        monkeypatch.setattr(tenants, "_SETTLE_SECONDS", 0.0)
        assert [self.look(tokens, each) for each in (token, other)] == ["a", "b"]

    @pytest.mark.parametrize("until", ["2020-01-01", "2020-01-01T00:00:00+02:00", None])
    def test_a_token_expires_even_if_it_was_used_before(self, tmp_path, until):
        token, line = new_token("a")
        soon = datetime.now(UTC) + timedelta(seconds=0.1)
        tokens = TokenFile(self._file(tmp_path, f"{line} {until or soon.isoformat()}"))
        if until is None:
            assert tokens.tenant(token) == "a"
            time.sleep(0.15)
        with pytest.raises(UnauthenticatedError, check=lambda e: e.reason == "TOKEN_EXPIRED"):
            tokens.tenant(token)

    @pytest.mark.parametrize(
        "text",
        [
            *("", "# no token yet\n", "\xff", "alice", "alice zz", "alice abcd", "a b c d"),
            *(f"alice {'ab' * 32} never", f"{'a' * 129} {'ab' * 32}"),
            # What a terminal does something with, a token that is empty, and one of two tenants.
            *(f"a\x1b[31m {'ab' * 32}", f"a {token_digest('').hex()}"),
            f"a {'ab' * 32} # b\nb {'AB' * 32}",
        ],
    )
    def test_a_wrong_file_is_refused_with_its_line(self, tmp_path, text):
        path = self._file(tmp_path, b"# comment\n" + text.encode("latin-1"))
        error = refused("BAD_TOKEN_FILE", TokenFile, path)
        if text.startswith("a"):
            assert f"line {2 + text.count(chr(10))}" in str(error)

    def test_no_call_waits_for_the_other_end_of_a_pipe(self, tmp_path):
        token, line = new_token("a")
        path = self._file(tmp_path, line)
        tokens = TokenFile(path)
        path.unlink()
        os.mkfifo(path, 0o600)
        assert self.look(tokens, token) == "a", "the old content stays in force"
        refused("NO_REGULAR_FILE", TokenFile, path)

    @pytest.mark.parametrize("wrong", ["mode", "folder", "content"])
    def test_a_token_is_withdrawn_although_the_new_file_was_wrong_at_first(self, tmp_path, wrong):
        folder, hidden = tmp_path / "mounted", tmp_path / "hidden"
        folder.mkdir()
        (token, line), (other, others_line) = new_token("a"), new_token("b")
        path = write_secret(folder / "tokens", f"{line}\n{others_line}\n")
        tokens = TokenFile(path)
        tokens._tokens._seconds = 0.0
        path.write_text(others_line + " x y z" * (wrong == "content"))
        times = path.stat().st_mtime_ns
        path.chmod(0o644 if wrong == "mode" else 0o600)
        if wrong == "folder":
            folder.rename(hidden)
        assert self.look(tokens, token) == "a", "the old content stays in force"
        if wrong == "folder":
            hidden.rename(folder)
        path.chmod(0o600)
        path.write_text(others_line)
        os.utime(path, ns=(times, times))
        with pytest.raises(UnauthenticatedError):
            self.look(tokens, token)
        assert tokens.tenant(other) == "b"

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, "another user's"])
    def test_a_file_that_others_may_read_or_its_group_may_write_is_refused(self, tmp_path, mode):
        path = self._file(tmp_path, new_token("alice")[1])
        if isinstance(mode, int):
            path.chmod(mode)
        elif os.geteuid() == 0:
            os.chown(path, 12345, 0)
        else:
            pytest.skip("only root can give files away")
        refused("FILE_NOT_SECRET.*(chmod 600|12345)", TokenFile, path)
        for accepted in (0o400, 0o640):  # Kubernetes mounts secrets for a group
            path.chmod(accepted)
            os.chown(path, os.geteuid(), -1)
            TokenFile(path)

    def test_a_token_whose_line_was_removed_is_refused(self, tmp_path):
        made = [new_token("a"), new_token("b", days=1)]
        lines = "\n".join(f"{line}  # note" for _, line in made)
        path = self._file(tmp_path, f"\ufeff{lines}")  # a mark of the byte order
        tokens = TokenFile(path)
        assert [tokens.tenant(token) for token, _ in made * 2] == ["a", "b"] * 2
        with pytest.raises(UnauthenticatedError, match="not known"):
            tokens.tenant("wrong")
        path.write_text(made[1][1])
        assert self.look(tokens, made[1][0]) == "b"
        with pytest.raises(UnauthenticatedError):
            tokens.tenant(made[0][0])
        path.write_text("")
        with pytest.raises(UnauthenticatedError):
            self.look(tokens, made[1][0])


def context(names):
    shown = {} if names is None else {"x509_common_name": names}
    return Mock(**{"peer.return_value": "ipv4:127.0.0.1:5", "auth_context.return_value": shown})


class TestAuthenticator:
    def test_the_common_name_of_a_certificate_is_the_tenant(self):
        authenticator = Authenticator(None, certificates=True)
        assert authenticator.authenticate(context([b"alice"]), {}) == "alice"
        for names in (None, [], [b""], [b"a" * 129], [b"\xff" * 100]):
            with pytest.raises(UnauthenticatedError):
                authenticator.authenticate(context(names), {})

    def test_a_token_wins_over_a_certificate(self, tmp_path):
        token, line = new_token("alice")
        path = write_secret(tmp_path / "tokens", line)
        authenticator = Authenticator(TokenFile(path), certificates=True)
        with pytest.raises(UnauthenticatedError):
            authenticator.authenticate(context([b"bob"]), {})
        metadata = {"authorization": f"bearer {token}"}
        assert authenticator.authenticate(context([b"bob"]), metadata) == "alice"
