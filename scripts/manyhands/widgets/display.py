"""Show a picture below its controls in a live notebook, or alone elsewhere."""

import base64
import html
import io
import sys
from importlib.util import find_spec

from manyhands.launch.run_folder import save_figure
from manyhands.launch.settings import live


def is_live():
    """Return whether somebody may use controls: a notebook's kernel with ipywidgets, and not a headless or stored run.

    Those set MANYHANDS_LIVE=0: what they show is read later, on a web page, without a kernel.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return live() and hasattr(shell, "kernel") and find_spec("ipywidgets") is not None


def show_picture(figure, alt):
    """Display a matplotlib Figure as PNG with its text equivalent; outside of a notebook the text alone."""
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        print(f"[figure: {alt}]")
        return
    from IPython.display import display

    display(
        {"image/png": png(figure), "text/plain": f"[figure: {alt}]"}, metadata={"image/png": {"alt": alt}}, raw=True
    )


def labelled(kind, label, label_em, width_em, **traits):
    """A control of ipywidgets, `width_em` wide in all; equal `label_em` align what stands in one column.

    `kind` is a Dropdown (the space bar opens it), a text or a number: their labels are their accessible names. A
    slider's handle has none, and the buttons of ToggleButtons do not tell a screen reader which of them is chosen.
    """
    return kind(
        description=label, style={"description_width": f"{label_em}em"}, layout={"width": f"{width_em}em"}, **traits
    )


def show_with_controls(draw, settings, *rows):
    """Show `draw(**values)` -> (figure, alt) below rows of controls for the values, which start with `settings`.

    A row is {name of a value: (class of ipywidgets, value, label, em of the label, em in all, traits)}. Where nobody
    can use controls there is the picture alone. A ValueError of `draw` is shown as a sentence, with nothing drawn.
    """
    values = {name: value for row in rows for name, (_, value, *_) in row.items()} | settings

    def picture(now):
        try:
            return draw(**now)
        except ValueError as error:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(9, 1.2))
            figure.text(0.02, 0.5, str(error), fontsize=11, va="center")
            return figure, str(error)

    if not is_live():
        show_picture(*picture(values))
        return
    import ipywidgets

    made = {
        name: labelled(getattr(ipywidgets, kind), label, label_em, width_em, value=values[name], **traits)
        for row in rows for name, (kind, _, label, label_em, width_em, traits) in row.items()
    }  # fmt: skip
    page = Controls(
        [[made[name] for name in row] for row in rows],
        lambda: picture({name: control.value for name, control in made.items()}),
    )
    for control in made.values():
        control.observe(page.redraw, "value")
    page.show()


class Controls:
    """Rows of ipywidgets above a picture that `draw()` -> (figure, alt) makes; `redraw` when something has changed.

    While a new picture is computed, a line above the old one says so.
    A front end without ipywidgets, and a web page, find the first picture in the same output.
    """

    def __init__(self, rows, draw):
        import ipywidgets

        self.draw, self.picture, self.state = draw, ipywidgets.HTML(), ipywidgets.HTML()
        rows = [ipywidgets.HBox(row, layout={"flex_flow": "row wrap", "grid_gap": "0 1em"}) for row in rows]
        self.box = ipywidgets.VBox([*rows, self.state, self.picture])
        self.redraw()

    def redraw(self, _=None):
        self.state.value = '<span role="status">drawing...</span>'
        try:
            figure, self.alt = self.draw()
            self.png = png(figure)
        finally:
            self.state.value = '<span role="status">&nbsp;</span>'  # as high, so that nothing moves
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        self.picture.value = f'<img alt="{html.escape(self.alt)}" style="max-width: 100%" src="{source}">'

    def show(self):
        from IPython.display import display

        bundle = {**self.box._repr_mimebundle_(), "image/png": self.png, "text/plain": f"[figure: {self.alt}]"}
        display(bundle, metadata={"image/png": {"alt": self.alt}}, raw=True)


def png(figure):
    buffer = io.BytesIO()
    save_figure(figure, buffer, format="png", dpi=100)
    return buffer.getvalue()
