"""SAPIEN's shader pack "minimal" without light from an environment map.

Of the 23 to 34 CPU-seconds that SwiftShader spends on a process's first picture, nearly all go into two tables for
light from an environment map. ManiSkill's table-top scenes have none (it is black), so the tables change no pixel;
where no shader names them, SAPIEN does not compute them, and the first picture takes well under a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import sapien

logger = logging.getLogger(__name__)

# file: (text of SAPIEN 3.0, what stands in its place)
_EDITS = {
    "gbuffer.frag": (
        ("layout(set = 3, binding = 7) uniform samplerCube samplerEnvironment;\n", ""),
        ("layout(set = 3, binding = 8) uniform sampler2D samplerBRDFLUT;\n", ""),
        ("textureLod(samplerEnvironment, texcoord, 0).rgb", "vec3(0)"),
        ("textureLod(samplerEnvironment, N, 5).rgb", "vec3(0)"),
        ("textureLod(samplerEnvironment, R, roughness * 5).rgb", "vec3(0)"),
        ("texture(samplerBRDFLUT, vec2(roughness, dotNV)).xy", "vec2(0)"),
    ),
    "composite0.frag": (
        ("layout(set = 2, binding = 7) uniform samplerCube samplerEnvironment;\n", ""),
        ("layout(set = 2, binding = 8) uniform sampler2D samplerBRDFLUT;\n", ""),
        ("textureLod(samplerEnvironment, texcoord, 0).rgb", "vec3(0)"),
    ),
}


def without_environment_map() -> str:
    """Folder of the edited pack, made once a SAPIEN version; "minimal" itself where its text is not as expected."""
    source = Path(sapien.__file__).parent / "vulkan_shader"
    parent = Path(tempfile.gettempdir())
    made = parent / f"joynexus-shaders-{os.getuid()}-{sapien.__version__}"
    if made.is_dir() and made.stat().st_uid == os.getuid():
        return str(made / "minimal")
    building = Path(tempfile.mkdtemp(prefix="joynexus-shaders-", dir=parent))
    try:
        for name in ("minimal", "common"):
            shutil.copytree(source / name, building / name)
        for name, edits in _EDITS.items():
            text = (building / "minimal" / name).read_text()
            for old, new in edits:
                if old not in text:
                    logger.warning(
                        "shader pack: %s of SAPIEN %s has no %r; using it as it is", name, sapien.__version__, old
                    )
                    return "minimal"
                text = text.replace(old, new)
            (building / "minimal" / name).write_text(text)
        with contextlib.suppress(OSError):  # another host made it in the meantime
            building.rename(made)
        return str(made / "minimal")
    finally:
        shutil.rmtree(building, ignore_errors=True)
