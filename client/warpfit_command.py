"""The command ``warpfit``. It is outside of the package, whose import an interrupt may end."""


def main() -> int:
    """Run the command; return its exit status, which is 130 after an interrupt at any moment."""
    try:
        from warpfit.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
