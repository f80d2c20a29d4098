#!/usr/bin/env bash
# Makes sure that LIBERO can render without a GPU: OSMesa out of Debian's libosmesa6. LIBERO itself is installed by
# `joynexus env install libero`.
set -euo pipefail
exec "$(dirname "$0")/system_package.sh" libosmesa6 "LIBERO's pictures" services.environments.mujoco_renderer:missing
