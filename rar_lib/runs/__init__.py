"""Where it lies: run folders and what is made of them."""
