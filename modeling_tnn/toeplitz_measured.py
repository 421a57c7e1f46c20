"""What `tno_implementation="auto"` takes on a device: only what was measured to be the fastest right product there.

A benchmark on the device writes the rows. A device without a row, as every GPU today (none was measured), has the
fused product.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """The fastest implementation for inputs of a dtype and filters up to a length."""

    dtype: str  # of the inputs, such as "bfloat16"
    taps: int  # at most so many taps, counted on both sides
    implementation: str


# From `toeplitz_choice.device_name` to rows; of those that fit, the first one counts.
MEASURED: dict[str, tuple[Row, ...]] = {}
