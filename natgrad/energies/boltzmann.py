"""The fully visible Boltzmann machine: every pair of bits coupled, all in closed form except the constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.checks import check_integer
from natgrad.ground.densities import Density, check_binary, check_density, check_entries, check_weights
from natgrad.ground.linalg import eigh, require_inverse
from natgrad.ground.pure import RandomState, unwrap_examples
from natgrad.ground.spaces import Params, Space
from natgrad.metrics import Metric, RatioMetric
from natgrad.operators import Operator
from natgrad.structures import Memory, Preconditioner

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
        kind: Any = {"device": generator and generator.device, "dtype": dtype}
        drawn = {name: scale * torch.randn(size, generator=generator, **kind) for name, size in sizes.items()}
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
        """(v_i - v_i') (h_i + sum_j J_ij v_j), v' the flipped unit: the diagonal of J is zero."""
        ratios = self._jumps(inputs) * self.fields(params, inputs)
        return ratios if dims is None else ratios[:, torch.as_tensor(dims, device=ratios.device)]

    def ratio_jacobian(self, params: Params, inputs: Tensor) -> Tensor:
        """The derivative in h_i is the jump of v_i, that in J_ij the jump times the other unit's v."""
        self.check(params)
        v, jumps = self.values(inputs), self._jumps(inputs)
        pairs = place_pairs(v, torch.triu_indices(self.units, self.units, 1, device=v.device))
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
        hint = f" for {self.units} units: J holds the couplings i < j row by row; start from machine.parameters()"
        check_entries(params, {"h": (self.units,), "J": (self.units * (self.units - 1) // 2,)}, hint)

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


def place_pairs(v: Tensor, ends: Sequence[Tensor] | Tensor) -> Tensor:
    """d (J v)_i / dJ_e for couplings J_e = J_ij = J_ji of pairs e of variables: v_j at i and v_i at j, (b, N, E)."""
    first, second = ends
    pairs, columns = v.new_zeros(*v.shape, len(first)), torch.arange(len(first), device=v.device)
    pairs[:, first, columns] = v[:, second]
    pairs[:, second, columns] = v[:, first]
    return pairs


def list_bit_states(count: int) -> Tensor:
    """All states of some bits, shape (2^count, count), the last one changing fastest, as float64."""
    numbers = torch.arange(2**count).unsqueeze(1)
    return ((numbers >> torch.arange(count - 1, -1, -1)) & 1).double()


# A preconditioner for the metrics: two factors, and a Lyapunov equation because J is symmetric


@dataclass(frozen=True)
class PairPreconditioner(Preconditioner):
    """P ~ (G + damping I)^-1 for `ng.ratio_metric` of a `Boltzmann` machine, from K-FAC's assumption.

    Row i of the couplings has the metric E[w_i v v^T], w_i = 2 [s_i (1 - s_i)]^2 jump^2. With w_i independent of v it
    is mean(w_i) C, C the covariance of v once the biases are centred; the symmetry of J makes one equation of the rows,
    W D C + C D W = S, which the eigenvectors of W^-1/2 C W^-1/2 solve. The damping is split over W and C as in K-FAC.
    Applying P costs four (N, N) products. Memory: 2 N^2 numbers.

    Args:
        machine: Whose metric it is.
        every: Steps between eigendecompositions, O(N^3) each.
        by_rows: True solves every row as if it were free, W D C = S / 2, and takes the symmetric part: one (N, N)
            product and an inverse in place of four and an eigendecomposition.

    Raises:
        TypeError: If the machine is no `Boltzmann`.
        ValueError: If `every` is no integer >= 1.
    """

    machine: Boltzmann
    every: int = 10
    by_rows: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.machine, Boltzmann):
            raise TypeError(f"machine is {type(self.machine).__name__}, expected an ng.Boltzmann")
        check_integer("every", self.every)

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator | None,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        if not isinstance(metric, RatioMetric) or metric.density is not self.machine:
            raise TypeError("PairPreconditioner(machine) goes with ng.ratio_metric(machine), of the same machine")
        age = memory["age"] if memory else 0
        if not memory or age % self.every == 0:
            memory = self._factors(metric, params, unwrap_examples(inputs), damping)
        weights = memory["weights"]
        if self.by_rows:
            solve = partial(solve_rows, weights, memory["inverse"])
        else:
            solve = partial(solve_pairs, weights, memory["values"], memory["vectors"])
        return CentredInverse(self.machine, params, weights, memory["mean"], solve), {**memory, "age": age + 1}

    def _factors(self, metric: RatioMetric, params: Params, inputs: Any, damping: float) -> Memory:
        with torch.no_grad():
            x = inputs.to(params["h"].dtype)
            entries = metric.entries(x, self.machine.ratios(params, x))  # (b, N)
            weights = entries.mean(0) * (4 if self.machine.spins else 1)
            v = self.machine.values(x)
            mean = v.mean(0)
            covariance = (v - mean).mT @ (v - mean) / len(v)
            weights, covariance = add_split_damping(weights, covariance, damping)
            if self.by_rows:
                inverse = require_inverse(covariance, "the units' covariance has no inverse: give a larger damping")
                return {"weights": weights, "mean": mean, "inverse": inverse}
            scale = weights.rsqrt()
            values, vectors = eigh(scale.unsqueeze(1) * covariance * scale)
        return {"weights": weights, "mean": mean, "values": values.clamp(min=0), "vectors": vectors}


def add_split_damping(weights: Tensor, covariance: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """W + delta I and C + epsilon I with 2 delta epsilon = damping, split by their mean eigenvalues (K-FAC's pi)."""
    pi = (weights.mean() / covariance.diagonal().mean().clamp(min=1e-30)).clamp(1e-6, 1e6).sqrt()
    root = (max(damping, 1e-12) / 2) ** 0.5
    shifted = covariance.clone()
    shifted.diagonal().add_(root / pi)
    return weights + root * pi, shifted


class CentredInverse(Operator):
    """g -> d: biases by 1 / W, couplings by `solve`, S -> D off the diagonal, (N, N) both; all centred by mean E[v]."""

    def __init__(
        self, machine: Boltzmann, params: Params, weights: Tensor, mean: Tensor, solve: Callable[[Tensor], Tensor]
    ) -> None:
        self.machine, self.space, self.solve = machine, Space(params), solve
        self.weights, self.mean = weights, mean  # (N,) both
        self.size, self.dtype, self.device = self.space.size, weights.dtype, weights.device

    def mv(self, vector: Tensor) -> Tensor:
        parts = self.space.unflatten(vector)
        h, couplings = parts["h"], self.machine.matrix(parts)
        centred = couplings - torch.outer(h, self.mean) - torch.outer(self.mean, h)
        solved = self.solve(centred.fill_diagonal_(0.0)).fill_diagonal_(0.0)
        solution = {"h": h / self.weights - solved @ self.mean, "J": self.machine.pairs(solved)}
        return self.space.flatten({name: solution[name] for name in parts})


def solve_pairs(weights: Tensor, values: Tensor, vectors: Tensor, right: Tensor) -> Tensor:
    """D of W D C + C D W = S, from the eigenvalues and eigenvectors of W^-1/2 C W^-1/2, weights the diagonal of W."""
    scale = weights.rsqrt()
    rotated = vectors.mT @ (scale.unsqueeze(1) * right * scale) @ vectors
    solved = vectors @ (rotated / (values.unsqueeze(1) + values)) @ vectors.mT
    return scale.unsqueeze(1) * solved * scale


def solve_rows(weights: Tensor, inverse: Tensor, right: Tensor) -> Tensor:
    """The symmetric part of W^-1 S C^-1 / 2: every row solved as if the couplings were not symmetric."""
    solved = (right / weights.unsqueeze(1)) @ inverse
    return 0.25 * (solved + solved.mT)
