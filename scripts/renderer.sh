#!/usr/bin/env bash
# Makes sure that ManiSkill can render: a GPU's Vulkan driver, or SwiftShader out of Debian's chromium-common.
set -euo pipefail
cd "$(dirname "$0")/.."

check() {
    .venv/bin/python - <<'PYTHON'
import sys

from services.environments.renderer import check

message = check()
if message:
    print(message, file=sys.stderr)
sys.exit(message is not None)
PYTHON
}

if check 2>/dev/null; then
    exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing chromium-common for its software renderer"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium-common; } >/dev/null || true
fi
check
