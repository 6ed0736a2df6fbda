"""Plans exports and reshards and writes them."""
