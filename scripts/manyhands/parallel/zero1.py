"""ZeRO-1: replicas of the model, and each rank keeps the optimizer's state of its share of the parameters alone.

By torch's ZeroRedundancyOptimizer (Rajbhandari et al. 2020, ZeRO, section 5.1): gradients are averaged as among any
replicas; each rank updates its share, and broadcasts it to the others.
"""

import warnings

from manyhands.parallel.ddp import Replicas
from manyhands.parallel.mesh_strategy import MeshStrategy


class Zero1(MeshStrategy):
    """See the module."""

    def replicate(self, model):
        return Replicas(model, self.options.parallel.reduce_dtype)  # it shares out whole tensors: a flat vector is one

    def make_optimizer(self, kind, groups, **settings):
        with warnings.catch_warnings():  # its package compiles old functional optimizers when it is imported
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, kind, parameters_as_bucket_view=True, **settings)

    def optimizer_state(self, optimizer):
        return super().optimizer_state(optimizer.optim)  # the one inside, which has this rank's state
