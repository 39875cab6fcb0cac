# %% [markdown]
# # A policy that balances a pole
#
# `ng.TRPO` trains a policy by the natural gradient of its expected return, with a bound on how far each step moves
# the policy. Here a small network learns to balance a pole on a cart within seconds.

# %% [markdown]
# ## The environment and the policy
#
# CartPole is an environment of gymnasium (`pip install gymnasium`): four numbers are observed, two actions push the
# cart left or right, and every step that the pole stands gives a reward of 1, up to 500. A policy is a module from
# observations to the parameters of the actions' distribution, here the logits of the two actions.

# %%
import gymnasium as gym
import matplotlib.pyplot as plt
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
envs = [gym.make("CartPole-v1") for _ in range(8)]

# %% [markdown]
# ## Learning
#
# `radius` bounds the KL divergence of an update in nats, as measured over all visited states. It means the same for
# every network and environment, so it is the one number that is worth a thought.

# %%
agent = ng.TRPO(policy, envs, radius=0.02, batch=800, seed=0)
history = agent.learn(5_600)
print(f"return {history['return'][0]:.0f} at first, {history['return'][-1]:.0f} at the end")
assert max(history["kl"]) <= 0.02
assert history["return"][-1] > 2 * history["return"][0]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.plot(history["steps"], history["return"], "o-")
left.set(xlabel="steps in the environment", ylabel="mean return of an episode", title="CartPole-v1, ng.TRPO, one seed")
right.plot(history["steps"], history["kl"], "o-", label="measured")
right.axhline(0.02, linestyle="--", label="bound")
right.set(
    xlabel="steps in the environment",
    ylabel="KL of the update, nats",
    title="How far each update moved the policy",
    ylim=(0, 0.025),
)
right.legend()
plt.show()

# %% [markdown]
# ## Without exploration
#
# `agent.evaluate` takes the likeliest action in every state.

# %%
returns = agent.evaluate(gym.make("CartPole-v1"), episodes=5)
print("five episodes:", [int(r) for r in returns])
action, _ = agent.predict([0.0, 0.0, 0.1, 0.5])  # the pole leans and falls to the right
print("action for a pole that falls to the right:", int(action), "(1 pushes right)")

# %% [markdown]
# ## What the policy learned
#
# The chance of pushing right, over the angle of the pole and its speed, with the cart at rest in the middle: a line
# through the origin, as in a linear controller.

# %%
angle, speed = torch.linspace(-0.2, 0.2, 60), torch.linspace(-2, 2, 60)
grid = torch.cartesian_prod(angle, speed)
states = torch.cat([torch.zeros(len(grid), 2), grid], 1)
with torch.no_grad():
    right_chance = policy(states).softmax(1)[:, 1].reshape(60, 60).T

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
shown = axes.contourf(angle, speed, right_chance, torch.linspace(0, 1, 11), cmap="Greys")
figure.colorbar(shown, label="probability of pushing right")
axes.set(xlabel="angle of the pole, rad", ylabel="angular speed, rad/s", title="The policy after 5600 steps")
plt.show()

# %% [markdown]
# `ng.TRPO(policy, "CartPole-v1").learn(30_000)` reached 500 of 500 from five seeds. [Policies](../theory/policy.md) has the settings,
# continuous actions, and figures for five seeds.
