"""Apply any strategy, or a product of them, to the GPT from outside; training sees one interface: see `strategy`.

parallel = parallelize(config, layout, options, ranks)          # all ranks
optimizer = build_optimizer(parallel, options)
loss = parallel.forward_backward(ids_bT, targets_bT)            # this data rank's share of the global batch
norm = parallel.clip(1.0)                                       # global, whatever is sharded
optimizer.step(); optimizer.zero_grad()
"""

from manyhands.parallel.deepspeed_engine import DeepSpeedParallel
from manyhands.parallel.full_model import full_model
from manyhands.parallel.mesh_strategy import MeshStrategy
from manyhands.parallel.zero1 import Zero1

# by how the layout says that data ranks are served
STRATEGIES = {"replicas": MeshStrategy, "fsdp": MeshStrategy, "zero1": Zero1, "deepspeed": DeepSpeedParallel}


def parallelize(config, layout, options, ranks, start=full_model):
    """The GPT of `config`, spread over `ranks` as `layout` says: a `Strategy`. All ranks must call it.

    `start(config, options)` makes the whole GPT that every rank cuts its share from: drawn from the seed, or one's own.
    `layout` comes from `resolve_layout`, which has refused what does not go together.
    """
    return STRATEGIES[layout.dp_mode(options)](config, layout, options, ranks, start)
