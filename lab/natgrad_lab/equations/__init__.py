"""Differential equations solved by networks: `ng.residuals` beside Adam."""
