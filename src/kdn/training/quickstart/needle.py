"""The needle task: facts are stated once, and asked for many lines later.

    # harbor=violet falcon=amber comet=teal
    …lines of the Python standard library…
    # comet=          the model must go on with: teal

Which name goes with which value is drawn anew for every document: nothing can be known by heart, all must be
remembered. In training, facts and questions are spread over a document; in the test, all facts come first,
all questions last, each name asked for once, and what grows is the text between (`length`) or the number of facts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MOST_FACTS", "NAMES", "VALUES", "Needle", "Question", "accuracy", "facts", "line"]

# One word each, so that a tokenizer can make it one token.
_NAMES = (
    "anchor arrow badger basket beacon bottle bridge candle castle cherry clover comet compass copper coral "
    "cradle dragon eagle engine falcon feather fiddle forest fountain garden ginger hammer harbor hazel helmet "
    "island jacket jungle kettle ladder lantern lemon magnet maple marble meadow mirror monkey needle orchid "
    "otter palace pebble pepper pillow pirate planet pocket puzzle rabbit ribbon river saddle salmon spider "
    "thunder tiger turtle violin"
)
_VALUES = (
    "amber azure beige black blue bronze brown crimson cyan emerald gold gray green indigo ivory jade khaki "
    "lavender lilac lime magenta maroon olive orange pink purple red scarlet silver teal violet white"
)

NAMES, VALUES = _NAMES.split(), _VALUES.split()
MOST_FACTS = 8  # of a training document


def facts(pairs: int, rng: random.Random) -> list[tuple[str, str]]:
    """Different names, each with any value."""
    return list(zip(rng.sample(NAMES, pairs), rng.choices(VALUES, k=pairs), strict=True))


def line(of: Sequence[tuple[str, str]]) -> str:
    """Facts in one line; questions are the same up to their values."""
    return "\n#" + "".join(f" {name}={value}" for name, value in of) + "\n"


class Question(NamedTuple):
    """A document of the test. Its i-th answer must be the token at answers[i], predicted from the one before."""

    tokens: list[int]
    answers: list[int]


class Needle:
    """Makes documents of an exact number of tokens.

    encode: text to tokens. filler: tokens of text that stands between facts and questions.
    """

    def __init__(self, encode: Callable[[str], list[int]], filler: Sequence[int]) -> None:
        self.encode, self.filler = encode, filler

    def _text(self, tokens: int, rng: random.Random) -> list[int]:
        start = rng.randrange(max(1, len(self.filler) - tokens))
        return list(self.filler[start : start + tokens])

    def training(self, length: int, rng: random.Random) -> list[int]:
        """`length` tokens: two to eight facts, each asked for again and again.

        Every other document has pieces of text between the lines, of one to 128 tokens; the rest have none. Those teach
        looking up, which models find hard to discover across text; the others teach keeping.
        """
        known = facts(rng.randint(2, MOST_FACTS), rng)
        apart = rng.random() < 0.5
        tokens = self.encode(line(known))
        while len(tokens) < length:
            if apart:
                tokens += self._text(int(2 ** rng.uniform(0, 7)), rng)
            tokens += self.encode(line(rng.sample(known, rng.randint(1, len(known)))))
        return tokens[:length]

    def question(self, length: int, pairs: int, rng: random.Random) -> Question:
        """`length` tokens: facts, text, and one question for every fact in another order."""
        known = facts(pairs, rng)
        stated = self.encode(line(known))
        order = rng.sample(known, pairs)
        asked = self.encode(line(order))
        # The line that ends with this answer, less the answer itself and the line's end.
        answers = [len(self.encode(line(order[: i + 1]))) - 2 for i in range(pairs)]
        between = length - len(stated) - len(asked)
        if between < 0:
            raise ValueError(
                f"length must be ≥ {len(stated) + len(asked)} to hold {pairs} facts and as many questions, "
                f"got {length}"
            )
        tokens = stated + self._text(between, rng) + asked
        return Question(tokens, [len(stated) + between + at for at in answers])

    def questions(self, length: int, pairs: int, count: int, seed: int) -> Iterator[Question]:
        """`count` documents; the same seed gives the same ones."""
        rng = random.Random(f"{seed} {length} {pairs}")
        return (self.question(length, pairs, rng) for _ in range(count))


@torch.no_grad()
def accuracy(answer: Callable[[Tensor], Tensor], questions: Sequence[Question]) -> float:
    """The share of answers that `answer` gets right.

    answer: tokens [B, T] → [B, T], at each position the token it takes to come next. The true answers stand
    in the tokens, as they would if the text were read.
    """
    predicted = answer(torch.tensor([q.tokens for q in questions]))
    right = [int(predicted[i, at - 1]) == q.tokens[at] for i, q in enumerate(questions) for at in q.answers]
    return sum(right) / len(right)
