"""The Gauss-Markov field: a normal distribution whose precision is zero wherever two variables have no edge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from natgrad.energies.boltzmann import place_pairs
from natgrad.ground.checks import check_integer
from natgrad.ground.densities import Density, check_continuous, check_density, check_entries
from natgrad.ground.linalg import require_factor, symmetrise
from natgrad.ground.pure import leave_autocast
from natgrad.ground.spaces import Params

OFF_CENTRE = 0.1  # deviations of a variable by which its mean may miss zero: 1 % of its second moment
SURE = 6.0  # standard errors that its mean may have by chance


class GaussMarkov(Density):
    """log p(x) = -1/2 x^T P x + constant, P symmetric, P_ij = 0 unless i = j or (i, j) is an edge.

    The mean of x is zero: subtract that of the data. Parameters: {"diagonal": (N,), "edges": (E,)}, the entries of
    P. The scores -P x are linear in them, so the score-matching loss is a quadratic whose Hessian is the score
    metric everywhere. One natural step at rate 1 ends at the optimum, from anywhere, and `fit` solves for it. With
    all edges it is maximum likelihood; without some of them it is not, but both find the same P as the data grow.

    Args:
        size: N.
        edges: Pairs of different variables, each once.

    Raises:
        ValueError: If the size is no integer >= 1, or a pair does not fit.

    Reference:
        Hyvarinen 2007.

    Example:
        >>> field = ng.GaussMarkov(3, [(0, 1), (1, 2)])
        >>> params = field.fit(torch.randn(500, 3))
        >>> field.precision(params)[0, 2].item()
        0.0
    """

    def __init__(self, size: int, edges: Iterable[tuple[int, int]]) -> None:
        check_integer("size", size, of="the number of variables")
        self.size = size
        self.edges = tuple((min(pair), max(pair)) for pair in edges)
        wrong = [(i, j) for i, j in self.edges if not 0 <= i < j < size]
        if wrong or len(set(self.edges)) < len(self.edges):
            what = f"the pair {wrong[0]}" if wrong else "a pair twice"
            raise ValueError(f"edges hold {what}, expected pairs of different variables 0 to {size - 1}, each once")
        self._ends = torch.tensor(self.edges, dtype=torch.long).view(-1, 2).unbind(1)

    def parameters(self, precision: Tensor | None = None) -> dict[str, Tensor]:
        """The entries of P on the graph; they require gradients.

        Args:
            precision: P, shape (N, N); default the identity.

        Raises:
            ValueError: If it has another shape.
        """
        matrix = torch.eye(self.size) if precision is None else precision.detach()
        if matrix.shape != (self.size, self.size):
            raise ValueError(f"precision has shape {tuple(matrix.shape)}, expected ({self.size}, {self.size})")
        first, second = self._ends
        parts = {"diagonal": matrix.diagonal().clone(), "edges": matrix[first, second].clone()}
        return {name: value.requires_grad_() for name, value in parts.items()}

    def precision(self, params: Params) -> Tensor:
        """P, shape (N, N).

        Args:
            params: Its entries.
        """
        self.check(params)
        first, second = (ends.to(params["edges"].device) for ends in self._ends)
        upper = params["edges"].new_zeros(self.size**2).scatter(0, first * self.size + second, params["edges"])
        upper = upper.view(self.size, self.size)
        return torch.diag_embed(params["diagonal"]) + upper + upper.mT

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        return 0.5 * (inputs * self.scores(params, inputs)).sum(1)

    def scores(self, params: Params, inputs: Tensor) -> Tensor:
        """-P x."""
        return -inputs @ self.precision(params)

    def scores_and_curvatures(
        self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """-P x and -diag P, the same for every example."""
        curvatures = -params["diagonal"].expand(len(inputs), -1)
        return self.scores(params, inputs), curvatures if dims is None else curvatures[:, list(dims)]

    def score_jacobian(self, params: Params, inputs: Tensor) -> Tensor:
        """The derivative of -(P x)_i in P_ii is -x_i, that in P_ij is -x_j."""
        self.check(params)
        parts = {"diagonal": torch.diag_embed(-inputs), "edges": place_pairs(-inputs, self._ends)}
        return torch.cat([parts[name] for name in params], dim=2)

    @leave_autocast
    def fit(self, X: Tensor) -> dict[str, Tensor]:
        """The minimum of the score-matching loss on X: G theta = d tr(P) / d theta, G the score metric.

        Args:
            X: Examples, shape (b, N).

        Raises:
            ValueError: If X does not determine P: too few examples, or a variable that is always zero. If the mean of a
                variable is not zero: by a tenth of its standard deviation, and by more than chance gives.
        """
        check_continuous(X)
        start = self.parameters(torch.zeros(self.size, self.size, dtype=X.dtype, device=X.device))
        x = self.condense(check_density(self, start, X))
        root = self.score_jacobian(start, x).flatten(0, 1)
        metric = symmetrise(root.mT @ root) / len(x)
        slope = torch.cat([torch.ones_like(start["diagonal"]), torch.zeros_like(start["edges"])])
        factor = require_factor(
            metric,
            f"X has {len(X)} examples of {self.size} variables and leaves some of the {len(slope)} entries of P "
            "undetermined: give more examples, or take the variables out that never move",
        )
        check_centred(X)
        entries = torch.cholesky_solve(slope.unsqueeze(1), factor).squeeze(1).split([self.size, len(self.edges)])
        return {name: value.clone().requires_grad_() for name, value in zip(start, entries, strict=True)}

    def condense(self, X: Tensor) -> Tensor:
        """N examples with the second moments of X: the loss and the metric depend on nothing else.

        Args:
            X: Examples, shape (b, N); with b <= N they are returned as they are.
        """
        return X if len(X) <= self.size else torch.linalg.qr(X, mode="r").R * (self.size / len(X)) ** 0.5

    def sample(self, params: Params, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, shape (count, N).

        Args:
            params: The entries of P.
            count: How many.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If P is not positive definite.
        """
        factor = self._factor(params).detach()
        z = torch.randn(self.size, count, generator=generator, dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor.mT, z, upper=True).mT

    def log_partition(self, params: Params) -> Tensor:
        """N/2 log 2 pi - 1/2 log det P, the constant that is left out.

        Args:
            params: The entries of P.

        Raises:
            ValueError: If P is not positive definite.
        """
        return self.size / 2 * math.log(2 * math.pi) - self._factor(params).diagonal().log().sum()

    def kl(self, params: Params, other: Params) -> Tensor:
        """KL(p(.; params), p(.; other)) in nats.

        Args:
            params: The entries of P.
            other: The entries of the other precision.

        Raises:
            ValueError: If a precision is not positive definite.
        """
        overlap = torch.cholesky_solve(self.precision(other), self._factor(params)).trace()  # tr(P^-1 Q)
        return 0.5 * (overlap - self.size) + self.log_partition(other) - self.log_partition(params)

    def check(self, params: Params) -> None:
        """Check that the parameters belong to this field.

        Args:
            params: The diagonal (N,) and the edges (E,).

        Raises:
            ValueError: If they do not.
        """
        shapes = {"diagonal": (self.size,), "edges": (len(self.edges),)}
        check_entries(params, shapes, ": the entries of the precision; start from field.parameters()")

    def _factor(self, params: Params) -> Tensor:
        return require_factor(
            self.precision(params),
            "params give a precision that is not positive definite, which no distribution has; score matching "
            "does not keep it so: take more examples or fewer edges",
        )

    def __repr__(self) -> str:
        return f"GaussMarkov({self.size}, {len(self.edges)} edges)"


def check_centred(X: Tensor) -> None:
    """Check that no mean of a variable is OFF_CENTRE deviations and SURE standard errors away from zero; X (b, N)."""
    mean, deviation = X.mean(0), X.std(0, correction=0)
    off = mean.abs() > deviation * max(OFF_CENTRE, SURE / len(X) ** 0.5)
    if bool(off.any()):
        i = int(off.nonzero()[0])
        raise ValueError(
            f"X[:, {i}] has the mean {float(mean[i]):.3g} and the standard deviation {float(deviation[i]):.3g}, "
            "expected the mean zero, without which all variables seem to depend on one another: subtract it, "
            "field.fit(X - X.mean(0))"
        )
