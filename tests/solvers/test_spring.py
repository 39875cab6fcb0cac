"""The solve whose damping pulls to the guess."""

from __future__ import annotations

import pytest
from models import assert_close, draw

import natgrad as ng
from natgrad.testing import check_solver


def test_without_a_guess_it_is_a_sound_solver():
    check_solver(ng.solvers.Spring(), rtol=1e-9, minimum_norm=True)


@pytest.mark.parametrize("solver", [ng.SampleSpace(), ng.Direct(), ng.CG(rtol=1e-12, max_steps=100)])
def test_damping_pulls_to_the_guess(solver):
    operator, rhs, guess, damping = ng.operators.LowRankOperator(draw(8, 3)), draw(8, seed=1), draw(8, seed=2), 0.1
    found = ng.solvers.Spring(solver).solve(operator, rhs, damping=damping, guess=guess)
    expected = ng.Direct().solve(operator, rhs + damping * guess, damping=damping)
    assert_close(found.value, expected.value, rtol=1e-8)
    assert_close(found.image, expected.image, rtol=1e-8)
    assert found.residual < 1e-8
