"""A page about a dataset."""
