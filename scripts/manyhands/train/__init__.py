"""What `scripts/train.py` is made of, beside the strategies."""
