"""The plot of lesson 11: a run that was killed and resumed, on top of the one that nobody touched."""

from manyhands.plots.looks import ALTERNATIVES, FAINT, INK

SIZES = (11, 8, 5)  # of the markers: where two lives made the same step both stay in sight


def killed_and_resumed(undisturbed, lives, title):
    """The losses of all lives over the undisturbed curve; below them the residual, a life's loss minus the undisturbed one.

    undisturbed: {step: loss}; lives: for each start of the run {step: loss}, with steps that `undisturbed` has.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(list(undisturbed), list(undisturbed.values()), color=FAINT, lw=8)
    first = next(iter(undisturbed))
    above.annotate("undisturbed", (first, undisturbed[first]), (12, -2), textcoords="offset points", color=INK)
    residuals = []
    for i, own in enumerate(lives):
        style = ALTERNATIVES[i % len(ALTERNATIVES)] | {"ms": SIZES[i % len(SIZES)], "mfc": "none"}
        above.plot(list(own), list(own.values()), **style)
        label = {"size": 10, "color": style["color"], "ha": "center", "va": "top"}
        above.text((min(own) + max(own)) / 2, 0.97, f"life {i + 1}", transform=above.get_xaxis_transform(), **label)
        residuals.append([loss - undisturbed[step] for step, loss in own.items()])
        below.plot(list(own), residuals[-1], **style)
    low, high = above.get_ylim()
    above.set(ylim=(low, high + (high - low) / 6), ylabel="loss", title=title)  # room for the labels
    furthest = max((abs(residual) for life in residuals for residual in life), default=0)
    below.set(xlabel="step", ylabel="residual", ylim=(-1.2 * furthest or -1e-6, 1.2 * furthest or 1e-6))
    return figure
