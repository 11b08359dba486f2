"""How rows and weights are multiplied here, and what is this machine's alone."""
