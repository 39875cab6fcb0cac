"""CartPole by trust region policy optimisation, with a policy of one's own: some seconds on one core."""

import gymnasium as gym
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))  # observations -> logits of the two actions
envs = [gym.make("CartPole-v1") for _ in range(8)]
agent = ng.TRPO(policy, envs, radius=0.02, batch=800, seed=0)


def tell(agent: ng.TRPO) -> None:
    row = agent.history.last()
    print(
        f"{row['steps']:5d} steps  return {row['return']:6.1f}  KL {row['kl']:.4f} nats  entropy {row['entropy']:.3f}"
    )


agent.learn(4_800, callback=tell)
returns = agent.evaluate(gym.make("CartPole-v1"), episodes=5)
print(f"five episodes without exploration: {returns}")
