"""``warpfit ray``: servers on the nodes of a Ray cluster."""

import argparse
from collections.abc import Sequence

from warpfit import ray
from warpfit.cli.numbers import amount


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="warpfit ray",
        description="Run a server on each node of a Ray cluster; clients connect to "
        "ray://NAMESPACE.",
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for name, text in (
        ("up", "start a server on each node that has GPUs and no server"),
        ("list", "print the servers' addresses"),
        ("restart", "restart the servers one after the other"),
        ("down", "stop the servers"),
    ):
        command = commands.add_parser(name, help=text)
        add = command.add_argument
        add("namespace", nargs="?", default=ray.NAMESPACE, help="default: %(default)s")
        if name == "up":
            add("--devices", default="all", help="all GPUs of a node, or cpu (default: all)")
            add("--cpus", type=amount, default=1.0, help="CPUs reserved for each (default: 1)")
            command.epilog = "What follows -- are further flags of `warpfit serve`."
    end = words.index("--") if "--" in words else len(words)
    _run(parser.parse_args(words[:end]), words[end + 1 :])
    return 0


def _run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    namespace = options.namespace
    if options.command == "up":
        found = ray.start(namespace, devices=options.devices, flags=flags, cpus=options.cpus)
        print("\n".join(found))
    elif options.command == "list":
        print("\n".join(ray.addresses(namespace)))
    elif options.command == "restart":
        ray.restart(namespace)
    else:
        ray.down(namespace)
