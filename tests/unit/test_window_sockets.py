"""Where workers and a server agree on windows, from both sides; without a server."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.windows import (
    LIMITS,
    PAGE,
    RawWindow,
    client_windows,
    connected,
    memory_file,
    open_windows,
)
from warpfit import codec
from warpfit.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from warpfit.windows import Window, Windows
from warpfit_server.config import Config
from warpfit_server.local import LocalSocket, Tickets
from warpfit_server.windows import WindowTable


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture
def table():
    return WindowTable(LIMITS)


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory() as directory:  # pytest's own paths may be too long
        yield f"{directory}/socket"


@pytest.fixture
def local(path, table):
    server = LocalSocket(path, table, LIMITS.windows)
    server.start()
    yield server
    server.stop()
    assert table.usage() == (0, 0)
    assert not Path(path).exists()


@pytest.fixture
def ticket(local):
    return local.introduction("alice").ticket


class TestSocket:
    def test_a_window_lasts_as_long_as_its_connection(self, local, table, ticket):
        before = open_windows()
        with RawWindow(local.path, ticket, [memory_file(PAGE)]) as window:
            with table.borrow(window.identifier, "alice"):
                pass
            assert table.usage() == (1, PAGE)
            assert open_windows() == before + 2
        eventually(lambda: table.usage() == (0, 0))
        assert open_windows() == before

    def test_a_second_packet_ends_it(self, local, table, ticket):
        with RawWindow(local.path, ticket, [memory_file(PAGE)]) as window:
            window.connection.send(b"more")
            eventually(lambda: table.usage() == (0, 0))
            with pytest.raises(ConnectionResetError):
                window.connection.recv(1)

    @pytest.mark.parametrize("count", [0, 2, 20])
    def test_one_file_comes_along(self, local, table, ticket, count):
        before = open_windows()
        with RawWindow(local.path, ticket, [memory_file(PAGE) for _ in range(count)]) as window:
            assert window.reason == "BAD_PACKET"
        assert table.usage() == (0, 0)
        assert open_windows() == before

    def test_another_user_is_refused(self, path, table):
        server = LocalSocket(path, table, 4, user_of=lambda _: os.geteuid() + 1)
        server.start()
        try:
            before = open_windows()
            ticket = server.introduction("alice").ticket
            with RawWindow(path, ticket, [memory_file(PAGE)]) as window:
                assert window.reason == "OTHER_USER"
            assert open_windows() == before
        finally:
            server.stop()

    def test_a_ticket_is_needed(self, local, table, ticket):
        for wrong in (ticket[:10], ticket[:-1], ticket + b"x", bytes(32) + b"alice", b"\xff" * 40):
            with RawWindow(local.path, wrong, [memory_file(PAGE)]) as window:
                assert window.reason == "TICKET_UNKNOWN"
        assert table.usage() == (0, 0)

    def test_an_unsealed_file_is_refused(self, local, ticket):
        before = open_windows()
        with RawWindow(local.path, ticket, [memory_file(PAGE, seals=0)]) as window:
            assert window.reason == "WINDOW_UNSEALED"
        assert open_windows() == before

    def test_too_many_are_refused(self, local, table, ticket):
        windows = [RawWindow(local.path, ticket, [memory_file(PAGE)]) for _ in range(4)]
        assert windows[-1].reason == "TOO_MANY_WINDOWS"
        for window in windows:
            window.close()
        eventually(lambda: table.usage() == (0, 0))
        with RawWindow(local.path, ticket, [memory_file(PAGE)]) as window:
            assert window.identifier

    @given(packet=st.binary(max_size=300), count=st.integers(0, 3))
    @settings(max_examples=100, deadline=None)
    def test_any_other_packet_is_refused(self, packet, count):
        with tempfile.TemporaryDirectory() as directory:
            table = WindowTable(LIMITS)
            server = LocalSocket(f"{directory}/socket", table, 4)
            server.start()
            try:
                files = [memory_file(PAGE) for _ in range(count)]
                with connected(server.path) as connection:
                    socket.send_fds(connection, [packet or b"\0"], files)
                    assert codec.WINDOW_PACKET_BYTES > len(connection.recv(1 << 16)) > 0
                    assert connection.recv(1) == b""
                assert table.usage() == (0, 0)
                for descriptor in files:
                    os.close(descriptor)
            finally:
                server.stop()

    def test_those_who_say_nothing_do_not_keep_others_out(self, local, table, ticket):
        silent = [connected(local.path) for _ in range(LIMITS.windows)]
        with RawWindow(local.path, ticket, [memory_file(PAGE)]) as window:
            assert window.identifier
        for connection in silent:
            connection.close()

    def test_more_connections_than_there_may_be_are_closed(self, local):
        crowd = [connected(local.path) for _ in range(LIMITS.windows + 17)]
        assert crowd[-1].recv(1) == b""
        for connection in crowd:
            connection.close()


class TestPath:
    def test_the_socket_of_a_server_that_was_killed_is_replaced(self, path, table):
        left_over = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left_over.bind(path)
        left_over.close()
        server = LocalSocket(path, table, 4)
        server.start()
        server.stop()

    def test_another_servers_socket_is_left_alone(self, local, table):
        with pytest.raises(UnavailableError) as caught:
            LocalSocket(local.path, table, 4).start()
        assert caught.value.reason == "SOCKET_IN_USE"
        connected(local.path).close()

    def test_a_file_is_left_alone(self, tmp_path, table):
        file = tmp_path / "file"
        file.write_text("mine")
        for path in (file, tmp_path / "missing" / "socket", tmp_path / ("x" * 120)):
            with pytest.raises(InvalidArgumentError) as caught:
                LocalSocket(str(path), table, 4).start()
            assert caught.value.reason == "BAD_SOCKET_PATH"
        assert file.read_text() == "mine"

    def test_it_is_closed_to_other_users(self, local):
        assert Path(local.path).stat().st_mode & 0o077 == 0

    def test_only_where_it_is_asked_for(self, table):
        assert LocalSocket.of(Config(), "/run", table) is None
        automatic = LocalSocket.of(Config(local_socket="auto"), "/run", table)
        assert automatic.path == "/run/local"
        assert LocalSocket.of(Config(local_socket="/x"), "/run", table).path == "/x"


def test_tickets_are_of_one_server_and_one_tenant():
    tickets = Tickets()
    for name in ("alice", "", "Ω"):
        assert tickets.tenant(tickets.issue(name)) == name
    with pytest.raises(PermissionDeniedError):
        Tickets().tenant(tickets.issue("alice"))
    forged = tickets.issue("alice")[:32] + b"bob"
    with pytest.raises(PermissionDeniedError):
        tickets.tenant(forged)


class TestClient:
    @pytest.fixture
    def windows(self, local):
        made = Windows(None, PAGE, 4 * PAGE)
        made.introduce(local.introduction("alice"))
        yield made
        made.close()

    def test_a_window_is_used_again(self, windows, table):
        with windows.borrow(2 * PAGE, mapped=True) as loan:
            first = loan.take()
        with windows.borrow(PAGE, mapped=True) as loan:
            assert loan.take() is first
            with windows.borrow(PAGE, mapped=True) as other:
                assert other.take() is not first
        assert table.usage()[0] == 2

    def test_one_whose_call_failed_is_not(self, windows, table):
        with pytest.raises(KeyError), windows.borrow(PAGE, mapped=True) as loan:
            loan.take()
            raise KeyError
        eventually(lambda: table.usage() == (0, 0))

    def test_a_second_attempt_has_none(self, windows, table):
        with windows.borrow(PAGE, mapped=True) as loan:
            assert loan.take() is not None
            assert loan.take() is None
            eventually(lambda: table.usage() == (0, 0))

    def test_idle_windows_have_a_limit(self, windows, table):
        loans = [windows.borrow(2 * PAGE, mapped=False) for _ in range(3)]
        for loan in loans:
            with loan:
                loan.take()
        eventually(lambda: table.usage() == (2, 4 * PAGE))

    def test_memory_is_reserved_when_it_is_mapped(self, windows):
        with windows.borrow(2 * PAGE, mapped=False) as loan:
            window = loan.take()
            assert os.fstat(window._descriptor).st_blocks == 0
            window.map()
            assert os.fstat(window._descriptor).st_blocks * 512 == 2 * PAGE
            window.write(memoryview(b"abc"), 5)
            assert bytes(window.view()[4:9]) == b"\0abc\0"

    def test_after_a_refusal_the_network_is_used_for_a_while(self, windows, caplog):
        assert windows.borrow(100 * PAGE, mapped=False) is None
        assert "TOO_MANY" in caplog.text or "limit" in caplog.text
        assert not windows.wants(PAGE)

    @pytest.mark.parametrize("nowhere", ["/nowhere/socket", "relative", "x" * 200])
    def test_without_a_server_the_network_is_used(self, nowhere, caplog, local):
        windows = Windows(nowhere, PAGE, PAGE)
        windows.introduce(local.introduction("alice"))
        before = open_windows()
        assert windows.borrow(PAGE, mapped=True) is None
        assert open_windows() == before
        assert "the network is used" in caplog.text

    def test_a_server_that_offers_none_is_not_asked_again_at_once(self, caplog):
        windows = Windows(None, PAGE, PAGE)
        assert windows.wants(PAGE)
        windows.introduce(None)
        assert not windows.wants(PAGE)
        assert "--local-socket" in caplog.text

    def test_small_matrices_go_over_the_network(self, windows):
        assert not windows.wants(0)
        assert not windows.wants(PAGE - 1)
        assert windows.wants(PAGE)

    def test_windows_of_a_server_that_is_gone_are_not_used(self, path, table):
        server = LocalSocket(path, table, 4)
        server.start()
        windows = Windows(None, PAGE, 4 * PAGE)
        windows.introduce(server.introduction("alice"))
        with windows.borrow(PAGE, mapped=True) as loan:
            loan.take()
        server.stop()
        assert windows.borrow(PAGE, mapped=True) is None
        assert not windows.is_introduced, "the next call asks the next server"
        assert windows.wants(PAGE)

    def test_a_window_can_be_closed_under_a_view(self, local, ticket):
        window = Window(PAGE, local.path, ticket)
        window.map()
        part = window.view()[:3]
        window.close()
        assert bytes(part) == bytes(3)

    def test_a_window_that_is_lost_is_closed(self, windows, table):
        before = client_windows()
        windows.borrow(PAGE, mapped=True)  # by a task that is cancelled meanwhile
        eventually(lambda: table.usage() == (0, 0))
        assert client_windows() == before

    def test_no_other_file_is_written_to_when_it_is_closed_under_an_upload(self, local, ticket):
        for _ in range(5):
            window = Window(PAGE, local.path, ticket)
            data = memoryview(bytes([1]) * PAGE)
            failures = []

            def write(window=window, data=data, failures=failures):
                try:
                    while True:
                        window.write(data, 0)
                except ResourceExhaustedError:
                    failures.append(True)

            thread = threading.Thread(target=write)
            thread.start()
            window.close()
            victims = [memory_file(PAGE) for _ in range(20)]
            thread.join()
            assert failures
            for victim in victims:
                assert not any(os.pread(victim, PAGE, 0))
                os.close(victim)

    @given(st.integers(1, 1 << 40))
    def test_sizes_are_rounded_by_little(self, size):
        from warpfit.windows import _rounded

        assert size <= _rounded(size) <= max(size * 1.13, size + PAGE)
        assert _rounded(_rounded(size)) == _rounded(size)
