"""The parts of `scripts/train.py`, except the strategies."""
