"""Plot of lesson 14: tokens per call of a large model against the number of draft tokens."""

import statistics

from manyhands.plots.looks import MEASURED, PREDICTED, WHISKERS


def tokens_per_call(samples, predicted, alpha):
    """Points of each text's tokens per call, with whiskers from the least to the most, and the formula as a line.

    samples: {draft tokens: rates of texts}; predicted: {draft tokens: rate}; alpha: the share of them that are kept.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for k, rates in samples.items():
        middle = statistics.mean(rates)
        axes.errorbar(k, middle, yerr=[[middle - min(rates)], [max(rates) - middle]], **WHISKERS | MEASURED)
    ks = sorted(predicted)
    axes.plot(ks, [predicted[k] for k in ks], **PREDICTED)
    axes.annotate(
        f"formula, alpha = {alpha:.2f}", (ks[-1], predicted[ks[-1]]), (-14, 8), textcoords="offset points", ha="right",
        color=PREDICTED["color"],
    )  # fmt: skip
    axes.set(
        xlabel="draft tokens k per call of the large model", ylabel="tokens written per call", xticks=ks,
        ylim=(1, None),
        title="points: mean of the texts; whiskers: least and most",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    return figure
