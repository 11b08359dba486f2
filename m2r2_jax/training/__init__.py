"""Text the model writes, its labels, and accelerators learnt from them."""
