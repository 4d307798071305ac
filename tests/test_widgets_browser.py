"""The widgets as a reader meets them: in real JupyterLab in real Chromium, by mouse and keyboard."""

import base64
import re

import nbformat
import pytest
from lab import Lab, chromium, opened
from manyhands.widgets.display import png
from manyhands.widgets.floats import floats_picture
from manyhands.widgets.memory import memory_picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

CONTROLS = {  # in the order of the key Tab: their roles and accessible names
    "show_floats": [
        ("textbox", "number"), ("combobox", "or take"), ("combobox", "bits in"), ("textbox", "sign exponent fraction"),
        ("button", "one down"), ("button", "one up"),
    ],
    "show_memory": [
        ("combobox", "model"), ("combobox", "recipe"), ("combobox", "ranks"), ("spinbutton", "sequences per rank"),
        ("spinbutton", "memory of a device"), ("combobox", "unit"),
    ],
    "show_sizes": [("spinbutton", "GB to hold"), ("combobox", "device"), ("combobox", "whose unit is")],
    "show_pipeline": [
        ("combobox", "schedule"), ("spinbutton", "ranks p"), ("spinbutton", "micro-batches m"),
        ("spinbutton", "stages per rank v"),
    ],
    "show_zigzag": [("spinbutton", "ranks c"), ("spinbutton", "positions"), ("combobox", "layout")],
    "show_rank_grid": [
        ("spinbutton", "pipeline ranks"), ("spinbutton", "data ranks"), ("spinbutton", "tensor ranks"),
        ("spinbutton", "ranks per node"), ("spinbutton", "look at rank"), ("combobox", "outermost first"),
    ],
    "show_planner": [
        ("combobox", "model"), ("combobox", "machine"), ("combobox", "GPUs"), ("spinbutton", "sequences per step"),
        ("combobox", "offload"),
    ],
}  # fmt: skip
WHAT_TAKES_KEYS = "input, select, textarea, button, [tabindex], [role=slider], [contenteditable=true]"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A notebook with one cell for each widget, in which all cells have run."""
    folder = tmp_path_factory.mktemp("widgets")
    (folder / "notebooks").mkdir()
    cells = [
        nbformat.v4.new_code_cell(f"from manyhands.widgets.{module} import {name}\n\n{name}()")
        for name in CONTROLS
        for module in ["memory" if name == "show_sizes" else name.removeprefix("show_")]
    ]
    kernel = {"name": "manyhands", "display_name": "Many Hands", "language": "python"}
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "notebooks/00_widgets.ipynb"
    )
    with chromium() as browser, Lab(folder, folder) as lab, opened(browser, lab, "00_widgets") as notebook:
        notebook.run_many("Run All Cells", timeout_s=120)
        yield notebook


class Widget:
    """What a cell that calls `name` has put out."""

    def __init__(self, notebook, name):
        self.keys = notebook.page.keyboard
        self.cell = notebook.cell(f"{name}()")
        self.output = self.cell.locator(".jp-OutputArea-output")
        self.picture = self.output.get_by_role("img")

    def control(self, name):
        """The control with this accessible name; a dropdown's, a field's or a button's."""
        (role,) = {role for controls in CONTROLS.values() for role, known in controls if known == name}
        return self.output.get_by_role(role, name=name, exact=True)

    def choose(self, name, option):
        self.control(name).select_option(option)

    def choose_by_keys(self, name, *keys):
        """Open a dropdown with the space bar and go to an option; while it is closed, JupyterLab takes arrow keys."""
        self.control(name).focus()
        self.keys.press("Space")
        self.output.page.wait_for_function("document.querySelector('select:open')")
        for key in (*keys, "Enter"):
            self.keys.press(key)

    def type(self, name, text):
        self.control(name).fill(text)
        self.keys.press("Enter")

    def says(self, pattern):
        """The picture's text, once all of it matches the pattern."""
        from playwright.sync_api import expect

        expect(self.picture).to_have_attribute("alt", re.compile(f"^{pattern}$"), timeout=60_000)
        return self.picture.get_attribute("alt")

    def shows(self, figure):
        """Whether the picture is the one that the function draws."""
        source = self.picture.get_attribute("src")
        return base64.b64decode(source.removeprefix("data:image/png;base64,")) == png(figure)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_widget_appears_with_its_picture_and_no_label_is_cut_off(notebook, name):
    widget = Widget(notebook, name)
    widget.picture.scroll_into_view_if_needed()
    assert widget.picture.evaluate("e => e.decode().then(() => e.naturalWidth)") > 800
    assert widget.picture.get_attribute("alt") in widget.output.aria_snapshot()
    for label in widget.output.locator("label, button").all():
        assert label.evaluate("e => e.scrollWidth <= e.clientWidth"), label.inner_text()


@pytest.mark.parametrize("name", CONTROLS)
def test_the_tab_key_reaches_every_control_and_each_has_a_name(notebook, name):
    widget = Widget(notebook, name)
    controls = [widget.control(control) for _, control in CONTROLS[name]]
    assert [control.count() for control in controls] == [1] * len(controls)
    assert widget.output.locator(WHAT_TAKES_KEYS).count() == len(controls), "one of them has no name"
    focus = notebook.page.locator(":focus")
    widget.cell.focus()
    for _ in range(20):  # past the buttons of the cell
        widget.keys.press("Tab")
        if controls[0].and_(focus).count():
            break
    for control in controls:
        assert control.and_(focus).count(), control
        widget.keys.press("Tab")


def test_a_number_its_bits_and_what_is_stored_follow_each_other(notebook):
    widget = Widget(notebook, "show_floats")
    widget.type("number", "1.5")
    widget.says(r"the bits of 1\.5\..* bf16: 0 01111111 1000000, normal: \+1\.5 x 2\^0 = 1\.5;.*")
    bits = widget.control("sign exponent fraction")
    bits.click()
    widget.keys.press("End")
    widget.keys.press("Shift+ArrowLeft")
    widget.keys.type("1")
    widget.keys.press("Enter")
    widget.says(r"the bits of 1\.5078125\..* fp16: 0 01111 1000001000, .*")
    assert widget.control("number").input_value() == str(1.5 + 2**-7)
    widget.control("one up").click()
    widget.says(r"the bits of 1\.515625\..*")
    assert bits.input_value() == "0 01111111 1000010" and widget.shows(floats_picture(1.5 + 2 * 2**-7)[0])
    widget.choose("bits in", "fp16")
    widget.control("one down").press("Enter")
    widget.says(r"the bits of 1\.514648438\..* fp16: 0 01111 1000001111, .*")
    assert bits.input_value() == "0 01111 1000001111"
    widget.choose("or take", "70000")
    widget.says(r"the bits of 70000\..* fp16: 0 11111 0000000000, infinity: \+inf")
    assert widget.shows(floats_picture(70000)[0])


def test_a_dropdown_is_chosen_by_keys_and_the_picture_follows(notebook):
    widget = Widget(notebook, "show_memory")
    widget.choose_by_keys("ranks", "ArrowUp", "ArrowUp")
    widget.says("GB on each of 16 ranks .*")
    widget.type("memory of a device", "27")
    widget.choose("unit", "GiB")
    widget.says("GiB on each of 16 ranks .*")
    assert widget.shows(memory_picture(ranks=16, device=27, unit="GiB")[0])
