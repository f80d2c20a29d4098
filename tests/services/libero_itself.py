"""LIBERO by its own means, as its evaluations use it; run under its interpreter, with no code of ours.

`PYTHON libero_itself.py SUITE TASK-FILE STATE OUT.npz`: the fixed initial state, ten steps of rest, then the actions
that OUT.npz holds already as `actions`; the observations are written into it.
"""

import io
import os
import pickle
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

suite, task, state, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ["MUJOCO_GL"] = "osmesa"
package = Path(next(iter(__import__("importlib.util").util.find_spec("libero").submodule_search_locations))) / "libero"
with tempfile.TemporaryDirectory() as config:
    lines = [f"{key}: {package}" for key in ("benchmark_root", "bddl_files", "init_states", "datasets", "assets")]
    Path(config, "config.yaml").write_text("\n".join(lines))
    os.environ["LIBERO_CONFIG_PATH"] = config
    import libero.libero

    libero.libero._assets_path_cache = os.environ["JOYNEXUS_LIBERO_ASSETS"]
    from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(
        bddl_file_name=str(package / "bddl_files" / suite / f"{task}.bddl"), camera_heights=128, camera_widths=128
    )
    env.seed(0)
    env.reset()
    with zipfile.ZipFile(package / "init_files" / suite / f"{task}.pruned_init") as archive:
        states = pickle.load(io.BytesIO(archive.read("archive/data.pkl")))
    seen = [env.set_init_state(states[state])]
    for action in [*[np.array([0.0] * 6 + [-1.0])] * 10, *np.load(out)["actions"]]:
        seen.append(env.step(action)[0])
    names = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "agentview_image", "robot0_eye_in_hand_image")
    np.savez(out, count=len(states), **{name: np.stack([row[name] for row in seen[10:]]) for name in names})
