"""The recipe of a run: one TOML file says everything that makes its result.

    [model]       preset = "kdn-diagonal-30m", and any field of KDNConfig to change
    [data]        shards that `kdn data` wrote, sequence length, packing, seed
    [train]       tokens, batch, precision
    [optimizer]   AdamW and its schedule
    [checkpoint]  where, how often, how many
    [log]         how often, and where to besides the console
    [parallel]    ranks that share one sequence

Keys and types are checked: a wrong one is an error that names the nearest right one. The command line may change any
of them: `kdn train recipe.toml train.tokens=1e6 optimizer.peak=1e-3`. docs/train.md lists all keys and defaults.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kdn.models.config import KDNConfig

__all__ = ["Recipe", "RecipeError", "build", "load", "made_of"]


class RecipeError(ValueError):
    """A recipe that cannot be meant as it is written."""


@dataclass(frozen=True)
class Data:
    train: str = "data/train"  # folders of shards
    validation: str | None = None
    length: int = 4096  # tokens of a sequence
    packing: Literal["concatenate", "documents"] = "concatenate"  # "documents": none sees another
    seed: int = 0


@dataclass(frozen=True)
class Train:
    tokens: int = 10_000_000  # the run's budget; steps are whole batches of it
    batch_tokens: int = 524_288  # of one optimizer step, over all ranks
    micro_batch: int = 1  # sequences in one pass of one rank
    seed: int = 0  # of the weights
    dtype: Literal["bfloat16", "float32"] = (
        "bfloat16"  # of matrix products; weights and optimizer are float32
    )
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
        for name, value in {
            "data.length": d.length,
            "train.micro_batch": t.micro_batch,
            "train.batch_tokens": t.batch_tokens,
            "checkpoint.keep": self.checkpoint.keep,
            "log.every": self.log.every,
            "parallel.context": self.parallel.context,
        }.items():
            must(value >= 1, f"{name} must be ≥ 1, got {value}")
        for name, least in {
            "train.validate_every": t.validate_every,
            "checkpoint.every": self.checkpoint.every,
            "optimizer.weight_decay": o.weight_decay,
        }.items():
            must(least >= 0, f"{name} must be ≥ 0, got {least}")
        for name, beta in {"optimizer.beta1": o.beta1, "optimizer.beta2": o.beta2}.items():
            must(0 <= beta < 1, f"{name} must be in [0, 1), got {beta}")
        must(o.clip > 0, f"optimizer.clip must be > 0, got {o.clip}")
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
        must(
            self.parallel.context == 1 or not t.compile,
            "parallel.context > 1 and train.compile do not go together yet: set one of them only",
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
        o, warmup = self.optimizer, self.warmup_steps
        if step < warmup:
            return o.peak * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return o.final + (o.peak - o.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def model_config(self) -> "KDNConfig":
        """The configuration that [model] names."""
        import torch

        from kdn.models.config import KDNConfig
        from kdn.models.presets import preset

        fields = dict(self.model)
        name = fields.pop("preset", None)
        if not isinstance(name, str | None):
            raise RecipeError(f"model.preset must be a text, got {name!r}")
        try:
            named = KDNConfig() if name is None else preset(name)
            kinds = _model_kinds(fields.get("layers") or [fields.get("mixer", named.mixer), *named.mixers])
            for key, value in fields.items():
                if key not in kinds:
                    raise RecipeError(f"[model] has no key {key!r}{_near(key, ['preset', *kinds])}")
                fields[key] = _typed(f"model.{key}", kinds[key], value)
            config = KDNConfig(**fields) if name is None else preset(name, **fields)
            with torch.device("meta"):  # mixers check their own options
                for index in {mixer: i for i, mixer in enumerate(config.mixers)}.values():
                    config.make_mixer(index)
            return config
        except RecipeError:
            raise
        except (TypeError, ValueError) as error:
            raise RecipeError(f"[model]: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def made_of(recipe: Recipe, config: "KDNConfig", shards: str) -> dict[str, Any]:
    """What a checkpoint may not be resumed without: model, data and batch, by their keys in a recipe.

    shards: the checksum of the training data's index. Its folder may move, what it holds may not change.
    """
    kinds = _model_kinds(config.mixers)
    found = {f"model.{name}": getattr(config, name) for name in kinds if hasattr(config, name)}
    d, t = recipe.data, recipe.train
    return found | {
        "data.train": f"shards {shards[:12]}",
        "data.length": d.length,
        "data.packing": d.packing,
        "data.seed": d.seed,
        "train.batch_tokens": t.batch_tokens,
        "train.seed": t.seed,
    }


def load(file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides."""
    path = Path(file)
    try:
        with path.open("rb") as opened:
            read = tomllib.load(opened)
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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


def _model_kinds(mixers: Any) -> dict[str, Any]:
    """The keys of [model] with their types: fields of the configuration, and options of these mixers."""
    from kdn.mixers import mixer_class
    from kdn.models.config import KDNConfig

    kinds = typing.get_type_hints(KDNConfig.__init__)
    for mixer in mixers if isinstance(mixers, list) else []:
        for cls in mixer_class(mixer).__mro__:
            kinds |= typing.get_type_hints(vars(cls).get("__init__", object))
    # What a layer is given by the model, and what only signatures have.
    theirs = {"args", "kwargs", "layer", "layer_index", "options", "rank", "return", "use_cache"}
    return {name: kind for name, kind in kinds.items() if name not in theirs}


def _typed(name: str, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        words = ", ".join(map(repr, typing.get_args(kind)))
        raise RecipeError(
            f"{name} must be one of {words}, got {value!r}{_nearest(value, typing.get_args(kind))}"
        )
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    listed = list[str] in allowed and isinstance(value, list) and all(isinstance(x, str) for x in value)
    if listed or type(value) in allowed or (value is None and types.NoneType in allowed):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
        return float(value)
    if isinstance(value, float) and int in allowed and value.is_integer():
        return int(value)  # 1e9 is how people write a billion
    wanted = " or ".join(_WORDS[a] for a in allowed if a in _WORDS)
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
    return _nearest(name, known) or f"; it has {', '.join(known)}"


def _nearest(name: Any, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), 1, 0.5)
    return f", did you mean {near[0]!r}?" if near else ""


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list[str]: "a list of texts",
    types.NoneType: "none",
}
