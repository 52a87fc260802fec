"""Does the package compute on this machine's accelerator what it computes on paper?

    python benchmarks/accelerator.py            (from a checkout, installed or with PYTHONPATH=src)

Operations of the `torch` backend in float32 on the accelerator against `reference` in float64 on the CPU, outputs and
gradients; every layer likewise; then a training step, a compiled one, and generation of a tiny model. Times are
printed for orientation: they are of plain PyTorch, there are no kernels of our own for GPUs yet.
"""

import copy
import importlib.util
import time

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kdn.ops import delta_memory, diagonal_gain, exact_gain, isotropic_gain

GAINS = {"diagonal": diagonal_gain, "isotropic": isotropic_gain, "exact": exact_gain}


def inputs(kind: str, time_: int, heads: int, keys: int, values: int) -> list[Tensor]:
    shape = (1, time_, heads, keys)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    k, q = normalize(normal(*shape), dim=-1), normalize(normal(*shape), dim=-1)
    noise = softplus(normal(*(shape[:3] if kind == "isotropic" else shape)))
    return [
        q,
        k,
        normal(*shape[:3], values),
        -softplus(normal(*shape)),
        noise,
        0.01 + softplus(normal(*shape[:3])),
    ]


def run(kind: str, tensors: list[Tensor], backend: str) -> list[Tensor]:
    q, k, v, decay, noise, obs = tensors
    gain, cov = GAINS[kind](k, decay, noise, obs, info_scale=float(k.shape[-1]), backend=backend)
    out, state = delta_memory(q, k, v, gain, decay, backend=backend)
    loss = (out * out.detach().roll(1, 1)).sum() + state.square().sum() + cov.square().sum()
    return [out, state, cov, *torch.autograd.grad(loss, tensors)]


def off(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach()
    return float((a - b).norm() / b.norm())


def operations(device: torch.device) -> None:
    for kind in GAINS:
        for length, keys in ((1, 32), (65, 32), (300, 64)):
            wide = [x.requires_grad_() for x in inputs(kind, length, 2, keys, 48)]
            narrow = [x.detach().float().to(device).requires_grad_() for x in wide]
            pairs = zip(run(kind, narrow, "torch"), run(kind, wide, "reference"), strict=True)
            worst = max(off(a, b) for a, b in pairs)
            print(f"{kind:<10} T={length:<4} K={keys:<4} worst relative error {worst:.1e}")
            assert worst < 1e-5, "float32 must be within 1e-5 of float64"


def speed(device: torch.device) -> None:
    tensors = [x.float().to(device).requires_grad_() for x in inputs("diagonal", 8192, 16, 128, 128)]
    for _ in range(2):
        run("diagonal", tensors, "torch")
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run("diagonal", tensors, "torch")
    torch.accelerator.synchronize()
    print(
        f"diagonal KDN, T=8192 H=16 K=V=128, forward + backward: {1e3 * (time.perf_counter() - start):.1f} ms"
    )


def layers(device: torch.device) -> None:
    """Every mixer in float32 against itself in float64 on the CPU: output and the input's gradient."""
    from kdn.mixers import MIXERS, make_mixer

    for name in MIXERS:
        torch.manual_seed(0)
        wide = make_mixer(name, hidden_size=64, num_heads=2, head_dim=32).double()
        narrow = copy.deepcopy(wide).float().to(device)
        x = torch.randn(2, 70, 64, dtype=torch.float64)
        found = []
        for mixer, given in ((narrow, x.float().to(device)), (wide, x)):
            given.requires_grad_()
            y, _ = mixer(given)
            found.append((y, *torch.autograd.grad(y.square().sum(), given)))
        worst = max(off(a, b) for a, b in zip(*found, strict=True))
        print(f"{name:<18} worst relative error {worst:.1e}")
        assert worst < 1e-4, "float32 must be within 1e-4 of float64"


def models(device: torch.device) -> None:
    from kdn import KDNForCausalLM
    from kdn.mixers import MIXERS
    from kdn.models.presets import preset

    ids = torch.randint(512, (2, 96), device=device)
    for name in MIXERS:
        torch.manual_seed(0)
        model = KDNForCausalLM(preset(f"{name}-tiny", vocab_size=512)).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        model.eval()
        more = model.generate(ids[:, :8], max_new_tokens=8, do_sample=False)
        with torch.no_grad():
            step, whole = model(more[:, :-1]).logits[:, -1], model(more).logits[:, -2]
        apart = float((step - whole).norm() / whole.norm())
        print(f"{name:<18} loss {float(loss.detach()):.3f}, one token fewer changes logits by {apart:.1e}")
        assert apart < 1e-3
    model = KDNForCausalLM(preset("kdn-diagonal-tiny", vocab_size=512)).to(device)
    eager = model(ids, labels=ids).loss
    compiled = torch.compile(model)(ids, labels=ids).loss
    print(f"compiled loss is off by {float((compiled - eager).abs().detach()):.1e}")


def main() -> None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("no accelerator here")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    operations(device)
    layers(device)
    speed(device)
    if importlib.util.find_spec("transformers"):
        models(device)
    else:
        print("transformers is not installed: no models")


if __name__ == "__main__":
    main()
