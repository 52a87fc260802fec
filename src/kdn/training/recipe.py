"""The recipe of a run: one TOML file says everything that makes its result.

    [model]       preset = "kdn-diagonal-30m", and any field of KDNConfig to change
    [data]        shards that `kdn data` wrote, sequence length, packing, seed
    [train]       tokens, batch, precision
    [optimizer]   AdamW and its schedule
    [checkpoint]  where, how often, how many
    [log]         how often, and where to besides the console
    [parallel]    ranks that share one sequence

Keys and types are checked: a wrong one is an error that names the nearest right one. The command line may change any
of them: `kdn train recipe.toml train.tokens=1e6 optimizer.peak=1e-3`.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Recipe", "RecipeError", "load"]


class RecipeError(ValueError):
    """A recipe that cannot be meant as it is written."""


@dataclass(frozen=True)
class Data:
    train: str = "data/train"  # folders of shards
    validation: str | None = None
    length: int = 4096  # tokens of a sequence
    packing: str = "concatenate"  # or "documents": none sees another
    seed: int = 0


@dataclass(frozen=True)
class Train:
    tokens: int = 10_000_000  # the run's budget; steps are whole batches of it
    batch_tokens: int = 524_288  # of one optimizer step, over all ranks
    micro_batch: int = 1  # sequences in one pass of one rank
    seed: int = 0  # of the weights
    dtype: str = "bfloat16"  # of activations and matrix products; weights and optimizer are float32
    compile: bool = False
    checkpoint_activations: bool = False
    validate_every: int = 0  # steps; 0: only at the end
    validate_tokens: int = 1_000_000  # at most


@dataclass(frozen=True)
class Optimizer:
    peak: float = 4e-4
    final: float = 4e-5
    warmup: float = 0.01  # share of the token budget
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # of matrices only
    clip: float = 1.0


@dataclass(frozen=True)
class Checkpoint:
    folder: str = "runs/kdn"
    every: int = 1000  # steps; 0: only at the end
    keep: int = 3


@dataclass(frozen=True)
class Log:
    every: int = 10  # steps
    tensorboard: bool = False
    wandb: str | None = None  # name of the project


@dataclass(frozen=True)
class Parallel:
    context: int = 1  # ranks that hold consecutive pieces of each sequence


@dataclass(frozen=True)
class Recipe:
    model: dict[str, Any] = field(default_factory=lambda: {"preset": "kdn-diagonal-30m"})
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    parallel: Parallel = Parallel()

    def __post_init__(self) -> None:
        def must(holds: bool, text: str) -> None:
            if not holds:
                raise RecipeError(text)

        d, t, o = self.data, self.train, self.optimizer
        packings, dtypes = ("concatenate", "documents"), ("bfloat16", "float32")
        must(d.packing in packings, f"data.packing must be one of {', '.join(packings)}, got {d.packing!r}")
        must(t.dtype in dtypes, f"train.dtype must be one of {', '.join(dtypes)}, got {t.dtype!r}")
        for name, value in {
            "data.length": d.length,
            "train.micro_batch": t.micro_batch,
            "train.batch_tokens": t.batch_tokens,
            "checkpoint.keep": self.checkpoint.keep,
            "log.every": self.log.every,
            "parallel.context": self.parallel.context,
        }.items():
            must(value >= 1, f"{name} must be ≥ 1, got {value}")
        must(
            t.batch_tokens % d.length == 0,
            f"train.batch_tokens must be a multiple of data.length {d.length}, got {t.batch_tokens}",
        )
        must(
            t.tokens >= t.batch_tokens,
            f"train.tokens ({t.tokens}) must hold at least one batch of train.batch_tokens ({t.batch_tokens})",
        )
        must(0 <= o.warmup < 1, f"optimizer.warmup must be a share of the run in [0, 1), got {o.warmup}")
        must(0 < o.final <= o.peak, f"optimizer.final must be in (0, peak], got {o.final} with peak {o.peak}")
        must(
            d.length % self.parallel.context == 0,
            f"parallel.context must divide data.length {d.length}, got {self.parallel.context}",
        )
        must(
            self.parallel.context == 1 or d.packing == "concatenate",
            "parallel.context needs data.packing = 'concatenate'",
        )

    @property
    def steps(self) -> int:
        return self.train.tokens // self.train.batch_tokens

    @property
    def warmup_steps(self) -> int:
        return int(self.steps * self.optimizer.warmup)

    @property
    def sequences(self) -> int:
        """Sequences in a batch."""
        return self.train.batch_tokens // self.data.length

    def learning_rate(self, step: int) -> float:
        """Of step 0, 1, …: linear to the peak, then half a cosine to the final one."""
        import math

        o, warmup = self.optimizer, self.warmup_steps
        if step < warmup:
            return o.peak * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return o.final + (o.peak - o.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def model_config(self) -> Any:
        """The `KDNConfig` of [model]."""
        from kdn.models.config import KDNConfig
        from kdn.models.presets import preset

        fields = dict(self.model)
        name = fields.pop("preset", None)
        try:
            return KDNConfig(**fields) if name is None else preset(name, **fields)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"[model]: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides."""
    path = Path(file)
    try:
        with path.open("rb") as opened:
            read = tomllib.load(opened)
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and section and key):
            raise RecipeError(f"an override is written section.key=value, got {override!r}")
        if not isinstance(read.setdefault(section, {}), dict):
            raise RecipeError(f"{section} is not a section")
        read[section][key] = _value(text)
    return build(read)


def build(read: dict[str, Any]) -> Recipe:
    """A recipe from nested dictionaries."""
    sections: dict[str, Any] = {}
    known = {f.name: f.type for f in dataclasses.fields(Recipe)}
    for name, content in read.items():
        if name not in known:
            raise RecipeError(f"a recipe has no section [{name}]{_near(name, known)}")
        if not isinstance(content, dict):
            raise RecipeError(f"[{name}] must be a section of keys, got {content!r}")
        sections[name] = dict(content) if name == "model" else _section(name, known[name], content)
    return Recipe(**sections)


def _section(name: str, cls: Any, content: dict[str, Any]) -> Any:
    kinds = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        if key not in kinds:
            raise RecipeError(f"[{name}] has no key {key!r}{_near(key, kinds)}")
        values[key] = _typed(f"{name}.{key}", kinds[key], value)
    return cls(**values)


def _typed(name: str, kind: Any, value: Any) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(value, bool) and bool not in allowed:
        pass
    elif type(value) in allowed or (value is None and types.NoneType in allowed):
        return value
    elif isinstance(value, int) and float in allowed:
        return float(value)
    elif isinstance(value, float) and int in allowed and value.is_integer():
        return int(value)  # 1e9 is how people write a billion
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    wanted = " or ".join(words[a] for a in allowed if a in words)
    raise RecipeError(f"{name} must be {wanted}, got {value!r}")


def _value(text: str) -> Any:
    """An override's value: as TOML would read it, else the text itself."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _near(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
