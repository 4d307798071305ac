"""tyro builds the parser of a dataclass anew for each command line, which takes 0.05 s of train.py's. Here it is built
once for each dataclass and its defaults, in the tests and in their ranks. To import this is enough."""

from tyro._parsers import ParserSpecification

_build, _built = ParserSpecification.from_callable_or_type, {}


def _kept(f, *, default_instance, **about):
    if about["intern_prefix"]:  # a part of another
        return _build(f, default_instance=default_instance, **about)
    key = f, repr(default_instance), repr(about)
    if key not in _built:
        _built[key] = _build(f, default_instance=default_instance, **about)
    return _built[key]


ParserSpecification.from_callable_or_type = staticmethod(_kept)
