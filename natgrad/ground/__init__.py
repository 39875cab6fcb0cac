"""What every floor stands on: vectors and models, matrices, derivatives, checks, and what is said and saved."""
