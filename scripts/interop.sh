#!/usr/bin/env bash
# Creates or mends .venv-interop, where the real lerobot writes and reads datasets: 6 GB, apart from .venv, since it
# asks for other versions. Both lerobots share its packages; each lies in a folder of its own. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-interop
requirements=tests_interop/requirements.txt
python="${PYTHON:-python3}"
key="$({ cat "$requirements" scripts/interop.sh; "$python" --version; pwd; } | sha256sum | cut -d' ' -f1)"
stamp="$venv/joynexus.stamp"

# torchcodec decodes with FFmpeg's shared libraries.
if ! command -v ffmpeg >/dev/null; then
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing ffmpeg for lerobot's decoder"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends ffmpeg; } >/dev/null || true
    fi
    if ! command -v ffmpeg >/dev/null; then
        echo "ffmpeg: got nothing; possible: Debian's package; as root run \`apt-get install ffmpeg\`" >&2
        exit 1
    fi
fi
if [[ -f "$stamp" && "$(cat "$stamp")" == "$key" ]]; then
    exit 0
fi

echo "setting up $venv (6 GB, the first time takes some minutes)"
[[ -x $venv/bin/python ]] && $venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
pip install --quiet --quiet --requirement "$requirements"
# The last one to write v3.0 under Python 3.11, and one that writes v2.1 and knows no datasets of version 4 or later.
for packages in "lerobot==0.4.4" "lerobot==0.3.2 datasets==3.6.0"; do
    folder="$venv/${packages%% *}"
    rm -rf "$folder"
    # shellcheck disable=SC2086  # words are packages
    pip install --quiet --quiet --no-deps --target "$folder" $packages
done
echo "$key" > "$stamp"
