#!/usr/bin/env bash
# Makes sure that LIBERO can render without a GPU: OSMesa out of Debian's libosmesa6. LIBERO itself is installed by
# `joynexus env install libero`.
set -euo pipefail
cd "$(dirname "$0")/.."

check() {
    .venv/bin/python - <<'PYTHON'
import sys

from services.environments.mujoco_renderer import missing

message = missing()
if message:
    print(message, file=sys.stderr)
sys.exit(message is not None)
PYTHON
}

if check 2>/dev/null; then
    exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing libosmesa6 for LIBERO's pictures"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends libosmesa6; } >/dev/null || true
fi
check
