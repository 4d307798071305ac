"""Measure what the course promises about speed: tables, JSON and plots in `outputs/bench`.

    python -m manyhands.bench            # or `make bench`: ten minutes, on a machine that does nothing else
    python -m manyhands.bench --trainer  # only the trainer, beside a plain PyTorch loop
    python -m manyhands.bench --lesson 03

You see each number beside its aim. Nothing is asserted: a number belongs to the machine that it was taken on, and to what
else that machine did meanwhile (its load is in the file). Exit status: 0, or 1 where something could not be measured.
An option of one part (such as --lesson, or --rounds) runs that part alone.

`lessons` and `trainer` are the two parts; `numbers` shows what they found.
"""

import argparse
import os
import sys
from pathlib import Path

from manyhands.bench.lessons import first_output, lesson_numbers
from manyhands.bench.numbers import show, write
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons


def main(argv=None, root=ROOT):
    """Measure, print, write. Returns the exit status."""
    options = _parsed(argv)
    try:
        lessons = find_lessons(root, options.lesson) if options.lessons else []
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    output = (options.output or root / "outputs" / "bench").resolve()
    output.mkdir(parents=True, exist_ok=True)
    from manyhands.launch.processes import sigterm_interrupts

    status = 0
    with sigterm_interrupts():
        if options.lessons:
            status |= _measure_lessons(lessons, output, options, root)
        if options.trainer:
            from manyhands.bench.trainer import measure_trainer

            status |= measure_trainer(output, root, rounds=options.rounds, steps=options.steps)
    return status


def _parsed(argv):
    parser = argparse.ArgumentParser(
        prog="python -m manyhands.bench", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--lessons", action="store_true", help="only the lessons")
    parser.add_argument("--trainer", action="store_true", help="only the trainer")
    parser.add_argument("--lesson", action="append", metavar="03", help="only this lesson (repeatable)")
    parser.add_argument("--starts", type=int, metavar="N", help="kernels started (default: 3)")
    parser.add_argument("--timeout", type=int, metavar="S", help="seconds for one lesson (default: 600)")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="of the trainer's bursts (default: 5)")
    parser.add_argument("--steps", type=_positive, metavar="N", help="of a burst (default: 40)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: outputs/bench")
    options = parser.parse_args(argv)
    options.lessons |= any(value is not None for value in (options.lesson, options.starts, options.timeout))
    options.trainer |= any(value is not None for value in (options.rounds, options.steps))
    if not (options.lessons or options.trainer):
        options.lessons = options.trainer = True
    defaults = {"lesson": [], "starts": 3, "timeout": 600, "rounds": 5, "steps": 40}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _measure_lessons(lessons, output, options, root):
    load = os.getloadavg()[0]
    numbers = [first_output(lessons[0], output / "runs", options.starts)] if lessons and options.starts else []
    for lesson in lessons:
        numbers += lesson_numbers(lesson, output / "runs" / lesson.name, options.timeout)
    write(output, numbers, load, root)
    show(numbers, output / "bench.json", output / "bench.svg")
    return int(any(number.value is None for number in numbers))
