"""Which device and which platform table a run uses when nobody says."""

import torch

from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.options import PLATFORMS

_SOCS = (("Ascend910_93", "ascend910_93"), ("Ascend910B", "ascend910b"), ("Ascend950", "ascend950"))


def default_device() -> str:
    """``"npu"`` where torch_npu finds one, else ``"cpu"``."""
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def platform_for(device: torch.device, asked: str | None = None) -> str:
    """The platform to compile for on ``device``.

    Args:
        asked: the user's choice. None means the device's own on an NPU, by the name of its SoC; ``"ascend910b"`` on a
            CPU, executed with emulated operators; ``"cpu"`` on a CPU beside torch_npu, whose operators replace those.

    Raises:
        CompileError: (a ValueError) the choice cannot run on the device, or the SoC is not known.
    """
    from gemma_npu_compile.ops.npu import EMULATED

    if device.type == "npu":
        if asked == "cpu":
            raise CompileError(f"platform is 'cpu' for tensors on {device}: leave it out, or move the models")
        if asked is not None:
            return asked
        name = torch.npu.get_device_name(device)  # type: ignore[attr-defined]
        for prefix, found in _SOCS:
            if name.startswith(prefix):
                return found
        known = ", ".join(each for each in PLATFORMS if each != "cpu")
        raise CompileError(f"{device} is a {name}, which has no table: name another's with platform=... ({known})")
    if EMULATED:
        return asked or "ascend910b"
    if asked not in (None, "cpu"):
        raise CompileError(
            f"platform is {asked!r} for tensors on {device}: where torch_npu is installed its operators run on an NPU "
            "only; use platform='cpu', or move the models to the NPU"
        )
    return "cpu"
