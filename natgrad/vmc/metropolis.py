"""Markov chains on |psi|^2: batched Metropolis with flips, exchanges, hops and shifts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from natgrad.ground.checks import Group, check_integer, check_positive, check_range, read_groups
from natgrad.vmc.amplitude import LogAmplitude, evaluate
from natgrad.vmc.configurations import Bosons, Configurations, Spins
from natgrad.vmc.continuous import Harmonic, Molecule
from natgrad.vmc.samples import Sampler, Samples


class WalkerSpace(Protocol):
    """What chains may start from: `ng.vmc.Spins`, `ng.vmc.Bosons`, or anything with these two, such as a molecule."""

    @property
    def count(self) -> int:
        """Variables of a state."""
        ...

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """States at random, shape (*shape, count)."""
        ...


class MarkovMove(Protocol):
    """A symmetric proposal: s -> s' as likely as s' -> s."""

    tuned: bool = False
    """Whether it has a width that is tuned to the acceptance."""

    def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
        """One proposal per state, shape (chains, n); the state itself where a proposal leads nowhere.

        Args:
            states: Shape (chains, n).
            generator: Source of the draws.
            width: Standard deviation of the steps, where the move is tuned.
        """
        ...


@dataclass(frozen=True)
class Flip(MarkovMove):
    """One variable, chosen at random, takes another of its values.

    Args:
        values: What a variable may be.
    """

    values: tuple[float, ...] = (-1.0, 1.0)

    def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
        place = torch.randint(states.shape[1], (len(states), 1), generator=generator, device=generator.device).to(
            states.device
        )
        now = states.gather(1, place)
        if len(self.values) == 2:
            return states.scatter(1, place, sum(self.values) - now)
        known = torch.tensor(self.values, dtype=states.dtype, device=states.device)
        shift = torch.randint(1, len(known), (len(states), 1), generator=generator, device=generator.device).to(
            states.device
        )
        index = (torch.searchsorted(known, now) + shift) % len(known)
        return states.scatter(1, place, known[index])


@dataclass(frozen=True)
class Exchange(MarkovMove):
    """The variables of two sites are exchanged: what is conserved stays so.

    Args:
        edges: Pairs of sites to choose from; None: any two.
    """

    edges: Sequence[tuple[int, int]] | None = None

    def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
        pair = draw_pairs(self.edges, len(states), states.shape[1], generator).to(states.device)
        return states.scatter(1, pair, states.gather(1, pair.flip(1)))


@dataclass(frozen=True)
class Hop(MarkovMove):
    """One boson goes from a site to another: their number is conserved.

    Args:
        most: The largest number on a site.
        edges: Pairs of sites to choose from; None: any two.
    """

    most: int
    edges: Sequence[tuple[int, int]] | None = None

    def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
        pair = draw_pairs(self.edges, len(states), states.shape[1], generator)
        turned = torch.rand(len(states), 1, generator=generator, device=generator.device) < 0.5
        pair = torch.where(turned, pair.flip(1), pair).to(states.device)
        numbers = states.gather(1, pair)
        allowed = ((numbers[:, :1] > 0) & (numbers[:, 1:] < self.most)).to(states.dtype)
        return states.scatter_add(1, pair, torch.cat([-allowed, allowed], dim=1))


@dataclass(frozen=True)
class Shift(MarkovMove):
    """Continuous variables move by normal steps, all at once or one particle at a time; the width is tuned.

    Args:
        single: Axes of a particle, to move one particle at a time; None: all together.
    """

    single: int | None = None
    tuned = True

    def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
        steps = width * torch.randn(states.shape, generator=generator, device=generator.device, dtype=states.dtype)
        if self.single is not None:
            count = states.shape[1] // self.single
            chosen = torch.nn.functional.one_hot(
                torch.randint(count, (len(states),), generator=generator, device=generator.device), count
            )
            steps = steps * chosen.repeat_interleave(self.single, 1)
        return states + steps.to(states.device)


@dataclass(frozen=True)
class WidthTuning:
    """How wide shifts are.

    Args:
        width: At the start; it is tuned after every draw.
        acceptance: What the width is tuned to, between 0 and 1.

    Raises:
        ValueError: For numbers out of range.
    """

    width: float = 0.3
    acceptance: float = 0.5

    def __post_init__(self) -> None:
        check_positive("width", self.width)
        check_range("acceptance", self.acceptance, "(0, 1)")


class WidthOptions(TypedDict, total=False):
    """Keywords of `Metropolis` for the width of shifts."""

    tuning: WidthTuning
    width: float
    acceptance: float


STUCK = 0.01
"""Share of stuck chains that is no trouble: at a Heisenberg chain's ground state .001 to .0025 of them rest."""

OWN = ("space", "move", "samples", "chains", "sweep", "burn_in", "patience", "seed")
GROUPS = {"tuning": Group(WidthTuning())}


class Metropolis(Sampler):
    """Markov chains that are continued from draw to draw: `samples` states from `chains` chains, evaluated together.

    The first draw starts with `burn_in` sweeps. A chain that has accepted nothing for `patience` sweeps is stuck:
    `stuck` has their numbers, and one warning comes when they are more than a hundredth of the chains. Few are no
    trouble: a chain at the likeliest state rests there.

    Args:
        space: Where chains start, such as `hamiltonian.space` or a molecule.
        move: `Flip`, `Exchange`, `Hop`, `Shift`, or your own. Default: by the space, one that conserves what it does.
        samples: States per draw, a multiple of the chains.
        chains: Their number. Default: one per sample, so that the samples of a draw are independent.
        sweep: Proposals between two samples of a chain. Default: the number of variables; 10 for shifts.
        burn_in: Sweeps before the first draw.
        patience: Sweeps without a move after which a chain is stuck.
        seed: Of the draws.
        **tuning: `width`, of shifts at the start, default .3, and `acceptance`, what it is tuned to after every draw,
            default .5; or both as `tuning=WidthTuning(...)`.

    Raises:
        TypeError: For a keyword that it does not know.
        ValueError: For numbers out of range, and for a move that leads out of the space or that conserves what the
            space does not: its chains would not reach all states.

    Example:
        >>> psi, space = ng.LogAmplitude(ng.vmc.RBM(6)), ng.vmc.Spins(6, up=3)
        >>> sampler = ng.vmc.Metropolis(space, samples=200, chains=20)
        >>> sampler.draw(psi).states.shape
        torch.Size([20, 10, 6])
    """

    continues = True
    STATE = ("states", "width", "idle", "accepted")

    def __init__(
        self,
        space: WalkerSpace,
        move: MarkovMove | None = None,
        *,
        samples: int = 1000,
        chains: int | None = None,
        sweep: int | None = None,
        burn_in: int = 20,
        patience: int = 20,
        seed: int = 0,
        **tuning: Unpack[WidthOptions],
    ) -> None:
        widths: WidthTuning = read_groups("Metropolis", GROUPS, tuning, OWN)["tuning"]
        self.space, self.move = space, choose_move(space) if move is None else move
        check_move(space, self.move)
        self.samples = check_integer("samples", samples)
        self.chains = self.samples if chains is None else check_integer("chains", chains)
        if self.samples % self.chains:
            raise ValueError(f"samples is {samples}, expected a multiple of chains, {self.chains}")
        usual = 10 if self.move.tuned else space.count
        self.sweep = usual if sweep is None else check_integer("sweep", sweep)
        self.burn_in, self.patience = check_integer("burn_in", burn_in, 0), check_integer("patience", patience)
        self.width, self.acceptance = float(widths.width), widths.acceptance
        self.generator = torch.Generator().manual_seed(seed)
        self.states: Tensor | None = None
        self.idle = torch.zeros(self.chains, dtype=torch.long, device="cpu")
        self.accepted, self._warned = math.nan, False

    def draw(self, psi: LogAmplitude) -> Samples:
        if self.states is None:
            self.states = self.space.draw((self.chains,), self.generator, psi.dtype)
            self.states = self.states.to(psi.device)
            for _ in range(self.burn_in):
                self._run(psi, 1)
        drawn = self._run(psi, self.samples // self.chains)
        if isinstance(self.space, Configurations) and not bool(self.space.contains(drawn).all()):
            raise ValueError(
                f"move {self.move} leads out of {self.space}: take a move that conserves what the space does, such as "
                f"{choose_move(self.space)}"
            )
        stuck = self.stuck
        if not self._warned and len(stuck) > STUCK * self.chains:
            self._warned = True
            few = ", ".join(map(str, stuck[:5])) + (", ..." if len(stuck) > 5 else "")
            warnings.warn(
                f"{len(stuck)} of {self.chains} walkers accepted no move for {self.patience} sweeps (chains {few}): "
                "their samples repeat one state; look at psi there, take another move, or more sweeps. This is said "
                "once; sampler.stuck has their numbers after every draw",
                stacklevel=2,
            )
        return Samples(drawn)

    @property
    def stuck(self) -> list[int]:
        """The chains that have accepted nothing for `patience` sweeps."""
        return (self.idle >= self.patience * self.sweep).nonzero()[:, 0].tolist()

    def report(self) -> str:
        width = f", width {self.width:.3g}" if self.move.tuned else ""
        return f"{self.chains} chains, acceptance {self.accepted:.2f}{width}, {len(self.stuck)} stuck"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_state({"generator": None, **state_dict})
        held, space = state_dict["states"], self.space
        if held is not None and len(held) != self.chains:
            raise ValueError(f"state_dict has {len(held)} chains, expected {self.chains}")
        fits = held is None or held.shape[1] == space.count
        if fits and held is not None and isinstance(space, Configurations):
            fits = bool(space.contains(held).all())
        if not fits:
            raise ValueError(f"state_dict has chains at states that are not of {space}: build the same sampler")
        super().load_state_dict(state_dict)

    def _run(self, psi: LogAmplitude, length: int) -> Tensor:
        """`length` states of every chain, (chains, length, n), a sweep apart. The width is tuned afterwards."""
        assert self.states is not None
        log, visited, count = evaluate(psi, self.states).real, list[Tensor](), list[Tensor]()
        for _ in range(length):
            for _ in range(self.sweep):
                log, moved = self._move(psi, log)
                count.append(moved.sum())
            visited.append(self.states)
        self.accepted = int(torch.stack(count).sum()) / (length * self.sweep * self.chains)
        if self.move.tuned:
            self.width *= math.exp(min(0.5, max(-0.5, self.accepted - self.acceptance)))
        return torch.stack(visited, dim=1)

    def _move(self, psi: LogAmplitude, log: Tensor) -> tuple[Tensor, Tensor]:
        """One proposal per chain: log |psi| afterwards, and which chains moved."""
        assert self.states is not None
        proposed = self.move.propose(self.states.clone(), self.generator, self.width)  # a move may change what it gets
        fresh = evaluate(psi, proposed).real
        chance = torch.rand(
            self.chains, generator=self.generator, device=self.generator.device, dtype=torch.float64
        ).to(log.device)
        # a start at psi = 0 goes anywhere with psi, and a NaN, as log 0 - log 0 is one, is less than nothing
        taken = chance.log_() < 2 * (fresh.double() - log.double())
        moved = taken & (proposed != self.states).any(1)
        self.states = torch.where(taken.unsqueeze(1), proposed, self.states)
        self.idle = torch.where(moved.cpu(), 0, self.idle + 1)
        return torch.where(taken, fresh, log), moved


def choose_move(space: WalkerSpace) -> MarkovMove:
    """The move that conserves what the space does."""
    free = getattr(space, "up", None) is None and getattr(space, "particles", None) is None
    if isinstance(space, Configurations):
        if free:
            return Flip(space.values)
        return Exchange() if len(space.values) == 2 else Hop(int(space.values[-1]))
    return Shift()


def check_move(space: WalkerSpace, move: MarkovMove) -> None:
    """ValueError for a move of ours that leads out of a space, or that does not reach all of it."""
    if isinstance(move, (Exchange, Hop)) and move.edges is not None:
        check_connected(move, space.count)
    if not isinstance(space, (Spins, Bosons, Harmonic, Molecule)) or not isinstance(move, (Flip, Exchange, Hop, Shift)):
        return
    usual = choose_move(space)
    if isinstance(move, Flip):
        fits = isinstance(usual, Flip) and sorted(move.values) == sorted(usual.values)
    elif isinstance(move, Hop):
        fits = isinstance(space, Bosons) and not isinstance(usual, Flip) and move.most == space.most
    else:
        fits = isinstance(move, type(usual))
    if not fits:
        raise ValueError(
            f"move is {move} and space is {space}: the move leads out of the space, or does not reach all of its "
            f"states; take {usual}, or a space that conserves what the move does"
        )


def check_connected(move: Exchange | Hop, sites: int) -> None:
    """ValueError unless one can go between any two sites along the edges of a move."""
    pairs, reached = [(int(a), int(b)) for a, b in move.edges or ()], {0}
    wrong = [pair for pair in pairs if not all(0 <= site < sites for site in pair)]
    if wrong:
        raise ValueError(f"move has the edge {wrong[0]}, expected pairs of sites from 0 to {sites - 1}")
    for _ in range(sites):
        reached |= {site for pair in pairs if reached & {*pair} for site in pair}
    if len(reached) < sites:
        raise ValueError(
            f"move has edges that do not join site {min({*range(sites)} - reached)} with site 0: what is on either "
            "side stays there, and chains do not reach all states; add an edge, or leave edges out for any two sites"
        )


def draw_pairs(edges: Sequence[tuple[int, int]] | None, count: int, sites: int, generator: torch.Generator) -> Tensor:
    """Two different sites for every chain, (count, 2)."""
    if edges is not None:
        known = torch.tensor(edges, dtype=torch.long)
        return known[torch.randint(len(known), (count,), generator=generator, device=generator.device)]
    first = torch.randint(sites, (count,), generator=generator, device=generator.device)
    second = (
        first + torch.randint(1, max(2, sites), (count,), generator=generator, device=generator.device)
    ) % sites  # one site: with itself
    return torch.stack([first, second], dim=1)
