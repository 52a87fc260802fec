"""`kdn info`: what is installed, and which backend computes here."""

import argparse
import os
from importlib import metadata

from kdn.cli.arguments import command

__all__ = ["add"]

# Packages that some parts need and `import kdn` does not, with what they are for.
OPTIONAL = {
    "transformers": "models, generation",
    "tokenizers": "text in and out",
    "datasets": "training data",
    "rich": "progress bars with time left",
    "matplotlib": "figures",
}


def add(commands: argparse._SubParsersAction) -> None:
    info = command(
        commands,
        "info",
        "what is installed, and which backend computes here",
        "Versions, processor and threads; which optional packages are there and what they are for;\n"
        "then every backend, best first: whether it serves this machine's devices, why not where it\n"
        "does not, and which one is used.\n\n"
        "KDN_BACKEND overrides the choice. To see what that does:\n\n"
        "    KDN_BACKEND=torch kdn info",
    )
    info.set_defaults(command=lambda options: _info(), parser=info)


def _info() -> int:
    import torch

    from kdn.bench.machine import machine, versions

    print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, torch uses {torch.get_num_threads()} threads")
    _print_optional()
    _print_backends("cpu")
    if torch.accelerator.is_available():
        _print_backends(str(torch.accelerator.current_accelerator()))
    return 0


def _print_optional() -> None:
    print("\noptional packages")
    width = max(map(len, OPTIONAL))
    for name, purpose in OPTIONAL.items():
        try:
            said = metadata.version(name)
        except metadata.PackageNotFoundError:
            said = f"not installed: pip install {name}"
        print(f"  {name:<{width}}  {said} ({purpose})")


def _print_backends(device: str) -> None:
    import torch

    from kdn.bench.machine import instruction_set
    from kdn.ops import backend_report
    from kdn.ops.registry import choose

    # The report is asked for without the override, so that a wrong one is explained and not raised.
    override = os.environ.pop("KDN_BACKEND", "")
    try:
        report = backend_report(device)
    finally:
        if override:
            os.environ["KDN_BACKEND"] = override
    print(f"\nbackends on {device}, best first")
    width = max(len(name) for name, _, _ in report)
    for name, why, default in report:
        said = f"no: {why}" if why else "default" if default else "serves"
        if not why and (compiled := instruction_set(name)):
            said += f", {compiled}"
        print(f"  {name:<{width}}  {said}")
    if not override:
        print("KDN_BACKEND is not set: the default is used")
        return
    try:
        choose(None, torch.device(device))
        print(f"KDN_BACKEND={override} overrides the default: {override} is used")
    except ValueError as error:
        print(f"{error}. Until KDN_BACKEND is corrected or unset, operations on {device} raise this")
