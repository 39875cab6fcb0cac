"""Stochastic reconfiguration: the natural gradient of the energy of a wave function, for any sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.ground.checks import check_number, check_positive, check_share
from natgrad.ground.exchanges import share_count
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.pure import check_examples_apart, set_modes_aside
from natgrad.ground.spaces import trainable
from natgrad.ground.states import check_parts
from natgrad.ground.typed_torch import measure_norm
from natgrad.metrics import GeometricTensor, geometric_tensor, lay_out_amplitudes
from natgrad.operators import Centred, Operator, Pullback
from natgrad.optim import LinearSystem, NaturalGradient, Processes, Solved, State, SystemEvidence, join_operator
from natgrad.rules import Constant, Damping, Rule, TrustRegion
from natgrad.solvers import Auto, Solver, Spring
from natgrad.structures import Dense, Exact, Structure
from natgrad.vmc.amplitude import LogAmplitude
from natgrad.vmc.energy import EnergyEstimate, estimate_jointly
from natgrad.vmc.local_energies import check_integers, read_numbers, read_states


class MeasuredSystem:
    """The system of a structure by layers, whose solutions take their length from S at the samples, centred.

    Blocks leave out what layers, and the positions of a convolution, have in common: along a translation S is as many
    times larger than its blocks as there are sites, and their own step would be as many times too long.
    """

    def __init__(self, blocks: LinearSystem, metric: Operator, gradient: Tensor) -> None:
        self.blocks, self.metric, self.gradient = blocks, metric, gradient
        self.operator, self.memory = blocks.operator, blocks.memory

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """a x with the a that minimises 1/2 a^2 x^T (S + damping I) x - a x^T (g + damping x_0): one product with S."""
        solved = self.blocks.solve(level, guess)
        solution, damping, value = solved.solution, solved.damping, solved.solution.value
        image = self.metric.mv(value) + damping * value
        pulled = self.gradient if guess is None else self.gradient + damping * guess
        form = value @ image
        length = torch.where(form > 0, (value @ pulled) / form, 1.0).clamp(min=0)
        value, image = length * value, length * image
        known = {"residual": measure_norm(self.gradient - image), "steps": solution.steps + 1}
        solution = replace(solution, value=value, image=image, basis=None, iterates=(), **known)
        return replace(solved, solution=solution)


@explain_calls
def stochastic_reconfiguration(
    psi: LogAmplitude,
    lr: float = 0.05,
    damping: float | Damping = 1e-3,
    momentum: float = 0.0,
    *,
    clip: float | None = None,
    structure: Structure | None = None,
    solver: Solver | None = None,
    rule: Rule | None = None,
    group: Any = None,
) -> StochasticReconfiguration:
    """theta <- theta - lr (S + damping I)^-1 F, with F = Re Cov(O, e) half the energy's gradient, S = Re Cov(O, O).

    O = d log psi / d theta at the samples, e their local energies. It is imaginary time evolution within the network,
    lr its time step, and the natural gradient of the energy. The solver follows the shape: S itself (SR) where there
    are fewer parameters than samples, the Gram matrix of the samples (minSR), layer by layer and without the Jacobian,
    where there are more. With momentum the step is SPRING's.

    Args:
        psi: The wave function.
        lr: Time step. A scheduler of torch's takes `.optimizer`.
        damping: Added to the diagonal of S, as it is; or a strategy such as `ng.Relative(1e-3)`.
        momentum: mu of SPRING, in [0, 1): how much of the last direction stays where the samples say nothing.
        clip: Local energies count in F up to this many mean absolute deviations from their median, as in FermiNet (5
            there); the reported energy is of all. None: as they are, which lattice models need.
        structure: `ng.Kronecker()` and its like for large nets: K-FAC, of the moment about zero instead of the mean,
            with the length that S itself gives its direction. Default `ng.Exact()`.
        solver: Default `ng.Auto()`, by shape.
        rule: Default `ng.TrustRegion(radius=0.1)`, which bounds a step in nats of |psi|^2; `ng.Rate()` does not.
        group: The processes of `torch.distributed` that each have walkers of their own: F, S and the energy are those
            of all walkers.

    Raises:
        TypeError: If psi is not an `ng.LogAmplitude`.
        ValueError: For numbers out of range, for momentum with a damping of each block's own, and for a damping or a
            rule that compares the loss at several points: samples belong to one psi.

    Reference:
        Sorella 1998 (SR); Chen & Heyl 2024 (minSR); Goldshlager, Abrahamsen & Lin 2024 (SPRING); Pfau, Spencer,
        Matthews & Foulkes 2020 (clipping, K-FAC).

    Example:
        >>> psi = ng.LogAmplitude(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        >>> sr = ng.stochastic_reconfiguration(psi, lr=0.05, damping=1e-3)
        >>> states, local_energies = torch.randn(100, 4), torch.randn(100)
        >>> print(sr.step(states, local_energies).samples)
        100
    """
    if not isinstance(psi, LogAmplitude):
        raise TypeError(f"psi is {type(psi).__name__}, expected ng.LogAmplitude(net)")
    check_share("momentum", momentum)
    if clip is not None:
        check_positive("clip", clip, hint=", or None for local energies as they are")
    if not isinstance(damping, Damping):
        check_number("damping", damping)
        damping = Constant(damping, per="loss")
    if momentum and damping.per_block:
        raise ValueError(f"damping is {damping}, expected one number for the whole of S: SPRING's momentum uses it")
    for name, chosen, other, needs in (
        ("damping", damping, "a number or ng.Relative(1e-3)", damping.needs_ratio),
        ("rule", rule, "ng.TrustRegion(radius) or ng.Rate()", rule is not None and rule.needs_loss),
    ):
        if needs:
            raise ValueError(
                f"{name} is {chosen}, which compares the loss at several points, and the samples of a step belong to "
                f"one psi: take {other}"
            )
    inner = solver or Auto()
    centred = structure is None or isinstance(structure, (Exact, Dense))
    optimizer = NaturalGradient(
        trainable(psi),
        geometric_tensor(psi, centred=centred, outputs=psi.take_moving),
        lr,
        structure=structure,
        solver=Spring(inner) if momentum else inner,
        damping=damping,
        rule=TrustRegion(radius=0.1) if rule is None else rule,
        warm_start=momentum,
        group=group,
    )
    return StochasticReconfiguration(psi, optimizer, clip)


class StochasticReconfiguration:
    """What `stochastic_reconfiguration` gives: `.step(states, local_energies)`, and what it has come to.

    Args:
        psi: The wave function.
        optimizer: The engine, a `torch.optim.Optimizer` over psi's real parameters.
        clip: As in `stochastic_reconfiguration`.

    Attributes:
        energies: The energy at every step so far, each with its error.
    """

    def __init__(self, psi: LogAmplitude, optimizer: NaturalGradient, clip: float | None = None) -> None:
        self.psi, self.optimizer, self.clip = psi, optimizer, clip
        self.energies: list[EnergyEstimate] = []

    def __repr__(self) -> str:
        chosen = {name: getattr(self.optimizer, name) for name in ("structure", "solver", "damping", "rule")}
        lr, steps = self.optimizer.param_groups[0]["lr"], len(self.energies)
        return write_choices(self, psi=self.psi.net, lr=lr, **chosen, clip=self.clip, steps=steps)

    @set_modes_aside
    def step(
        self, states: Any, local_energies: Any, weights: Any = None, *, enumerated: bool = False
    ) -> EnergyEstimate:
        """One step.

        Args:
            states: Samples of |psi|^2, shape (b, ...); or of several chains, shape (chains, b, ...). A tensor, or an
                array of NumPy's or JAX's, as NetKet's `state.samples`; so are the next two.
            local_energies: (H psi)(s) / psi(s), shape (b,) or (chains, b), real or complex; NetKet's
                `state.local_estimators(H)` too.
            weights: Of the samples, with sum one, same shape. None: equal ones.
            enumerated: True if the states are all there are, with their probabilities as weights.

        With several processes (`group=`) these are this process's walkers, at least one, and weights count relative to
        one another over all of them.

        Returns:
            The energy before the step, with its error. It joins `energies`.

        Raises:
            TypeError: For what is neither a tensor nor an array.
            ValueError: For shapes that do not fit, and for a local energy or log psi that is not finite: the sentence
                names the sample. Nothing is changed then.
        """
        processes = self.processes
        states = read_states(self.psi, states)
        local_energies = read_numbers(self.psi, local_energies, "local_energies")
        weights = None if weights is None else read_numbers(self.psi, weights, "weights")
        with processes.failing_together(self.psi.device):
            check_examples_apart("psi.net", self.psi.net)
            states, flat = check_samples(states, local_energies, weights)
            check_integers(self.psi, states)
            if weights is not None and processes.size > 1 and not self.metric.centred:
                raise ValueError("weights is given, and a structure by layers on several processes takes equal ones")
        energy = estimate_jointly(processes, local_energies, weights, enumerated=enumerated)
        shares = None if weights is None else weights.detach().reshape(-1)
        self.optimizer.step(evidence=lambda: self._gather_evidence(states, flat, shares))
        self.energies.append(energy)
        return energy

    @property
    def processes(self) -> Processes:
        """The processes that have walkers; one alone exchanges nothing."""
        return self.optimizer.processes

    def state_report(self) -> Any:
        """How the last step went, as of `ng.NaturalGradient`: damping, solver, residual, KL in nats of |psi|^2."""
        return self.optimizer.state_report()

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides psi's parameters, and the energies so far: plain values and tensors."""
        energies = [list(vars(energy).values()) for energy in self.energies]
        return {"optimizer": self.optimizer.state_dict(), "energies": energies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Args:
            state_dict: What that returned.

        Raises:
            ValueError: If it lacks a part.
        """
        check_parts(self, state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.energies = [EnergyEstimate(*values) for values in state_dict["energies"]]

    @property
    def metric(self) -> GeometricTensor:
        """Which S; about zero for structures by layers, which listen to a pass of their own."""
        metric = self.optimizer.metric
        assert isinstance(metric, GeometricTensor)
        return metric

    def _gather_evidence(self, states: Tensor, local_energies: Tensor, weights: Tensor | None) -> SystemEvidence:
        """F and S at the samples, from the same graph."""
        processes, params, opt = self.processes, trainable(self.psi), self.optimizer
        freed = sorted(params.keys() - opt.model.keys())
        if freed:
            raise ValueError(
                f"psi's parameters {freed} were frozen when ng.stochastic_reconfiguration was built, and are trainable "
                "now: build it anew, or freeze them again"
            )
        share = float(len(states)) if weights is None or processes.size == 1 else float(weights.sum())
        with processes.failing_together(self.psi.device):
            own = weights if processes.size == 1 else (weights / share if share and weights is not None else None)
            operator = replace(self.metric, centred=True).at(params, (states, own))
            assert isinstance(operator, Centred)
            moment = operator.moment
            assert isinstance(moment, Pullback)
            check_amplitudes(moment.outputs, states)
        metric: Operator = operator
        if processes.size > 1:  # S over the walkers of all processes, about their common mean
            joined = join_operator(processes, moment, moment.linearization.space, share)
            counted = processes.gather_rows(joined.shares[processes.rank] ** 0.5 * operator.counted)
            metric = Centred(cast("Any", joined), counted)
        shares = None if weights is None else processes.gather_rows(weights)
        gaps = find_gaps(processes.gather_rows(local_energies), shares, self.clip)
        place = sum(share_count(processes, len(states), states.device)[: processes.rank])
        cotangents = fit_columns(gaps[place : place + len(states)], moment.outputs)
        gradient = processes.sum(pull_back(moment, cotangents))

        def system(state: State) -> LinearSystem:
            known = metric if self.metric.centred else None
            blocks = opt.metric_system(params, gradient, states, weights, state, known)
            return blocks if known is not None else MeasuredSystem(blocks, metric, gradient)

        return opt.evidence(params, gradient, system, examples=lambda: len(states))


def find_gaps(local_energies: Tensor, weights: Tensor | None, clip: float | None) -> Tensor:
    """w (e - E e), so that F = Re E[O* (e - E e)] is the sum of their pullbacks on the rows of log psi."""
    values = lay_out_amplitudes(local_energies)
    if clip is not None:  # to so many mean absolute deviations from the column's median, as in the code of Pfau et al.
        centre = values.median(dim=0).values
        reach = clip * (values - centre).abs().mean(0)
        values = values.clamp(centre - reach, centre + reach)
    shares = torch.full_like(values[:, 0], 1 / len(values)) if weights is None else weights.to(values)
    shares = (shares / shares.sum()).unsqueeze(1)
    return shares * (values - (shares * values).sum(0))


def pull_back(moment: Pullback, cotangents: Tensor) -> Tensor:
    """J^T w for cotangents w (b, m), from the rows sqrt(w_i) O_i that S needs as well: no backward pass for it."""
    rows = moment.rows
    assert rows is not None  # of the identity form
    roots = moment.weights.sqrt().unsqueeze(1)
    return rows.mv(torch.where(roots > 0, cotangents / roots, 0).flatten())


def fit_columns(gaps: Tensor, rows: Tensor) -> Tensor:
    """Gaps (b, 1) or (b, 2) as cotangents of the rows of log psi (b, m): in their dtype, with as many columns."""
    gaps = gaps.to(rows)
    if gaps.shape[1] < rows.shape[1]:  # real energies of a complex psi
        gaps = torch.cat([gaps, torch.zeros_like(gaps)], dim=1)
    return gaps[:, : rows.shape[1]]


def check_samples(states: Tensor, local_energies: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """States (b, ...) and local energies (b,), chains one after the other. ValueError where they do not fit."""
    shape = local_energies.shape
    if local_energies.dim() not in (1, 2) or states.shape[: len(shape)] != shape or not shape.numel():
        raise ValueError(
            f"states has shape {tuple(states.shape)} and local_energies {tuple(shape)}, expected (b, ...) and (b,), or "
            "(chains, b, ...) and (chains, b)"
        )
    if states.dim() == len(shape):
        raise ValueError(f"states has shape {tuple(states.shape)}, expected an axis for the variables of a state too")
    if weights is not None and weights.shape != shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, expected {tuple(shape)}, that of local_energies")
    if weights is not None and not bool((weights >= 0).all()):
        raise ValueError(f"weights has entries down to {float(weights.min()):.4g}, expected numbers >= 0 with sum one")
    flat, states = local_energies.detach().reshape(-1), states.detach().flatten(0, len(shape) - 1)
    if not all_finite(flat):
        worst = int((~flat.isfinite()).nonzero()[0])
        raise ValueError(
            f"local_energies[{worst}] is {flat[worst].item()} at the state {states[worst].tolist()}: look for psi = 0 "
            "or a singular potential there"
        )
    return states, flat


def check_amplitudes(rows: Tensor, states: Tensor) -> None:
    """ValueError where log psi is not finite, with the state."""
    if not all_finite(rows):
        worst = int((~rows.isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"log psi is {rows[worst].tolist()} at the state {states[worst].tolist()}: a sample of |psi|^2 has a "
            "finite one; look for an overflow in the network"
        )
