"""The client needs nothing that only Linux has, so that workers run on Windows and macOS."""

import subprocess
import sys

#: Imports other libraries first, which look for the system themselves; then takes away what Windows
#: or macOS lack, imports every module of the client, and makes calls.
SCRIPT = """
import importlib, multiprocessing, os, pkgutil, signal, socket, subprocess, sys, tempfile
import grpc, matplotlib, numpy, pyarrow, sklearn.utils.validation

lacking = "fork register_at_fork memfd_create pread pwrite getuid geteuid getgid killpg setsid"
lacking += " sched_getaffinity sched_setaffinity statvfs sysconf mkfifo posix_spawn uname chown"
lacking += " fchmod nice getloadavg"
for name in lacking.split():
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGUSR1", "SIGCHLD", "pthread_sigmask"):
    delattr(signal, name)
del socket.AF_UNIX
for name in ("fcntl", "pwd", "grp", "resource", "termios", "syslog"):
    sys.modules[name] = None

import warpfit.testing

for module in pkgutil.walk_packages(warpfit.__path__, "warpfit."):
    if module.name == "warpfit.mcp_server":
        continue  # the MCP SDK looks at the name of the platform, which is still Linux
    importlib.import_module(module.name)
with warpfit.testing.client() as client:
    data = client.upload([[1.0], [2.0]], [2.0, 4.0])
    assert client.evaluate(data, ["2*x1"], loss="sse")[0] == 0.0
with warpfit.connect("127.0.0.1:1", wait=0) as client:
    try:
        client.info()
    except warpfit.UnavailableError as error:
        print(error.reason)
"""


def test_the_client_runs_without_what_only_linux_has():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "CONNECTION_REFUSED\n", done.stderr
