"""How tokens are chosen, and the loops that choose them."""
