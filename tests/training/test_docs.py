"""docs/train.md lists every key of a recipe with its default."""

import dataclasses
import json
import re
from pathlib import Path

from kdn.training.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "train.md").read_text(encoding="utf-8")


def test_the_table_of_keys_is_the_recipes() -> None:
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| `?([^|`]+?)`? \|", PAGE, flags=re.MULTILINE))
    wanted = {
        f"{section}.{key}": "none" if value is None else json.loads(json.dumps(value))
        for section, keys in dataclasses.asdict(Recipe()).items()
        for key, value in keys.items()
        if section != "model"
    }
    del listed["log.jsonl"]  # a file, of another table
    found = {key: text if text == "none" else json.loads(text) for key, text in listed.items()}
    assert found == wanted
    assert Recipe().model == {"preset": "kdn-diagonal-30m"} and "`kdn-diagonal-30m`" in PAGE
