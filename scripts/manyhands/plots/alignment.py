"""The plots of lesson 13: what two rewards teach, and what each stage of alignment brings."""

from manyhands.plots.looks import ALTERNATIVES, MEASURED, PREDICTED


def reward_and_kl(runs, chance):
    """A matplotlib Figure with three panels over the steps: mean reward, accuracy on held-out words, KL per answer.

    `runs`: {name: ([(step, mean reward, KL in nats)], {step: accuracy})}; the accuracy of chance is a dashed line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for (name, (points, shares)), look in zip(runs.items(), ALTERNATIVES, strict=False):
        steps, rewards, kls = zip(*points, strict=True)
        line = {key: look[key] for key in ("color", "ls")} | {"lw": 1.6}
        axes[0].plot(steps, rewards, **line)
        axes[1].plot(list(shares), list(shares.values()), ms=5, **(look | {"lw": 1.6}))
        axes[2].plot(steps, kls, label=name, **line)
    axes[1].axhline(chance, **PREDICTED)
    axes[1].text(0.99, chance + 0.03, "chance", transform=axes[1].get_yaxis_transform(), ha="right", va="bottom")
    for panel, title in zip(axes, ("mean reward", "held-out accuracy", "KL, nats per answer"), strict=True):
        panel.set(title=title, xlabel="step")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[:2]:
        panel.set_ylim(-0.03, 1.05)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False, title="trained on the reward of")
    return figure


def stages(shares, chance):
    """A matplotlib Figure: the accuracy on held-out words after each stage, a point per seed, over chance.

    `shares`: {stage: [accuracy of each seed]}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for i, found in enumerate(shares.values()):
        axes.plot([i] * len(found), found, **(MEASURED | {"ls": "none", "ms": 7, "mfc": "none"}))
        axes.text(i + 0.12, sum(found) / len(found), f"{sum(found) / len(found):.0%}", va="center")
    axes.axhline(chance, **PREDICTED)
    axes.text(len(shares) - 0.45, chance + 0.015, "chance", ha="right", va="bottom")
    axes.set_xticks(range(len(shares)), list(shares))
    axes.set(
        xlim=(-0.5, len(shares) - 0.4),
        ylim=(-0.03, 1.05),
        ylabel="held-out words right",
        title="a point per seed, and their mean",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
