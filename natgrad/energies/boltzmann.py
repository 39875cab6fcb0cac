"""The fully visible Boltzmann machine: every pair of bits coupled, all in closed form except the constant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.checks import check_integer
from natgrad.ground.densities import Density, check_binary, check_density, check_weights
from natgrad.ground.spaces import Params

LARGEST_ENUMERATION = 22
"""Units up to which the states are enumerated: 4 million of them."""


class Boltzmann(Density):
    """log p(x) = h . v + sum_{i<j} J_ij v_i v_j + constant, v = x in {0, 1}, or 2 x - 1 in {-1, 1} with spins.

    Parameters: {"h": (N,), "J": (N (N - 1) / 2,)}, J the couplings i < j, row by row (`parameters`, `matrix`). All log
    ratios at once cost one matrix product. The constant, probabilities and KL are exact by enumeration, up to 22 units.

    Bits and spins give the same set of distributions, in coordinates that differ by an affine map. Plain gradient
    descent takes another way in each, the undamped natural gradient the same.

    Args:
        units: N.
        spins: True if biases and couplings multiply -1 and 1, False if 0 and 1; X holds bits either way.

    Raises:
        ValueError: If units is no integer >= 2.

    Example:
        >>> machine = ng.Boltzmann(4)
        >>> params = machine.parameters(0.5)
        >>> X = machine.gibbs(params, torch.zeros(100, 4), sweeps=10)
        >>> ng.ratio_matching_loss(machine, params, X).backward()
        >>> params["J"].grad.shape
        torch.Size([6])
    """

    def __init__(self, units: int, *, spins: bool = False) -> None:
        check_integer("units", units, 2, hint=": a machine couples its units")
        self.units, self.spins = units, spins

    def parameters(
        self, scale: float = 0.0, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Biases and couplings that require gradients, drawn from N(0, scale^2).

        Args:
            scale: Standard deviation; 0 for zeros.
            generator: Of the draws; default torch's global one.
            dtype: Default torch's.
        """
        sizes = {"h": self.units, "J": self.units * (self.units - 1) // 2}
        drawn = {name: scale * torch.randn(size, generator=generator, dtype=dtype) for name, size in sizes.items()}
        return {name: value.requires_grad_() for name, value in drawn.items()}

    def matrix(self, params: Params) -> Tensor:
        """The couplings as a symmetric matrix (N, N) with a zero diagonal.

        Args:
            params: h and J.
        """
        self.check(params)
        upper = params["J"].new_zeros(self.units**2).scatter(0, self._places.to(params["J"].device), params["J"])
        return upper.view(self.units, -1) + upper.view(self.units, -1).mT

    def pairs(self, matrix: Tensor) -> Tensor:
        """The entries i < j of a matrix, in the order of J.

        Args:
            matrix: Shape (N, N).
        """
        return matrix.flatten()[self._places.to(matrix.device)]

    @cached_property
    def _places(self) -> Tensor:
        first, second = torch.triu_indices(self.units, self.units, 1)
        return first * self.units + second

    def fields(self, params: Params, inputs: Tensor) -> Tensor:
        """h + J v, shape (b, N): how strongly each unit is driven by the others.

        Args:
            params: h and J.
            inputs: Bits, shape (b, N).
        """
        return torch.addmm(params["h"], self.values(inputs), self.matrix(params))

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        v = self.values(inputs)
        return v @ params["h"] + 0.5 * (v @ self.matrix(params) * v).sum(1)

    def ratios(self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """(v_i - v_i') (h_i + sum_j J_ij v_j), v' the flipped unit: the diagonal of J is zero.

        Args:
            params: h and J.
            inputs: Bits, shape (b, N).
            dims: Units i; None for all.
        """
        ratios = self._jumps(inputs) * self.fields(params, inputs)
        return ratios if dims is None else ratios[:, torch.as_tensor(dims, device=ratios.device)]

    def ratio_jacobian(self, params: Params, inputs: Tensor) -> Tensor:
        """The derivative in h_i is the jump of v_i, that in J_ij the jump times the other unit's v.

        Args:
            params: h and J.
            inputs: Bits, shape (b, N).
        """
        self.check(params)
        v, jumps, count = self.values(inputs), self._jumps(inputs), params["J"].numel()
        first, second = torch.triu_indices(self.units, self.units, 1, device=v.device)
        pairs, columns = v.new_zeros(len(v), self.units, count), torch.arange(count, device=v.device)
        pairs[:, first, columns] = v[:, second]
        pairs[:, second, columns] = v[:, first]
        parts = {"h": torch.diag_embed(jumps), "J": jumps.unsqueeze(2) * pairs}
        return torch.cat([parts[name] for name in params], dim=2)

    @cached_property
    def states(self) -> Tensor:
        """All 2^N states as bits (2^N, N), the last unit changing fastest. ValueError beyond 22 units."""
        if self.units > LARGEST_ENUMERATION:
            raise ValueError(
                f"{self.units} units have 2^{self.units} states: exact sums end at {LARGEST_ENUMERATION} units; draw "
                "from the machine with gibbs(params, X, sweeps=...) instead"
            )
        return list_bit_states(self.units)

    def log_partition(self, params: Params) -> Tensor:
        """log of the sum of exp(log_p) over all states, a scalar: the constant that is left out. Exact.

        Args:
            params: h and J.

        Raises:
            ValueError: Beyond 22 units.
        """
        return self.log_p(params, self.states.to(params["h"])).logsumexp(0)

    def log_probabilities(self, params: Params) -> Tensor:
        """log p of every state with its constant, shape (2^N,), in the order of `states`.

        Args:
            params: h and J.

        Raises:
            ValueError: Beyond 22 units.
        """
        return self.log_p(params, self.states.to(params["h"])).log_softmax(0)

    def kl(self, params: Params, other: Params) -> Tensor:
        """KL(p(.; params), p(.; other)) in nats, exact.

        Args:
            params: h and J.
            other: h and J of the other machine.

        Raises:
            ValueError: Beyond 22 units.
        """
        ours, theirs = self.log_probabilities(params), self.log_probabilities(other)
        return (ours.exp() * (ours - theirs)).sum()

    def pseudo_likelihood_loss(self, params: Params, X: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """mean over X of -sum_i log p(x_i | the others): each term is a logistic regression.

        Args:
            params: h and J.
            X: Examples of 0 and 1, shape (b, N).
            weights: How often each example came, shape (b,); see `ng.ratio_matching_loss`.

        Reference:
            Besag 1975.
        """
        inputs = check_binary(check_density(self, params, X).detach(), params["h"].dtype)
        terms = functional.softplus(-self.ratios(params, inputs)).sum(1)  # p(x_i | others) = sigmoid(r_i)
        shares = check_weights(weights, inputs)
        return terms.mean() if shares is None else shares @ terms

    def gibbs(self, params: Params, X: Tensor, *, sweeps: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draws (b, N) after rounds of Gibbs sampling, every unit in turn, all examples at once.

        Args:
            params: h and J.
            X: Bits to start from, shape (b, N).
            sweeps: Number of rounds.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If sweeps is no integer >= 1, or X is not binary.
        """
        check_integer("sweeps", sweeps)
        state = check_binary(check_density(self, params, X).detach(), params["h"].dtype).clone()
        with torch.no_grad():
            v, couplings = self.values(state).mT.contiguous(), self.matrix(params)  # (N, b): a unit is a row
            low, gap = (-1.0, 2.0) if self.spins else (0.0, 1.0)
            for _ in range(sweeps):
                chances = torch.rand(v.shape, generator=generator, dtype=v.dtype, device=v.device).logit()
                for unit in range(self.units):
                    field = params["h"][unit] + couplings[unit] @ v
                    v[unit] = low + gap * (chances[unit] < gap * field)  # up with sigmoid(gap * field)
        return ((v - low) / gap).mT.contiguous()

    def check(self, params: Params) -> None:
        """Check that the parameters belong to this machine.

        Args:
            params: h (N,) and J (N (N - 1) / 2,).

        Raises:
            ValueError: If they do not.
        """
        sizes = {"h": self.units, "J": self.units * (self.units - 1) // 2}
        came = {name: tuple(value.shape) for name, value in params.items()}
        if came != {name: (size,) for name, size in sizes.items()}:
            raise ValueError(
                f"params are {came}, expected {{'h': ({sizes['h']},), 'J': ({sizes['J']},)}} for {self.units} units: "
                "J holds the couplings i < j row by row; start from machine.parameters()"
            )

    def values(self, inputs: Tensor) -> Tensor:
        """v, shape (b, N): what the biases and couplings multiply.

        Args:
            inputs: Bits, shape (b, N).
        """
        return 2 * inputs - 1 if self.spins else inputs

    def _jumps(self, inputs: Tensor) -> Tensor:
        """v_i less what it would be if flipped."""
        return (4 if self.spins else 2) * inputs - (2 if self.spins else 1)

    def __repr__(self) -> str:
        return f"Boltzmann({self.units}{', spins=True' if self.spins else ''})"


def list_bit_states(count: int) -> Tensor:
    """All states of some bits, shape (2^count, count), the last one changing fastest, as float64."""
    numbers = torch.arange(2**count).unsqueeze(1)
    return ((numbers >> torch.arange(count - 1, -1, -1)) & 1).double()
