"""Finds a Vulkan device for SAPIEN, or Chromium's SwiftShader on a machine without a GPU.

SAPIEN refuses Debian's lavapipe; SwiftShader works, but has to be named in a driver manifest (an "ICD JSON") that
`VK_ICD_FILENAMES` points to before sapien is imported.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

SWIFTSHADER_PATHS = (
    Path("/usr/lib/chromium/libvk_swiftshader.so"),
    Path("/usr/lib/chromium-browser/libvk_swiftshader.so"),
    Path("/opt/google/chrome/libvk_swiftshader.so"),
)
_DRIVER_FOLDERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))
_VARIABLE = "VK_ICD_FILENAMES"


def gpu_driver() -> Path | None:
    """Manifest of an NVIDIA Vulkan driver whose device is present, or None."""
    if not Path("/dev/nvidiactl").exists():
        return None
    return next((path for folder in _DRIVER_FOLDERS for path in sorted(folder.glob("*nvidia*.json"))), None)


def swiftshader() -> Path | None:
    """SwiftShader's library, or None."""
    return next((path for path in SWIFTSHADER_PATHS if path.exists()), None)


def check() -> str | None:
    """None if ManiSkill can render here; else one line that says what to install. Imports no simulator."""
    if os.environ.get(_VARIABLE) or gpu_driver() or swiftshader():
        return None
    return (
        "renderer: found no Vulkan device that SAPIEN can use; possible: an NVIDIA driver or SwiftShader; as root on "
        "Debian run `apt-get install chromium-common`, or go on without ManiSkill (--without-renderer)"
    )


def select() -> None:
    """Point Vulkan at SwiftShader where no GPU is present; to be called before sapien is imported."""
    if os.environ.get(_VARIABLE) or gpu_driver():
        return
    library = swiftshader()
    if library is None:
        return
    folder = Path(tempfile.gettempdir()) / f"joynexus-swiftshader-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        # Somebody else's folder could name a library of theirs.
        folder = Path(tempfile.mkdtemp(prefix="joynexus-swiftshader-"))
    manifest = folder / "icd.json"
    text = json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(library), "api_version": "1.1.0"}})
    if not manifest.exists() or manifest.read_text() != text:
        temporary = folder / f"icd.{os.getpid()}.json"
        temporary.write_text(text)
        temporary.replace(manifest)
    os.environ[_VARIABLE] = str(manifest)


def device() -> Any:
    """The first `sapien.Device` that can render, the GPU before others; None if there is none."""
    import sapien

    # ManiSkill's render_backend string cannot name a PCI device, since it splits at ":".
    for name in ("cuda", "pci:0000:00:00.0", "cpu"):
        try:
            found = sapien.Device(name)
        except RuntimeError:
            continue
        if found.can_render():
            return found
    return None
