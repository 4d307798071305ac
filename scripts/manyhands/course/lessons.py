"""The lessons of a course, found by their files, and what a short run of each looks like.

A lesson is a pair `scripts/NN_topic.py` and `notebooks/NN_topic.ipynb`. Tests and `make preflight` run lessons
headless; their short parameters and the aims for a run of full length live here and nowhere else.
"""

from dataclasses import dataclass
from pathlib import Path

from manyhands.course.folders import ROOT

# About 10 s of work on 2 cores; every name is one of the lesson's parameters.
SHORT = {
    "00_start": {"iterations": 20},
    "01_one_device": {"repeats": 2, "peak_s": 0.05},
    "02_collectives": {"largest_mib": 0.02, "repeats": 1, "wait_s": 2.0, "points": 100_000},
    "03_data_parallel": {"steps": 6, "repeats": 1},
    "04_first_job": {"steps": 10, "job_flags": "--steps 4 --repeats 1"},
    "05_same_science": {"steps": 4, "sweep_tokens": 2048, "repeats": 1},
    "06_zero_fsdp": {"layers": 2, "steps": 2},
    "07_tensor_parallel": {"layers": 1, "sequences": 2, "steps": 3},
    "08_pipeline_parallel": {"micro_batches": 4, "rows": 1},
    "09_context_and_experts": {"positions": 32, "tokens": 32, "steps": 10, "seeds": 1},
    "10_meshes_and_planning": {"layers": 2, "gpus": 8},
    "11_when_it_breaks": {"steps": 16, "wait_s": 2.0, "state_mib": 2, "repeats": 2, "failures": "none"},
    "12_llm_pretraining": {"merges": 48, "hashes": 64, "live_flops": 2e9, "zoo_steps": 10, "lab_steps": 10},
    "13_llm_alignment": {"base_steps": 2, "sft_steps": 2, "dpo_steps": 2, "rl_steps": 2, "seeds": 1},
    "14_llm_serving": {"texts": 2, "draws": 600},
    "15_on_your_cluster": {"layers": 2, "largest": 64, "repeats": 2},
}

AIM_S = 90  # a lesson of full length, headless, 2 cores, 4 ranks
AIM_LONG_S = 180  # for the lessons on language models
LONG = {"12", "13", "14"}
AIM_BYTES = 3 * 2**30  # memory of all its processes together


@dataclass(frozen=True)
class Lesson:
    """One lesson: its name ("02_collectives") and where its two files are, or should be."""

    name: str
    root: Path

    @property
    def number(self):
        return self.name.split("_", 1)[0]

    @property
    def script(self):
        return self.root / "scripts" / f"{self.name}.py"

    @property
    def notebook(self):
        return self.root / "notebooks" / f"{self.name}.ipynb"

    @property
    def short(self):
        """Parameters of a short run."""
        return SHORT.get(self.name, {})

    @property
    def aim_s(self):
        return AIM_LONG_S if self.number in LONG else AIM_S

    def beyond_aims(self, seconds, peak_bytes):
        """Return what a headless run of full length takes beyond its aims, as a sentence, or ""."""
        found = []
        if seconds > self.aim_s:
            found.append(f"{seconds:.0f} s where {self.aim_s} s are the aim")
        if peak_bytes > AIM_BYTES:
            found.append(f"{peak_bytes / 2**30:.1f} GiB where {AIM_BYTES / 2**30:.0f} GiB are the aim")
        return " and ".join(found)


def course_here():
    """The course whose lessons a command means: that of the current folder, else the one around this package."""
    return Path.cwd() if (Path.cwd() / "notebooks").is_dir() else ROOT


def find_lessons(root=ROOT, only=()):
    """The lessons below `root` in order of their numbers; `only` names some ("03", "3" or "03_data_parallel").

    Raises ValueError, naming the lessons that exist, if one of `only` does not exist.
    """
    files = [*Path(root).glob("scripts/[0-9][0-9]_*.py"), *Path(root).glob("notebooks/[0-9][0-9]_*.ipynb")]
    lessons = [Lesson(name, Path(root)) for name in sorted({file.stem for file in files})]
    if not only:
        return lessons
    known = {key: lesson for lesson in lessons for key in (lesson.name, lesson.number)}
    wanted = {name: known.get(name) or known.get(name.zfill(2)) for name in only}
    for name, lesson in wanted.items():
        if lesson is None:
            names = ", ".join(lesson.name for lesson in lessons) or f"none in {root}"
            raise ValueError(f"there is no lesson {name!r}; the lessons are: {names}")
    return [lesson for lesson in lessons if lesson in wanted.values()]
