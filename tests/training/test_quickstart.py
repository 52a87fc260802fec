"""The quickstart: its needle task counts right answers, its two models are equal, its page needs nothing else."""

import json
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("numpy")

from kdn.cli import main
from kdn.training.quickstart import FULL, MODELS, model_fields, parameters, report
from kdn.training.quickstart.needle import NAMES, VALUES, Needle, accuracy

# Every piece of a line is one token, as a trained tokenizer has it; filler is beyond all of these.
PIECES = ["\n", "#", "=", *(f" {name}" for name in NAMES), *VALUES]
NUMBER = {piece: i for i, piece in enumerate(PIECES)}
NAME_IDS = {NUMBER[f" {name}"] for name in NAMES}


def encode(text: str) -> list[int]:
    return [NUMBER[piece] for piece in re.findall(r"\n|#|=| ?\w+", text)]


@pytest.fixture
def needle() -> Needle:
    return Needle(encode, range(1000, 3000))


def looked_up(tokens: torch.Tensor) -> torch.Tensor:
    """What follows "name =" is what followed it the first time."""
    answers = torch.zeros_like(tokens)
    for row, answer in zip(tokens.tolist(), answers, strict=True):
        seen: dict[int, int] = {}
        for t in range(1, len(row) - 1):
            if row[t] == NUMBER["="] and row[t - 1] in NAME_IDS:
                answer[t] = seen.setdefault(row[t - 1], row[t + 1]) if row[t - 1] in seen else -1
                seen.setdefault(row[t - 1], row[t + 1])
    return answers


@pytest.mark.parametrize(("length", "pairs"), [(64, 1), (128, 8), (512, 16)])
def test_looking_the_answers_up_is_all_right(needle: Needle, length: int, pairs: int) -> None:
    questions = list(needle.questions(length, pairs, 20, seed=3))
    assert all(len(q.tokens) == length and len(q.answers) == pairs for q in questions)
    assert accuracy(looked_up, questions) == 1


def test_guessing_is_right_by_chance(needle: Needle) -> None:
    questions = list(needle.questions(128, 8, 500, seed=3))
    values = torch.tensor([NUMBER[value] for value in VALUES])
    torch.manual_seed(0)
    found = accuracy(lambda x: values[torch.randint(len(values), x.shape)], questions)
    assert found == pytest.approx(1 / len(VALUES), abs=4 * (1 / len(VALUES) / 4000) ** 0.5)


def test_answers_are_found_where_they_are_asked_and_not_elsewhere(needle: Needle) -> None:
    (question,) = needle.questions(128, 4, 1, seed=0)
    for at in question.answers:
        assert PIECES[question.tokens[at]] in VALUES
        assert question.tokens[at - 1] == NUMBER["="]
        assert at > 64  # facts come first, questions last
    known = [PIECES[question.tokens[at - 2]] for at in question.answers]
    assert len(set(known)) == 4


def test_a_text_too_short_for_its_facts_is_refused(needle: Needle) -> None:
    with pytest.raises(ValueError, match="length must be ≥ 54 to hold 8 facts"):
        needle.question(32, 8, random.Random(0))


def test_training_documents_are_exactly_long(needle: Needle) -> None:
    rng = random.Random(0)
    assert {len(needle.training(255, rng)) for _ in range(50)} == {255}


def test_models_are_equal_in_parameters() -> None:
    counts = [parameters(model_fields(FULL, mixer)) for mixer in MODELS]
    assert max(counts) - min(counts) < 0.001 * min(counts)


class _Page(HTMLParser):
    """Collects what a page is made of; tags must close in order."""

    EMPTY = frozenset({"meta", "circle", "line", "rect", "polyline", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The quick run's files."""
    out = tmp_path_factory.mktemp("run") / "quickstart"
    assert main(["quickstart", "--quick", "--out", str(out)]) == 0
    return {name: (out / name).read_text(encoding="utf-8") for name in ("report.html", "quickstart.json")}


def test_the_page_is_whole_and_needs_nothing_else(made: dict[str, str]) -> None:
    text = made["report.html"]
    page = _Page(text)
    assert not page.open
    assert {"script", "link", "iframe", "img"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert {"src", "href", "srcset"}.isdisjoint(attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert not re.search(r"url\(|@import|//", style)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 7
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing


def test_the_page_says_what_the_json_says(made: dict[str, str]) -> None:
    found = json.loads(made["quickstart.json"])
    cells = re.findall(r"<td>(.+?)</td>", made["report.html"])
    expected = [cell for row in report.table(found)[1:] for cell in row[1:]]
    assert cells == expected
    for mixer, model in found["models"].items():
        assert f"{model['bits_per_byte']:.3f}" in cells
        assert f"{model['parameters']:,}" in cells
        assert 0 < model["bits_per_byte"] < 8
        assert model["name"] == MODELS[mixer]


def test_a_folder_with_other_things_is_left_alone(tmp_path, capsys) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("precious")
    with pytest.raises(SystemExit, match="holds something else than a quickstart"):
        main(["quickstart", "--quick", "--out", str(tmp_path)])
    assert (tmp_path / "data" / "mine").read_text() == "precious"
