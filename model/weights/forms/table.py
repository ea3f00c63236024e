"""Tables that map the name of a form of codes to its classes.

We build the tables from all modules of this package, so a new form needs only a new module.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import llamaspec.model.weights.forms
from llamaspec.model.checkpoints.checkpoint import Form
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.words import Words


def _classes() -> Iterator[type[QuantizedMatrix]]:
    """Yield all classes with a `form` that the modules of this package define."""
    for _, name, _ in pkgutil.iter_modules(llamaspec.model.weights.forms.__path__):
        if name == "table":
            continue
        module = import_module(f"{llamaspec.model.weights.forms.__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "form"):
                yield value


CLASS_OF_FORM: dict[Form, type[QuantizedMatrix]] = {  # layouts that XLA reads
    cls.form: cls for cls in _classes() if not issubclass(cls, Words)
}
WORDS: dict[Form, type[Words]] = {cls.form: cls for cls in _classes() if issubclass(cls, Words)}  # for the kernels
LEVELS = {form: cls.kernel_levels for form, cls in WORDS.items() if cls.kernel_levels}
