"""The configuration of a model: sizes, which mixer each layer has, and the mixers' own options."""

import difflib
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from kdn.mixers import check_option_types, make_mixer, mixer_class, mixer_options

__all__ = ["KDNConfig"]

# Written into configurations by transformers itself, beside the attributes that every configuration has.
_THEIRS = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "is_decoder",
    "model_type",
    "name_or_path",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "use_cache",
}
# Sizes that are too large fail when their memory is asked for. Layers are made one by one, and a damaged number
# of them would keep a machine busy for hours before that.
MOST_LAYERS = 10_000
# Options that the model gives its layers itself.
_OURS = {"norm_eps", "window"}


class KDNConfig(PreTrainedConfig):
    """Sizes and mixers of a `KDNModel`.

    mixer: the mixer of every layer (`kdn.mixers.MIXERS` has the names). layers: one mixer name per layer
    instead, such as ["kdn-diagonal", "attention"] * 9. window: how many tokens attention layers see, the
    token itself included; None: all. intermediate_size: None is 8/3 of hidden_size. Options of any mixer in
    use (info_scale, decay, mimo_rank, …) are fields too: `KDNConfig(mixer="kdn-diagonal", info_scale=1.0)`.

    An unknown field, an option of a mixer that is not in use, or impossible sizes raise ValueError.
    """

    model_type = "kdn"
    # A list, since transformers' Trainer adds another to it.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "uncertainty"]
    for_hub: ClassVar[bool] = False  # set by register_for_auto_class, of this class or a model's

    def __init__(
        self,
        mixer: str = "kdn-diagonal",
        layers: list[str] | None = None,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        num_hidden_layers: int | None = None,
        num_heads: int = 4,
        head_dim: int = 128,
        intermediate_size: int | None = None,
        window: int | None = None,
        norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if layers is None:
            num_hidden_layers = 8 if num_hidden_layers is None else num_hidden_layers
            mixer_class(mixer)
        else:
            if not isinstance(layers, (list, tuple)):
                raise ValueError(f"layers must be a list of mixer names, one per layer, got {layers!r}")
            layers = list(layers)
            if not layers or (num_hidden_layers or len(layers)) != len(layers):
                raise ValueError(
                    f"layers names {len(layers)} mixers, num_hidden_layers is {num_hidden_layers}"
                )
            for name in layers:
                mixer_class(name)
            num_hidden_layers = len(layers)
        self.mixer, self.layers, self.num_hidden_layers = mixer, layers, num_hidden_layers
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_heads, self.head_dim = num_heads, head_dim
        self.intermediate_size = intermediate_size if intermediate_size is not None else hidden_size * 8 // 3
        self.window, self.norm_eps, self.use_cache = window, norm_eps, use_cache
        self._check_sizes()
        for name, value in {"tie_word_embeddings": tie_word_embeddings, "use_cache": use_cache}.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        dtype = kwargs.get("dtype")
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype must be one of torch's, such as 'bfloat16', got {dtype!r}")
        options = self._take_options(kwargs)
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def mixers(self) -> list[str]:
        """The mixer of every layer."""
        return self.layers if self.layers is not None else [self.mixer] * self.num_hidden_layers

    def options_of(self, mixer: str) -> dict[str, Any]:
        """What this configuration says of a mixer's options."""
        return {name: getattr(self, name) for name in mixer_options(mixer) if hasattr(self, name)}

    def make_mixer(self, layer_index: int) -> Any:
        name = self.mixers[layer_index]
        sizes = self.hidden_size, self.num_heads, self.head_dim
        return make_mixer(name, *sizes, layer_index=layer_index, **self.options_of(name))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """From now on, what is saved loads with trust_remote_code=True, where kdn is installed.

        transformers would copy the sources of the class, which then age apart from the kdn they import.
        """
        KDNConfig.for_hub = True

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write config.json; after `register_for_auto_class` also hub.py and Auto classes' map to it."""
        if self.for_hub:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(__file__).with_name("hub.py"), Path(save_directory, "hub.py"))
            self.auto_map = {
                "AutoConfig": "hub.KDNConfig",
                "AutoModel": "hub.KDNModel",
                "AutoModelForCausalLM": "hub.KDNForCausalLM",
            }
        super().save_pretrained(save_directory, *args, **kwargs)

    def _check_sizes(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "head_dim",
            "intermediate_size",
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers must be ≤ {MOST_LAYERS:,}, got {self.num_hidden_layers:,}")
        window = self.window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ValueError(f"window must be a whole number ≥ 1 or None, got {window!r}")
        eps = self.norm_eps
        if not isinstance(eps, (int, float)) or not 0 < eps < 1:
            raise ValueError(f"norm_eps must be a number between 0 and 1, got {eps!r}")

    def _take_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The mixers' options out of kwargs; what then remains must be transformers' own."""
        allowed = {name for mixer in self.mixers for name in mixer_options(mixer)} - _OURS
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in allowed}
        fields = {*self.__dict__, *allowed, "tie_word_embeddings"}
        for name in kwargs:
            if name not in _THEIRS and not hasattr(PreTrainedConfig, name):
                near = difflib.get_close_matches(name, fields, 1, 0.6)
                hint = f", did you mean {near[0]!r}?" if near else ""
                used = ", ".join(dict.fromkeys(self.mixers))
                raise ValueError(f"KDNConfig has no field {name!r} (mixers: {used}){hint}")
        for mixer in dict.fromkeys(self.mixers):
            check_option_types(mixer, options)
        return options
