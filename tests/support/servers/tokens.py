"""Token files and tenants files of servers."""

from pathlib import Path

from warpfit.transport.connection import new_token


def token_file(folder: Path, *tenants: str) -> tuple[str, dict[str, str]]:
    """Write a token file; return its path and each tenant's token."""
    made = {tenant: new_token(tenant) for tenant in tenants}
    path = folder / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    path.chmod(0o600)
    return str(path), {tenant: token for tenant, (token, _) in made.items()}


def tenants_file(folder: Path, text: str) -> str:
    """Write a tenants file; return its path."""
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)
