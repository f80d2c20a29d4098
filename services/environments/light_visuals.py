"""Light visuals: collision hulls in place of the robot's visual meshes, and no ground.

A software renderer spends its time on some 157,000 triangles of visual meshes; the convex hulls that physics uses
anyway are about 2,000. Physics is untouched. Called once after a ManiSkill environment was built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien

_ARM = (0.85, 0.85, 0.87, 1.0)
_FINGER = (0.25, 0.25, 0.28, 1.0)


def apply(env: Any) -> None:
    """Change what cameras of the ManiSkill environment `env` (unwrapped) see."""
    for link in env.agent.robot.links:
        colour = _FINGER if "finger" in link.name else _ARM
        for component in link._objs:
            _show_hulls(component.entity, component.collision_shapes, colour)
    ground = getattr(getattr(env, "table_scene", None), "ground", None)
    if ground is not None:
        for entity in ground._objs:
            for body in _render_bodies(entity):
                body.disable()


def _render_bodies(entity: sapien.Entity) -> list[Any]:
    return [c for c in entity.components if isinstance(c, sapien.render.RenderBodyComponent)]


def _show_hulls(entity: sapien.Entity, shapes: list[Any], colour: tuple[float, ...]) -> None:
    for body in _render_bodies(entity):
        body.disable()
    hulls = [hull for hull in (_hull(shape, colour) for shape in shapes) if hull is not None]
    if not hulls:
        return
    body = sapien.render.RenderBodyComponent()
    for hull in hulls:
        body.attach(hull)
    entity.add_component(body)


def _hull(shape: Any, colour: tuple[float, ...]) -> Any:
    """The render shape of one collision shape; None for kinds without a simple picture (planes, fields)."""
    material = sapien.render.RenderMaterial()
    material.base_color = list(colour)
    physx, render = sapien.physx, sapien.render
    if isinstance(shape, physx.PhysxCollisionShapeConvexMesh):
        corners = (np.asarray(shape.vertices, np.float32) * np.asarray(shape.scale, np.float32))[shape.triangles]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        # Each triangle has corners of its own, so that the hull is shaded flat and its edges are seen.
        count = 3 * len(corners)
        result = render.RenderShapeTriangleMesh(
            corners.reshape(-1, 3),
            np.arange(count, dtype=np.uint32).reshape(-1, 3),
            np.repeat(normals, 3, axis=0).astype(np.float32),
            np.zeros((count, 2), np.float32),
            material,
        )
    elif isinstance(shape, physx.PhysxCollisionShapeBox):
        result = render.RenderShapeBox(shape.half_size, material)
    elif isinstance(shape, physx.PhysxCollisionShapeSphere):
        result = render.RenderShapeSphere(shape.radius, material)
    elif isinstance(shape, physx.PhysxCollisionShapeCapsule):
        result = render.RenderShapeCapsule(shape.radius, shape.half_length, material)
    else:
        return None
    result.local_pose = shape.local_pose
    return result
