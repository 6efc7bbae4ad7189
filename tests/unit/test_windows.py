"""Windows of shared memory: what may be one, and who may use it; without a server."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.windows import (
    LIMITS,
    PAGE,
    SEALS,
    memory_file,
    open_windows,
)
from warpfit import codec
from warpfit.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from warpfit_server import channel as wire
from warpfit_server.config import Config
from warpfit_server.door import BorrowedWindows
from warpfit_server.windows import Region, WindowLimits, WindowTable, check_memory_file
from warpfit_server.windows import Window as Served

NAME = bytes(range(16))


@pytest.fixture
def table():
    return WindowTable(LIMITS)


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
