"""What really happened: bytes on the wire, spans of time, tensors in memory; and the network that is simulated."""
