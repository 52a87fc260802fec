"""The page: one file that needs nothing else. Numbers come from `quickstart.json`, charts from charts.py."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kdn.training.quickstart.charts import Series, densities, heat_map, lines
from kdn.training.quickstart.needle import MOST_FACTS

__all__ = ["page", "table"]

STYLES = {"kdn-diagonal": "kdn", "kda": "kda"}
STYLE = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")


def table(found: dict[str, Any]) -> list[list[str]]:
    """The comparison as text: a heading, then one row per measure."""
    models = list(found["models"].values())
    length = found["size"]["length"]
    rows = [["", *(m["name"] for m in models)]]

    def row(text: str, form: str, values: Iterator[float]) -> None:
        rows.append([text, *(form.format(value) for value in values)])

    row("parameters", "{:,}", (m["parameters"] for m in models))
    row("bits per byte, unseen files (less is better)", "{:.3f}", (m["bits_per_byte"] for m in models))
    for tokens in dict.fromkeys((length, models[0]["recall_by_length"][-1][0])):
        facts = min(4, max(found["size"]["pairs"]))
        text = f"recall of {facts} facts over {tokens:,} tokens"
        row(text, "{:.1%}", (dict(m["recall_by_length"])[tokens] for m in models))
    row("training, tokens/s", "{:,.0f}", (m["training_tokens_per_second"] for m in models))
    row("generation, tokens/s", "{:,.0f}", (m["generation_tokens_per_second"] for m in models))
    return rows


def page(found: dict[str, Any]) -> str:
    """The whole document."""
    title = "Kalman Delta Networks: your first two models"
    parts = [_head(found), _numbers(found), _training(found), _recall(found), _writes(found)]
    parts += [_sample(found), _next(found), _foot(found)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(found: dict[str, Any]) -> str:
    kdn = found["models"]["kdn-diagonal"]
    tokens = kdn["loss"][-1][0] * kdn["step_tokens"]
    minutes = found["seconds"] / 60
    took = f"{minutes:.1f} minutes" if minutes > 1.5 else f"{found['seconds']:.0f} seconds"
    note = (
        '<p class="note">These are the tiny sizes of <code>--quick</code>: the models have learned nothing.</p>'
        if found["quick"]
        else ""
    )
    return f"""<header>
<p class="kicker">Kalman Delta Networks · quickstart</p>
<h1>A memory that knows what it does not know</h1>
<p class="lead">In {took}, on {_count(found["threads"], "processor core")} and without a download, this machine
trained two language models of {kdn["parameters"] / 1e6:.2f} million parameters on {tokens / 1e6:.1f} million tokens:
Python’s standard library, and notes whose facts must be remembered. Both read the same text in the same order; what
differs is who decides how strongly a token is written to memory: in <b class="kda">KDA</b> the token, in
<b class="kdn">Diagonal KDN</b> the memory, by how uncertain it is.</p>
{note}</header>"""


def _numbers(found: dict[str, Any]) -> str:
    heading, *rows = table(found)
    head = "".join(f'<th scope="col" class="{style}">{name}</th>' for name, style in _named(heading[1:]))
    body = "".join(
        f'<tr><th scope="row">{escape(text)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for text, *cells in rows
    )
    return f"""<section>
<h2>Side by side</h2>
<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="small">One run with one seed: small differences mean little. Guessing would recall 3% of the facts. Speeds
were measured one model after the other; whatever else the machine was doing is in them.</p>
</section>"""


def _training(found: dict[str, Any]) -> str:
    def curves(key: str, text: str) -> str:
        series = [
            Series(m["name"], style, [s * m["step_tokens"] / 1e6 for s, _ in m[key]], [y for _, y in m[key]])
            for m, style in _models(found)
        ]
        return lines(text, series, ("million tokens", text), dots=key == "validation")

    return f"""<section>
<h2>Learning</h2>
{_legend(found)}
<div class="pair">
<figure>{curves("loss", "training loss, nats per token")}
<figcaption>On what is being read: code and facts. The bend is where a model discovers that what was said before
can be looked up.</figcaption></figure>
<figure>{curves("validation", "validation loss, nats per token")}
<figcaption>On files of the standard library that are not trained on.</figcaption></figure>
</div>
</section>"""


def _recall(found: dict[str, Any]) -> str:
    length = found["size"]["length"]
    facts = min(4, max(found["size"]["pairs"]))

    def curves(key: str, labels: tuple[str, str], mark: tuple[int, str]) -> str:
        series = [
            Series(m["name"], style, [x for x, _ in m[key]], [y for _, y in m[key]])
            for m, style in _models(found)
        ]
        marks = [mark] if mark[0] < series[0].x[-1] else []
        return lines(labels[1], series, labels, y=(0, 1), logarithmic=True, percent=True, marks=marks)

    apart = ("tokens from the first fact to the last question", "right answers")
    by_length = curves("recall_by_length", apart, (length, "as long as in training"))
    by_pairs = curves("recall_by_pairs", ("facts", "right answers"), (MOST_FACTS, "as many as in training"))

    return f"""<section>
<h2>Needles in the code</h2>
<p>A line states facts, such as <code># harbor=violet falcon=amber</code>. Then comes code, and then a line that asks
for every fact, in another order. Names and values are paired anew in every document: only memory can help.</p>
{_legend(found)}
<div class="pair">
<figure>{by_length}
<figcaption>{facts} facts, more and more code between. Beyond the mark, texts are longer than any in
training.</figcaption></figure>
<figure>{by_pairs}
<figcaption>{length} tokens, more and more facts in them.</figcaption></figure>
</div>
</section>"""


def _writes(found: dict[str, Any]) -> str:
    def curve(m: dict[str, Any], style: str, key: str) -> Series:
        counts, width = m[key]["counts"], 4  # bins are joined by fours: 25 per unit
        total, per_unit = sum(counts), m[key]["bins_per_unit"] / width
        joined = [sum(counts[i : i + width]) for i in range(0, len(counts), width)]
        when = key.removeprefix("writes_")
        middle = [(i + 0.5) / per_unit for i in range(len(joined))]
        return Series(f"{m['name']} {when} training", style, middle, [c * per_unit / total for c in joined])

    figures = []
    for m, style in _models(found):
        drawn = densities(
            f"effective writes of {m['name']}",
            [curve(m, style, "writes_before")],
            [curve(m, style, "writes_after")],
            ("effective write kᵀg", "how frequent"),
        )
        figures.append(
            f'<figure><figcaption class="above"><b class="{style}">{m["name"]}</b> on average '
            f"{m['writes_before']['mean']:.2f} before training (dashed), {m['writes_after']['mean']:.2f} after "
            f"(filled)</figcaption>{drawn}</figure>"
        )
    return f"""<section>
<h2>How strongly they write</h2>
<p>Every token replaces a share of what the memory holds for its key: at 1 all of it, at 0 nothing. Each curve says
how frequent which share is, over all layers, heads and tokens of unseen code.</p>
<div class="pair">{"".join(figures)}</div>
</section>"""


def _sample(found: dict[str, Any]) -> str:
    kdn, kda = found["models"]["kdn-diagonal"], found["models"]["kda"]
    known = kdn["sample"]
    layers = known["read_variance"]
    rows = [(f"layer {i + 1}", row) for i, row in enumerate(layers)]
    drawn = heat_map("read variance of every layer at every token", rows, [_seen(t) for t in known["tokens"]])
    return f"""<section>
<h2>What the memory is unsure of</h2>
<p>Both models were given three facts and the beginning of a function, went on by themselves (underlined), and were
asked for the facts again. In KDN’s text the background is the variance of what the memory answered at that token:
<span class="scale">sure<i></i>unsure</span>. Point at a token to see its numbers.</p>
<div class="pair">
<figure><figcaption class="above"><b class="kdn">{kdn["name"]}</b> {_right(known)}</figcaption>
<pre>{_tokens(known, _shares(layers))}</pre></figure>
<figure><figcaption class="above"><b class="kda">{kda["name"]}</b> {_right(kda["sample"])}; this memory has no
variance</figcaption><pre>{_tokens(kda["sample"], None)}</pre></figure>
</div>
<figure><div class="scroll">{drawn}</div>
<figcaption>The same, layer by layer: read variance τ²qᵀPq of KDN over its text, from left to right; each layer from
its own smallest (pale) to its own largest (dark).</figcaption></figure>
</section>"""


def _shares(layers: Sequence[Sequence[float]]) -> list[float]:
    """Per token the mean over layers of where its variance lies between the layer's least and most, 0 … 1."""
    scaled = [[(v - min(row)) / ((max(row) - min(row)) or 1) for v in row] for row in layers]
    return [sum(column) / len(column) for column in zip(*scaled, strict=True)]


def _right(sample: dict[str, Any]) -> str:
    """How many of the questions behind the text are answered with what the facts in front say."""
    words = "".join(sample["tokens"]).split()
    stated = [word for word in words if "=" in word]
    known, asked = dict(w.split("=", 1) for w in stated[:3]), [w.split("=", 1) for w in stated[-3:]]
    count = sum(known.get(name) == value for name, value in asked)
    return f"recalls {count} of 3 facts here"


def _tokens(sample: dict[str, Any], shares: Sequence[float] | None) -> str:
    spans = []
    for i, token in enumerate(sample["tokens"]):
        if i == 0 and not token.strip():
            continue  # the empty line in front
        said = [_seen(token)]
        for layer, write in enumerate(sample["effective_write"]):
            variance = sample["read_variance"][layer][i]
            about = "" if variance is None else f"read variance {variance:.4f}, "
            said.append(f"layer {layer + 1}: {about}write {write[i]:.2f}")
        kind = ' class="own"' if sample["by_model"][i] else ""
        shade = "" if shares is None else f' style="--v:{100 * shares[i]:.0f}%"'
        spans.append(
            f'<span title="{escape(chr(10).join(said))}"{kind}{shade}>{escape(_printable(token))}</span>'
        )
    return "".join(spans)


def _next(found: dict[str, Any]) -> str:
    folder = escape(found["folder"])
    return f"""<section>
<h2>What to do next</h2>
<p>Let the model go on with a text of yours:</p>
<pre class="command">.venv/bin/kdn generate {folder}/kdn-diagonal/model "def main():"</pre>
<p>See what its memory makes of a sentence, layer by layer:</p>
<pre class="command">.venv/bin/kdn probe {folder}/kdn-diagonal/model --heatmap "for x in range(10): print(x)"</pre>
<p>Read the code that did all this, from top to bottom:</p>
<pre class="command">less src/kdn/training/quickstart/__init__.py</pre>
</section>"""


def _foot(found: dict[str, Any]) -> str:
    size = found["size"]
    return f"""<footer>{size["layers"]} layers of width {size["hidden"]}, {size["heads"]} heads of {size["head_dim"]},
feed-forward width {" and ".join(str(m["intermediate"]) for m in found["models"].values())};
{size["vocabulary"]:,} tokens of a byte-level BPE; sequences of {size["length"]}; Python {escape(found["python"])},
torch {escape(found["torch"])}, {_count(found["threads"], "thread")}. All numbers are in quickstart.json beside this
page.</footer>"""


def _models(found: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(m, STYLES[mixer]) for mixer, m in found["models"].items()]


def _named(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(names, STYLES.values(), strict=True)


def _legend(found: dict[str, Any]) -> str:
    keys = "".join(f'<span class="{style}"><i></i>{m["name"]}</span>' for m, style in _models(found))
    return f'<p class="legend">{keys}</p>'


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _seen(token: str) -> str:
    """A token as a label: spaces and line ends visible."""
    return _printable(token).replace("\n", "↵").replace(" ", "·")


def _printable(token: str) -> str:
    """Control characters, which a model that knows little does write, have no place in a page."""
    return "".join(c if c.isprintable() or c == "\n" else "▯" for c in token)
