"""Races of optimisers over networks: classifiers, autoencoders, a convolutional network, a transformer."""
