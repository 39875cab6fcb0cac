"""Boltzmann machines with a layer of hidden bits, and maximum likelihood by persistent chains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.checks import check_integer, check_positive, check_share
from natgrad.ground.densities import Density, check_binary, check_density, check_entries
from natgrad.ground.linalg import all_finite, require_inverse
from natgrad.ground.pure import set_modes_aside
from natgrad.ground.spaces import Params


class RestrictedBoltzmann(Density):
    """log p(x) = b . x + sum_j log(1 + exp(c_j + w_j . x)) + constant: bits x whose hidden bits are summed out.

    Parameters: {"b": (N,), "c": (H,), "W": (H, N)}. Given the hidden bits all visible ones are independent, and the
    other way round, so that a sweep of Gibbs sampling is two matrix products.

    Args:
        units: N, the visible bits.
        hidden: H.

    Raises:
        ValueError: If a number of units is no integer >= 1.

    Example:
        >>> machine = ng.energies.RestrictedBoltzmann(4, 3)
        >>> params = machine.parameters()
        >>> machine.gibbs(params, torch.zeros(10, 4), sweeps=5).shape
        torch.Size([10, 4])
    """

    def __init__(self, units: int, hidden: int) -> None:
        self.units, self.hidden = check_integer("units", units), check_integer("hidden", hidden)

    def parameters(
        self, scale: float = 0.01, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Biases of zero, and W drawn from N(0, scale^2); all require gradients.

        Args:
            scale: Standard deviation of W.
            generator: Of the draws; default torch's global one.
            dtype: Default torch's.
        """
        kind: Any = {"device": generator and generator.device, "dtype": dtype}
        W = scale * torch.randn(self.hidden, self.units, generator=generator, **kind)
        params = {"b": torch.zeros(self.units, **kind), "c": torch.zeros(self.hidden, **kind), "W": W}
        return {name: value.requires_grad_() for name, value in params.items()}

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        self.check(params)
        return inputs @ params["b"] + functional.softplus(inputs @ params["W"].mT + params["c"]).sum(1)

    def hidden_means(self, params: Params, inputs: Tensor) -> Tensor:
        """p(h_j = 1 | x), shape (b, H).

        Args:
            params: b, c and W.
            inputs: Bits, shape (b, N).
        """
        return (inputs @ params["W"].mT + params["c"]).sigmoid()

    def visible_means(self, params: Params, hidden: Tensor) -> Tensor:
        """p(x_i = 1 | h), shape (b, N).

        Args:
            params: b, c and W.
            hidden: Bits, shape (b, H).
        """
        return (hidden @ params["W"] + params["b"]).sigmoid()

    @torch.no_grad()
    def gibbs(self, params: Params, X: Tensor, *, sweeps: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws (b, N) after rounds of Gibbs sampling, hidden bits first.

        Args:
            params: b, c and W.
            X: Bits to start from, shape (b, N).
            sweeps: Number of rounds.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If sweeps is no integer >= 1, or X is not binary.
        """
        check_integer("sweeps", sweeps)
        x = self.check_bits(params, X)
        for _ in range(sweeps):
            h = torch.bernoulli(self.hidden_means(params, x), generator=generator)
            x = torch.bernoulli(self.visible_means(params, h), generator=generator)
        return x

    @torch.no_grad()
    def estimate_log_partition(
        self,
        params: Params,
        base: Tensor,
        *,
        levels: int = 1000,
        chains: int = 100,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log of the sum of exp(log_p) over all 2^N states by annealed importance sampling, and its standard error.

        Args:
            params: b, c and W.
            base: Visible biases of the independent bits where the chains start, shape (N,): best those of the data.
            levels: Temperatures between both machines.
            chains: Independent chains.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If a number is too small, or base has another shape.

        Returns:
            Two scalar tensors; the error is that of the mean weight, to first order.

        Reference:
            Salakhutdinov & Murray 2008.
        """
        check_integer("levels", levels)
        check_integer("chains", chains, 2)
        if base.shape != (self.units,):
            raise ValueError(f"base has shape {tuple(base.shape)}, expected the visible biases ({self.units},)")
        x = torch.bernoulli(base.sigmoid().expand(chains, -1), generator=generator)

        def temper(beta: float) -> dict[str, Tensor]:
            """The machine between independent bits (beta = 0) and the one of `params` (beta = 1)."""
            return {"b": base.lerp(params["b"], beta), "c": beta * params["c"], "W": beta * params["W"]}

        before, weights = temper(0.0), base.new_zeros(chains)
        for beta in torch.linspace(0, 1, levels + 1)[1:].tolist():
            after = temper(beta)
            weights += self.log_p(after, x) - self.log_p(before, x)
            x, before = self.gibbs(after, x, generator=generator), after
        start = functional.softplus(base).sum() + self.hidden * torch.log(base.new_tensor(2.0))
        shares = chains * weights.softmax(0)
        error = shares.std() / chains**0.5
        return start + weights.logsumexp(0) - torch.log(base.new_tensor(float(chains))), error

    def check_bits(self, params: Params, X: Tensor) -> Tensor:
        """X as floating point, after a check that it holds bits of this machine, and that its parameters are numbers.

        Args:
            params: b, c and W.
            X: Shape (b, N).

        Raises:
            ValueError: If it does not.
        """
        self.check(params)
        if not all(all_finite(value.detach()) for value in params.values()):
            raise ValueError(
                "params hold a NaN or an infinity: start again, and with a lower rate if they were trained"
            )
        bits = check_binary(check_density(self, params, X).detach(), params["b"].dtype)
        if bits.shape[1:] != (self.units,):
            raise ValueError(f"X has shape {tuple(X.shape)}, expected (b, {self.units})")
        return bits

    def check(self, params: Params) -> None:
        """Check that the parameters belong to this machine.

        Args:
            params: b (N,), c (H,) and W (H, N).

        Raises:
            ValueError: If they do not.
        """
        shapes = {"b": (self.units,), "c": (self.hidden,), "W": (self.hidden, self.units)}
        check_entries(params, shapes, ": start from machine.parameters()")

    def __repr__(self) -> str:
        return f"RestrictedBoltzmann({self.units}, {self.hidden})"


@dataclass
class PersistentLikelihood:
    """Steps of maximum likelihood for a restricted machine; the model's expectations come from chains that are kept.

    The gradient of the mean of -log p is E_chains[T] - E_data[T], T = (x, h, h x^T). Its natural direction takes the
    Fisher matrix of the joint distribution of x and h, Cov(T), as if x and h were independent: in the centred variables
    x - E[x] and h - E[h] it is Cov(x), Cov(h) and Cov(h) (x) Cov(x), with the moments of the chains.

    Args:
        machine: The model.
        params: Its parameters; changed in place.
        chains: States of the chains at the start, bits (k, N).
        lr: Rate.
        natural: False for the plain gradient.
        damping: Added to each covariance, in units of its mean variance.
        sweeps: Of Gibbs sampling, between steps.
        refresh: Steps between two inversions of the covariances.
        decay: Weight of the past in the running moments.
        momentum: Of the direction.
        generator: Of the draws; default torch's global one.

    Raises:
        ValueError: For numbers out of range.

    Example:
        >>> machine = ng.energies.RestrictedBoltzmann(4, 3)
        >>> params, x = machine.parameters(), torch.ones(20, 4)
        >>> trainer = ng.energies.PersistentLikelihood(machine, params, torch.zeros(20, 4), lr=0.05)
        >>> trainer.step(x)
        >>> bool((params["b"] > 0).all())
        True
    """

    machine: RestrictedBoltzmann
    params: dict[str, Tensor]
    chains: Tensor
    lr: float
    natural: bool = True
    damping: float = 0.1
    sweeps: int = 1
    refresh: int = 50
    decay: float = 0.99
    momentum: float = 0.0
    generator: torch.Generator | None = None
    count: int = field(default=0, init=False)
    memory: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("damping", self.damping)
        check_share("decay", self.decay)
        check_share("momentum", self.momentum)
        for name in ("sweeps", "refresh"):
            check_integer(name, getattr(self, name))
        self.machine.check(self.params)

    @set_modes_aside
    @torch.no_grad()
    def step(self, X: Tensor) -> None:
        """Move the chains, then the parameters.

        Args:
            X: Bits, shape (b, N).

        Raises:
            ValueError: If X holds no bits of the machine, or the parameters left the finite numbers: take a lower rate.
        """
        bits = self.machine.check_bits(self.params, X)
        self.chains = self.machine.gibbs(self.params, self.chains, sweeps=self.sweeps, generator=self.generator)
        direction = self.find_direction(bits)
        self.count += 1
        for name, p in self.params.items():
            velocity = self.memory.get(f"velocity {name}", torch.zeros_like(p))
            self.memory[f"velocity {name}"] = velocity.mul_(self.momentum).add_(direction[name])
            p.sub_(velocity, alpha=self.lr)

    @torch.no_grad()
    def find_direction(self, X: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The gradient of the mean of -log p, or the natural gradient.

        Args:
            X: Bits, shape (b, N).
            weights: How often each chain counts, shape (k,), with sum 1. None: all alike.
        """
        seen, drawn = self.machine.hidden_means(self.params, X), self.machine.hidden_means(self.params, self.chains)
        shares = self.chains.new_full((len(self.chains),), 1 / len(self.chains)) if weights is None else weights
        x, h = X.mean(0), seen.mean(0)
        y, k = shares @ self.chains, shares @ drawn
        centred = (drawn * shares.unsqueeze(1)).mT @ self.chains - seen.mT @ X / len(X)  # E_chains[h x] - E_data[h x]
        if not self.natural:
            return {"b": y - x, "c": k - h, "W": centred}
        if self.count % self.refresh == 0:
            self._update_moments(drawn, shares)
        m = self.memory
        centred = centred - torch.outer(k - h, m["x"]) - torch.outer(m["h"], y - x)
        W = m["of h"] @ centred @ m["of x"]
        # back from the centred variables
        return {"b": m["of x"] @ (y - x) - m["h"] @ W, "c": m["of h"] @ (k - h) - W @ m["x"], "W": W}

    def _update_moments(self, drawn: Tensor, shares: Tensor) -> None:
        """Running means and covariances of x and h over the chains, and inverses."""
        for name, states in (("x", self.chains), ("h", drawn)):
            second = (states * shares.unsqueeze(1)).mT @ states
            second.diagonal().add_(shares @ (states - states.square()))  # the variance of h given x; of bits x none
            for key, new in ((name, shares @ states), (f"{name} squared", second)):
                past = self.decay**self.refresh if key in self.memory else 0.0
                self.memory[key] = new if past == 0 else torch.lerp(new, self.memory[key], past)
            mean = self.memory[name]
            covariance = self.memory[f"{name} squared"] - torch.outer(mean, mean)
            covariance.diagonal().add_(self.damping * covariance.diagonal().mean().clamp(min=1e-8))
            self.memory[f"of {name}"] = require_inverse(covariance, f"the covariance of {name} has no inverse")
