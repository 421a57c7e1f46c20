"""How texts are written unless their user says otherwise: the same in `tnn generate`, `chat`, `serve` and `api`."""

# Tokens are drawn from the likeliest ones of this mass, at this temperature, whatever a `generation_config.json` says.
TEMPERATURE, TOP_P = 1.0, 0.95


def sampling(temperature: float | None = None, top_p: float | None = None) -> dict:
    """The options of `generate`; a temperature of 0 is greedy."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    temperature = TEMPERATURE if temperature is None else temperature
    return {"do_sample": True, "temperature": temperature, "top_p": TOP_P if top_p is None else top_p, "top_k": 0}
