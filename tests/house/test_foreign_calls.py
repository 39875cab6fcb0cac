"""What people type who come from other packages: one sentence each, which says what to type here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Assembled
from torch import nn

import natgrad as ng

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
X, Y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])
CE = nn.CrossEntropyLoss()
NAMES = {
    "ng.optim.KFAC": "natgrad.kfac",
    "ng.KFACPreconditioner": "natgrad.kfac",
    "ng.NGD": "natgrad.NaturalGradient",
    "ng.GGNLinearOperator": "natgrad.gauss_newton",
    "ng.FIM": "natgrad.fisher",
    "ng.CMAEvolutionStrategy": "natgrad.minimize",
    "ng.PINN": "natgrad.residuals",
    "ng.MCState": "natgrad.vmc",
    "ng.SVI": "natgrad.variational",
    "ng.metrics.KFAC": "natgrad.kfac",
    "ng.families.Categoric": "Categorical",
}
BASES = (
    *(ng.Density, ng.Likelihood, ng.Metric, ng.Rule, ng.Damping, ng.Structure, ng.Solver, ng.Preconditioner, ng.Update),
    *(ng.ExponentialFamily, ng.layers.Layer, ng.geometry.Manifold),
)


def make_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)


INSIDE = Assembled(lambda m, x: m.linear(make_jagged().double()).values(), linear=nn.Linear(3, 2)).double()
COUNTED = nn.Embedding(5, 3, scale_grad_by_freq=True)


def pde(x: Any, u: Any) -> Any:
    return u[:, 0] - x


def ode(x: Any, u: Any) -> Any:
    return u(x) - x


def log_joint(z: torch.Tensor) -> torch.Tensor:
    return -z.square().sum(-1)


def fit_mean() -> Any:
    return ng.maximize_likelihood(lambda p, x: -(x - p).square().sum(), torch.zeros(3), X.float())


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "criteria as heads": (lambda: ng.Heads(CE, nn.MSELoss()), r"\(ng.Categorical\(\), 10\)"),
    "a scripted model": (lambda: ng.kfac(torch.jit.script(NET), CE), "torch.jit.script"),
    "a scripted model's metric": (lambda: ng.fisher(torch.jit.script(NET), CE).at(ng.trainable(NET), X), "jit.script"),
    "a gradient over counts": (
        lambda: ng.fisher(COUNTED, CE).at(ng.trainable(COUNTED), torch.zeros(4, dtype=torch.long)),
        "scale_grad_by_freq",
    ),
    "parameters alone": (lambda: ng.kfac(NET.parameters(), CE), "give the model itself"),
    "a list of parameters": (lambda: ng.kfac(list(NET.parameters()), CE), "parameters alone"),
    "groups of parameters": (lambda: ng.hessian_free([{"params": NET.parameters()}], CE), "parameters alone"),
    "a likelihood alone": (lambda: ng.fisher(ng.Categorical()), "missing; expected fisher"),
    "parameters, inputs and targets": (
        lambda: ng.hessian(NET, CE).at(ng.trainable(NET), X, Y),
        r"at\(ng.trainable\(model\), \(x, y\)\)",
    ),
    "targets for a Fisher": (lambda: ng.fisher(NET, CE).at(ng.trainable(NET), X, Y), "takes no targets"),
    "jagged inputs": (lambda: [ng.kfac(NET, CE), NET(make_jagged().double())], "nested tensor"),
    "jagged inputs of a metric": (
        lambda: ng.fisher(NET, CE).at(ng.trainable(NET), make_jagged().double()),
        "nested tensor",
    ),
    "jagged inputs of a layer": (lambda: [ng.kfac(INSIDE, CE), INSIDE(X)], "'linear.weight' is a nested tensor"),
    "an ode of another order": (lambda: ng.residuals(NET, {"inside": ode}).step(inside=X), r"term\(u, x\)"),
    "a pde of DeepXDE's": (lambda: ng.residuals(NET, {"inside": pde}).step(inside=X), r"term\(u, x\)"),
    "an argument of another package": (lambda: ng.minimize(lambda x: x.sum(), [0.0], sigma=1.0), "no argument 'sigma'"),
    "a shift of NetKet's": (
        lambda: ng.stochastic_reconfiguration(ng.LogAmplitude(ng.vmc.RBM(3)), diag_shift=1e-3),
        r"no argument 'diag_shift', write damping=; expected stochastic_reconfiguration\(psi",
    ),
    "options of pycma's": (lambda: ng.minimize(sum, [0.0], 1.0, {"seed": 1}), "entries of a dict as arguments"),  # type: ignore[call-arg]
    "a tolerance of pycma's": (lambda: ng.minimize(sum, [0.0], 1.0, tolfun=1e-3), r"tolerances=ng.search.Tolerances"),  # type: ignore[call-arg]
    "a budget of a search": (lambda: ng.GaussianSearch([0.0], 1.0, maxfevals=9), "compare search.nfev with it"),  # type: ignore[call-arg]
    "weights of statsmodels'": (
        lambda: ng.maximize_likelihood(lambda p, x: (p * x).sum(), X[0], X, weights=Y),  # type: ignore[call-arg]
        "make them a tensor of the data",
    ),
    "weights of DeepXDE's": (lambda: ng.residuals(NET, {"inside": ode}, loss_weights=[1]), "by the names of the terms"),  # type: ignore[call-arg]
    "steps of Pyro's": (
        lambda: ng.variational(log_joint, 2).fit(num_steps=9),
        r"did you mean 'steps'\?; expected fit\(",
    ),  # type: ignore[call-arg]
    "an argument of a machine's": (
        lambda: ng.WakeSleep(ng.HelmholtzMachine([2, 1])).fit(X, n_epochs=9),  # type: ignore[call-arg]
        r"did you mean 'epochs'\?; expected fit\(x",
    ),
    "a criterion of statsmodels'": (lambda: fit_mean().aic, r"'aic': write 2 \* k - 2 \* fit.log_likelihood"),
    "errors of statsmodels'": (lambda: fit_mean().bse, r"'bse': write fit.standard_errors\(\).values"),
    "a pool of NumPy's": (lambda: ng.residuals.draw_where_large(X.numpy(), Y, 2), r"as_tensor\(pool\)"),  # type: ignore[arg-type]
    "rows of NumPy's": (lambda: ng.variational.Projected(X.numpy(), abs), r"rows is ndarray, expected a tensor"),  # type: ignore[arg-type]
    "energies of NumPy's": (lambda: ng.vmc.estimate_energy(X.numpy()), r"local_energies is ndarray"),  # type: ignore[arg-type]
    "an optimizer's loop": (lambda: ng.kfac(NET, CE).fit(X, Y), r"step\(\)"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_packages_lead_to_ours(name: str):
    with pytest.raises(AttributeError, match="did you mean") as caught:
        eval(name)
    assert NAMES[name] in str(caught.value)


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_base_classes_say_what_to_take(kind: type):
    with pytest.raises(TypeError, match=f"{kind.__name__} is a base class: derive a class of your own with"):
        kind()


@pytest.mark.parametrize("call", CALLS)
def test_a_foreign_call_is_one_sentence(call: str):
    act, text = CALLS[call]
    try:
        with pytest.raises((TypeError, ValueError, AttributeError, IndexError)) as caught:
            act()
        assert re.search(text, "".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    finally:
        for module in NET.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


def test_errors_of_the_users_own_code_stay_as_they_are():
    def raise_inside(x: torch.Tensor) -> Any:
        return len()  # type: ignore[call-arg]

    with pytest.warns(RuntimeWarning, match=r"len\(\) takes exactly one argument"):
        ng.minimize(raise_inside, [0.0], 1.0, maxfevals=10, vectorized=False)
