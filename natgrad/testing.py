"""Checks for your own operators, solvers, metrics, structures and families: each holds a class to its contract.

A check returns nothing, or raises AssertionError with a sentence that names the broken promise and its size. They
write matrices out: use small models and float64.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Likelihood
from natgrad.metrics import Metric
from natgrad.operators import Block, Dense, Diagonal, Kronecker, LowRank, Operator
from natgrad.pure import Call, as_call, leaves, map_tensors
from natgrad.solvers import Solution, Solver, Status
from natgrad.spaces import Params, Space

__all__ = ["check_family", "check_metric", "check_operator", "check_solver", "check_structure"]

DEVIATIONS = 6  # standard errors between a sampled and an exact number: one false alarm in 5e8 normal draws


def check_operator(operator: Operator, *, rtol: float | None = None) -> None:
    """G is symmetric, positive semi-definite and linear, and every closed form agrees with its products.

    Compares mm, @, dense, diagonal, trace, root and inverse with the matrix of n products `mv`.
    rtol: allowed error relative to the largest entry; default 1e4 eps of the operator's dtype.
    """
    rtol = _tolerance(rtol, operator.dtype)
    matrix = _product_matrix(operator, rtol)
    _require_products(operator, matrix, rtol)
    scale = float(matrix.abs().max()) * len(matrix)
    for name, expected in (("dense", matrix), ("diagonal", matrix.diagonal()), ("trace", matrix.trace())):
        _require_close(f"operator.{name}()", getattr(operator, name)(), expected, rtol, scale)
    mean = operator.mean_eigenvalue()
    _require(mean.shape == () and bool(mean >= 0), f"operator.mean_eigenvalue() is {mean}, expected a scalar >= 0")
    root = operator.root()
    if root is not None:
        _require(root.shape[:1] == (operator.size,), f"operator.root() has shape {tuple(root.shape)}, expected (n, r)")
        _require_close("root root^T of operator.root()", root @ root.mT, matrix, rtol)
    _require_inverse(operator, matrix, rtol)


def check_solver(
    solver: Solver,
    *,
    operators: Mapping[str, Operator] | None = None,
    damping: float = 0.1,
    rtol: float = 1e-6,
    minimum_norm: bool = False,
) -> None:
    """The solver solves, and its residual, image, steps and status are what they say.

    operators: name -> operator, default a table of small ones that have a root.   rtol: allowed |b - A x| / |b| where
    the status is CONVERGED.   minimum_norm: demand G^+ b at damping 0 for b in the range, G singular or not.
    """
    for name, operator in (_example_operators() if operators is None else operators).items():
        generator = torch.Generator().manual_seed(0)
        rhs = torch.randn(operator.size, generator=generator, dtype=operator.dtype).to(operator.device)
        _require_solution(solver, name, operator, rhs, damping, rtol)
        if minimum_norm:
            least = torch.linalg.pinv(operator.dense(), hermitian=True, rtol=1e-12) @ operator.mv(rhs)
            found = solver.solve(operator, operator.mv(rhs)).value
            _require_close(f"on {name}, the undamped solution (minimum norm, G^+ b)", found, least, 1e3 * rtol)
        nothing = solver.solve(operator, torch.zeros_like(rhs), damping=damping)
        _require(not nothing.value.any(), f"on {name}, the solution for rhs = 0 is not 0")
    _require_errors(solver)
    overflow = Diagonal(torch.tensor([1.0, torch.inf, 1.0], dtype=torch.float64))
    broken = solver.solve(overflow, torch.ones(3, dtype=torch.float64), damping=damping)
    _require(broken.status != Status.CONVERGED, "on an operator that overflows, the status is CONVERGED")
    _require(
        bool(broken.value.isfinite().all()),
        "on an operator that overflows, the value is not finite; keep the last finite one",
    )


def check_metric(
    metric: Metric,
    params: Params,
    inputs: Any,
    *,
    reference: Metric | Operator | Tensor | None = None,
    draws: bool = False,
    rtol: float | None = None,
) -> None:
    """G(params) is a sound operator, a mean over examples, and leaves no trace in the model.

    inputs: as `metric.at` takes them.   reference: what G must equal: a matrix (n, n), an operator or another metric.
    draws: True for a metric with draws of its own (sampled labels, dropout): the comparison of two calls is left out.
    No trace: parameters, their `.grad`, buffers and the global random state are as before.
    """
    rtol = _tolerance(rtol, Space(params).dtype)
    with _untouched(params, getattr(metric, "model", None), "metric.at"):
        operator = metric.at(params, inputs)
        _require(isinstance(operator, Operator), f"metric.at returned {type(operator).__name__}, expected an Operator")
        size = Space(params).size
        _require(operator.size == size, f"metric.at returned {operator!r}, but params have {size} entries")
        check_operator(operator, rtol=rtol)
        matrix = operator.dense()
        if not draws:
            with torch.no_grad():
                _require_close("G taken under torch.no_grad()", metric.at(params, inputs).dense(), matrix, rtol)
            twice = metric.at(params, _duplicated(inputs, metric.needs_targets)).dense()
            _require_close("G of the batch taken twice (a mean over examples)", twice, matrix, rtol)
        if reference is not None:
            known = reference.at(params, inputs) if isinstance(reference, Metric) else reference
            expected = known.dense() if isinstance(known, Operator) else known
            _require_close("G against the reference", matrix, expected, rtol)


def check_structure(structure: Any, metric: Metric, params: Params, inputs: Any, *, rtol: float | None = None) -> None:
    """`structure.update` gives a sound operator and a memory that survives a checkpoint.

    Each of three updates is taken twice, from the memory and from the memory saved and loaded with
    weights_only=True, and the operators are compared bit for bit. The metric must not draw (no sampled labels).
    """
    with _untouched(params, getattr(metric, "model", None), "structure.update"):
        memory = None
        for _ in range(3):
            stored = _reloaded(memory)
            operator, following = structure.update(memory, metric, params, inputs)
            again, _ = structure.update(stored, metric, params, inputs)
            _require(isinstance(operator, Operator), f"structure.update returned {operator!r} first, no Operator")
            check_operator(operator, rtol=rtol)
            same = torch.equal(operator.dense(), again.dense())
            _require(
                same, "structure.update gives another operator from its memory saved and loaded: a part is missing"
            )
            kept = all(torch.equal(a, b) for a, b in zip(leaves(memory), leaves(stored), strict=True))
            _require(kept, "structure.update changed the memory that was passed in; return a new one")
            memory = following


def check_family(family: Likelihood, outputs: Any, *, samples: int = 20_000, rtol: float | None = None) -> None:
    """nll, sample, score, fisher, mv, root and kl of a likelihood speak of one distribution, at the given outputs.

    By sampling, within six standard errors: E[score] = 0, E[score score^T] = fisher, E[log p - log q] = KL(p, q).
    Exactly: mv and root agree with fisher, KL(p, p) = 0, and its second derivative is fisher. `fisher` and `kl` are
    checked where the family has them. Targets must not be bounded by the batch: outputs are repeated along it.
    """
    rows = family.rows(outputs).detach()
    rtol = _tolerance(rtol, rows.dtype)
    _require(rows.dim() == 2, f"family.rows(outputs) has shape {tuple(rows.shape)}, expected (R, m)")
    with _untouched({"outputs": rows}, None, "family"):
        targets, many = _drawn_targets(family, outputs, samples)
        scores = family.score(many, targets).view(samples, *rows.shape)
        _require_score_is_derivative(family, outputs)
        _require_mean("E[score]", scores, torch.zeros_like(rows))
        with suppress(NotImplementedError):
            fisher = family.fisher(rows)
            _require_form(family, rows, fisher, rtol)
            _require_mean("E[score score^T]", scores.unsqueeze(-1) * scores.unsqueeze(-2), fisher)
        with suppress(NotImplementedError):
            _require_mean_kl(family, outputs, many, targets, samples)
            _require_kl(family, rows, rtol)


def _require(condition: bool, sentence: str) -> None:
    """AssertionError with the sentence unless the condition holds (a bare assert vanishes under python -O)."""
    if not condition:
        raise AssertionError(sentence)


def _require_close(what: str, found: Tensor, expected: Tensor, rtol: float, scale: Any = None) -> None:
    """AssertionError unless shapes agree and the largest error is within rtol * scale (default: the largest entry)."""
    _require(found.shape == expected.shape, f"{what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if expected.numel():
        error = float((found - expected).abs().max())
        allowed = rtol * float(expected.abs().max() if scale is None else scale) + torch.finfo(expected.dtype).tiny
        _require(error <= allowed, f"{what} is off by {error:.3g}, allowed {allowed:.3g}")


def _tolerance(rtol: float | None, dtype: torch.dtype) -> float:
    return 1e4 * torch.finfo(dtype).eps if rtol is None else rtol  # 2e-12 in float64, 1e-3 in float32


def _product_matrix(operator: Operator, rtol: float) -> Tensor:
    """The (n, n) matrix of the products with the unit vectors, symmetric and PSD."""
    unit = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
    columns = [operator.mv(column) for column in unit]
    for column in columns:
        found, expected = (column.shape, column.dtype, column.device), (unit.shape[:1], unit.dtype, unit.device)
        _require(found == expected, f"operator.mv returned {found}, expected {expected}")
        _require(bool(column.isfinite().all()), "operator.mv returned a non-finite product with a unit vector")
    matrix = torch.stack(columns, dim=1)
    _require_close("operator.mv is not symmetric: G^T", matrix.mT, matrix, rtol)
    values = torch.linalg.eigvalsh(matrix)
    low, high = float(values[0]), float(values[-1])
    _require(
        low >= -rtol * abs(high), f"operator.mv is not positive semi-definite: eigenvalues {low:.3g} to {high:.3g}"
    )
    return matrix


def _require_products(operator: Operator, matrix: Tensor, rtol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(operator.size, 3, generator=generator, dtype=operator.dtype).to(operator.device)
    kept, expected = block.clone(), matrix @ block
    scale = float(matrix.abs().max()) * operator.size**0.5
    _require_close("operator.mm(block)", operator.mm(block), expected, rtol, scale)
    _require_close("operator @ block", operator @ block, expected, rtol, scale)
    _require_close("operator.mm of no columns", operator.mm(block[:, :0]), expected[:, :0], rtol)
    # a column of a block is strided: products must not rely on contiguous memory
    _require_close("operator.mv of a sum", operator.mv(block[:, 1]), expected[:, 1], rtol, scale)
    _require_close("operator @ vector", operator @ block[:, 2], expected[:, 2], rtol, scale)
    _require(torch.equal(block, kept), "a product changed its argument in place")
    _require_raises("operator @ a vector that is too long", lambda: operator @ torch.ones(len(matrix) + 1))


def _require_inverse(operator: Operator, matrix: Tensor, rtol: float) -> None:
    damping = float(matrix.trace()) / len(matrix) / 10 or 1.0
    inverse = operator.inverse(damping)
    if inverse is not None:
        unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        found = matrix @ inverse.dense() + damping * inverse.dense()
        _require_close(f"(G + {damping:.3g} I) operator.inverse({damping:.3g})", found, unit, 10 * len(matrix) * rtol)
    pseudo = operator.inverse(0.0)
    if pseudo is not None:
        inner = matrix @ pseudo.dense() @ matrix  # sqrt: conditioning enters squared
        _require_close("G operator.inverse(0) G", inner, matrix, torch.finfo(matrix.dtype).eps ** 0.5)


def _require_raises(what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (ValueError, TypeError) as error:
        _require(len(str(error)) > 20, f"{what} raises {error!r}: say what was expected, what came and what to do")
    except Exception as error:
        raise AssertionError(f"{what} raises {error!r}, expected a ValueError or TypeError at the door") from error
    else:
        raise AssertionError(f"{what} passes without an error")


def _example_operators() -> dict[str, Operator]:
    """Small operators, all with a root: what `check_solver` solves with."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def spd(n: int) -> Tensor:
        return torch.cov(draw(n, 3 * n)).view(n, n)

    thin = draw(9, 4)
    return {
        "Dense": Dense(spd(8)),
        "Dense of size one": Dense(spd(1)),
        "Dense of rank four": Dense(thin @ thin.mT),
        "Diagonal": Diagonal(draw(7).square()),
        "LowRank": LowRank(draw(10, 3)),
        "LowRank with more columns than rows": LowRank(draw(5, 12)),
        "Kronecker": Kronecker(spd(3), spd(4)),
        "Block": Block([Dense(spd(3)), Diagonal(draw(4).square()), LowRank(draw(5, 2))]),
        "Scaled sum": 0.5 * (Dense(spd(6)) + LowRank(draw(6, 2))),
    }


def _require_solution(solver: Solver, name: str, operator: Operator, rhs: Tensor, damping: float, rtol: float) -> None:
    kept, on, norm = rhs.clone(), f"on {name},", float(rhs.norm())
    solution = solver.solve(operator, rhs, damping=damping)
    _require(isinstance(solution, Solution), f"solve returned {type(solution).__name__}, expected a Solution")
    _require(torch.equal(rhs, kept), f"{on} solve changed rhs in place")
    value, found = solution.value, (solution.value.shape, solution.value.dtype)
    _require(found == (rhs.shape, rhs.dtype), f"{on} the value is {found}, expected {(rhs.shape, rhs.dtype)}")
    _require(bool(value.isfinite().all()), f"{on} the value is not finite")
    _require(isinstance(solution.status, Status), f"{on} the status is {solution.status!r}, expected a Status")
    _require(isinstance(solution.steps, int) and solution.steps >= 0, f"{on} steps is {solution.steps!r}")
    image = operator.mv(value) + damping * value
    residual, accuracy = (rhs - image).norm(), torch.finfo(rhs.dtype).eps ** 0.5
    _require_close(f"{on} the image (G + damping I) x", solution.image, image, accuracy, norm)
    _require_close(f"{on} the residual |b - (G + damping I) x|", solution.residual, residual, accuracy, norm)
    ratio = float(residual) / norm
    honest = solution.status != Status.CONVERGED or ratio <= rtol
    _require(honest, f"{on} the status is CONVERGED with |r| / |b| = {ratio:.3g}, allowed {rtol:.3g}")
    _require(ratio <= 1, f"{on} the value is worse than zero: |r| / |b| = {ratio:.3g}")


def _require_errors(solver: Solver) -> None:
    operator, rhs = Dense(torch.eye(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "rhs with an entry too many": lambda: solver.solve(operator, rhs.new_ones(4)),
        "rhs as a column (n, 1)": lambda: solver.solve(operator, rhs.unsqueeze(1)),
        "a NaN in rhs": lambda: solver.solve(operator, rhs * torch.nan),
        "a negative damping": lambda: solver.solve(operator, rhs, damping=-1.0),
        "a NaN as damping": lambda: solver.solve(operator, rhs, damping=float("nan")),
        "a guess of another shape": lambda: solver.solve(operator, rhs, guess=rhs[:2]),
        "a matrix instead of an operator": lambda: solver.solve(rhs.diag(), rhs),  # pyright: ignore
    }
    for what, call in calls.items():
        _require_raises(what, call)


@contextmanager
def _untouched(params: Params, model: Any, what: str) -> Iterator[None]:
    """AssertionError unless the block inside leaves parameters, gradients, buffers and the random state as they are."""
    buffers = dict(model.named_buffers(prefix="buffer ")) if isinstance(model, nn.Module) else {}

    def watched() -> dict[str, Tensor]:
        found = {f"params[{name!r}]": p for name, p in params.items()} | buffers
        return found | {
            f"params[{name!r}].grad": p.grad for name, p in params.items() if p.is_leaf and p.grad is not None
        }

    kept = {name: tensor.detach().clone() for name, tensor in watched().items()}
    state = torch.get_rng_state()
    yield
    for name, tensor in watched().items():
        _require(name in kept and torch.equal(tensor, kept[name]), f"{what} changed {name}")
    _require(torch.equal(state, torch.get_rng_state()), f"{what} moved the global random state; draw from a generator")


def _duplicated(inputs: Any, with_targets: bool) -> Any:
    data, targets = inputs if with_targets else (inputs, None)
    batch = as_call(data).batch()

    def twice(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor]) if tensor.dim() and len(tensor) == batch else tensor

    data = data.map(twice) if isinstance(data, Call) else map_tensors(data, twice)
    return (data, map_tensors(targets, twice)) if with_targets else data


def _reloaded(memory: Any) -> Any:
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError(f"torch.load(weights_only=True) refuses the memory; keep plain values: {error}") from error


def _drawn_targets(family: Likelihood, outputs: Any, samples: int) -> tuple[Any, Any]:
    many = map_tensors(outputs, lambda t: t.detach().repeat(samples, *[1] * (t.dim() - 1)))
    device = next(leaves(outputs)).device
    first, second = (family.sample(many, torch.Generator(device).manual_seed(0)) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))
    _require(same, "family.sample draws differently from one generator state; draw from the generator only")
    family.check_targets(many, first)
    return first, many


def _require_score_is_derivative(family: Likelihood, outputs: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    targets = family.sample(outputs, torch.Generator(next(leaves(outputs)).device).manual_seed(1))
    direction = map_tensors(outputs, lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device))
    length = torch.finfo(family.rows(outputs).dtype).eps ** (1 / 3)

    def value(shift: float) -> Tensor:
        moves = iter(leaves(direction))
        return family.nll(map_tensors(outputs, lambda t: t.detach() + shift * next(moves)), targets)

    nll = value(0.0)
    count = len(family.rows(outputs))
    _require(nll.shape == (count,), f"family.nll has shape {tuple(nll.shape)}, expected ({count},), one number per row")
    slope = (value(-length) - value(length)) / (2 * length)
    found = (family.score(outputs, targets) * family.rows(direction)).sum(1)
    _require_close("family.score against differences of nll", found, slope, 1e3 * length**2, 1 + slope.abs().max())


def _require_mean(what: str, draws: Tensor, expected: Tensor) -> None:
    error = (draws.mean(0) - expected).abs()
    floor = 1e4 * torch.finfo(draws.dtype).eps * (1 + draws.abs().max())  # entries without spread, such as exact zeros
    spread = draws.std(0) / len(draws) ** 0.5
    worst = float((error / (spread + floor)).max())
    _require(worst <= DEVIATIONS, f"{what} over {len(draws)} draws is {worst:.3g} standard errors off")


def _require_form(family: Likelihood, rows: Tensor, fisher: Tensor, rtol: float) -> None:
    shape = (*rows.shape, rows.shape[1])
    _require(fisher.shape == shape, f"family.fisher(rows) has shape {tuple(fisher.shape)}, expected {shape}")
    tangents = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3), dtype=rows.dtype).to(rows.device)
    expected = torch.einsum("imn,in->im", fisher, tangents)
    _require_close("family.mv(rows, tangents)", family.mv(rows, tangents), expected, rtol, fisher.abs().max())
    root = family.root(rows)
    _require_close("root root^T of family.root(rows)", root @ root.mT, fisher, rtol)


def _require_kl(family: Likelihood, rows: Tensor, rtol: float) -> None:
    same = family.kl(rows, rows)
    _require_close("family.kl(p, p)", same, torch.zeros(len(rows)).to(rows), rtol, 1.0)
    with torch.enable_grad():
        point = rows.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(family.kl(rows, point).sum(), point, create_graph=True)
        columns = [torch.autograd.grad(g, point, retain_graph=True)[0] for g in gradient.sum(0)]
    _require_close("the derivative of family.kl(p, q) at q = p", gradient.detach(), torch.zeros_like(rows), rtol, 1.0)
    fisher = family.fisher(rows)
    _require_close("the second derivative of family.kl", torch.stack(columns, 2), fisher, rtol, 1 + fisher.abs().max())


def _require_mean_kl(family: Likelihood, outputs: Any, many: Any, targets: Any, samples: int) -> None:
    moved, moved_many = (map_tensors(tree, lambda t: 0.9 * t.detach()) for tree in (outputs, many))
    ratio = (family.nll(moved_many, targets) - family.nll(many, targets)).view(samples, -1)
    _require_mean("E[log p - log q] against family.kl", ratio, family.kl(family.rows(outputs), family.rows(moved)))
