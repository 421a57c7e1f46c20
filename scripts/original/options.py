"""Options of a released implementation against what can be converted, and against the weights."""


def check_values(options: dict, supported: dict, unused: tuple[str, ...] = ()):
    """Refuse options that have another value than the `supported` one, by name."""
    for name, allowed in supported.items():
        if name in options and name not in unused and options[name] != allowed:
            raise ValueError(f"{name} must be {allowed!r} for a conversion, got {options[name]!r}")


def check_stated(options: dict, measured: dict):
    """Refuse options that contradict what the weights say."""
    for name, value in measured.items():
        if options.get(name) is not None and options[name] != value:
            raise ValueError(f"{name} must be {value!r}, as in the weights of the checkpoint, got {options[name]!r}")
