"""The fields: the packages of natgrad that solve a kind of problem each."""

FIELDS = ("energies", "estimation", "flows", "helmholtz", "policy", "residuals", "search", "variational", "vmc")
