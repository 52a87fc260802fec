"""`kdn probe`: how strongly a memory writes, and what it is unsure of."""

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdn.cli.arguments import command, more_than_zero, stop, whole
from kdn.cli.loading import (
    add_device,
    add_tokenizer,
    config_of,
    device_of,
    load,
    make_folder,
    tokenizer_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    probe = command(
        commands,
        "probe",
        "how strongly a memory writes, and what it is unsure of",
        "Effective writes: kᵀg is the share of what a memory gets wrong at a token's key that the token's\n"
        "write corrects. Near 1 it overwrites, near 0 it hardly listens. The information scale μ says how\n"
        "much surer a write makes the memory: the larger it is, the more gently later tokens write. This\n"
        "prints the mean at several μ beside KDA's and draws the distributions; docs/probe.md explains more.\n\n"
        "With random weights (the paper's table has 0.842, 0.743, 0.630, 0.580 for the 750M model; a small\n"
        "model takes seconds, this one minutes):\n\n"
        "    kdn probe --preset kdn-diagonal-tiny --random-init --sequences 2 --length 256\n"
        "    kdn probe --preset kdn-diagonal-750m --random-init\n\n"
        "A trained model, before (with random weights) and after training, on a text:\n\n"
        "    kdn probe runs/stories --text book.txt --info-scale 1 11.3 128 512\n\n"
        "What it is unsure of, word by word: a heat map over layers and tokens.\n\n"
        '    kdn probe runs/stories --heatmap "The cat sat on the mat. The dog sat on the mat."',
    )
    probe.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name of a trained model")
    probe.add_argument("--preset", metavar="NAME", help="a preset instead, with --random-init")
    probe.add_argument("--random-init", action="store_true", help="fresh random weights, nothing trained")
    probe.add_argument(
        "--info-scale",
        type=more_than_zero,
        nargs="+",
        metavar="μ",
        help="at which μ (default: 1, √K, K and 4K)",
    )
    probe.add_argument(
        "--beside",
        metavar="MODEL",
        help="the model or preset to compare with, or none (default: KDA of the same sizes, random weights)",
    )
    probe.add_argument("--text", type=Path, metavar="FILE", help="read this text (default: random tokens)")
    probe.add_argument(
        "--sequences", type=whole(1), default=8, metavar="N", help="how many to read (default: %(default)s)"
    )
    probe.add_argument(
        "--length", type=whole(1), default=2048, metavar="T", help="tokens of each (default: %(default)s)"
    )
    probe.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of random weights and tokens (default: 0)"
    )
    probe.add_argument(
        "--heatmap", metavar="TEXT", help="draw the heat map instead, of a text or of the file of that name"
    )
    probe.add_argument(
        "--out",
        type=Path,
        default=Path("kdn-probe"),
        metavar="FOLDER",
        help="for JSON and PNG (default: %(default)s)",
    )
    probe.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the weights; means differ by less than 0.001, so take what is faster here: bfloat16 where the "
        "processor computes with it (default: %(default)s)",
    )
    add_tokenizer(probe)
    add_device(probe)
    probe.set_defaults(command=_probe, parser=probe)


def _probe(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.preset is None):
        options.parser.error("give a MODEL or --preset NAME, one of them")
    name = options.model or options.preset
    if options.preset and not options.random_init:
        options.parser.error("a preset has no trained weights: add --random-init")
    config_of(name, options.random_init)  # complains before anything is made
    make_folder(options.out)
    return (_heatmap if options.heatmap is not None else _writes)(name, options)


class _Run(NamedTuple):
    """One model to probe."""

    panel: str  # the heading under which its curves appear
    label: str
    load: Callable[[], "nn.Module"]


def _writes(name: str, options: argparse.Namespace) -> int:
    from kdn.probe.report import default_scales

    config = config_of(name, True)
    scales = options.info_scale or default_scales(config.head_dim)
    tokens, read = _tokens(name, config.vocab_size, options)
    print(read)
    if options.random_init or options.beside != "none":
        print(f"seed {options.seed} for random weights: at every μ the same ones")
    panels = _curves(list(_runs(name, config, options)), tokens, scales, options)
    if not any(panel["curves"] for panel in panels):
        stop(f"{name} has no layer that erases before it writes, so no effective writes")
    _print_table(panels)
    result = {
        **_circumstances(name, options),
        "tokens": read,
        "sequences": tokens.shape[0],
        "length": tokens.shape[1],
        "seed": options.seed,
        "panels": panels,
    }
    _save(result, options.out / "writes.json")
    from kdn.probe.figures import write_figure

    _draw(lambda file: write_figure(panels, file), options.out / "writes.png")
    return 0


def _tokens(name: str, vocabulary: int, options: argparse.Namespace) -> "tuple[Tensor, str]":
    """[sequences, length] ids, and a line about them."""
    import torch

    count, length = options.sequences, options.length
    if options.text is None:
        drawn = torch.Generator().manual_seed(options.seed)
        tokens = torch.randint(_smaller_vocabulary(vocabulary, options), (count, length), generator=drawn)
        said = f"{count} sequences of {length} random token ids, seed {options.seed}"
        return tokens, said if options.random_init else said + " (--text FILE reads a text instead)"
    ids = _ids_of(name, _read_file(options.text), vocabulary, options)[0]
    if len(ids) < length:
        return torch.tensor([ids]), f"1 sequence of {len(ids)} tokens, all of {options.text}"
    count = min(count, len(ids) // length)
    tokens = torch.tensor(ids[: count * length]).view(count, length)
    return tokens, f"{count} sequences of {length} tokens from {options.text}"


def _smaller_vocabulary(vocabulary: int, options: argparse.Namespace) -> int:
    """So that every model knows all ids."""
    if options.beside in (None, "none"):
        return vocabulary
    return min(vocabulary, int(config_of(options.beside, True).vocab_size))


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {file}: {error}")


def _ids_of(
    name: str, text: str, vocabulary: int, options: argparse.Namespace
) -> tuple[list[int], Callable[[list[int]], str]]:
    tokenizer = tokenizer_of(name, options.tokenizer, options.random_init)
    ids = tokenizer.encode(text)
    if not ids:
        stop("the text is empty")
    known = _smaller_vocabulary(vocabulary, options)
    if max(ids) >= known:
        stop(f"the tokenizer gives the id {max(ids)}, but a model knows only {known} tokens")
    return ids, tokenizer.decode


def _runs(name: str, config: Any, options: argparse.Namespace) -> Iterator[_Run]:
    """The models one after another, each beside what it is compared with."""

    import torch

    dtype = getattr(torch, options.dtype)

    def fresh(config: Any) -> Callable[[], "nn.Module"]:
        def build() -> "nn.Module":
            from kdn.models import KDNModel

            torch.manual_seed(options.seed)
            return KDNModel(config).to(dtype).eval()

        return build

    def trained(name: str) -> Callable[[], "nn.Module"]:
        return lambda: load(name, False, 0, backbone=True, dtype=dtype)

    beside, other = _beside(name, config, options)
    before, after = f"{_title(name)}, random weights", f"{_title(name)}, trained"
    yield _Run(before, _title(config.mixer), fresh(config))
    if other is not None:
        yield _Run(before, beside, fresh(other))
    if not options.random_init:
        yield _Run(after, _title(config.mixer), trained(name))
        if options.beside and other is not None and Path(options.beside).is_dir():
            yield _Run(after, beside, trained(options.beside))


def _beside(name: str, config: Any, options: argparse.Namespace) -> tuple[str, Any]:
    """What to compare with: a label and a configuration, None for nothing."""
    from kdn.models import KDNConfig
    from kdn.models.presets import SCALES, preset, preset_names

    if options.beside == "none" or (options.beside is None and set(config.mixers) <= {"kda", "attention"}):
        return "", None
    if options.beside is not None:
        return _title(options.beside), config_of(options.beside, True)
    if name in preset_names():
        scale = next(scale for scale in SCALES if name.endswith(f"-{scale}"))
        return "KDA", preset(f"kda-swa-{scale}" if "-swa-" in name else f"kda-{scale}")
    sizes = ("vocab_size", "hidden_size", "num_heads", "head_dim", "intermediate_size", "window", "norm_eps")
    layers = [mixer if mixer == "attention" else "kda" for mixer in config.mixers]
    return "KDA", KDNConfig(layers=layers, **{size: getattr(config, size) for size in sizes})


def _title(name: str) -> str:
    return {"kdn-diagonal": "Diagonal KDN", "kdn-isotropic": "Isotropic KDN", "kda": "KDA"}.get(
        name, Path(name).name
    )


def _curves(
    runs: list[_Run], tokens: "Tensor", scales: list[float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Probe every model, one in memory at a time."""
    from kdn.mixers.kalman import KalmanMixer
    from kdn.probe.report import probe_writes
    from kdn.progress import progress

    device = device_of(options.device)
    panels: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs, 1):
        model = run.load().to(device)
        passes = len(scales) if any(isinstance(m, KalmanMixer) for m in model.modules()) else 1
        text = f"model {number} of {len(runs)}: {run.label}"
        with progress(passes * len(tokens), text) as bar:
            found = probe_writes(
                model, tokens, scales, run.label, lambda done, total: bar.advance(1 if done else 0)
            )
        panels.setdefault(run.panel, []).extend(found)
    return [{"title": title, "curves": curves} for title, curves in panels.items()]


def _print_table(panels: list[dict[str, Any]]) -> None:
    print("\neffective write kᵀg, over all layers, heads and tokens")
    width = max(len(curve["label"]) for panel in panels for curve in panel["curves"])
    for panel in panels:
        print(f"\n{panel['title']}\n  {'':<{width}}   mean  median")
        for curve in panel["curves"]:
            print(f"  {curve['label']:<{width}}  {curve['mean']:.3f}   {curve['median']:.3f}")
    print()


def _heatmap(name: str, options: argparse.Namespace) -> int:
    scales = options.info_scale or [None]
    if len(scales) > 1:
        options.parser.error("argument --heatmap: takes one --info-scale")
    import torch

    from kdn.probe import info_scale_set
    from kdn.probe.figures import token_figure
    from kdn.probe.report import by_token

    file = Path(options.heatmap)
    text = _read_file(file) if _is_file(file) else options.heatmap
    dtype = getattr(torch, options.dtype)
    model: Any = load(name, options.random_init, options.seed, backbone=True, dtype=dtype)
    model = model.to(device_of(options.device))
    ids, decode = _ids_of(name, text, model.config.vocab_size, options)
    ids = ids[: options.length]
    with info_scale_set(model, scales[0]):
        data = by_token(model, ids, [decode([i]) for i in ids])
    print(f"{len(ids)} tokens; means over layers, heads and tokens:")
    for field in ("read_variance", "effective_write", "state_norm"):
        numbers = [x for row in data[field] for x in row if x is not None]
        said = f"{sum(numbers) / len(numbers):.4g}" if numbers else "no layer has it"
        print(f"  {field.replace('_', ' '):<15}  {said}")
    _save({**_circumstances(name, options), "info_scale": scales[0], **data}, options.out / "tokens.json")
    title = f"{_title(name)}{', random weights' if options.random_init else ''}"
    _draw(lambda file: token_figure(data, file, title), options.out / "tokens.png")
    return 0


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a text can be too long for a file's name
        return False


def _circumstances(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from kdn.bench.machine import machine, versions

    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"date": date, "machine": machine(), "versions": versions()}
    return {**about, "model": name, "random_init": options.random_init, "dtype": options.dtype}


def _save(result: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"saved {file}")


def _draw(draw: Callable[[Path], object], file: Path) -> None:
    try:
        draw(file)
    except ImportError:
        print("notice: no figure, matplotlib is not installed: pip install matplotlib")
    else:
        print(f"saved {file}")
