"""A registered adapter as files that other programs read; no torch, so that the command may write them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from configs.backend import PolicyConfig
from configs.errors import SpecError, refusal
from configs.model import LoraSpec
from kernels.peft_adapters import exported
from storage.atomic import WRITING
from storage.peft_files import encode_object, encode_tensors, write_adapter
from storage.registry import ResolvedAdapter

ADAPTER = "adapter."
"""Where a module keeps what lies inside the base; the rest is its head."""
HEAD, MANIFEST = "head.safetensors", "manifest.json"


def export_peft(found: ResolvedAdapter, folder: Path) -> None:
    """Write a version of kind lora as PEFT's files, and beside them its head and its manifest, so that nothing is lost.

    `PeftModel.from_pretrained` takes the folder with transformers' model of the base without a language head
    (`AutoModel.from_pretrained`), the one that is resident here.

    Args:
        found: the registered version.
        folder: that does not exist yet.

    Raises:
        SpecError: if the version's module is not of kind lora.
        Conflict: if the folder exists.
    """
    policy = PolicyConfig.model_validate(found.manifest["policy"])
    module, name = policy.action_module, f"models:/{found.name}/{found.version}"
    if not isinstance(module, LoraSpec):
        possible = "an adapter of kind lora: PEFT has no files for other modules"
        raise SpecError(refusal("adapter", f"{name} of kind {module.kind}", possible, "see `joynexus adapters`"))
    inside = {n.removeprefix(ADAPTER): a for n, a in found.params.items() if n.startswith(ADAPTER)}
    head = {n: a for n, a in found.params.items() if not n.startswith(ADAPTER)}
    tensors, config = exported(inside, policy.base_model, rank=module.rank, alpha=module.alpha)
    manifest = {**found.manifest, "adapter": name, "tags": found.tags}
    beside = {HEAD: encode_tensors(head), MANIFEST: encode_object(manifest)}
    write_adapter(folder, tensors, config, beside=beside)
    with suppress(OSError):  # the folder is a person's, not a store's: nothing of ours stays next to it
        (folder.parent / WRITING).rmdir()
