"""A stand-in for one GPU per rank: real values, computed on the CPU, on a machine without a GPU.

    python tests/stand_in_device.py scripts/02_collectives.py --repeats 2     # a lesson that believes to be on cuda:0
    torchrun --nproc-per-node 2 tests/stand_in_device.py scripts/train.py --parallel.strategy fsdp THEN scripts/train.py

What is made on or moved to "cuda" gets a mark on its storage, results of marked tensors are marked, and a marked tensor
says that its device is cuda:0, or that of its rank on this node. An operator that finds marked and other tensors
together raises WrongDevice with the lesson's line, as CUDA would; so does `.numpy()` of a marked one, and a collective
whose tensors no backend of its group serves.

What it cannot see: kernels that CUDA lacks, streams that race, and the bytes of a real allocator. `copy_`, `to` and
indices may cross devices, and a tensor without dimensions on the CPU goes along with marked ones, as with CUDA. An
average over ranks, which gloo lacks, is a sum of what was divided before: its last bit may be another one.
"""

import contextlib
import functools
import inspect
import itertools
import os
import runpy
import sys
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # before anything is replaced: it lists torch's functions when it is first imported
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

INDEX, COUNT = (  # as torchrun says it, or MPICH
    int(os.environ.get(one, os.environ.get(other, or_else)))
    for one, other, or_else in (("LOCAL_RANK", "MPI_LOCALRANKID", 0), ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", 1))
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", INDEX)
BOTH = "cpu:gloo,cuda:nccl"
# operators that CUDA lets cross devices: a copy, and what takes its indices from the CPU
CROSSING = {"copy_", "_to_copy", "set_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
WRAPPERS, PLAIN = (DTensor, AsyncCollectiveTensor), (torch.Tensor, torch.nn.Parameter)
_real_device, _real_is_cpu = torch.Tensor.device, torch.Tensor.is_cpu


class WrongDevice(RuntimeError):
    """What a GPU would have refused: the lesson's line, the operator, and what is wrong."""


def _storage(tensor):
    """The storage that carries the mark; None for a tensor without data."""
    if type(tensor) not in PLAIN:  # for speed: hardly any is
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        if isinstance(tensor, FakeTensor):
            return None
    with torch._C.DisableTorchFunction():  # or the mode below would be asked what we ask here
        if tensor.layout != torch.strided or not _real_is_cpu.__get__(tensor):
            return None
        while torch._C._functorch.is_batchedtensor(tensor):  # within vmap
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def on_gpu(tensor):
    """True, False, or None for a tensor without data, such as one on "meta"."""
    storage = _storage(tensor)
    return None if storage is None else getattr(storage, "on_gpu", False)


def _mark(result, gpu):
    for tensor in _tensors(result):
        if (storage := _storage(tensor)) is not None:
            storage.on_gpu = gpu
    return result


def _device_of(tensor):
    if on_gpu(tensor):
        return GPU
    with torch._C.DisableTorchFunction():
        return _real_device.__get__(tensor)


def _tensors(*values):
    """The tensors in lists, tuples and dicts; pytree knows more kinds, and is too slow for every operator."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _asked(value):
    """The device that an argument asks for: a torch.device, or None if it is no device."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu", "meta"):
        return torch.device(value)
    return None


class StandIn:
    """A context manager; inside, torch has one GPU. `lesson` is the file whose lines are named."""

    def __init__(self, lesson=None):
        self.lesson, self.groups, self.inside = str(lesson or ""), {}, []
        self.moves, self.marks = _Moves(self), _Marks(self)

    def refuse(self, operator, what):
        """Raise WrongDevice that names the line of the lesson that led here, the latest one."""
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != self.lesson:
            frame = frame.f_back
        where = f"{Path(self.lesson).name}, line {frame.f_lineno}" if frame else Path(self.lesson).name or "here"
        raise WrongDevice(f"{where}: {operator}: {what}")

    def is_for_gpu(self):
        """Whether C++ that makes a tensor makes it for the GPU.

        Within a call it is for that call's tensors, such as a mask for attention; outside of any it is a Reducer of
        DDP, with the buckets of its model.
        """
        if not self.inside:
            frame = sys._getframe(1)
            while frame and frame.f_code.co_filename != torch.nn.parallel.distributed.__file__:
                frame = frame.f_back
            return frame is not None and frame.f_locals["self"].device.type == "cuda"
        asked, args, kwargs = self.inside[-1]
        return asked.type == "cuda" if asked else any(map(on_gpu, _tensors(args, kwargs)))

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        for owner, name, value in self._replacements():
            self._stack.enter_context(mock.patch.object(owner, name, value))
        self._stack.enter_context(self.marks)
        self._stack.enter_context(self.moves)
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def _replacements(self):
        """(owner, name, what stands for it): methods of tensors, torch.cuda, autocast, groups, autograd's engine."""
        tensor, real_numpy, real_groups = torch.Tensor, torch.Tensor.numpy, dist.init_process_group
        real_new_group, real_engine = dist.new_group, torch.autograd._engine_run_backward
        real_wrapped = torch.Tensor._make_wrapper_subclass
        real_autocast, real_profile = torch.amp.autocast.__init__, torch.profiler.profile.__init__

        def numpy(self_, **options):
            if on_gpu(self_) and not options.get("force"):
                self.refuse("numpy", f"can't convert a {GPU} tensor to numpy; use .cpu() first")
            return real_numpy(self_, **options)

        def init_process_group(backend=None, *args, **kwargs):
            assert not kwargs.get("device_id"), "with device_id, NCCL splits the world's communicator for every group"
            real_groups("gloo", *args, **kwargs)
            self.groups = {dist.group.WORLD.group_name: backend}

        def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
            spec = backend or self.groups.get(dist.group.WORLD.group_name, BOTH)
            made = real_new_group(ranks, timeout, "gloo", *args, **kwargs)
            if isinstance(made, dist.ProcessGroup):
                self.groups[made.group_name] = spec
            return made

        def run_backward(*args, **kwargs):
            with self.moves:  # hooks of the backward are Python, and ask for devices like everybody
                return real_engine(*args, **kwargs)

        def autocast(self_, device_type, *args, **kwargs):
            real_autocast(self_, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        def profile(self_, *, activities=None, **kwargs):
            there = set(activities or ()) - {torch.profiler.ProfilerActivity.CUDA}
            real_profile(self_, activities=there or None, **kwargs)

        def wrapped(*args, device=None, **kwargs):  # a wrapper says what the tensor in it says, C++ must not see a GPU
            device = CPU if device is not None and torch.device(device).type == "cuda" else device
            return real_wrapped(*args, device=device, **kwargs)

        yield torch.profiler.profile, "__init__", profile
        yield tensor, "_make_wrapper_subclass", staticmethod(wrapped)
        yield tensor, "device", property(_device_of)
        yield tensor, "is_cuda", property(lambda t: bool(on_gpu(t)))
        yield tensor, "is_cpu", property(lambda t: _device_of(t).type == "cpu")
        yield tensor, "get_device", lambda t: INDEX if on_gpu(t) else -1
        yield tensor, "record_stream", lambda t, stream: None
        yield tensor, "numpy", numpy
        yield tensor, "is_pinned", lambda t, device=None: False
        yield tensor, "pin_memory", lambda t, device=None: t
        yield torch.amp.autocast, "__init__", autocast
        yield torch.autograd, "_engine_run_backward", run_backward
        yield dist, "init_process_group", init_process_group
        yield dist, "new_group", new_group
        yield dist, "is_nccl_available", lambda: True
        from manyhands.parallel import mesh_strategy  # late: of the course that the script is of

        yield mesh_strategy, "records_graph", lambda *_: False  # this torch has no CUDA graphs
        yield flex_attention, "flex_attention", _dense_attention  # whose operator knows no modes
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
            yield dist, name, _averaging(getattr(dist, name))
        yield torch, "set_num_threads", lambda count: None  # one per rank: the CPU's cores have other work
        yield from ((torch.cuda, name, value) for name, value in _cuda().items())


def _dense_attention(q_BHTE, k_BHTE, v_BHTE, block_mask):
    """FlexAttention's result, by a mask of all pairs."""
    *batch, T, _ = q_BHTE.shape
    b, h, t, other = torch.meshgrid(*(torch.arange(n, device=q_BHTE.device) for n in (*batch, T, T)), indexing="ij")
    allowed_BHTT = block_mask.mask_mod(b, h, t, other)
    return torch.nn.functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=allowed_BHTT)


def _averaging(collective):
    """`collective`, which also knows ReduceOp.AVG."""

    @functools.wraps(collective)
    def call(*args, **kwargs):
        given = inspect.signature(collective).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        if values["op"] == dist.ReduceOp.AVG:
            values["op"], n = dist.ReduceOp.SUM, dist.get_world_size(values["group"])
            if "tensor" in values:
                values["tensor"].div_(n)
            elif "input" in values:
                values["input"] = values["input"] / n
            else:
                values["input_list"] = [part / n for part in values["input_list"]]
        return collective(*given.args, **given.kwargs)

    return call


def _cuda():
    """What the course and torch's own Python ask of torch.cuda: one device whose queue is always empty."""

    def properties(device=None):
        return types.SimpleNamespace(
            name="NVIDIA Stand-in", total_memory=80 * 2**30, uuid=f"stand-in {device}", multi_processor_count=1,
            major=9, minor=0,
        )  # fmt: skip

    def saying(value):  # a function of its own for each name: dynamo has a table of them
        return lambda *args, **kwargs: value

    silent = (
        "_lazy_init init set_device synchronize reset_peak_memory_stats empty_cache "
        "manual_seed manual_seed_all set_stream"
    )
    sizes = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    return {
        **{name: saying(None) for name in silent.split()}, **{name: saying(2**20) for name in sizes.split()},
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: COUNT,
        "current_device": lambda: INDEX,
        "get_device_properties": properties, "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *args: True,
        "mem_get_info": lambda device=None: (2**36, 80 * 2**30), "device": lambda device: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Stream": _Stream, "Event": _Event, "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(), "stream": lambda stream: contextlib.nullcontext(),
        "nccl": types.SimpleNamespace(version=lambda: (2, 27, 3)),
        "nvtx": types.SimpleNamespace(**{name: saying(None) for name in ["mark", "range_push", "range_pop"]}),
    }  # fmt: skip


class _Event:
    def __init__(self, *args, **kwargs):
        self.at_s = 0.0

    def record(self, stream=None):
        self.at_s = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)

    def synchronize(self):
        pass

    wait = synchronize


class _Stream(_Event):
    device = GPU

    def record_event(self, event=None):
        event = event or _Event()
        event.record()
        return event

    def wait_event(self, event):
        pass

    wait_stream = wait_event


class _Moves(TorchFunctionMode):
    """Calls from Python that ask for a device: the CPU's values, with or without the mark."""

    def __init__(self, stand_in):
        super().__init__()
        self.stand_in = stand_in

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs)
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # a dispatch mode hands it on
            return func(*args, **kwargs)
        asked = _asked(kwargs.get("device"))
        if asked and asked.type == "cuda":
            kwargs["device"] = CPU
        self.stand_in.inside.append((asked, args, kwargs))
        try:
            result = func(*args, **kwargs)
        finally:
            self.stand_in.inside.pop()
        if asked and asked.type != "meta" and isinstance(result, torch.Tensor):
            gpu = asked.type == "cuda"
            before = {id(s) for t in _tensors(args, kwargs) if (s := _storage(t)) is not None}
            if id(_storage(result)) in before and on_gpu(result) != gpu:
                result = result.clone()  # as_tensor
            _mark(result, gpu)
        return result

    def _move(self, func, name, args, kwargs):
        tensor, others = args[0], list(args[1:])
        if name == "to":
            places = [i for i, value in enumerate(others) if _asked(value) or isinstance(value, torch.Tensor)]
            target = others[places[0]] if places else kwargs.get("device", kwargs.get("other"))
            if isinstance(target, torch.Tensor):
                target, dtype = _device_of(target), target.dtype
                others = [dtype if isinstance(value, torch.Tensor) else value for value in others]
                kwargs.pop("other", None)
                places = []
            target = _asked(target)
            if places:
                others[places[0]] = CPU if target.type == "cuda" else target
            if "device" in kwargs and target:
                kwargs["device"] = CPU if target.type == "cuda" else target
        else:
            target, others, kwargs, func = torch.device(name), [CPU], {}, torch.Tensor.to
        if target is None or target.type == "meta" or on_gpu(tensor) in (None, target.type == "cuda"):
            return func(tensor, *others, **kwargs)
        gpu = target.type == "cuda"
        self.stand_in.inside.append((target, args, kwargs))
        try:
            if isinstance(tensor, DTensor):
                return func(tensor, *others, **kwargs | {"copy": True})
            if tensor.requires_grad and torch.is_grad_enabled():
                return _Move.apply(tensor, gpu).to(*others, **kwargs)
            return _mark(func(tensor, *others, **kwargs | {"copy": True}), gpu)
        finally:
            self.stand_in.inside.pop()


class _Move(torch.autograd.Function):
    """Onto the GPU or off it; the gradient goes the other way."""

    @staticmethod
    def forward(ctx, tensor, gpu):
        ctx.gpu = gpu
        return _mark(tensor.detach().clone(), gpu)

    @staticmethod
    def backward(ctx, grad):
        return _mark(grad.clone(), not ctx.gpu), None


class _Marks(TorchDispatchMode):
    """Every operator: marks go from tensors to results, and what CUDA or NCCL would refuse is refused."""

    def __init__(self, stand_in):
        super().__init__()
        self.stand_in = stand_in

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if types:
            if any(issubclass(kind, WRAPPERS) for kind in types):
                return NotImplemented  # they call operators of plain tensors, which come here again
            if any(issubclass(kind, FakeTensor) for kind in types):
                return operator(*args, **kwargs)
        asked = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)), None)
        if asked:
            args, kwargs = tree_map_only(torch.device, lambda d: CPU if d.type == "cuda" else d, (args, kwargs))
        name = operator._schema.name.split("::")[1]
        given = [(tensor, storage) for tensor in _tensors(args, kwargs) if (storage := _storage(tensor)) is not None]
        marked = [getattr(storage, "on_gpu", False) for _, storage in given]
        if operator.namespace in ("c10d", "_c10d_functional"):
            self._judge_collective(operator, name, args, marked)
        elif name not in CROSSING and any(marked):
            left = [tensor for (tensor, _), gpu in zip(given, marked, strict=True) if not gpu and len(tensor.shape)]
            if left:
                self.stand_in.refuse(name, f"tensors of {GPU} and of the CPU in one operator")
        before = {id(storage) for _, storage in given}
        result = operator(*args, **kwargs)
        if asked and asked.type == "cuda":
            gpu = True
        elif given:
            gpu = any(marked)
        else:
            gpu = self.stand_in.is_for_gpu()
        for tensor in _tensors(result):
            if (storage := _storage(tensor)) is not None and id(storage) not in before:
                storage.on_gpu = gpu
        return result

    def _judge_collective(self, operator, name, args, marked):
        groups = [value for value in tree_leaves(args) if isinstance(value, torch.ScriptObject)]
        names = [v for v in args if isinstance(v, str)][-1:]
        for group in groups:
            with contextlib.suppress(Exception):  # a reduce operation is a script object, too
                names.append(dist.ProcessGroup.unbox(group).group_name)
        backends = next((self.stand_in.groups[n] for n in names if n in self.stand_in.groups), BOTH)
        if name in ("barrier", "monitored_barrier_", "wait_tensor"):
            return
        if any(marked) and not all(marked) and backends != "gloo":
            self.stand_in.refuse(name, f"tensors of {GPU} and of the CPU in one collective")
        if marked and not any(marked) and "gloo" not in backends:
            self.stand_in.refuse(name, f"a tensor of the CPU in a group of {backends}")
        if any(marked) and name == "recv_any_source_" and backends != "gloo":
            self.stand_in.refuse(name, "NCCL does not receive from anybody")


def run_programs(programs):
    """Run programs, each [path, *arguments], one after the other in this process, as ranks that believe to own GPUs."""
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ["MANYHANDS_DEVICE"] = "cuda"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for script, *arguments in programs:
        sys.argv = [script, *arguments]
        with StandIn(Path(script).resolve()), mock.patch.object(os, "_exit", sys.exit):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise


if __name__ == "__main__":
    told = [list(one) for then, one in itertools.groupby(sys.argv[1:], lambda word: word == "THEN") if not then]
    sys.path[:0] = [str(Path(told[0][0]).resolve().parent)]  # of the course that the script is of
    run_programs(told)
