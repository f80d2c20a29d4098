"""Deterministic digests: the schema signature of a tenant's interface and the prefix key of a shared forward.

SHA-256 over canonical JSON (sorted keys, no spaces, ASCII, shortest floats): stable across processes, machines
and Python versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from functools import lru_cache

from configs.environment import CameraSpec
from configs.model import ActionModuleSpec, BaseModelSpec
from configs.transforms import TransformsSpec


def canonical_json(value: object) -> str:
    """`value` as the one JSON text that equal values share.

    Raises:
        ValueError: on NaN or infinity, which have no JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: object) -> str:
    """64 hex digits of SHA-256 over `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def base_identity(base: BaseModelSpec) -> dict[str, object]:
    """What makes a base the one that it is; where it runs is no part of that."""
    return base.model_dump(mode="json", exclude={"device"})


def schema_signature(
    base: BaseModelSpec,
    action_module: ActionModuleSpec,
    cameras: Sequence[CameraSpec],
    *,
    light_visuals: bool,
    turned_cameras: Collection[str] = (),
    transforms: TransformsSpec | None = None,
) -> str:
    """Digest of a tenant's whole model-facing interface: base, tap, module, widths, horizon, cameras, transforms.

    Without turned cameras and transforms it is the one from before they could be declared.
    """
    turned: dict[str, object] = {"turned_cameras": sorted(turned_cameras)} if turned_cameras else {}
    declared = (transforms or TransformsSpec()).model_dump(mode="json", exclude_defaults=True)
    turned |= {"transforms": declared} if declared else {}
    return digest(
        {
            "base_model": base_identity(base),
            "action_module": action_module.model_dump(mode="json"),
            "cameras": sorted((c.model_dump(mode="json") for c in cameras), key=lambda c: str(c["name"])),
            "light_visuals": light_visuals,
            **turned,
        }
    )


@lru_cache(maxsize=1024)  # asked for every request
def prefix_key(base: BaseModelSpec, length: int | None = None) -> str:
    """Digest of what must be equal for requests to share a forward: base, revision, tap, dtype, length bucket.

    With `length` None it names the family of forwards; the service adds each request's bucket.
    """
    identity = {k: v for k, v in base_identity(base).items() if k not in ("length_bucket", "max_length", "max_cameras")}
    return digest({"base_model": identity, "length": length})
