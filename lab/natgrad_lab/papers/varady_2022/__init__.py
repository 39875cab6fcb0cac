"""Várady, Volpi, Malagò and Ay 2022, Natural reweighted wake-sleep, on five sets of images."""
