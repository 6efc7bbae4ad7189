#!/usr/bin/env bash
# Install warpfit with its server from the checkout that this file is in, and compile the engine.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
pip install "$root[server,sklearn,sympy]" pandas
warpfit precompile
