"""The checks of lesson 15 accept its solutions and reject each usual mistake with the sentence that names it."""

from exercises import Answers, AnswersOfRanks
from manyhands.checks import on_your_cluster as checks

LESSON = "15_on_your_cluster"
SHARE = "cores[k * each : (k + 1) * each]"
WAYS = '[line.split(" via ")[1] for line in log.splitlines() if " via " in line]'
BETWEEN = '[way.split("/") for way in ways if way.startswith("NET/")]'
DIRECT = 'all("GDRDMA" in way for way in between)'
ROW = "rows[task - 1]"
PAIRS = 'f"#SBATCH --{option}={value}"'

REJECTED = {
    "cores_beside": [
        ("in domains:", "in domains[gpu:] + domains[:gpu]:", SHARE, "cores[:each]", "those are GPU"),
        (SHARE, "cores", "GPUs share"),
        (SHARE, "cores[k :: len(gpus)][:each]", "those are dealt in turn"),
        (SHARE, "cores[: each]", "those are GPU"),
        ("if gpu in gpus:", "if True:", "each = len(cores) // len(gpus)", "each = 8", "k = gpus.index(gpu)",
         "k, cores = 0, sorted(c for own, _ in domains for c in own)[8 * gpu :]",
         "on Polaris the cores for GPU 0 should be [24, 25, 26, 27, 28, 29, 30, 31], not [0, 1, 2, 3, 4, 5, 6, 7]: "
         "those are counted off by the GPU's number"),
        (SHARE, "range(k * each, (k + 1) * each)", "should be"),
        (SHARE, "range(cores[0] + k * each, cores[0] + (k + 1) * each)", "should be"),
        (SHARE, "','.join(map(str, cores))", "return a list of numbers, not the text"),
        (SHARE, "cores[k]", "return a list of numbers, not 24"),
        ("if gpu in gpus:", "if gpu == gpus:", "you found no cores for GPU 0 (None): in which domain's `gpus` is it?"),
    ],
    "network": [
        (BETWEEN, '[["", line.split("Using network ")[1]] for line in log.splitlines() if "Using network" in line]',
         "you return None, and its channels go `via NET/IB`"),
        (BETWEEN, '[line.split("NET/")[1].split() for line in log.splitlines() if "NET" in line and ": Using" in line]',
         "between[0][1]", "between[0][0]", DIRECT, 'log.count("GDRDMA") == 4', "what it uses stands behind `via`"),
        (BETWEEN, '[["", line.split("Using ")[1]] for line in log.splitlines() if "Bootstrap" in line]',
         "what you return should be"),
        ("between[0][1]", "between[0][1].split()[0]", "AWS Libfabric"),
        (DIRECT, 'any("GDRDMA" in way for way in between)', "some of its channels do not say GDRDMA"),
        (DIRECT, '"GDRDMA" in between[0]', "some of its channels do not say"),
        (DIRECT, 'all("GDRDMA" in way for way in between[:3])', "some of its channels do not say"),
        ('way.startswith("NET/")', 'way.startswith(("NET/IB", "NET/Socket", "NET/AWS", "NET/Mellanox"))',
         "to another node"),
        ('way.startswith("NET/")', 'way.startswith("NET/IB")', "you return None, and its channels go `via NET/Socket`"),
        (DIRECT, '"GDRDMA" in between', "each of its channels to another node has the piece GDRDMA"),
        (DIRECT, 'all("GDRDMA" in way for way in ways)', "each of its channels to another node has the piece GDRDMA"),
        ("name = between[0][1]", 'name = "IB"', "IB is what NCCL has found"),
        ("if between:", "between = between or [['NET', 'Socket']]\n    if between:", "should be None"),
        ('if way.startswith("NET/")', "", "return name, direct", "return (name, direct) if name != 'IPC' else None",
         "what you return should be ('IB'"),
    ],
    "directives": [
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', 'f"01:{minutes - 60}:00"', "--time"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', '__import__("datetime").timedelta(minutes=minutes)',
         "--time for"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"',
         '__import__("time").strftime("%H:%M:%S", __import__("time").gmtime(60 * minutes))', "--time for"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', "60 * minutes", "one number is minutes, not seconds"),
        ("return [", "[", "return lines, not None (is a `return` missing?)"),
        ('[f"#SBATCH --{option}={value}" for option, value in asked.items()]', "asked", "return lines, not the dict"),
        ("asked.items()]", 'asked.items()] + ["srun torchrun train.py"]', "at the first command"),
        (PAIRS, 'f"# SBATCH --{option}={value}"', "without a blank in it"),
        (PAIRS, 'f"#SBATCH --{option}=${value}"', "holds a variable"),
        ('"ntasks-per-node": 1', '"ntasks-per-node": gpus', "that starts 4 torchruns on each node"),
        ('"cpus-per-task": cores', '"cpus-per-task": cores // gpus', "those are one rank's"),
        ('"cpus-per-task": cores, ', "", "--cpus-per-task="),
        ('"gpus-per-node": gpus', '"gpus-per-node": gpus * nodes', "the number of the whole job"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', 'f"{minutes // 60:02d}:{minutes % 60:02d}"',
         "two numbers are minutes and seconds"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', 'f"{minutes}:00:00"', "the first of three numbers is hours"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', 'f"{minutes}min"', "sbatch reads minutes"),
        ('asked["time"] =', "_ =", "a line with --time is missing"),
        ('"nodes": nodes', '"nodes": f"{nodes}-{nodes}"', "is no number"),
    ],
    "to_exclude": [
        ("sorted(nodes - fine)", "sorted({node for pair, s in measured.items() if s < least for node in pair})",
         "a slow node makes its partner look slow"),
        ("return sorted(nodes - fine)", "return sorted(fine)", "those are the nodes to keep"),
        ("return sorted(nodes - fine)", "return sorted(nodes - fine)[::-1]", "are not sorted"),
        ("return sorted(nodes - fine)", "return nodes - fine", "return a list of names"),
        (">= least", "> least", "those to leave out should be []"),
        ("sorted(nodes - fine)", "sorted(nodes - fine)[:1]", "those to leave out should be"),
    ],
    "flags_of": [
        ('f"--{name}", value', '{"0": "--optimizer.lr"}.get(str(names.index(name)), "--train.global-batch"), value',
         "the flags of task 1 should be"),
        ("zip(names, rows[task - 1], strict=True)", "zip(names[:2], rows[task - 1])", "should be"),
        ('names, *rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]',
         "names, *rows = [line.split() for line in lines[1:] if line.strip()]", "should"),
        ("names, *rows =", "rows = [names, *_] =", "the header is not a row"),
        (ROW, "rows[task % len(rows)]", "and row 1 is task 1's"),
        (ROW, "[names, *rows][task - 1]", "the header holds names, and is not a row"),
        ("for name, value in zip(names, rows[task - 1], strict=True)",
         "for row in rows[task : task + 1] for name, value in zip(names, row)", "those are row"),
        ("for name, value in zip(names, rows[task - 1], strict=True)",
         "for row in (rows + rows)[task - 1 + (task == len(rows)) * len(rows) + (task == len(rows)) :][:1]"
         " for name, value in zip(names, row)", "trains with the defaults"),
        ("if tasks != len(rows):", "if tasks < len(rows):", "a task without one"),
        ("if tasks != len(rows):", "if False:", "leaves a row out"),
        ("an array of {tasks} tasks for {len(rows)} rows; submit it with --array=1-{len(rows)}", "wrong size",
         "raise a ValueError that names"),
        ('if line.strip() and not line.startswith("#")', "if line.strip()", "should do: count"),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, worlds = LESSON, checks, (1,)
    rejected, elsewhere = REJECTED, ("stage",)
    right = {
        "cores_beside": [(SHARE, "set(cores[k * each :][:each])"), (SHARE, "tuple(cores[k * each :][:each])")],
        "network": [("return name, direct", "return [name, direct]")],
        "directives": [
            (PAIRS, 'f"#SBATCH --{option} {value}"'),
            ('"gpus-per-node": gpus', '"gres": f"gpu:{gpus}"'),
            ('"gpus-per-node": gpus', '"gres": f"gpu:a100:{gpus}"'),
            ('"gpus-per-node": gpus', '"gpus-per-node": f"h100:{gpus}"'),
            ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', "minutes"),
            ("return [", 'return ["#!/bin/bash", "# 2 nodes", ""] + ['),
            (PAIRS, PAIRS.replace('}"', '}\\n"')),
            (PAIRS, PAIRS.replace("SBATCH --", "SBATCH --exclusive --")),
            (PAIRS, """f'#SBATCH --{option}="{value}"'"""),
            ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', 'f"0-{minutes // 60}:{minutes % 60}"'),
        ],
        "flags_of": [("[word for", "list(word for", 'f"--{name}", value)]', 'f"--{name}", value))')],
        "to_exclude": [
            ("sorted(nodes - fine)", "sorted(node for node in nodes if node not in fine)"),
            ("sorted(nodes - fine)", "tuple(sorted(nodes - fine))"),
        ],
    }


WAIT = "dist.barrier()  # all ranks"
WHO = "if local_rank == 0 and not target.exists():"
A_TOKEN = """rank, n, x = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    for turn in range(2 if n > 1 else 0):
        if rank or turn:
            dist.recv(x, (rank - 1) % n)
        if turn == 0 or rank < n - 1:
            dist.send(x, (rank + 1) % n)"""


class TestCopies(AnswersOfRanks):
    lesson, checks, in_a_folder = LESSON, checks, {"stage"}
    elsewhere = ("cores_beside", "network", "directives", "flags_of", "to_exclude")
    rejected = {
        "stage": [
            (WHO, WHO.replace("local_rank", "dist.get_rank()"), "local rank 0 is one per node"),
            (WHO, "if not target.exists():", '".part"', 'f".{dist.get_rank()}"', "copies of the same file"),
            (WHO, "if local_rank == 0:", "node 1 has the whole file of an earlier job, and it was copied again"),
            (WHO, "if local_rank == 0 and not part.exists():", "node 0 has no copy: copy where there is no"),
            (WAIT, "", "was back before node 0 had its copy"),
            (WHO, f"dist.barrier()\n    {WHO}", WAIT, "", "had its copy"),
            (WAIT, "dist.barrier(async_op=True)", "did not wait for it"),
            (WAIT, "dist.broadcast(torch.ones(1), 0)", "broadcast alone lets some ranks go on"),
            ("copy(source, part)", "copy(source, target)", "part.rename(target)", "pass",
             "copied to the target itself: killed now, it leaves half a file there"),
            ("part.rename(target)", "pass", "rename the complete copy"),
            ("copy(source, part)", "part.write_bytes(source.read_bytes())", "has no copy"),
            (WAIT, "dist.barrier()\n    target.unlink(missing_ok=True)", "no file at the target in the end"),
            ("copy(source, part)", "copy(part, part)", "the file at the target is not the source"),
            (WAIT, "    dist.barrier()", "all ranks wait, also those that copy nothing"),
        ],
    }  # fmt: skip
    right = {
        "stage": [
            (WAIT, "dist.all_gather_object([None] * dist.get_world_size(), local_rank)"),
            (WAIT, "x = torch.ones(1)\n    dist.reduce(x, 0)\n    dist.broadcast(x, 0)"),
            (WAIT, "x = torch.ones(1)\n    for r in range(dist.get_world_size()):\n        dist.broadcast(x, r)"),
            (WAIT, "n = dist.get_world_size()\n    dist.reduce_scatter_tensor(torch.ones(1), torch.ones(n))"),
            (WAIT, A_TOKEN),
        ]
    }
