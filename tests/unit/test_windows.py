"""Windows of shared memory: what may be one, who may use it, and how it ends; without a server."""

from __future__ import annotations

import fcntl
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
    SEALS,
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
from warpfit_server import channel as wire
from warpfit_server.config import Config
from warpfit_server.door import BorrowedWindows
from warpfit_server.local import LocalSocket, Tickets
from warpfit_server.windows import Region, WindowLimits, WindowTable, check_memory_file
from warpfit_server.windows import Window as Served

PAGE = 4096
NAME = bytes(range(16))
LIMITS = WindowLimits(windows=4, nbytes=10 * PAGE, tenant_windows=3, tenant_nbytes=8 * PAGE)


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


class TestMemoryFiles:
    @pytest.mark.parametrize(
        "seals",
        [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, SEALS | fcntl.F_SEAL_WRITE],
        ids=["none", "may grow", "may shrink", "closed to writing"],
    )
    def test_other_seals_are_refused(self, seals):
        with pytest.raises(InvalidArgumentError) as caught:
            check_memory_file(memory_file(PAGE, seals))
        assert caught.value.reason == "WINDOW_UNSEALED"

    def test_other_files_are_refused(self, tmp_path):
        plain = tmp_path / "file"
        plain.write_bytes(bytes(PAGE))
        pipe, _ = os.pipe()
        read_only = os.open(f"/proc/self/fd/{memory_file(PAGE)}", os.O_RDONLY)
        for descriptor in (os.open(plain, os.O_RDWR), pipe, memory_file(0), read_only):
            with pytest.raises(InvalidArgumentError):
                check_memory_file(descriptor)

    def test_what_is_sealed_keeps_its_size(self):
        descriptor = memory_file(PAGE)
        assert check_memory_file(descriptor) == PAGE
        for size in (0, PAGE - 1, PAGE + 1):
            with pytest.raises(PermissionError):
                os.truncate(descriptor, size)


class TestTable:
    def test_a_window_is_its_tenants_own(self, table):
        identifier = table.add(memory_file(PAGE), "alice")
        with table.borrow(identifier, "alice") as window:
            assert window.size == PAGE
        messages = set()
        for name, tenant in ((identifier, "bob"), (bytes(16), "bob"), (b"", "alice")):
            with pytest.raises(InvalidArgumentError) as caught, table.borrow(name, tenant):
                pass
            messages.add((caught.value.reason, str(caught.value)))
        assert len(messages) == 1, "nobody can tell which windows there are"

    def test_a_call_that_has_it_finishes_with_it(self, table):
        descriptor = memory_file(PAGE)
        ours = os.dup(descriptor)
        identifier = table.add(descriptor, "alice")
        with table.borrow(identifier, "alice") as window:
            table.remove(identifier)
            Region(window, codec.Piece(identifier, 0, 5), 5, "").write(memoryview(b"bytes"), 0)
        assert os.pread(ours, 5, 0) == b"bytes"
        with pytest.raises(InvalidArgumentError), table.borrow(identifier, "alice"):
            pass

    @pytest.mark.parametrize(
        ("tenants", "size"),
        [("aaa", PAGE), ("aabb", PAGE), ("aa", 4 * PAGE), ("ab", 5 * PAGE)],
        ids=["tenant's windows", "windows", "tenant's bytes", "bytes"],
    )
    def test_there_are_only_so_many(self, table, tenants, size):
        opened = [table.add(memory_file(size), tenant) for tenant in tenants]
        with pytest.raises(ResourceExhaustedError) as caught:
            table.add(memory_file(size), "a")
        assert caught.value.reason == "TOO_MANY_WINDOWS"
        assert caught.value.needed > caught.value.available
        table.remove(opened[0])
        table.add(memory_file(size), "a")

    def test_tenants_have_a_share(self):
        alone = WindowLimits.of(Config(max_windows=100, max_window_bytes=1000))
        shared = WindowLimits.of(Config(max_windows=100, max_window_bytes=1000, token_file="t"))
        assert (alone.tenant_windows, alone.tenant_nbytes) == (100, 1000)
        assert (shared.tenant_windows, shared.tenant_nbytes) == (75, 750)


class TestRegion:
    @given(
        size=st.integers(1, 3 * PAGE),
        offset=st.integers(0, 2**64 - 1) | st.integers(0, 3 * PAGE),
        length=st.integers(0, 2**64 - 1) | st.integers(0, 3 * PAGE),
        needed=st.integers(0, 3 * PAGE),
    )
    @settings(max_examples=200, deadline=None)
    def test_only_pieces_that_lie_in_the_window_and_are_large_enough(
        self, size, offset, length, needed
    ):
        window = Served(memory_file(size), size)
        fits = offset + length <= size and needed <= length
        try:
            region = Region(window, codec.Piece(b"", offset, length), needed, "window")
        except InvalidArgumentError as error:
            assert not fits
            assert error.reason in ("WINDOW_RANGE", "WINDOW_TOO_SMALL")
        else:
            assert fits
            region.write(memoryview(b"\1" * needed), 0)
            content = os.pread(window.descriptor, 4 * PAGE, 0)
            assert len(content) == size
            assert content.count(1) == needed
            assert not any(content[:offset])
        finally:
            window.close()

    def test_nothing_is_read_or_written_beyond_the_piece(self):
        region = Region(Served(memory_file(PAGE), PAGE), codec.Piece(b"", 10, 20), 20, "window")
        for action in (
            lambda: list(region.read(0, 21)),
            lambda: region.write(memoryview(b"ab"), 19),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                action()
            assert caught.value.reason == "WINDOW_RANGE"

    def test_what_is_read_is_a_copy(self):
        descriptor = memory_file(3 << 20)
        region = Region(Served(descriptor, 3 << 20), codec.Piece(b"", 0, 3 << 20), 0, "window")
        os.pwrite(descriptor, b"a" * 10, (1 << 20) - 5)
        parts = list(region.read_as_filled(iter([(1 << 20) - 5, (1 << 20) + 5, 7, 3 << 20])))
        os.pwrite(descriptor, b"b" * 10, (1 << 20) - 5)
        content = b"".join(parts)
        assert len(content) == 3 << 20
        assert content.index(b"a" * 10) == (1 << 20) - 5
        assert b"b" not in content

    def test_a_file_sealed_against_writing_later_is_an_error(self):
        descriptor = memory_file(PAGE)
        region = Region(Served(descriptor, PAGE), codec.Piece(b"", 0, PAGE), PAGE, "window")
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(InvalidArgumentError) as caught:
            region.write(memoryview(b"a"), 0)
        assert caught.value.reason == "WINDOW_UNUSABLE"


class TestBorrowed:
    """Windows as a further door sees them."""

    def _ask(self, answer):
        sent = []

        def send(message):
            sent.append(message)
            threading.Timer(0.02, answer, [windows, message]).start()

        windows = BorrowedWindows(send)
        return windows, sent

    def test_one_is_lent_for_each_call(self):
        windows, sent = self._ask(
            lambda w, asked: w.lent(wire.Lent(asked.number, PAGE), [memory_file(PAGE)])
        )
        before = open_windows()
        for _ in range(2):
            with windows.borrow(NAME, "alice") as window:
                assert window.size == PAGE
                assert open_windows() == before + 1
        assert open_windows() == before
        assert sent == [wire.BorrowWindow(number, NAME, "alice") for number in range(2)]

    def test_refusals_arrive(self):
        error = InvalidArgumentError("no", "WINDOW_UNKNOWN")
        windows, _ = self._ask(lambda w, asked: w.lent(wire.Lent(asked.number, error=error), []))
        with pytest.raises(InvalidArgumentError, match="no"), windows.borrow(NAME, "alice"):
            pass

    @pytest.mark.parametrize("name", [b"", bytes(15), bytes(1 << 20)])
    def test_what_is_no_id_is_not_asked_for(self, name):
        windows, sent = self._ask(lambda w, asked: None)
        with pytest.raises(InvalidArgumentError, match="no such"), windows.borrow(name, "alice"):
            pass
        assert not sent

    def test_a_descriptor_that_the_system_dropped(self):
        windows, _ = self._ask(lambda w, asked: w.lent(wire.Lent(asked.number, PAGE), []))
        with pytest.raises(UnavailableError), windows.borrow(NAME, "alice"):
            pass


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
