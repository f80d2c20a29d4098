#!/usr/bin/env bash
# Makes sure that ManiSkill can render: a GPU's Vulkan driver, or SwiftShader out of Debian's chromium-common.
set -euo pipefail
exec "$(dirname "$0")/system_package.sh" chromium-common "its software renderer" services.environments.renderer:check
