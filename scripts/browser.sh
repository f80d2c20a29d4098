#!/usr/bin/env bash
# Makes sure that the tests of Prefect's page have a browser at /usr/bin/chromium.
set -euo pipefail

if [[ -x /usr/bin/chromium ]]; then
    exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing chromium for the tests of Prefect's page"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium; } >/dev/null || true
fi
if [[ ! -x /usr/bin/chromium ]]; then
    echo "chromium: nothing at /usr/bin/chromium; possible: Debian's package; as root run \`apt-get install chromium\`" >&2
    exit 1
fi
