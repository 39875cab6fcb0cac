"""Ang 2020, a report on natural gradient for deep networks: figures 2 and 3 on CIFAR-10."""
