"""What one GPU does in a training step: what `step_time` turns into seconds, from `plan_work` or `published_runs`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What the busiest GPU does in one step."""

    tensor: int
    pipeline: int
    replicate: int
    shard: int
    micro_batches: int
    stages_per_rank: int
    sharing: str  # replicas, zero1, zero2, zero3, hybrid or offload
    layers: int  # of this GPU
    # of one micro-batch, on this GPU: operations of the forward, of all its layers and of the head
    layers_flops: float
    head_flops: float
    again_flops: float  # that recomputation repeats
    # bytes that its forward leaves for its backward; that recomputation writes once more; of its layers, and around them
    layers_bytes: float
    again_bytes: float
    around_bytes: float
    # tensor parallelism: all-reduces of one micro-batch, or the pairs that take their place, and the payload of one
    tensor_calls: int
    tensor_payload: float
    stream_bytes: float  # that a stage sends to the next one for a micro-batch
    stream_scattered: bool  # whether the tensor ranks share that
    # parameters of this GPU's share of layers and tensors; bytes of a number in gathers and in sums of gradients
    parameters: float
    units: int  # in how many pieces FSDP gathers them
    gather_bytes: int
    gradient_bytes: int
    cast_bytes: float = 0.0  # that autocast reads and writes per micro-batch
    overlap: bool = True  # False: this program sends its gradients when all backwards are done
    # of what the other ranks do ahead of this one, how much it idles for: a third where W fills the rest of the bubble
    idle_share: float = 1.0
    # context parallelism: ranks (of the data ranks) that share a sequence; operations of a forward's scores and their product
    # with V; bytes of K and V, and of K, V and their gradients, of whole sequences in one layer; forwards, with those repeated
    context: int = 1
    attention_flops: float = 0.0
    ring_payload: float = 0.0
    ring_back_payload: float = 0.0
    forwards: int = 1
    # expert parallelism: ranks (of the data ranks) that the experts are spread over; of `parameters` those of experts; of a
    # micro-batch's `layers_flops` and `layers_bytes` those of experts; all-to-alls, and the payload of one
    expert: int = 1
    expert_parameters: float = 0.0
    expert_flops: float = 0.0
    expert_bytes: float = 0.0
    exchange_calls: int = 0
    exchange_payload: float = 0.0

    @property
    def data(self):
        """Ranks whose gradients are summed: those of the context axis see other tokens, too."""
        return self.replicate * self.shard

    @property
    def owned(self):
        """Parameters that this GPU updates."""
        if self.sharing == "replicas":
            return self.parameters
        ranks = self.shard if self.sharing == "hybrid" else self.data
        return (self.parameters - self.expert_parameters) / ranks + self.expert_parameters * self.expert / ranks
