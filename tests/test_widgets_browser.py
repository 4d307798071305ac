"""The widgets as a reader meets them: in real JupyterLab in real Chromium, by mouse and keyboard."""

import nbformat
import pytest
from lab import Lab, chromium, opened

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
        for module in [name.removeprefix("show_")]
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


@pytest.mark.parametrize("name", CONTROLS)
def test_a_widget_has_its_picture_and_whole_labels_and_the_tab_key_reaches_every_named_control(notebook, name):
    widget = Widget(notebook, name)
    widget.picture.scroll_into_view_if_needed()
    assert widget.picture.evaluate("e => e.decode().then(() => e.naturalWidth)") > 800
    assert widget.picture.get_attribute("alt") in widget.output.aria_snapshot()
    for label in widget.output.locator("label, button").all():
        assert label.evaluate("e => e.scrollWidth <= e.clientWidth"), label.inner_text()
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
