"""Keeping an environment session while its caller lives: signs to the service at a fifth of the session's lease.

A caller that is gone gives none, so its hosts are others' within `lease_s` and a quarter; one that steps through the
service or has a direct connection open is known to live without them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from services.renewals import renewed_every

logger = logging.getLogger(__name__)


def renewed_session(service: Any, opened: Mapping[str, Any]) -> AbstractAsyncContextManager[None]:
    """Renew the session `opened` with the EnvironmentService, or a handle of it, while the block runs.

    One that has ended ends the renewals (`renewed_every`): the caller hears so from its next call.
    """
    return renewed_every(opened["lease_s"] / 5, lambda: service.renew(opened["session_id"]), logger, logging.INFO)
