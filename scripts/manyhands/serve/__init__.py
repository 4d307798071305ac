"""Serve a trained GPT: sampling, caches, continuous batching and an HTTP server."""
