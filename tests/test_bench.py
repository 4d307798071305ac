"""The bench reads its numbers from real runs, marks what misses its aim, and asserts nothing."""

import json

import fake_course
import nbformat
import pytest
from manyhands import bench
from manyhands.bench import lessons, numbers
from manyhands.course.lessons import find_lessons
from manyhands.preflight.runs import Run

KEEPS_RATIO = "write_metrics(42, 4.174, measured={'ours_to_library': 0.97})\n"


def cell(source):
    return nbformat.v4.new_code_cell(source)


def test_a_number_is_within_its_aim_from_the_right_side():
    assert numbers.Number("seconds", 80, "s", 90).within and not numbers.Number("seconds", 91, "s", 90).within
    assert numbers.Number("ratio", 0.95, "", 0.9, at_least=True).within
    assert not numbers.Number("ratio", 0.85, "", 0.9, at_least=True).within
    assert numbers.Number("seconds", None, "s", 90).within is None


def test_the_ring_is_compared_with_gloo_at_16_mib_and_at_no_other_size():
    measured = {"sizes_b": [2**20, 2**24], "all_reduce_s": {"our ring": [1.0, 3.0], "gloo": [1.0, 2.0]}}
    assert lessons.ring_to_gloo(measured) == 1.5
    assert lessons.ring_to_gloo({**measured, "sizes_b": [2**20, 2**22]}) is None
    assert lessons.ring_to_gloo({}) is None


def test_the_first_cells_end_with_the_first_that_runs_on_the_ranks(tmp_path):
    cells = [
        cell("n_ranks = 4"),
        nbformat.v4.new_markdown_cell("text"),
        cell("start()"),
        cell("%%ranks\njoin()"),
        cell("1"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path := tmp_path / "x.ipynb")
    assert lessons.first_cells(path) == ["n_ranks = 4", "start()", "%%ranks\njoin()"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:3]), path)
    with pytest.raises(ValueError, match="no cell that runs on the ranks"):
        lessons.first_cells(path)


def test_first_output_is_timed_from_the_first_cell_to_the_last_ones_first_words(tmp_path):
    fake_course.write_lesson(tmp_path, "00_fake", fake_course.GOOD)
    (lesson,) = find_lessons(tmp_path)
    (tmp_path / "run").mkdir()
    run = Run(lesson, "notebook", None, tmp_path / "run")
    cells = ["import time; print('not a rank'); time.sleep(1)", "print('hello', flush=True); time.sleep(600)"]
    seconds = lessons.seconds_to_first_output(cells, run)
    assert seconds > 1  # and the end of the last cell would come after its time-out
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        lessons.seconds_to_first_output(["1 / 0"], run)


def test_table_json_and_plot_are_written_and_a_failed_lesson_is_said(tmp_path, capsys):
    fake_course.write_lesson(tmp_path, "02_raises", fake_course.RAISES)
    fake_course.write_lesson(tmp_path, "03_ratio", KEEPS_RATIO)
    assert bench.main(["--starts", "0"], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "not measured" in printed and "rank 1 has 3 numbers" in printed and "at least 0.9" in printed
    numbers = json.loads((tmp_path / "outputs" / "bench" / "bench.json").read_text())["numbers"]
    ratio = next(number for number in numbers if number["aim"] == 0.9)
    assert (ratio["value"], ratio["within"]) == (0.97, True)
    assert (tmp_path / "outputs" / "bench" / "bench.svg").read_text().count("03_ratio") == 2
