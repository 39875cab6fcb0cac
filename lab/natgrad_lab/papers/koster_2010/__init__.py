"""Köster and Hyvärinen 2010, A two-layer model of natural stimuli estimated with score matching."""
