"""The laboratory of natgrad: experiments that reproduce papers and race optimisers, their reports, the command.

It depends on natgrad, never the other way round. `experiments` says what an experiment is and finds one by its name;
`papers`, `networks`, `energies` and `policies` hold the experiments; `report` turns their records into a page.
"""
