"""Auto-reset of vector environments: which style one has, how single rows are reset, where final observations are.

Three styles (gymnasium's `AutoresetMode`). *Same-step*: the step that ends an episode returns the next one's first
observation, the final one is in `info`. *Next-step*: it returns the final observation, and the following step is the
reset, whose action is ignored and whose reward is nobody's. *Disabled*: the caller resets.

None of them can be told a seed for the episode that follows, so here every episode that counts is begun by a reset of
its own rows with its own seed, and what a vector environment begins by itself is never a sample. Two dialects of that
reset: gymnasium's (`seed` a list, `options["reset_mask"]` bool [n]) and ManiSkill's (`options["env_idx"]`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from configs.errors import EnvironmentFault, SpecError, refusal

Row = Any
"""One environment's part of a batched observation: float32 [S], or a dict of arrays."""


def maniskill_layer(env: Any) -> Any | None:
    """ManiSkill's `ManiSkillVectorEnv` in a stack of wrappers, told by its two settings; None elsewhere."""
    while env is not None:
        if "auto_reset" in vars(env) and "ignore_terminations" in vars(env):
            return env
        env = vars(env).get("env")
    return None


def autoreset_mode(env: Any, env_id: str) -> AutoresetMode:
    """The style of a vector environment.

    Raises:
        SpecError: if its metadata name none, or one that is not known.
    """
    layer = maniskill_layer(env)
    if layer is not None and not layer.auto_reset:
        return AutoresetMode.DISABLED  # its metadata say same-step whatever `auto_reset` is
    given = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(given)
    except ValueError:
        known = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
        raise SpecError(
            refusal("metadata['autoreset_mode']", given, known, f"set it in the vector environment that {env_id} makes")
        ) from None


def reset_rows(env: Any, rows: Sequence[int], seeds: Sequence[int]) -> tuple[Any, Mapping[str, Any]]:
    """Begin an episode in some rows, or in all, each by its own seed; the others stay as they are.

    Returns:
        The observation of all rows, and the reset's infos (those of `rows` count).
    """
    layer = maniskill_layer(env)
    if layer is None and len(rows) == env.num_envs:
        whole: tuple[Any, Mapping[str, Any]] = env.reset(
            seed=[int(seed) for _, seed in sorted(zip(rows, seeds, strict=True))]
        )
        return whole
    if layer is None:
        mask, chosen = np.zeros(env.num_envs, bool), dict(zip(rows, seeds, strict=True))
        mask[list(rows)] = True
        every = [int(chosen[row]) if row in chosen else None for row in range(env.num_envs)]
        reset: tuple[Any, Mapping[str, Any]] = env.reset(seed=every, options={"reset_mask": mask})
        return reset
    import torch  # ManiSkill has loaded it

    # One at a time: it draws the initial states of a joint reset from the first seed alone.
    for row, seed in zip(rows, seeds, strict=True):
        index = torch.tensor([row], device=layer.device)
        reset = env.reset(seed=int(seed), options={"env_idx": index})
    return reset


def final_rows(infos: Mapping[str, Any], rows: Sequence[int], env_id: str) -> dict[int, Row]:
    """Copies of the final observations that a same-step environment hands out in its infos.

    Three forms are known: `final_obs` as objects, one an ended row (gymnasium 1), `final_observation` likewise (before
    that) and `final_observation` as a whole batch (ManiSkill).

    Raises:
        EnvironmentFault: if one is missing.
    """
    finals = infos.get("final_obs", infos.get("final_observation"))
    found = {row: row_of(finals, row) for row in rows} if finals is not None else dict.fromkeys(rows)
    if any(value is None for value in found.values()):
        raise EnvironmentFault(
            refusal(
                "info['final_obs']",
                f"none for row {next(row for row, value in found.items() if value is None)}, whose episode ended",
                "the episode's last observation",
                f"put it there in {env_id}, or set metadata['autoreset_mode'] to the style that it has",
            )
        )
    return found


def succeeded(infos: Mapping[str, Any], row: int) -> bool:
    """`success` or `is_success` of one row in a step's infos.

    `final_info` comes first: what stands beside it is of the reset, in ManiSkill's wrapper for every row.
    """
    final = infos.get("final_info")
    places: list[tuple[Mapping[str, Any], int]] = [(infos, row)]
    if isinstance(final, Mapping):
        places.insert(0, (final, row))
    elif final is not None and final[row] is not None:  # objects, one an ended row (gymnasium before 1)
        places.insert(0, ({name: [value] for name, value in final[row].items()}, 0))
    for source, place in places:
        for name in ("success", "is_success"):
            if name in source and (f"_{name}" not in source or source[f"_{name}"][place]):
                return bool(source[name][place])
    return False


def row_of(batch: Any, row: int) -> Row:
    """A copy of one row of a batch: of an array or tensor [n, …], of a dict of such, or of n objects."""
    if isinstance(batch, Mapping):
        return {name: row_of(value, row) for name, value in batch.items()}
    value = as_numpy(batch)[row]
    if isinstance(value, Mapping):
        return {name: np.array(as_numpy(part)) for name, part in value.items()}
    return None if value is None else np.array(value)


def as_numpy(value: Any) -> np.ndarray:
    """An array of a tensor, on whichever device, or of anything else."""
    return np.asarray(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)
