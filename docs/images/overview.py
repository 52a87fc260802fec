"""Draws docs/images/overview.png: what a memory that knows its uncertainty does with a noisy stream.

    python docs/images/overview.py       (needs matplotlib)

Eight facts, each a key of its own and a hidden value; tokens show them with noise, some facts often, some
rarely. At token 300 half of the facts change, and the process noise ω says that something moved.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from kdn.ops import delta_memory, diagonal_gain

FACTS, VALUES, LENGTH, CHANGE = 8, 64, 600, 300
NOISE = 1.0


def main() -> None:
    torch.manual_seed(1)
    rates = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.07, 0.05, 0.03])
    fact = torch.multinomial(rates, LENGTH, replacement=True)
    k = torch.eye(FACTS)[fact][None, :, None]
    before, after = torch.randn(2, FACTS, VALUES)
    after[1::2] = before[1::2]
    truth = torch.stack([before if t < CHANGE else after for t in range(LENGTH)])
    v = (truth[torch.arange(LENGTH), fact] + NOISE * torch.randn(LENGTH, VALUES))[None, :, None]
    w = torch.full((1, LENGTH, 1, FACTS), 1e-4)
    w[:, CHANGE, :, 0::2] = 1.0
    r = torch.full((1, LENGTH, 1), NOISE**2)

    def recall_error(gain: torch.Tensor) -> torch.Tensor:
        """Mean squared error of all eight facts after every token."""
        state, errors = torch.zeros(1, 1, FACTS, VALUES), []
        for t in range(LENGTH):
            now = slice(t, t + 1)
            key = k[:, now]
            _, state = delta_memory(key, key, v[:, now], gain[:, now], None, initial_state=state)
            errors.append((state[0, 0] - truth[t]).square().mean())
        return torch.stack(errors)

    gain, _, prior = diagonal_gain(k, None, w, r, return_prior=True)
    written = (k * gain).sum(-1)[0, :, 0]

    ink, accent, muted = "#1d2733", "#0b6e99", "#c2703d"
    plt.rcParams.update({"font.size": 9, "axes.edgecolor": "#8a94a0", "axes.titlesize": 10})
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
    image = top.imshow(
        prior[0, :, 0].sqrt().T, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest"
    )
    top.set(ylabel="fact", title="What the memory knows: standard deviation of every fact")
    figure.colorbar(image, ax=top, pad=0.01)
    middle.scatter(range(LENGTH), written, s=7, color=accent, label="Diagonal KDN, kᵀg")
    middle.axhline(0.5, color=muted, lw=1.2, ls="--", label="fixed β = 0.5")
    middle.set(ylabel="effective write", ylim=(0, 1), title="How strongly it writes")
    middle.legend(frameon=False, ncols=2, loc="upper right")
    bottom.plot(recall_error(gain), color=accent, lw=1.6, label="Diagonal KDN")
    for beta, style in ((0.5, "--"), (0.1, ":")):
        bottom.plot(recall_error(beta * k), color=muted, lw=1.2, ls=style, label=f"fixed β = {beta}")
    bottom.set(xlabel="token", ylabel="error", yscale="log", title="How well it recalls all eight facts")
    bottom.legend(frameon=False, ncols=3, loc=(0.06, 0.88))
    for axis in (middle, bottom):
        axis.axvline(CHANGE, color=ink, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
