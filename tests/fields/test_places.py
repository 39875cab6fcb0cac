"""A field is a package of natgrad, two of them are called as functions too, and earlier places still lead there."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from field_names import FIELDS
from torch import nn

import natgrad as ng
from natgrad.ground.messages import CallableModule

CALLED = [name for name in FIELDS if isinstance(getattr(ng, name), CallableModule)]


def run_alone(*programs: str) -> None:
    """Run programs in an interpreter of their own, which each of them finds without natgrad."""
    forget = "import sys\nfor n in [n for n in sys.modules if n.partition('.')[0] == 'natgrad']: del sys.modules[n]\n"
    subprocess.run([sys.executable, "-c", "\n".join(forget + program for program in programs)], check=True)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_holds_its_own_name_is_called(name: str):
    field = getattr(ng, name)
    assert field is importlib.import_module(f"natgrad.{name}")
    assert isinstance(field, CallableModule) == (name in field.__all__)


@pytest.mark.parametrize("name", CALLED)
def test_a_called_field_shows_what_it_calls(name: str):
    field, function = getattr(ng, name), getattr(getattr(ng, name), name)
    assert inspect.signature(field) == inspect.signature(function)
    assert inspect.getdoc(function) in inspect.getdoc(field)
    assert pickle.loads(pickle.dumps(field)) is field
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(field) is field


def test_a_wrong_call_of_a_field_is_the_sentence_of_its_function():
    with pytest.raises(TypeError, match=r"^residuals.*'terms' is missing"):
        ng.residuals(nn.Linear(1, 1))  # type: ignore[call-arg]
    assert isinstance(ng.variational(lambda z: -z.square().sum(-1), 2), ng.variational.Variational)


# The place before this version


CALL = """
import torch
try:
    call(torch.nn.Linear(1, 1))
except TypeError as error:
    assert "residuals" in str(error) and "'terms' is missing" in str(error)
else:
    raise AssertionError("called without terms")
import natgrad
assert natgrad.residuals is field and natgrad.laplacian is field.laplacian
"""
ORDERS = (
    "import natgrad.residuals as field; call = field",
    "from natgrad import residuals as field; call = field",
    "import natgrad as ng; ng.laplacian; call = field = ng.residuals",
    "from natgrad.residuals import laplacian; import natgrad as ng; call = field = ng.residuals",
)
EARLIER_IMPORTS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import natgrad.applications.vmc
    from natgrad.applications.search import GaussianSearch
    from natgrad.applications import Boltzmann, flows, maximize_likelihood, residuals, score_matching_loss
import natgrad as ng
(warning,) = caught
assert warning.category is FutureWarning and warning.filename == "<string>"
assert "write natgrad.search for natgrad.applications.search" in str(warning.message)
assert natgrad.applications.vmc is ng.vmc and GaussianSearch is ng.GaussianSearch and flows is ng.flows
assert Boltzmann is ng.Boltzmann and residuals is ng.residuals and score_matching_loss is ng.score_matching_loss
assert maximize_likelihood is ng.maximize_likelihood
"""
EARLIER_ATTRIBUTE = """
import warnings
import natgrad as ng
assert "applications" not in dir(ng)  # who lists the names is not warned
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert ng.applications.search.RayPool is ng.search.RayPool
assert [warning.category for warning in caught] == [FutureWarning]
"""


def test_any_order_of_imports_calls_the_function_and_the_earlier_place_leads_there():
    run_alone(*(order + CALL for order in ORDERS), EARLIER_IMPORTS, EARLIER_ATTRIBUTE)


def test_what_was_pickled_under_the_earlier_place_is_read():
    search = ng.GaussianSearch(torch.zeros(2), 1.0, seed=0)
    machine = ng.HelmholtzMachine([3, 2])
    text = pickle.dumps((search, machine, ng.Boltzmann(3)), protocol=0)
    text = text.replace(b"natgrad.energies.", b"natgrad.applications.")
    for field in (b"search", b"helmholtz"):
        text = text.replace(b"natgrad." + field, b"natgrad.applications." + field)
    assert text.count(b"natgrad.applications.") >= 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = pickle.loads(text)
    assert [type(thing) for thing in loaded] == [ng.GaussianSearch, ng.HelmholtzMachine, ng.Boltzmann]
    assert torch.equal(loaded[0].ask(), search.ask())
