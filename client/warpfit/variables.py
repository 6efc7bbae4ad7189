"""The names of the environment variables of warpfit: a name that is none of them is a mistake.

A variable that is misspelt would be left out in silence, and a server would run without its tokens
or limits. So a server refuses to start with one, and a client warns.
"""

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Final

#: Read by clients.
_CLIENT: Final = "ADDRESS CA CLIENT_CERT CLIENT_KEY PROXY SERVER_NAME TLS TOKEN"
#: Settings of the server, for whom a client may share its environment; `Config` has their meaning.
_SERVER: Final = """
    ADDRESS_FILE CACHE_DIR DATA_ROOT DEVICES DEVICE_MEMORY EXPOSE_TENANTS FRONT_ENDS GRACE
    HANG_SECONDS HEALTH_PORT HOST INSECURE LEASE_SECONDS LOG_FORMAT LOG_LEVEL MAX_PENDING_BYTES
    MAX_QUEUE_SECONDS MAX_REQUESTS MAX_RESIDENT_BYTES MAX_RESULT_BYTES MAX_SEARCHES
    MESSAGE_SECONDS METRICS_PORT NOTICE PARENT PORT TENANTS_FILE THREADS TLS_CERT TLS_CLIENT_CA
    TLS_KEY TOKEN_FILE
"""
CLIENT_VARIABLES: Final = frozenset(f"WARPFIT_{name}" for name in _CLIENT.split())
SERVER_VARIABLES: Final = frozenset(f"WARPFIT_{name}" for name in _SERVER.split())
#: What Kubernetes and Docker set in containers beside a service whose name begins with "warpfit".
_SERVICE: Final = re.compile(
    r"WARPFIT_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)=.*"
    r"|WARPFIT_\w+_PORT=(tcp|udp)://.*"
)


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence about each variable of warpfit whose name is not known.

    Args:
        environment: all variables.
        known: names that are, beside those of an orchestrator.
    """
    names = set(known)
    found = []
    for name in sorted({one for one in environment if one.startswith("WARPFIT_")} - names):
        if not _SERVICE.fullmatch(f"{name}={environment[name]}"):
            similar = difflib.get_close_matches(name, sorted(names), 1, 0.8)
            meant = f"; is {similar[0]} meant?" if similar else ""
            found.append(f"the environment variable {name} is not known{meant}")
    return found


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Warn of variables that neither client nor server knows; each one once a process."""
    for sentence in unknown_variables(environment, CLIENT_VARIABLES | SERVER_VARIABLES):
        warnings.warn(f"warpfit: {sentence}", UserWarning, stacklevel=2)
