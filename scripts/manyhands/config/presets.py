"""Options under a name: `--preset gpt2`. What a preset does not say is as in `options`.

From gpt2 on they are for GPUs: they fit into 80 GB on 8 of them, and their batches split over 2, 4, ... 64 ranks.
"""

GPT2 = {"block_size": 1024, "vocab_size": 50257, "tie": True, "qkv_bias": True}
PRESETS = {
    "nano": {},  # the lessons' ShakespeareGPT: seconds on 2 cores
    "shakespeare": {
        "model": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "dropout": 0.2},
        "train": {"steps": 5000, "global_batch": 64},
        "log": {"eval_every": 250, "eval_batches": 20},
    },
    "shakespeare-85m": {
        "model": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
        "train": {"steps": 1000, "global_batch": 64},
        "optimizer": {"lr": 6e-4},
    },
    **{
        name: {
            "model": {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, **GPT2},
            # 512 x 1,024 = 0.5 million tokens per step, as Brown et al. 2020, table 2.1, have it for the smaller ones
            "train": {"steps": 10000, "global_batch": 512, "micro_batch": micro_batch, "precision": "bf16"},
            "optimizer": {"lr": lr, "beta2": 0.95},
        }
        # sizes and learning rates: Radford et al. 2019, table 2; Brown et al. 2020, table 2.1
        for name, n_layer, n_head, n_embd, lr, micro_batch in (
            ("gpt2", 12, 12, 768, 6e-4, 8),
            ("gpt2-medium", 24, 16, 1024, 3e-4, 8),
            ("gpt2-large", 36, 20, 1280, 2.5e-4, 4),
            ("gpt2-xl", 48, 25, 1600, 2e-4, 4),
        )
    },
    # this GPT at the sizes of OLMo (Groeneveld et al. 2024): not its architecture
    "olmo-1b": {
        "model": {"n_layer": 16, "n_head": 16, "n_embd": 2048, "block_size": 2048, "vocab_size": 32100},
        "train": {"steps": 10000, "global_batch": 512, "micro_batch": 4, "precision": "bf16"},
        "optimizer": {"lr": 4e-4, "beta2": 0.95},
    },
    "olmo-7b": {
        "model": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "block_size": 2048, "vocab_size": 32100},
        "train": {"steps": 10000, "global_batch": 512, "micro_batch": 4, "precision": "bf16"},
        "parallel": {"strategy": "fsdp", "activation_checkpointing": "block"},
        "optimizer": {"lr": 3e-4, "beta2": 0.95},
    },
}
