#!/usr/bin/env bash
# system_package.sh PACKAGE PURPOSE MODULE:FUNCTION
# Makes sure that something of the system is there: FUNCTION gives None, or the line that says what is missing. Where it
# is, and this is Debian and root, PACKAGE is installed for PURPOSE.
set -euo pipefail
cd "$(dirname "$0")/.."
package="$1" purpose="$2" function="$3"

check() {
    .venv/bin/python - "$function" <<'PYTHON'
import importlib
import sys

module, name = sys.argv[1].split(":")
message = getattr(importlib.import_module(module), name)()
if message:
    print(message, file=sys.stderr)
sys.exit(message is not None)
PYTHON
}

if check 2>/dev/null; then
    exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing $package for $purpose"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends "$package"; } >/dev/null || true
fi
check
