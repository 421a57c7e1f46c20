"""The weights of a model in the memory layout in which a CPU reads them fastest for one token.

    y_i = sum_j W_ij x_j    by rows: a sum for each i;    by columns: y = sum_j x_j W_:j    (W: (D, d))

A new token multiplies each matrix by one vector, and takes the time of reading W. In float32, PyTorch's products read
columns up to twice as fast as rows on some processors (measured: docs/research/benchmarks.md). Results are equal up
to rounding.
"""

from torch import nn

from ..linear import is_plain_linear


def to_column_major(model: nn.Module) -> nn.Module:
    """Store the weights `(D, d)` of linear layers with D >= d column by column in memory, and return the model.

    For a model that writes: to save it, do that before, because transformers saves no tied weights in this layout.
    Layers that are quantized, sharded, adapted or not on a CPU stay as they are.

    Example:
        model = to_column_major(TnnForCausalLM.from_pretrained(folder))
    """
    for layer in filter(is_plain_linear, model.modules()):
        weight = layer.weight
        if weight.device.type == "cpu" and weight.shape[0] >= weight.shape[1] and not weight.is_inference():
            weight.data = weight.t().contiguous().t()
    return model
