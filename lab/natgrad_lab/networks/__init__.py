"""Races of optimisers over networks: classifiers, autoencoders, a convolutional network, a transformer.

The natural gradient in blocks per layer, with its defaults, beside Adam, Muon, SOAP and SGD, each tuned over a grid of
the same size, on equal seconds of one thread.
"""
