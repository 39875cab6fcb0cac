"""A variational autoencoder on MNIST, 784-400-20-400-784, whose divergence goes past the criterion.

The reconstruction goes through the criterion, the KL from the posterior to the prior is added to it: no metric knows
of that part. Kingma & Welling 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad_lab.data import digits, mnist
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, pair_with_inputs
from natgrad_lab.experiments.models import bernoulli_divergence
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts, check_word

DATA = {"mnist": mnist, "digits": digits}


@dataclass(frozen=True)
class VaeSettings(RaceSettings):
    """What `--set` can change."""

    looked_at: int = 2000  # the first of the training and of the test images
    methods: str = "structures"  # or names of contestants such as kfac,adam
    hidden: int = 400  # units of the hidden layers
    code: int = 20  # dimensions of the code
    data: str = "mnist"  # or digits, which need no file

    def __post_init__(self) -> None:
        check_word(self, "data", DATA)
        check_counts(self, "hidden", "code")


def tasks(settings: VaeSettings) -> tuple[Task, ...]:
    """One task: the negative evidence lower bound."""
    pixels = 784 if settings.data == "mnist" else 64
    return (
        Task(
            name="vae",
            title=f"Variational autoencoder {pixels}-{settings.hidden}-{settings.code}",
            model=lambda: VAE(pixels, settings.hidden, settings.code),
            data=lambda: pair_with_inputs(DATA[settings.data]().flat()),
            criterion=nn.BCEWithLogitsLoss(),
            scale=float(pixels),  # from the mean over pixels to the cross-entropy of an image
            unit="nats per image",
            divergence=bernoulli_divergence,
            contestants=contestants.select(settings.methods, contestants.line_up(128, **GRIDS)),
            heard=lambda outputs: outputs[:, :pixels],
            besides=lambda outputs: divergence_from_prior(outputs[:, pixels:]),
            note="The divergence from the prior is added to the criterion's value, and no metric knows of it.",
        ),
    )


GRIDS = {
    "adam": {"lr": (1e-3, 3e-3)},
    "muon": {"lr": (0.02, 0.05), "adam_lr": (1e-3,)},
    "soap": {"lr": (1e-3, 3e-3)},
    "sgd": {"lr": (1e-4, 3e-4)},
}


class VAE(nn.Module):
    """Images (b, pixels) -> logits, posterior means and log variances side by side, (b, pixels + 2 code).

    In evaluation mode every call takes the same noise, so that two evaluations can be compared.
    """

    def __init__(self, pixels: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x: Tensor) -> Tensor:
        posterior = self.encoder(x)
        mean, log_variance = posterior.chunk(2, dim=1)
        fixed = None if self.training else torch.Generator(x.device).manual_seed(0)
        noise = torch.randn(mean.shape, generator=fixed, device=x.device, dtype=x.dtype)
        return torch.cat([self.decoder(mean + (log_variance / 2).exp() * noise), posterior], dim=1)


def divergence_from_prior(posterior: Tensor) -> Tensor:
    """KL(N(mean, exp(log variance)) || N(0, I)) in nats, a mean over images. posterior: (b, 2 code)."""
    mean, log_variance = posterior.chunk(2, dim=1)
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2


RACE = race(
    "vae_mnist",
    "A variational autoencoder, half its loss unknown to the metric (needs the data)",
    VaeSettings,
    tasks,
    title="A variational autoencoder: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=15,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "data": "digits"},
)
