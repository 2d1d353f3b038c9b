"""Rollout workers and the engines inside them."""
