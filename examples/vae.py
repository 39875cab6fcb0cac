"""A variational autoencoder: reconstruction and KL go through `opt.loss`, so that the metric sees both."""

import torch
from torch import Tensor, nn

import natgrad as ng

K, STEPS = 4, 150


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 2 * K))
        self.decoder = nn.Sequential(nn.Linear(K, 48), nn.Tanh(), nn.Linear(48, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(z), (mean, log_variance)


torch.manual_seed(0)
data = (torch.randn(1000, 3) @ torch.randn(3, 32) > 0).float()  # 32 bits that three numbers decide
model = VAE()
opt = ng.kfac(model, ng.Heads((ng.Bernoulli(), 32), (ng.GaussianPosterior(), 2 * K)))
for step in range(STEPS):
    x = data[torch.randint(0, 1000, (128,))]
    opt.zero_grad()
    logits, posterior = model(x)
    loss = opt.loss((logits, posterior), (x, None))  # the negative evidence lower bound per example, in nats
    loss.backward()
    opt.step()
    if step in (0, STEPS - 1):
        print(f"step {step}: {float(loss.detach()):.2f} nats")
