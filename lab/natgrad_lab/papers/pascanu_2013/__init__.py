"""Pascanu and Bengio 2013, Revisiting natural gradient for deep networks: figure 1, table 1, the order of examples."""
