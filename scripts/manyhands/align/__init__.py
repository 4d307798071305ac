"""Turn a base model into one that answers: chat template, supervised fine-tuning, DPO, GRPO, LoRA. See lesson 13."""
