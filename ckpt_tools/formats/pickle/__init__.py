"""Reading and writing pickles without torch."""
