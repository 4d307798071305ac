"""A layout with axes that `train.py` does not have: context parallelism and expert parallelism.

    planned_layout(layout, "shard", context=2, expert=8)      # a PlannedLayout; the Layout itself where both are 1

Ranks of the context axis share each sequence: a rank has two of 2 c equal pieces of it, one from the front and one from the
back (zig-zag), so that all have as much attention to do under the causal mask. They have the same weights, or shards of the
same weights, and sum their gradients with the data ranks: for all that is about weights they are data ranks, and `replicate`
and `shard` count them. Experts are spread over `expert` neighbours among these, which keep the dense weights as they are.
From the inside: tensor, context, shard, replicate, pipeline.
"""

from dataclasses import dataclass, fields

from manyhands.config.layout import Layout


@dataclass(frozen=True)
class PlannedLayout(Layout):
    """A Layout whose data ranks hold a part of a sequence, or a part of the experts."""

    context: int = 1  # of replicate x shard
    expert: int = 1  # of replicate x shard

    @property
    def data(self):
        """Groups of ranks that see different sequences."""
        return self.replicate * self.shard // self.context


def planned_layout(layout, axis, context, expert):
    """`layout`, which leaves the context axis out, with it: on `axis`, which is "shard" or "replicate"."""
    if context == expert == 1:
        return layout
    sizes = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return PlannedLayout(**sizes | {axis: sizes[axis] * context}, context=context, expert=expert)
