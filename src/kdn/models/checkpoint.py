"""Loading that says in one sentence why a checkpoint does not load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["checked_loading"]


def checked_loading(load: Callable[..., Any], cls: type, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
    """load(name_or_path, …), a `from_pretrained`; a damaged or foreign checkpoint is a ValueError."""
    from safetensors import SafetensorError

    wants_info = kwargs.pop("output_loading_info", False)
    if kwargs.setdefault("use_safetensors", True) is False:
        raise ValueError("use_safetensors=False: weights are read from safetensors files only")
    folder = (
        Path(name_or_path, kwargs.get("subfolder") or "") if isinstance(name_or_path, (str, Path)) else None
    )
    if folder is not None and folder.is_dir():
        _check_config(folder)
        if "state_dict" not in kwargs and not any(folder.glob("*.safetensors")):
            raise ValueError(f"{folder}: no weights there (*.safetensors; no other files are read)")
    try:
        model, info = load(name_or_path, *args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"{name_or_path}: the weights are damaged or cut off ({error})") from None
    except (
        FileNotFoundError
    ) as error:  # one of several files of weights; transformers has words for the others
        absent = Path(str(error).rpartition(" ")[2]).name
        raise ValueError(f"{name_or_path}: {absent} is missing, which has a part of the weights") from None
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(f"{name_or_path}: the weights do not have the sizes that config.json says") from None
    tied = (
        set(getattr(model, "all_tied_weights_keys", None) or {})
        if model.config.tie_word_embeddings
        else set()
    )
    missing = sorted(set(info["missing_keys"]) - tied)
    foreign = sorted(info["unexpected_keys"])
    if cls.__name__ == "KDNModel":  # the backbone of a language model's checkpoint: its head is not wanted
        foreign = [name for name in foreign if not name.startswith("lm_head.")]
    if missing or foreign:
        parts = []
        if missing:
            parts.append(f"{len(missing)} weights are missing (such as {missing[0]})")
        if foreign:
            parts.append(f"{len(foreign)} are not of this model (such as {foreign[0]})")
        raise ValueError(f"{name_or_path}: not a checkpoint of this configuration: {' and '.join(parts)}")
    return (model, info) if wants_info else model


def _check_config(folder: Path) -> None:
    """A local folder must hold our own config.json."""
    file = folder / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no config.json there, so no model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(read, dict):
        raise ValueError(f"{file}: not a JSON object but a {type(read).__name__}")
    kind = read.get("model_type")
    if kind != "kdn":
        hint = ", kdn.models.fla.load converts flash-linear-attention's" if kind else ""
        raise ValueError(f"{folder}: a checkpoint of model type {kind!r}, not 'kdn'{hint}")
