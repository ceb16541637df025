"""Versions, and whether the installed torch has code for the devices that are there and Triton can run on them."""

import importlib.metadata
import platform
import re

import torch

from gsplit.devices import resolve_device
from gsplit.kernels.triton.availability import find_obstacle, is_installed, is_switched_off
from gsplit.selftest.finding import Finding

__all__ = ["check_architectures", "check_triton", "collect_versions"]

_PACKAGES = ("gsplit", "torch", "torch_geometric", "triton", "numba", "numpy")


def collect_versions(device: str) -> dict[str, str]:
    """Versions of what matters, by name."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if device == "cuda" and torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def has_code_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch built for some architectures runs on a GPU: its own code, of the same generation, or PTX.

    >>> has_code_for((8, 6), ["sm_80", "sm_90"]), has_code_for((7, 0), ["sm_75", "sm_80"])
    (True, False)
    >>> has_code_for((12, 0), ["sm_80", "compute_90"])
    True
    """
    major, minor = capability
    for name in architectures:
        kind, number = re.fullmatch(r"(sm|compute)_(\d+)[a-z]*", name).groups()  # type: ignore[union-attr]
        have = divmod(int(number), 10)
        if kind == "compute" and have <= capability:
            return True
        if kind == "sm" and have[0] == major and have[1] <= minor:
            return True
    return False


def check_architectures(device: str) -> Finding:
    """Whether torch has code for every GPU."""
    name = "code for this GPU"
    if device != "cuda":
        return Finding(name, "not tried", f"the device is {device}")
    if not torch.cuda.is_available():
        fix = "install a CUDA build of torch and a driver, and see whether nvidia-smi works"
        return Finding(name, "wrong", "torch sees no GPU", fix)
    built = torch.cuda.get_arch_list()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    missing = [f"sm_{a}{b}" for a, b in sorted(capabilities) if not has_code_for((a, b), built)]
    if missing:
        fix = "install wheels of an older CUDA: those of CUDA 12.6 still have sm_70 (V100)"
        return Finding(name, "wrong", f"torch {torch.__version__} has {' '.join(built)}, not {' '.join(missing)}", fix)
    return Finding(name, "ok", ", ".join(f"sm_{a}{b}" for a, b in sorted(capabilities)))


def check_triton(device: str) -> Finding:
    """Whether Triton's kernels are used on the devices, or torch operations."""
    name, instead = "Triton", "torch operations are used: slower, same results"
    if device == "cpu":
        return Finding(name, "not tried", "the host has kernels of its own")
    if is_switched_off():
        return Finding(name, "not tried", f"GSPLIT_TRITON=0; {instead}", "unset GSPLIT_TRITON")
    if not is_installed():
        return Finding(name, "not tried", f"not installed; {instead}", "pip install triton (Linux)")
    obstacle = find_obstacle(resolve_device(device))
    if obstacle is not None:
        return Finding(name, "not tried", f"{obstacle.reason}; {instead}", obstacle.fix)
    return Finding(name, "ok", "its kernels are used")
