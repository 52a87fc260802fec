"""Makes transformers' Auto classes know model type "kdn" after `import kdn`, in either order, at no cost.

What `AutoConfig` gets is a stand-in that imports `kdn.models` when a configuration of this type is first
read; that import registers the real classes. Until then neither package loads the other. Where transformers
comes later, a finder on `sys.meta_path` waits for the one module that holds the table of configurations, and
leaves then. Importing `kdn.models` at that moment would not do: transformers is half imported itself.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register"]

_TABLE = "transformers.models.auto.configuration_auto"


class KDNConfig:
    """Stands in for `kdn.models.KDNConfig`, which it makes."""

    model_type = "kdn"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from kdn import models

        return models.KDNConfig(*args, **kwargs)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        from kdn import models

        return models.KDNConfig.from_dict(*args, **kwargs)


class _Finder(MetaPathFinder):
    """Lets the usual finders find the table, and registers once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add(module)

            # On this one loader, so that everything else about the module is as it was.
            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _add(table: ModuleType) -> None:
    if KDNConfig.model_type not in table.CONFIG_MAPPING:  # kdn.models may have been first
        table.AutoConfig.register(KDNConfig.model_type, KDNConfig)


def register() -> None:
    """Tell transformers' `AutoConfig` of "kdn", now or when it is imported."""
    table = sys.modules.get(_TABLE)
    if table is not None:
        _add(table)
    else:
        sys.meta_path.insert(0, _Finder())
