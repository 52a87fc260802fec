"""Finds the backends and picks one.

A backend is one module (or package) in `kdn/ops/backends/`; dropping it there is all it takes. It defines

    RANK                         int; of the backends that serve a device, the highest is the default
    unavailable(device)          None, or one sentence saying why this backend cannot serve the device
    exact_gain, diagonal_gain, isotropic_gain, delta_memory

The functions receive arguments that `interface.py` has checked and completed (`info_scale` is a tensor
of H values, `scale` a float), and return `(gain, cov, prior)` and `(out, state)`. A backend may also have kernels
for `decode` (decode.py says how it is called) and for what is in layer.py.
"""

import importlib
import os
import pkgutil
from types import ModuleType

import torch

from kdn.ops import backends

BACKENDS: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{backends.__name__}.{found.name}")
    for found in pkgutil.iter_modules(backends.__path__)
}
_BY_RANK = sorted(BACKENDS, key=lambda name: BACKENDS[name].RANK, reverse=True)


def choose(requested: str | None, device: torch.device) -> ModuleType:
    """The backend named by the caller, else by KDN_BACKEND, else the fastest that serves `device`."""
    name = requested or os.environ.get("KDN_BACKEND") or None
    if name is None:
        for candidate in _BY_RANK:
            if BACKENDS[candidate].unavailable(device) is None:
                return BACKENDS[candidate]
        raise RuntimeError(f"no backend serves {device}")
    asked = "backend" if requested else "KDN_BACKEND"
    if name not in BACKENDS:
        raise ValueError(f"{asked} must be one of {', '.join(_BY_RANK)}, got {name!r}")
    why = BACKENDS[name].unavailable(device)
    if why is not None:
        raise ValueError(f"{asked} {name!r} cannot serve {device}: {why}")
    return BACKENDS[name]


def backend_report(device: torch.device | str = "cpu") -> list[tuple[str, str | None, bool]]:
    """For each backend, best first: its name, why it cannot serve `device` (None: it can), if it is used."""
    device = torch.device(device)
    used = choose(None, device)
    return [(name, BACKENDS[name].unavailable(device), BACKENDS[name] is used) for name in _BY_RANK]
