"""Karakida, Okada and Amari 2016, Adaptive natural gradient learning by score matching: table 1 and figure 1."""
