#!/usr/bin/env bash
# Install warpfit with its server, and compile the engine: from a checkout if this file is in one, as
# in tests, and otherwise, as in SRBench's algorithms/warpfit, from the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")" && cd ../../.. && pwd)
source="warpfit[server,sklearn,sympy] @ git+https://github.com/warpfit/warpfit"
if grep -qs '^name = "warpfit"' "$root/pyproject.toml"; then
    source="$root[server,sklearn,sympy]"
fi
pip install "$source" pandas
warpfit precompile
