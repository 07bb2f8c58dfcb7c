"""Translating with a trained model: search, and what is built on it."""
