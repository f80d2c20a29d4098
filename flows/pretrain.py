"""Flow `pretrain`: makes a small base that grounds objects, goals and grippers, so that anyone can repeat ours."""

from __future__ import annotations

from typing import Any

from prefect import flow

from configs.requests import PretrainRequest
from tasks.pretraining import pretrain_base


@flow(name="pretrain", flow_run_name="pretrain {request.name}")
async def pretrain(request: PretrainRequest) -> dict[str, Any]:
    """Render scenes, train on them, save the checkpoint, report errors on unseen scenes."""
    return await pretrain_base(request)
