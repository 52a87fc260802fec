"""The KDN layers: KDA's, with a Kalman gain where β was.

    kdn-diagonal    one variance per channel
    kdn-isotropic   one per head
    kdn-exact       a full covariance per head

They share everything but the process noise's shape and the covariance they start from.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdn.mixers.delta import ChannelDecayMixer, ChannelDecayOptions, DeltaMixer, DeltaState, Write
from kdn.mixers.parts import Linear, low_rank, softplus_inverse
from kdn.ops import decode, diagonal_gain, exact_gain, isotropic_gain
from kdn.ops.precision import state_dtype

__all__ = ["DiagonalKDN", "ExactKDN", "IsotropicKDN", "KalmanMixer"]


class KalmanMixer(ChannelDecayMixer):
    """A KDN layer: KDA's, with β replaced by noises from which the Kalman gain follows.

        ω = softplus(·)        process noise: how much the stored map may have changed
        r = r_min + softplus(·)    observation noise: how little the token is to be trusted
        c₀ = 1/(0.1 + softplus(θ))    prior variance of a head, 1 at the start

    info_scale μ: None is K; learned (positive, one per head, from that value) with `learn_info_scale`.
    process_noise, obs_noise: numbers that fix ω or r instead of predicting them. The attribute `info_scale`
    of a built layer may be set to another number: that overrides μ without touching weights.
    """

    w_proj: nn.Module  # ω before softplus, [B, T, ·]; where it is predicted

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        info_scale: float | None = None,
        learn_info_scale: bool = False,
        process_noise: float | None = None,
        obs_noise: float | None = None,
        r_min: float = 0.01,
        **layer: Unpack[ChannelDecayOptions],
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **layer)
        for name, value in {"info_scale": info_scale, "obs_noise": obs_noise, "r_min": r_min}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if process_noise is not None and not process_noise >= 0:
            raise ValueError(f"process_noise must be ≥ 0, got {process_noise}")
        self.info_scale: float | None = None  # an override at run time
        self.start_info_scale = float(head_dim if info_scale is None else info_scale)
        self.process_noise, self.obs_noise, self.r_min = process_noise, obs_noise, r_min
        if learn_info_scale:
            self.log_info_scale = nn.Parameter(torch.empty(num_heads))
        self.prior_precision = nn.Parameter(torch.empty(num_heads))  # θ
        if process_noise is None:
            self.make_process_noise()
        if obs_noise is None:
            self.r_proj = Linear(hidden_size, num_heads)
        self.reset_parameters()

    def make_process_noise(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how its process noise is predicted")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.prior_precision.copy_(softplus_inverse(torch.full_like(self.prior_precision, 0.9)))
        if hasattr(self, "log_info_scale"):
            self.log_info_scale.fill_(self.start_info_scale).log_()
        if self.obs_noise is None:
            nn.init.zeros_(self.r_proj.bias)

    def mu(self) -> float | Tensor:
        """The information scale in use: a number, or one per head."""
        if self.info_scale is not None:
            return float(self.info_scale)
        if hasattr(self, "log_info_scale"):
            return self.log_info_scale.to(state_dtype(self.log_info_scale)).exp()
        return self.start_info_scale

    def prior(self) -> Tensor:
        """c₀, [H], in at least float32."""
        theta = self.prior_precision.to(state_dtype(self.prior_precision))
        return 1 / (0.1 + F.softplus(theta))

    def first_cov(self, sequences: int) -> Tensor:
        """The covariance before the first token."""
        return self.prior().expand(sequences, -1)

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        wide = state_dtype(x)
        if self.process_noise is None:
            noise = F.softplus(self.w_proj(x))
        else:
            noise = k.new_full((), self.process_noise, dtype=wide)
        if self.obs_noise is None:
            r = self.r_min + F.softplus(self.r_proj(x).to(wide))
        else:
            r = k.new_full(k.shape[:3], self.obs_noise, dtype=wide)
        return Write(k, v, self.log_decay(x), None, self.shape_noise(noise, k), r)

    def shape_noise(self, noise: Tensor, k: Tensor) -> Tensor:
        """ω as the gain wants it: [B, T, H, K]."""
        return noise.expand(k.shape) if noise.ndim == 0 else self.by_head(noise)

    def gain(
        self, k: Tensor, w: Write, state: DeltaState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        found = self.gain_and_prior(k, w, state, cu_seqlens, return_prior=False)
        return found[0], found[1]

    def gain_and_prior(
        self,
        k: Tensor,
        w: Write,
        state: DeltaState | None = None,
        cu_seqlens: Tensor | None = None,
        return_prior: bool = True,
    ) -> tuple[Tensor, ...]:
        """gain, final covariance and, with `return_prior`, the predictive covariance of every token."""
        sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        gains = {"diagonal": diagonal_gain, "isotropic": isotropic_gain, "exact": exact_gain}
        assert w.process_noise is not None and w.obs_noise is not None
        return gains[str(self.kalman)](
            k,
            w.log_decay,
            w.process_noise,
            w.obs_noise,
            info_scale=self.mu(),
            initial_cov=self.first_cov(sequences) if state is None else state.cov,
            cu_seqlens=cu_seqlens,
            return_prior=return_prior,
        )

    def _step(self, q: Tensor, w: Write, state: DeltaState) -> tuple[Tensor, Tensor, Tensor | None]:
        assert state.cov is not None
        memory, cov = state.memory.clone(), state.cov.clone()
        out = decode(
            q,
            w.erase,
            w.value,
            w.log_decay,
            state=memory,
            kind=str(self.kalman),
            process_noise=w.process_noise,
            obs_noise=w.obs_noise,
            info_scale=self.mu(),
            cov=cov,
        )
        return out, memory, cov


class DiagonalKDN(KalmanMixer):
    """One variance per channel. ω is low-rank, its second matrix zero at the start: ω = ln 2."""

    kalman = "diagonal"
    w_proj: nn.Sequential

    def make_process_noise(self) -> None:
        self.w_proj = low_rank(self.hidden_size, self.value_dim, self.num_heads * self.head_dim, bias=True)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.process_noise is None:
            last = self.w_proj[1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def first_cov(self, sequences: int) -> Tensor:
        return super().first_cov(sequences)[..., None].expand(-1, -1, self.head_dim)

    def state_size(self) -> int:
        return super().state_size() + self.num_heads * self.head_dim


class ExactKDN(DiagonalKDN):
    """The Kalman filter itself: a dense covariance per head, sequential in time."""

    kalman = "exact"

    def first_cov(self, sequences: int) -> Tensor:
        return torch.diag_embed(super().first_cov(sequences))

    def state_size(self) -> int:
        return DeltaMixer.state_size(self) + self.num_heads * self.head_dim**2

    def flops_per_token(self) -> int:
        """As the others, and of the covariance: decay on both sides, its product with k, and the downdate."""
        return super().flops_per_token() + 8 * self.num_heads * self.head_dim**2


class IsotropicKDN(KalmanMixer):
    """One variance per head."""

    kalman = "isotropic"

    def make_process_noise(self) -> None:
        self.w_proj = Linear(self.hidden_size, self.num_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.process_noise is None:
            assert isinstance(self.w_proj, nn.Linear)
            nn.init.zeros_(self.w_proj.bias)

    def shape_noise(self, noise: Tensor, k: Tensor) -> Tensor:
        return noise.expand(k.shape[:3]) if noise.ndim == 0 else noise

    def state_size(self) -> int:
        return super().state_size() + self.num_heads
