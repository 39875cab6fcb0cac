"""Malagò 2023, lectures on information geometry: gradient flows of E[f], balls of constant divergence."""
