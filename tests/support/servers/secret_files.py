"""Files that nobody else may read, as the server and its clients demand of keys and tokens."""

from pathlib import Path


def write_secret(path: Path, content: str | bytes) -> Path:
    """Write a file for this user alone; return its path."""
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
