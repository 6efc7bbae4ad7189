"""The file in which a server tells clients its address, for clusters with a shared file system."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warpfit.errors import InvalidArgumentError
from warpfit_server.system.sockets import join_address

#: Addresses to listen on that stand for all of the machine's.
_ANY = ("0.0.0.0", "::", "[::]")


@contextmanager
def address_file(path: str, host: str, port: int) -> Iterator[None]:
    """Keep a file PATH.HOST-PORT that holds HOST:PORT; none if the path is empty.

    Many servers may be given the same path, such as by one ``srun``: clients of ``file://PATH``
    read all files that begin so (`warpfit.transport.connection.file_target`).

    Raises:
        InvalidArgumentError: if the file cannot be written.
    """
    if not path:
        yield
        return
    host = socket.gethostname() if host in _ANY else host.strip("[]")
    file = Path(f"{Path(path).absolute()}.{host.replace(':', '_')}-{port}")
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        half.unlink(missing_ok=True)
        with half.open("x") as new:  # follows no link that another user has put there
            new.write(f"{join_address(host, port)}\n")
        half.replace(file)  # so that nobody reads a part of it
    except OSError as error:
        raise InvalidArgumentError(
            f"the address file {file} cannot be written: {error.strerror or error}",
            "ADDRESS_FILE",
            "Give --address-file in a folder that exists and that the server may write to",
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
