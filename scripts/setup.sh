#!/usr/bin/env bash
# Creates or mends .venv: this project editable, its tools, the versions of constraints.txt. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    found="$("$python" --version 2>&1 || true)"
    echo "python: got '${found:-nothing}' from '$python'; possible: 3.11 or later; install it, or set PYTHON=/path/to/python" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "python: '$python' cannot make virtual environments; possible: one with venv; on Debian install python3-venv" >&2
    exit 1
fi

# The folder is part of the key: an environment that was moved or copied has the old paths in it.
key="$({ cat constraints.txt pyproject.toml scripts/setup.sh; "$python" --version; pwd; } | sha256sum | cut -d' ' -f1)"
stamp=".venv/joynexus.stamp"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$key" ]]; then
    exit 0
fi

echo "setting up .venv (the first time takes some minutes)"
[[ -x .venv/bin/python ]] && .venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
# Twice quiet: pip warns of folders in its own configuration that it does not find; errors still show.
# torch first and alone, so that no other package's wish decides which build comes.
pip install --quiet --quiet --constraint constraints.txt "$(grep '^torch==' constraints.txt)"
pip install --quiet --quiet --constraint constraints.txt --editable ".[dev]"
if .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torchvision") is None)'; then
    # A torchvision of another build breaks `import transformers`, and nothing here needs one.
    pip uninstall --quiet --quiet --yes torchvision
fi
echo "$key" > "$stamp"
