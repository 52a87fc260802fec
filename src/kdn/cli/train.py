"""`kdn train`: the model of a recipe, trained."""

import argparse
import os
from pathlib import Path

from kdn.cli.arguments import command, stop

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    train = command(
        commands,
        "train",
        "train the model of a recipe, or go on where it was stopped",
        "Train the model that a recipe describes, on token shards that kdn data prepare made. Any key\n"
        "of the recipe can be changed behind it:\n\n"
        "    kdn data prepare stdlib --out data/stdlib --train-tokenizer 512 --validation 0.02\n"
        "    kdn train recipes/small/kdn-diagonal-tiny.toml\n"
        "    kdn train recipes/small/kdn-diagonal-tiny.toml train.tokens=2e6 optimizer.peak=1e-3\n"
        "    torchrun --nproc-per-node 8 -m kdn train recipes/paper/kdn-diagonal-750m.toml\n\n"
        "However it was stopped, the same command goes on from the newest checkpoint. The folder\n"
        "checkpoint.folder then has model/, which from_pretrained and the other commands load, log.jsonl\n"
        "and checkpoints/. docs/train.md lists all keys.",
    )
    train.add_argument("recipe", metavar="RECIPE", help="a TOML file, such as those in recipes/")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to change")
    train.add_argument(
        "--replay",
        type=Path,
        metavar="CHECKPOINT",
        help="compute the step after this checkpoint once more, print its loss, and write nothing: for the "
        "nan-… folder that a run leaves whose loss became NaN",
    )
    train.set_defaults(command=_train, parser=train)


def _train(options: argparse.Namespace) -> int:
    from kdn.cli.loading import needs
    from kdn.training import TrainingStopped
    from kdn.training.data import DataError
    from kdn.training.recipe import RecipeError, load

    try:
        recipe = load(options.recipe, options.overrides)
        with needs("transformers"), needs("numpy"):
            from kdn.training import loop
        if options.replay is None:
            loop.train(recipe)
            return 0
        loss, norm = loop.replay(recipe, options.replay)
        print(f"loss {loss}, gradient norm {norm}")
    except (RecipeError, DataError, TrainingStopped) as error:
        stop(f"rank {os.environ['RANK']}: {error}" if "RANK" in os.environ else error)
    return 0
