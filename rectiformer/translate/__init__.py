"""Translating with a trained model: beam search, and what is built on it."""
