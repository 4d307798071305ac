"""The shortest run of each lesson in which every line still runs: shorter than the short runs of `lessons`."""

import json

from manyhands.course.lesson_parameters import parse, read

FLAGS = {
    "00_start": "--iterations 10",
    "01_one_device": "--sequences 4 --repeats 1 --peak-s 0.05",
    "02_collectives": "--largest-mib 0.1 --repeats 1 --wait-s 0.5 --points 1000",
    "03_data_parallel": "--steps 2 --global-batch 2 --repeats 1",
    "04_first_job": "--steps 8 --job-flags=--steps=1 --wait-s 0",
    "05_same_science": "--steps 2 --micro-batch 1 --global-batch 4 --sweep-tokens 1024 --repeats 1",
    "06_zero_fsdp": "--layers 2 --global-batch 2 --steps 1",
    "07_tensor_parallel": "--layers 1 --sequences 1 --steps 2",
    "08_pipeline_parallel": "--layers 2 --micro-batches 2 --rows 1",
    "09_context_and_experts": "--positions 16 --tokens 32 --steps 10 --seeds 1",
    "10_meshes_and_planning": "--layers 2 --gpus 8",
    "11_when_it_breaks": "--steps 16 --wait-s 0.5 --state-mib 1 --repeats 1 --failures none",
    "12_llm_pretraining": "--merges 16 --hashes 32 --live-flops 1e9 --zoo-steps 2 --lab-steps 2",
    "13_llm_alignment": "--base-steps 2 --sft-steps 2 --dpo-steps 2 --rl-steps 2 --seeds 1",
    "14_llm_serving": "--texts 2 --draws 500",
    "15_on_your_cluster": "--layers 2 --largest 64 --repeats 1 --wait-s 0",
}


# constants of cells that only repeat what is done, in what runs them here: (as it stands there, as it runs)
FEWER = {
    "01_one_device": [
        ("num_steps=8", "num_steps=2"),
        ("GPTConfig(vocab_size=len(corpus.vocab))", "GPTConfig(vocab_size=len(corpus.vocab), n_layer=2)"),
        ("shakespeare.vocab_size, 64, 128, 4)", "shakespeare.vocab_size, 64, 128, 2)"),
    ],
    "03_data_parallel": [("Shakespeare(ranks, global_batch, steps", "Shakespeare(ranks, global_batch, 2, steps")],
    "05_same_science": [("num=256", "num=32"), ("0, 256, T, 0, 1, seed=9", "0, 16, T, 0, 1, seed=9")],
    "10_meshes_and_planning": [
        ('"gpt-7b", "--parallel.tensor"', '"gpt-1b", "--model.n-layer", "2", "--parallel.tensor"'),
        ('(("gpt-7b", 64, 512), ("llama3-70b"', '(("llama3-70b"'),
    ],
    "12_llm_pretraining": [
        ("[:60000]", "[:4000]"), ("[:1200]", "[:200]"), ("vocab_size=512", "vocab_size=288"),
        ("separator + 1, block_size=T)", "separator + 1, block_size=T, n_layer=1)"),
    ],
    "14_llm_serving": [
        ("val_ids[:2048]", "val_ids[:256]"),
        # the small model is judged by the large one's text: each in the other's place
        ('target, about = shipped_model("plays")', 'target, about = shipped_model("plays-draft")'),
        ('draft = shipped_model("plays-draft")', 'draft = shipped_model("plays")'),
        ("in (1, 4, 16, 64)}", "in (1, 4)}"), ("16 * T", "2 * T"), ("view(16, T)", "view(2, T)"),
    ],
    "15_on_your_cluster": [('for preset in ("gpt-1b", "gpt-7b"):', 'for preset in ("gpt2", "shakespeare-85m"):')],
}  # fmt: skip


def shorten(lesson):
    """Write FEWER into the notebook and the script of a copy of the course.

    The script is saved last: if its notebook were, each run of the script would read both to compare them.
    """
    for path in (lesson.notebook, lesson.script):
        text = path.read_text("utf-8")
        for there, here in FEWER.get(lesson.name, ()):
            if path == lesson.notebook:  # it is JSON
                there, here = (json.dumps(code)[1:-1] for code in (there, here))
            assert there in text, f"{path.name} has no {there!r} any more"
            text = text.replace(there, here)
        path.write_text(text, "utf-8")


def values(lesson):
    """The parameters of the shortest run of a Lesson: {name: value}."""
    return parse(read(lesson.script), FLAGS[lesson.name].split())
