"""Checkpoints of flash-linear-attention as our models.

    model = kdn.models.fla.load("some/folder")     # or a repository of the Hugging Face hub, "owner/name"

Its KDA, Gated DeltaNet and DeltaNet models have the blocks that ours have: only names differ. Of GDN-2 it
has the layer and no model; a checkpoint of type "gdn2" with the names of its KDA model is read too. Settings
that change what a model computes and that our layers do not have are errors. Weights are read from
safetensors only, nothing is unpickled.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdn.models.config import KDNConfig
from kdn.models.modeling import KDNForCausalLM

__all__ = ["config_from_fla", "load", "state_dict_from_fla"]

_MIXERS = {"kda": "kda", "gdn2": "gdn2", "gated_deltanet": "gated-deltanet", "delta_net": "deltanet"}

# What its configuration classes take for a field that config.json does not name.
_COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 16,
    "expand_v": 1.0,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "norm_eps": 1e-6,
    "attn": None,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "kda": _COMMON | {"head_dim": 128},
    "gdn2": _COMMON | {"head_dim": 128},
    "gated_deltanet": _COMMON
    | {"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0, "use_gate": True},
    "delta_net": _COMMON | {"expand_k": 1.0, "use_gate": False},
}

# Settings that change what is computed, and their values that our layers know. Absent is the first.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "attnres_block_size": (None,),
    "conv_bias": (False,),
    "hidden_act": ("swish", "silu"),
    "lower_bound": (None,),
    "output_gate_activation": ("swish", "silu"),
    "qk_activation": ("silu",),
    "qk_norm": ("l2",),
    "safe_gate": (False,),
    "use_beta": (True,),
    "use_output_norm": (True,),
}


def load(path_or_repo: str | Path) -> KDNForCausalLM:
    """The model of a checkpoint, in the precision of its embeddings.

    path_or_repo: a folder with config.json and safetensors, or the name of such a repository on the hub.
    What is not there, not readable or not expressible is a ValueError that says what.
    """
    folder = _folder(path_or_repo)
    read = _json(folder / "config.json")
    try:
        config = config_from_fla(read)
        state = state_dict_from_fla(_tensors(folder), config)
    except ValueError as error:
        raise ValueError(f"{path_or_repo}: {error}") from None
    dtype = state["model.embeddings.weight"].dtype
    return KDNForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def config_from_fla(config: Mapping[str, Any]) -> KDNConfig:
    """Our configuration for the contents of a config.json; a setting we cannot express is a ValueError."""
    kind = config.get("model_type")
    if kind not in _MIXERS:
        raise ValueError(f"model_type must be one of {', '.join(_MIXERS)}, got {kind!r}")
    given = _DEFAULTS[kind] | dict(config)
    for name, values in _KNOWN.items():
        if given.get(name, values[0]) not in values:
            accepted = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name}={given[name]!r} has no counterpart here, only {accepted} has")
    if given.get("num_v_heads") not in (None, given["num_heads"]):
        raise ValueError(
            f"num_v_heads={given['num_v_heads']} has no counterpart here: there are as many value heads "
            f"as key heads, num_heads={given['num_heads']}"
        )
    head_dim, expand_v = _head(kind, given)
    options = {
        "expand_v": expand_v,
        "conv_size": given["conv_size"] if given["use_short_conv"] else 0,
        "allow_neg_eigval": given["allow_neg_eigval"],
    }
    if "use_gate" in _DEFAULTS[kind]:
        options["output_gate"] = given["use_gate"]
    fields = {"mixer": _MIXERS[kind], "num_hidden_layers": given["num_hidden_layers"]}
    attention = _attention(given, head_dim)
    if attention:
        chosen = attention.pop("layers")
        layers = ["attention" if i in chosen else _MIXERS[kind] for i in range(given["num_hidden_layers"])]
        fields = {"layers": layers, **attention}
        if _MIXERS[kind] not in layers:
            options = {}
    same = ("hidden_size", "num_heads", "vocab_size", "norm_eps", "tie_word_embeddings", "use_cache")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return KDNConfig(
        head_dim=head_dim,
        intermediate_size=_intermediate_size(given),
        **fields,
        **options,
        **{name: given[name] for name in same + tokens},
    )


def state_dict_from_fla(state_dict: Mapping[str, Tensor], config: KDNConfig) -> dict[str, Tensor]:
    """The same tensors under our names. One that is missing, left over or of another size is a ValueError."""
    with torch.device("meta"):
        ours = KDNForCausalLM(config).state_dict()
    # Frequencies follow from the configuration, and a tied head from the embeddings.
    given = {name: x for name, x in state_dict.items() if not name.endswith(".rotary.inv_freq")}
    if config.tie_word_embeddings:
        ours.pop("lm_head.weight", None)
        given.pop("lm_head.weight", None)
    names = {name.replace(".mixer_norm.", ".attn_norm.").replace(".mixer.", ".attn."): name for name in ours}

    wrong = []
    if missing := sorted(names.keys() - given.keys()):
        wrong.append(f"{len(missing)} weights are missing (such as {missing[0]})")
    if foreign := sorted(given.keys() - names.keys()):
        wrong.append(f"{len(foreign)} are not of this model (such as {foreign[0]})")
    both = sorted(names.keys() & given.keys())
    if sizes := [name for name in both if given[name].shape != ours[names[name]].shape]:
        has, wants = tuple(given[sizes[0]].shape), tuple(ours[names[sizes[0]]].shape)
        wrong.append(f"{len(sizes)} have other sizes (such as {sizes[0]}, {has} and not {wants})")
    if wrong:
        raise ValueError(f"the weights do not fit the configuration: {'; '.join(wrong)}")
    return {names[name]: x for name, x in given.items()}


def _head(kind: str, given: Mapping[str, Any]) -> tuple[int, float]:
    """Key channels of a head, and value channels for each of them."""
    if kind != "delta_net":
        return given["head_dim"], given["expand_v"]
    # Its DeltaNet says how wide all heads are together.
    width = given["hidden_size"] * given["expand_k"]
    keys = round(width)
    if not math.isclose(width, keys) or keys % given["num_heads"]:
        raise ValueError(
            f"expand_k={given['expand_k']} gives {width:g} key channels, hidden_size · expand_k: no whole "
            f"number for each of {given['num_heads']} heads"
        )
    return keys // given["num_heads"], given["expand_v"] / given["expand_k"]


def _intermediate_size(given: Mapping[str, Any]) -> int:
    """As said, or 2/3 · hidden_ratio · hidden_size, up to the next multiple of 256."""
    if given["intermediate_size"] is not None:
        return given["intermediate_size"]
    ratio = 4 if given["hidden_ratio"] is None else given["hidden_ratio"]
    return -(-int(given["hidden_size"] * ratio * 2 / 3) // 256) * 256


def _attention(given: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """layers, window and rope_theta of a hybrid's attention layers; empty where there are none."""
    specs = given["attn"] or []
    specs = [specs] if isinstance(specs, dict) else specs
    specs = [spec for spec in specs if spec.get("layers")]
    found: dict[str, Any] = {}
    heads, hidden_size = given["num_heads"], given["hidden_size"]
    for spec in specs:
        here = {
            "window": spec.get("window_size"),
            "rope_theta": spec.get("rope_theta", 10000.0),
        }
        if spec.get("num_heads") != heads or heads * head_dim != hidden_size:
            raise ValueError(
                f"attn.num_heads={spec.get('num_heads')}, sharing {hidden_size} channels, has no counterpart "
                f"here: attention layers have the heads of the others, {heads} of {head_dim} channels"
            )
        if spec.get("num_kv_heads") not in (None, heads):
            raise ValueError(
                f"attn.num_kv_heads={spec['num_kv_heads']} has no counterpart here, only {heads} has"
            )
        for name in ("qkv_bias", "qk_norm"):
            if spec.get(name):
                raise ValueError(f"attn.{name}={spec[name]} has no counterpart here, only False has")
        for name, theirs in (("window", "window_size"), ("rope_theta", "rope_theta")):
            if name in found and found[name] != here[name]:
                raise ValueError(
                    f"attn.{theirs} must be one for all layers, got {found[name]} and {here[name]}"
                )
        found = here | {"layers": [*found.get("layers", []), *spec["layers"]]}
    return found


# --- files ---


def _folder(path_or_repo: str | Path) -> Path:
    """A local folder as it is, a repository of the hub downloaded."""
    if Path(path_or_repo).is_dir():
        return Path(path_or_repo)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_repo)):
        raise ValueError(f"{path_or_repo}: neither a folder nor the name of a repository, owner/name")
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    return Path(snapshot_download(str(path_or_repo), allow_patterns=wanted))


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file.parent}: no {file.name} there, so no model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(read, dict):
        raise ValueError(f"{file}: not a JSON object")
    return read


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the files that its index names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(_json(index).get("weight_map", {}).values()))
    tensors: dict[str, Tensor] = {}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{index.name} names a file outside of the folder, {name}")
        if not (folder / name).exists():
            raise ValueError(f"no {name} there (weights are read from safetensors only)")
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged or cut off ({error})") from None
    return tensors
