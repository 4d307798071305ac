"""From a base model to one that answers: chat template, supervised fine-tuning, DPO, GRPO, LoRA. Lesson 13 teaches it."""
