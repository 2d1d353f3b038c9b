"""Rows from files or generators, and the prompts made of them."""
