"""Find names and descriptions for Tab and Shift-Tab on a rank, in a thread beside whatever its cell does.

Nothing of the learner's runs: a property may start a collective, which hangs, and so may the `repr` of a DTensor.
Everything comes from the dictionaries of objects and types. IPython's completer and jedi's interpreter call `__dir__`
and `__getattr__`, even with unsafe execution off, so they cannot answer here.
"""

import ast
import inspect
import re
import sys
import types

MOST = 5000  # names that one answer holds
LONGEST = 200  # characters of a value, a default or an annotation
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # types whose repr runs nothing of the learner's
_MISSING = object()
_SLOTS = types.GetSetDescriptorType, types.MemberDescriptorType
_CALLABLE = types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType
_STEP = re.compile(r"\.(\w+)|\[(-?\d+|'[^'\\]*'|\"[^\"\\]*\")\]")
_SAME_TYPE = {"grad", "data", "T", "mT", "H", "mH", "real", "imag"}  # of a tensor: again a tensor


class _Some:
    """An object of type `cls` that exists only once something is computed, such as `x.grad` or `x[0]`."""

    def __init__(self, cls):
        self.cls = cls


def complete(space, path, prefix, call=""):
    """Return {name: type} of the attributes of `path` (of all names in `space` if ""), those that begin with `prefix`.

    path: "model.layers[0]"; call: the function inside whose parentheses the cursor is, for "name=" of its parameters.
    The type is one that JupyterLab draws: "function", "class", "module", "instance", "param".
    """
    if path:
        found = _find(space, path)
        names = {} if found is _MISSING else _names(found)
    else:
        names = dict(space)
        function = _find(space, call) if call else _MISSING
        parameters = _signature(function) if function is not _MISSING else None
        named = (
            (p for p in parameters.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
            if parameters
            else ()
        )
        names |= {f"{p.name}=": p for p in named}
    hidden = not prefix.startswith("_")
    fit = sorted(
        name for name in names
        if type(name) is str and name.startswith(prefix) and name.rstrip("=").isidentifier()
        and not (hidden and name.startswith("_"))
    )  # fmt: skip
    return {name: _kind(names[name]) for name in fit[:MOST]}


def describe(space, path, detail=0):
    """Return text on `path`: signature, type, shape, docstring, or its source with `detail`; "" if unknown."""
    found = _find(space, path)
    if found is _MISSING:
        return ""
    function = _function(found)
    cls = found if _is_class(found) else found.cls if type(found) is _Some else type(found)
    lines = []
    if (signature := _signature(found)) is not None:
        lines.append(f"Signature: {path.rpartition('.')[2]}{signature}")
    lines.append(f"Type:      {_full_name(type if _is_class(found) else cls)}")
    lines += [f"{label + ':':<11}{value}" for label, value in _details(found)]
    if code := getattr(function, "__code__", None) if type(function) is types.FunctionType else None:
        lines.append(f"File:      {code.co_filename}, line {code.co_firstlineno}")
    if detail and code:
        try:
            return "\n".join([*lines, "Source:", inspect.getsource(code)])
        except (OSError, TypeError):
            pass
    if doc := _doc(found, cls):
        lines += ["Docstring:", inspect.cleandoc(doc)]
    return "\n".join(lines)


def _find(space, path):
    """Return what `path` stands for, looked up in dictionaries and types alone, or _MISSING."""
    first = re.match(r"\w+", path)
    if not first:
        return _MISSING
    builtin = vars(sys.modules["builtins"])
    found = space[first[0]] if first[0] in space else builtin.get(first[0], _MISSING)
    at = first.end()
    while at < len(path) and found is not _MISSING:
        if not (step := _STEP.match(path, at)):
            return _MISSING
        found = _attribute(found, step[1]) if step[1] else _item(found, ast.literal_eval(step[2]))
        at = step.end()
    return found


def _attribute(thing, name):
    if type(thing) is not _Some:
        if (found := _own(thing).get(name, _MISSING)) is not _MISSING and not _is_class(thing):
            return found
        for held in _held(thing):
            if name in held:
                return held[name]
    cls = thing.cls if type(thing) is _Some else thing if _is_class(thing) else type(thing)
    for base in _bases(cls):
        raw = _vars(base).get(name, _MISSING)
        if raw is _MISSING:
            continue
        if type(raw) in (staticmethod, classmethod):
            return raw.__func__
        if type(raw) is types.MemberDescriptorType and not _is_class(thing) and type(thing) is not _Some:
            try:
                return raw.__get__(thing)  # a slot: read in C, with no code of the class
            except AttributeError:
                return _MISSING
        if type(raw) in _SLOTS and name in _SAME_TYPE and _is_tensor(cls):
            return _Some(cls)
        return raw
    return _MISSING


def _item(thing, key):
    if type(thing) in (list, tuple) and type(key) is int and -len(thing) <= key < len(thing):
        return thing[key]
    if type(thing) is dict:
        return next(
            (value for known, value in list(thing.items()) if type(known) is type(key) and known == key), _MISSING
        )
    for held in _held(thing):  # of a Sequential or a ModuleList, a ModuleDict
        names = list(held)
        name = names[key] if type(key) is int and -len(names) <= key < len(names) else key
        if name in held:
            return held[name]
    cls = thing.cls if type(thing) is _Some else type(thing)
    return _Some(cls) if _is_tensor(cls) else _MISSING


def _names(thing):
    """Return {name: raw attribute} of all that the object, its class and its bases define."""
    names = {}
    if type(thing) is _Some:
        thing, cls = None, thing.cls
    else:
        cls = thing if _is_class(thing) else type(thing)
    if type(thing) is property:  # its value is unknown; its return annotation may be a class
        cls = (thing.fget.__annotations__ if type(thing.fget) is types.FunctionType else {}).get("return")
        thing = None
        if not _is_class(cls):
            return {}
    for base in reversed(_bases(cls)):
        names |= _vars(base)
    if thing is not None and not _is_class(thing):
        for held in _held(thing):
            names |= held
        names |= _own(thing)
    return names


def _held(thing):
    """Return the parameters, buffers and modules of a torch module, which its `__getattr__` reads."""
    cls = _of_torch("nn.modules.module", "Module")
    if cls is None or not issubclass(type(thing), cls):
        return []
    own = _own(thing)
    return [held for key in ("_parameters", "_buffers", "_modules") if type(held := own.get(key)) is dict]


def _own(thing):
    """Return the object's dictionary, {} for one whose class computes it."""
    for base in _bases(type(thing)):
        if (found := _vars(base).get("__dict__")) is not None:
            own = found.__get__(thing) if type(found) in _SLOTS else {}
            return dict(own) if type(own) in (dict, types.MappingProxyType) else {}
    return {}


def _is_class(thing):
    return issubclass(type(thing), type)


def _bases(cls):
    return type.__dict__["__mro__"].__get__(cls)


def _vars(cls):
    return type.__dict__["__dict__"].__get__(cls)


def _full_name(cls):
    module, name = _vars(cls).get("__module__"), type.__dict__["__qualname__"].__get__(cls)
    return f"{module}.{name}" if type(module) is str and module not in ("builtins", "__main__") else name


def _of_torch(module, name):
    """Return a class of torch where it has been imported: nothing is imported here."""
    found = sys.modules.get(f"torch.{module}")
    return None if found is None else vars(found).get(name)


def _is_tensor(cls):
    tensor = _of_torch("_tensor", "Tensor")
    return tensor is not None and issubclass(cls, tensor)


def _kind(raw):
    if type(raw) is inspect.Parameter:
        return "param"
    if _is_class(raw):
        return "class"
    if type(raw) is types.ModuleType:
        return "module"
    return "function" if type(_function(raw)) in _CALLABLE else "instance"


def _function(thing):
    """Return the function behind a method, a static or class method and `functools.wraps`, or the thing itself."""
    if type(thing) in (staticmethod, classmethod, types.MethodType):
        thing = thing.__func__
    for _ in range(20):
        if type(thing) is not types.FunctionType or "__wrapped__" not in vars(thing):
            break
        thing = vars(thing)["__wrapped__"]
    return thing


def _signature(thing):
    """Return the inspect.Signature of a function or class, with defaults that can be shown; None for others."""
    function = _function(thing)
    is_class = _is_class(function)
    if is_class:
        function = _function(_attribute(function, "__init__"))
    if type(function) not in _CALLABLE or (type(function) is types.FunctionType and "__signature__" in vars(function)):
        return None
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        return None
    parameters = [
        p.replace(default=_shown(p.default), annotation=_shown(p.annotation, annotation=True))
        for p in list(signature.parameters.values())[is_class:]
    ]
    returns = signature.empty if is_class else _shown(signature.return_annotation, annotation=True)
    return signature.replace(parameters=parameters, return_annotation=returns)


class _Said(str):
    """Text that stands for a default or an annotation in a signature."""

    def __repr__(self):
        return str(self)


def _shown(value, annotation=False):
    """Return what stands for `value` in a signature: its repr only if that runs nothing of the learner's."""
    if value is inspect.Parameter.empty:
        return value
    if annotation and type(value) is str:
        return _Said(value)
    if _is_class(value):
        return _Said(type.__dict__["__name__"].__get__(value))
    plain = type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))
    typing = type(value) in (types.GenericAlias, types.UnionType) or _vars(type(value)).get("__module__") == "typing"
    if plain or (annotation and typing):
        return _Said(repr(value)[:LONGEST])
    return _Said("...")


def _details(thing):
    """Return (label, text) of a value: its shape, dtype and device, its length, or the plain value itself."""
    cls = type(thing)
    if _is_tensor(cls):
        computes = next(base for base in _bases(cls) if "__torch_dispatch__" in _vars(base))  # perhaps its shape, too
        if not str(_vars(computes).get("__module__", "torch")).startswith("torch"):
            return []
        base = sys.modules["torch._C"]
        with base.DisableTorchFunctionSubclass():  # so that no `__torch_function__` of a subclass is called
            read = {name: getattr(base.TensorBase, name).__get__(thing) for name in ("shape", "dtype", "device")}
        details = [("Shape", tuple(read["shape"])), ("Dtype", read["dtype"]), ("Device", read["device"])]
        spec = _own(thing).get("_spec")
        if spec is not None and (placed := _own(spec).get("placements")) and type(placed) is tuple:
            details.append(("Placed", ", ".join(_full_name(type(one)).rpartition(".")[2] for one in placed)))
        return details
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, vars(numpy).get("ndarray", _Some)):
        return [
            ("Shape", vars(numpy)["ndarray"].shape.__get__(thing)),
            ("Dtype", vars(numpy)["ndarray"].dtype.__get__(thing)),
        ]
    if cls in _PLAIN:
        return [("Value", repr(thing[:LONGEST] if cls in (str, bytes) else thing))]
    return [("Length", len(thing))] if cls in (list, tuple, dict, set, frozenset) else []


def _doc(thing, cls):
    if type(thing) in (*_CALLABLE, *_SLOTS, property, types.MethodType, types.ModuleType):
        return thing.__doc__ if type(thing.__doc__) is str else ""
    for base in _bases(cls)[:-1]:
        if type(doc := _vars(base).get("__doc__")) is str:
            return doc
    return ""
