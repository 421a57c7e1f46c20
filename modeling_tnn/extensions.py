"""Optional features of the installed package, for the files that checkpoints carry.

A saved folder has a copy of these files and of no sub-package, and they import nothing else of ours. So they ask here
for what makes models faster, compiles them or divides them over processes: each method is what holds without the
package. When the package is imported, its sub-packages register functions in place of the methods. Results are equal
up to rounding: without the package, speed is lost, and extras whose methods raise an error that names it.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

# Implementations of Toeplitz products. "eager" consists of PyTorch's own operations, "fused" of custom functions that
# are faster and save less for the backward pass, with the same values and derivatives of every order. "triton" is for
# GPUs, and "auto" takes the fastest.
IMPLEMENTATIONS = ("auto", "fused", "eager", "triton")

NEEDS_PACKAGE = "needs the package, not only the files of a saved folder: pip install modeling-tnn"


class Extensions:
    """The functions that sub-packages replace."""

    modules: Sequence[str] = ()  # the names of the modules that register functions; the package sets them

    def load(self):
        """Import the modules. The file of the models calls this, because most of them take long to import."""
        for name in self.modules:
            import_module(name)

    def register(self, **functions: Callable):
        """Replace methods of these names by functions with the same arguments."""
        for name, function in functions.items():
            getattr(self, name)  # an AttributeError if there is no such method
            setattr(self, name, function)

    def check_before_loading(self, model_class: type, source, options: dict):  # tools/checks.py
        """Raise a ValueError if files of `from_pretrained(source, **options)` do not fit the configuration."""

    def convolve_documents(self, v, kernel, first: int, starts, implementation: str):  # compile/product.py
        """In a graph, the product of each document of packed rows. Only asked if `keeps_products`."""
        raise ImportError(f"A graph with packed rows {NEEDS_PACKAGE}")

    def document_starts(self, tokens, attention_mask, position_ids):  # compile/product.py
        """In a graph, where the documents of packed rows begin. Only asked if `keeps_products`."""
        raise ImportError(f"A graph with packed rows {NEEDS_PACKAGE}")

    def find_product(self, implementation: str, v, kernel) -> Callable | None:  # compile/product.py
        """A product in place of the eager and the fused one, with the arguments `v, kernel, first, gate`, or None."""
        if implementation == "triton":
            logger.warning_once(f"tno_implementation='triton' {NEEDS_PACKAGE}. Products are computed by 'fused'.")

    def head_logits(self, head, hidden_states):  # kernels/loss.py
        """The logits `(B, L, V)` of a language model's head in a layout for compilers, or None."""

    def head_loss(self, model, hidden_states, **options):  # kernels/loss.py
        """The loss of a language model without the logits of the whole batch, or None. `options`: of its loss."""

    def keeps_products(self) -> bool:  # compile/product.py
        """Whether a graph is recorded in which products are custom operators."""
        return False

    def kernels_of_layers(self, layers: Sequence, hidden_states, context) -> Sequence:  # kernels/stacking.py
        """The kernels of the layers for `hidden_states` `(B, L, d)` of a pass, None for each that makes its own."""
        return [None] * len(layers)

    def limit_documents(self, starts, most: int, field: str):  # compile/product.py
        """In a graph, `starts` after a check of the documents' lengths. Only asked if `keeps_products`."""
        raise ImportError(f"A graph with packed rows {NEEDS_PACKAGE}")

    def open_step(self, context, tokens, position_ids):  # compile/static_cache.py
        """The context of a step of tokens that `prepare_step` has made ready, or None."""

    def operator_code(self, cls: type, file, carried: set) -> bytes:  # tools/operator_code.py
        """The code of the file of a user's operator, for folders. Without the package it is from a folder."""
        return file.read_bytes()

    def prepare_step(self, model, inputs: dict) -> dict:  # compile/static_cache.py
        """The `inputs` of a forward pass in `generate`, of fixed shape if they are one token for a static cache."""
        return inputs

    def static_layer(self, **kwargs):  # compile/static_cache.py, in transformers' table of cache layers
        """An empty layer of a static cache."""
        raise ImportError(f"A static cache {NEEDS_PACKAGE}")

    def takes_taps(self, implementation: str, v, taps: int) -> bool:  # kernels/choice.py
        """Whether the product of `v` with `taps` taps is computed from them even if there is a response."""
        return False

    def tensor_plan(self, config) -> dict[str, str]:  # parallel/tensor.py
        """The plan of a model with this configuration for transformers' tensor parallelism."""
        return {}

    def to_recurrent(self, model, order: int, window: int, tolerance: float | None) -> tuple:  # tools/recurrent.py
        """A copy of a causal model whose kernels are recurrences of low order, and a report for each layer."""
        raise ImportError(f"to_recurrent {NEEDS_PACKAGE}")

    def write_check(self, model, folder):  # tools/checks.py
        """Write what the model saved in `folder` gives. Without the package, remove what an earlier one gave."""
        Path(folder, "self_check.json").unlink(missing_ok=True)


extensions = Extensions()
