"""Pictures for the tests of images."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def pictures():
    """Vertical, horizontal and diagonal stripes of random phase."""
    rng, rows = np.random.default_rng(0), []
    y, x = np.mgrid[:24, :24]
    for index in range(96):
        label = index % 3
        wave = np.sin((x, y, x + y)[label] * 1.3 + rng.uniform(0, 6))
        noisy = 128 + 80 * wave[..., None] + rng.normal(0, 10, (24, 24, 3))
        rows.append((Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), label))
    return rows
