"""Ground states by variational Monte Carlo: stochastic reconfiguration, SPRING and Adam."""
