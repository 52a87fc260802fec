"""The models: embedding, blocks of RMSNorm, mixer, RMSNorm, SwiGLU, a last norm, and a head.

    KDNModel          tokens → hidden states
    KDNForCausalLM    tokens → logits, or the loss; generates

Padded batches are unpadded once, before the first layer: all rows lie one after another with `cu_seqlens`, so
that padding enters no state. States are in a `KDNCache`. What a mixer is, no code here asks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from kdn.mixers.parts import Linear, RMSNorm, ShortConvolution
from kdn.models.cache import KDNCache
from kdn.models.checkpoint import checked_loading
from kdn.models.config import KDNConfig
from kdn.models.loss import next_token_loss, token_loss
from kdn.ops.layer import swiglu

__all__ = ["KDNForCausalLM", "KDNModel", "Uncertainty"]


class Uncertainty(NamedTuple):
    """What the memory of every layer knows, [layers, B, T, H]; NaN where a layer does not track it."""

    effective_write: Tensor  # kᵀg: the share of the residual that a token's write removes
    read_variance: Tensor  # τ² qᵀ P q, P the covariance after the token
    state_norm: Tensor  # Frobenius norm of the memory after the token


@dataclass
class KDNOutput(BaseModelOutputWithPast):
    uncertainty: Uncertainty | None = None


@dataclass
class KDNCausalLMOutput(CausalLMOutputWithPast):
    uncertainty: Uncertainty | None = None


class ResidualLinear(Linear):
    """A linear layer without bias, starting √(2·layers) smaller: as many additions as that go into the residual.

    A layer of its own, since transformers initialises only modules that have parameters themselves.
    """

    def __init__(self, inputs: int, outputs: int, layers: int) -> None:
        self.layers = layers  # reset_parameters, which super() calls, needs it
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.weight.div_((2 * self.layers) ** 0.5)


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) ⊙ up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int, layers: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualLinear(intermediate_size, hidden_size, layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: KDNConfig, layer_index: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = config.make_mixer(layer_index)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.num_hidden_layers)

    def forward(self, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), state, cu_seqlens)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class KDNPreTrainedModel(PreTrainedModel):
    config_class = KDNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.RMSNorm, ShortConvolution)):
            module.reset_parameters()
        elif not isinstance(module, PreTrainedModel):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):  # a mixer, after its parts
                reset()

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """As `KDNConfig.register_for_auto_class`: one file serves all classes."""
        KDNConfig.register_for_auto_class()

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, but a checkpoint that does not fit the model whole is an error."""
        return checked_loading(super().from_pretrained, cls, name_or_path, *args, **kwargs)


class KDNModel(KDNPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: KDNConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KDNCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_uncertainty: bool = False,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> KDNOutput | tuple[Any, ...]:
        """input_ids: [B, T]. attention_mask: [B, ≥ T], 0 for padding. cu_seqlens: sequences packed in a row.

        Packed rows of transformers' collators are understood as well: `cu_seq_lens_q`, or `position_ids` that
        start again at 0. `output_uncertainty` adds an `Uncertainty`; it computes a layer a second time, token by
        token.
        """
        _check_inputs(input_ids, inputs_embeds, attention_mask, past_key_values)
        cu_seqlens = _offsets(cu_seqlens, attention_mask, unused)
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = KDNCache() if past_key_values is None and use_cache else past_key_values
        if cache and len(cache) != len(self.layers):
            raise ValueError(
                f"past_key_values is of a model with {len(cache)} layers, not {len(self.layers)}"
            )
        length = x.shape[1]
        padding = None
        if cu_seqlens is None and attention_mask is not None:
            padding = _Padding.of(attention_mask, length)
        elif cu_seqlens is not None and attention_mask is not None:
            raise ValueError("give attention_mask (padded rows) or cu_seqlens (packed rows), not both")
        if padding is not None:
            x, cu_seqlens = padding.remove(x), padding.cu_seqlens

        hidden, states = [], []
        known: list[Any] = []
        layer: Any
        for i, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(x)
            state = None if cache is None else cache.state(i)
            if output_uncertainty:
                from kdn.probe.uncertainty import of_layer

                heads = self.config.num_heads
                known.append(of_layer(layer.mixer, layer.mixer_norm(x), state, cu_seqlens, heads))
            x, state = layer(x, state, cu_seqlens)
            states.append(state)
        x = self.norm(x)
        if output_hidden_states:
            hidden.append(x)
        if padding is not None:
            x = padding.restore(x)
            hidden = [padding.restore(h) for h in hidden]
            known = [[padding.restore(y) for y in layer] for layer in known]
        if cache is not None:
            cache.put(states, length)
        output = KDNOutput(
            last_hidden_state=x,
            past_key_values=cache if use_cache or past_key_values is not None else None,
            hidden_states=tuple(hidden) if output_hidden_states else None,
            uncertainty=Uncertainty(*(torch.stack(y) for y in zip(*known, strict=True))) if known else None,
        )
        return output if return_dict or return_dict is None else output.to_tuple()


def _check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None, cache: Any
) -> None:
    """Raise on what would otherwise fail deep inside, or pass for something that it is not."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    given, rank = (input_ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
    name, layout = ("input_ids", "[B, T]") if rank == 2 else ("inputs_embeds", "[B, T, hidden_size]")
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {type(given).__name__}")
    if given.ndim != rank or 0 in given.shape:
        raise ValueError(f"{name} must be {layout} with at least one token, got {list(given.shape)}")
    if rank == 2 and given.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids must be whole numbers (int64 or int32), got {given.dtype}")
    rows, length = given.shape[:2]
    if attention_mask is not None and (
        attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < length
    ):
        raise ValueError(
            f"attention_mask must be [B, ≥ T] = [{rows}, ≥ {length}], 0 for padding, "
            f"got {list(attention_mask.shape)}"
        )
    if cache is not None and not isinstance(cache, KDNCache):
        raise TypeError(f"past_key_values must be a kdn.models.KDNCache, got {type(cache).__name__}")


def _offsets(
    cu_seqlens: Tensor | None, attention_mask: Tensor | None, given: dict[str, Any]
) -> Tensor | None:
    """cu_seqlens, from whatever says where sequences start that lie one after another in one row."""
    if cu_seqlens is not None or attention_mask is not None:
        return cu_seqlens
    if given.get("cu_seq_lens_q") is not None:
        return given["cu_seq_lens_q"]
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.shape[0] != 1:
        return None
    starts = (positions[0, 1:] == 0).nonzero()[:, 0] + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=positions.shape[1]) if len(starts) else None


class _Padding(NamedTuple):
    """Where the real tokens of padded rows are."""

    at: Tensor  # their positions in the flattened rows
    cu_seqlens: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, attention_mask: Tensor, length: int) -> "_Padding | None":
        """None where nothing is padded. A mask longer than the input also covers what a cache holds."""
        mask = attention_mask[:, -length:].bool()
        if mask.all():
            return None
        counts = F.pad(mask.sum(1).cumsum(0), (1, 0))
        return cls(mask.flatten().nonzero()[:, 0], counts, (mask.shape[0], mask.shape[1]))

    def remove(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.at][None]

    def restore(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return rows.index_copy(0, self.at, x[0]).unflatten(0, self.shape)


class KDNForCausalLM(KDNPreTrainedModel, GenerationMixin):
    """A language model. With labels it returns the loss and no logits, which are never all in memory."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: KDNConfig) -> None:
        super().__init__(config)
        self.model = KDNModel(config)
        self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embeddings = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KDNCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_uncertainty: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> KDNCausalLMOutput | tuple[Any, ...]:
        """labels: [B, T], usually input_ids; shifted inside, −100 is left out. targets: labels that are
        shifted already, position t holding the token after input t. logits_to_keep: how many of the last
        positions get logits, 0: all (none with labels); a tensor lists the positions."""
        cu_seqlens = _offsets(cu_seqlens, attention_mask, unused)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache if labels is None and targets is None else bool(use_cache),
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_uncertainty=output_uncertainty,
        )
        hidden, loss, logits = found.last_hidden_state, None, None
        if labels is not None:
            if attention_mask is not None:
                real = attention_mask[:, -labels.shape[1] :].bool()
                # Neither padding nor what follows it (the first token, of a row padded on the left).
                labels = labels.masked_fill(~(real & F.pad(real[:, :-1], (1, 0))), -100)
            if cu_seqlens is not None:  # the first token of a sequence is nobody's next
                starts = cu_seqlens[:-1].long()
                first = torch.zeros_like(labels, dtype=torch.bool)
                first[0, starts[starts < labels.shape[1]]] = True
                labels = labels.masked_fill(first, -100)
            loss = next_token_loss(hidden, self.lm_head.weight, labels, count=num_items_in_batch)
        elif targets is not None:
            loss = token_loss(hidden, self.lm_head.weight, targets, count=num_items_in_batch)
        else:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep])
        output = KDNCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            uncertainty=found.uncertainty,
        )
        return output if return_dict or return_dict is None else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.use_cache is False:
            return
        given = model_kwargs.get("past_key_values")
        if given is None:
            model_kwargs["past_key_values"] = KDNCache()
        elif not isinstance(given, KDNCache):
            raise TypeError(f"past_key_values must be a kdn.models.KDNCache, got {type(given).__name__}")
