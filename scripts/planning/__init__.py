"""Memory and communication of a training step, counted without the devices."""
