"""Start, connect and end ranks; inspect the machine; write a run's folder, metrics and output."""
