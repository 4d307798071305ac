"""The picture of a memory timeline: stacked areas over the events of a step; or of several, side by side by phases."""

from manyhands.plots.looks import BYTES, INK, PAPER, PREDICTED, QUIET, kind_keys, new_figure, prefix

HERE = {**PREDICTED, "color": INK, "lw": 2}  # on hatching, with a white rim
BESIDE = {"loc": "outside right center", "frameon": False, "handleheight": 1.4}


def memory_stack(samples, title, predicted=None, highest=None, totals=None):
    """A matplotlib Figure of a MemoryTimeline's `samples`: bytes by kind, one on the other, event by event.

    `predicted` {kind: bytes}: a dashed line on each of these kinds, as high above what lies under it as it should be
    where the kind is largest. `totals` {phase: (bytes at its begin, bytes at its end)}: a dashed line over the whole of
    each phase. `highest`: bytes for which the axis has room, so that two figures have one scale. Kinds differ by
    hatching as well as by colour.
    Raise ValueError without samples, and for kinds that there are not.
    """
    from matplotlib.lines import Line2D

    if not samples:
        raise ValueError("there are no samples yet: a MemoryTimeline has them when its block has ended")
    predicted = predicted or {}
    if unknown := [kind for kind in predicted if kind not in BYTES]:
        raise ValueError(f"no kind {unknown[0]!r} of memory; there are: {', '.join(BYTES)}")
    figure, axes = new_figure(8, 4.2)
    most = max([sum(sample.bytes.values()) for sample in samples] + [highest or 0])
    scale, unit = prefix("bytes", most)
    areas = _stack(axes, list(enumerate(sample.bytes for sample in samples)), scale)
    for kind, size in predicted.items():
        _predict(axes, *areas[kind], size / scale)
    phases = [sample.phase for sample in samples]
    for phase, ends in (totals or {}).items():
        events = [i for i, name in enumerate(phases) if name == phase]
        _dashed(axes, [events[0], events[-1]], [size / scale for size in ends])
    keys = kind_keys([kind for kind, (_, heights) in areas.items() if any(heights)], lw=0.4)
    if predicted or totals:
        keys.append(Line2D([], [], **HERE, label="predicted"))
    _phases(axes, phases)
    axes.set(xlim=(0, max(1, len(samples) - 1)), ylim=(0, max(most / scale * 1.12, 1e-9)))
    axes.set(xlabel="events of the step, one for each piece of memory made", ylabel=f"memory, {unit}", title=title)
    figure.legend(handles=keys[::-1], **BESIDE)
    return figure


def _predict(axes, floor, heights, value):
    """A dashed line at `value` above the floor, around where the kind is largest."""
    last = len(heights) - 1
    at = max(range(len(heights)), key=heights.__getitem__)
    begin = end = at  # as long as kind and floor stay as they are
    alike = 0.005 * max(floor[at] + heights[at], value, 1e-12)
    while begin > 0 and abs(heights[begin - 1] - heights[at]) + abs(floor[begin - 1] - floor[at]) < alike:
        begin -= 1
    while end < last and abs(heights[end + 1] - heights[at]) + abs(floor[end + 1] - floor[at]) < alike:
        end += 1
    least = max(1, round(0.04 * last))
    begin, end = max(0, min(begin, at - least)), min(last, max(end, at + least))
    _dashed(axes, [begin, end], [floor[at] + value] * 2)


def _dashed(axes, x, y):
    from matplotlib.patheffects import Normal, Stroke

    line = axes.plot(x, y, **HERE, zorder=5)[0]
    line.set_path_effects([Stroke(linewidth=4.5, foreground=PAPER), Normal()])  # seen on any hatching


def _phases(axes, phases):
    """A line where each phase begins, its name above; that of a phase too short for it ends with the phase, lower."""
    begin, above = 0, axes.get_xaxis_transform()
    for i in range(1, len(phases) + 1):
        if i < len(phases) and phases[i] == phases[begin]:
            continue
        name, end = phases[begin], min(i, len(phases) - 1)
        if begin:
            axes.axvline(begin, color=QUIET, lw=0.8, zorder=3)
        if name and end - begin > 0.02 * len(phases) * len(name):
            axes.text((begin + end) / 2, 0.99, name, transform=above, ha="center", va="top")
        elif name:
            axes.text(end, 0.93, f"{name} ", transform=above, ha="right" if begin else "left", va="top")
        begin = i


def memory_stacks(timelines):
    """A matplotlib Figure of several timelines, {title: samples}, side by side on one scale, by kind and phase.

    Each phase is equally wide in all of them; the events of a phase, however many, are spread over its width. Samples
    outside of phases are left out. Raise ValueError where a timeline has no phases, or others than the first one.
    """
    samples = {title: [s for s in found if s.phase] for title, found in timelines.items()}
    phases = {title: list(dict.fromkeys(s.phase for s in found)) for title, found in samples.items()}
    names = next(iter(phases.values()), [])
    if not names or any(other != names for other in phases.values()):
        raise ValueError(f"timelines side by side need the same phases, one at least; these have {phases}")
    most = max(s.total for found in samples.values() for s in found)
    scale, unit = prefix("bytes", most)
    figure, panels = new_figure(1 + 2.9 * len(samples), 4, 1, len(samples), sharey=True, squeeze=False)
    panels = panels[0]
    for axes, (title, found) in zip(panels, samples.items(), strict=True):
        _stack(axes, [part for name in names for part in _spread(found, name, names.index(name))], scale)
        for i in range(1, len(names)):
            axes.axvline(i, color=QUIET, lw=0.8, zorder=3)
        axes.set_xticks([i + 0.5 for i in range(len(names))], names)
        axes.tick_params(axis="x", length=0)
        peak = max(s.total for s in found) / scale
        axes.set(xlim=(0, len(names)), ylim=(0, most / scale * 1.08 or 1), title=f"{title}\npeak {peak:.1f} {unit}")
    panels[0].set_ylabel(f"memory, {unit}")
    there = [kind for kind in BYTES if any(s.bytes.get(kind) for found in samples.values() for s in found)]
    figure.legend(handles=kind_keys(reversed(there), lw=0.4), **BESIDE)
    return figure


def _spread(samples, phase, start):
    """[(x, bytes by kind)] of a phase's events over the width 1 from `start`, and where the last one ends."""
    found = [sample.bytes for sample in samples if sample.phase == phase]
    return [*((start + i / len(found), held) for i, held in enumerate(found)), (start + 1, found[-1])]


def _stack(axes, points, scale):
    """The areas of [(x, bytes by kind)], one on the other: {kind: (what lies under it, its heights)}."""
    areas, floor, at = {}, [0.0] * len(points), [x for x, _ in points]
    for kind, (colour, hatch) in BYTES.items():
        areas[kind] = floor, [held.get(kind, 0) / scale for _, held in points]
        top = [low + height for low, height in zip(*areas[kind], strict=True)]
        if top != floor:
            axes.fill_between(at, floor, top, step="post", fc=colour, ec=INK, lw=0.4, hatch=hatch, zorder=2)
        floor = top
    return areas
