"""From a base model to one that answers: chat template, supervised fine-tuning, DPO, GRPO, LoRA. See lesson 13."""
