"""A trained GPT as a service: sampling, caches, continuous batching, and the server around them."""
