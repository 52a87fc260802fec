"""`kdn bench train`: training steps of a whole language model on this machine, beside a Llama of equal size.

Everyone runs the same step: bfloat16 autocast over float32 weights, the same chunked cross entropy, clipping, fused
AdamW. Steps of all contenders alternate in one process, and medians are compared. The mixer's share is the time that
passes inside the mixers' forward and backward passes.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kdn.bench.machine import machine, versions
from kdn.models.loss import token_loss
from kdn.models.modeling import KDNForCausalLM
from kdn.models.presets import preset

__all__ = ["main"]


def llama(scale: str, blocks: int) -> nn.Module:
    """A `LlamaForCausalLM` with SDPA whose stack of blocks has as many parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    like = preset(f"kdn-diagonal-{scale}")
    d, layers = like.hidden_size, like.num_hidden_layers
    width = round((blocks / layers - 4 * d * d - 2 * d) / (3 * d))
    config = LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=d,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=like.num_heads,
        num_key_value_heads=like.num_heads,
        tie_word_embeddings=like.tie_word_embeddings,
        max_position_embeddings=2**17,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def mixers_of(model: Any) -> list[nn.Module]:
    """The modules that mix tokens."""
    layers = model.model.layers
    return [getattr(layer, "mixer", None) or layer.self_attn for layer in layers]


class Stopwatch:
    """Time inside some modules: from their call to its end, and from their output's gradient to their input's."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.seconds = self.started = 0.0  # one module runs at a time
        for module in modules:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.start()
        if args:
            return (_Mark.apply(args[0], self.stop), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Mark.apply(kwargs["hidden_states"], self.stop)}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.stop()
        return (_Mark.apply(output[0], self.start), *output[1:])

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started


class _Mark(torch.autograd.Function):
    """The identity, which tells when the gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Any) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return grads[0], None


class Contender:
    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.watch = Stopwatch(mixers_of(model))
        self.times: list[float] = []
        self.shares: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        start, self.watch.seconds = time.perf_counter(), 0.0
        body: Any = self.model.model
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
            loss = token_loss(hidden, self.model.get_output_embeddings().weight, targets)  # type: ignore[operator]
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.times.append(seconds)
        self.shares.append(self.watch.seconds / seconds)


def measure(scale: str, length: int, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    first = KDNForCausalLM(preset(f"{names[0]}-{scale}"))
    blocks = sum(p.numel() for p in first.model.layers.parameters())
    everyone = [Contender(names[0], first)]
    everyone += [Contender(n, KDNForCausalLM(preset(f"{n}-{scale}"))) for n in names[1:]]
    everyone.append(Contender("Llama, SDPA", llama(scale, blocks)))
    tokens = torch.randint(0, first.config.vocab_size, (1, length + 1))
    for i in range(rounds + 1):
        for contender in everyone:
            contender.step(tokens[:, :-1], tokens[:, 1:])
            if i == 0:  # warming up
                contender.times.clear()
                contender.shares.clear()
    base = statistics.median(everyone[0].times)
    return [
        {
            "model": c.name,
            "scale": scale,
            "T": length,
            "seconds": statistics.median(c.times),
            "tokens/s": length / statistics.median(c.times),
            "ratio": statistics.median(c.times) / base,
            "mixer share": statistics.median(c.shares),
            "parameters": sum(p.numel() for p in c.model.parameters()),
        }
        for c in everyone
    ]


def main(scale: str, lengths: list[int], rounds: int, out: Path, threads: int | None) -> int:
    """Measure, print, and save `train.json` in `out`."""
    if threads:
        torch.set_num_threads(threads)
    names = ["kdn-diagonal", "kdn-isotropic", "kda"]
    print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"{machine()['cpu']}, {torch.get_num_threads()} threads, bfloat16 autocast, one sequence a step")
    print(f"{'model':<16}{'T':>7}{'parameters':>12}{'s/step':>9}{'tokens/s':>10}{'ratio':>7}{'mixer':>7}")
    rows = []
    for length in lengths:
        for row in measure(scale, length, rounds, names):
            rows.append(row)
            print(
                f"{row['model']:<16}{length:>7}{row['parameters']:>12,}{row['seconds']:>9.3f}"
                f"{row['tokens/s']:>10,.0f}{row['ratio']:>7.2f}{100 * row['mixer share']:>6.0f}%",
                flush=True,
            )
    out.mkdir(parents=True, exist_ok=True)
    saved = {"machine": machine(), "versions": versions(), "rows": rows}
    (out / "train.json").write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"saved {out / 'train.json'}")
    return 0
