"""The forms of codes by name.

A form is in these tables because a module of this package has a class for it: no other file names the class.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import llamaspec.model.weights.forms
from llamaspec.model.checkpoints.checkpoint import Form
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.words import Words


def _classes() -> Iterator[type[QuantizedMatrix]]:
    """Yield the classes with a form that modules of this package define."""
    for _, name, _ in pkgutil.iter_modules(llamaspec.model.weights.forms.__path__):
        if name == "table":
            continue
        module = import_module(f"{llamaspec.model.weights.forms.__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "form"):
                yield value


CLASS_OF_FORM: dict[Form, type[QuantizedMatrix]] = {  # as XLA reads them
    cls.form: cls for cls in _classes() if not issubclass(cls, Words)
}
WORDS: dict[Form, type[Words]] = {cls.form: cls for cls in _classes() if issubclass(cls, Words)}  # as kernels read them
LEVELS = {form: cls.kernel_levels for form, cls in WORDS.items() if cls.kernel_levels}
