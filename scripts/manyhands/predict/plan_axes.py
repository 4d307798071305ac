"""Every product of axes that GPUs split into, with the ways to share weights and to spread experts: before a batch is cut.

for axes in all_axes(question):          # Axes(context, tensor, pipeline, group, sharing, expert)
"""

from typing import NamedTuple


class Axes(NamedTuple):
    """A product of axes and a way to share, before a batch is cut."""

    context: int
    tensor: int
    pipeline: int
    group: int  # ranks that see different tokens: data ranks, times context
    sharing: str
    expert: int

    @property
    def data(self):
        return self.group // self.context

    def shard(self, per_node):
        """Of `group` the ranks that share weights."""
        if self.sharing == "hybrid":
            return per_node // self.tensor
        return self.group if self.sharing in ("zero2", "zero3", "offload") else 1


def all_axes(question):
    """Every Axes of a question."""
    per_node = question.per_node
    for context in question.contexts():
        for tensor in divisors(question.gpus // context):
            if tensor > per_node or per_node % tensor:
                continue
            if question.context is None and context > 1 and context * tensor > per_node:
                continue  # a ring between nodes is for those who ask for it
            for pipeline in divisors(question.gpus // context // tensor):
                group = question.gpus // tensor // pipeline
                for sharing in _sharings(question, context, tensor, pipeline, group):
                    for expert in _experts(question.model, sharing, tensor, group, per_node):
                        yield Axes(context, tensor, pipeline, group, sharing, expert)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def _sharings(question, context, tensor, pipeline, group):
    """What makes sense for so many data ranks; zero1 goes with nothing else, and the trainer says so itself."""
    within = question.per_node // tensor
    names = ["replicas"]
    if group > 1:
        names += ["zero2", "zero3"] + (["zero1"] if tensor == pipeline == 1 else [])
        if 1 < within < group and group % within == 0 and within % context == 0:
            names.append("hybrid")
    return names + ["offload"] * question.offload


def _experts(model, sharing, tensor, group, per_node):
    """Over how many ranks the experts are spread: not at all, as far as a node reaches, and as far as they go."""
    if sharing in ("zero1", "hybrid"):
        return [1]
    degrees = [degree for degree in divisors(model.n_expert) if group % degree == 0]
    return sorted({1, max(d for d in degrees if d == 1 or d * tensor <= per_node), degrees[-1]})
