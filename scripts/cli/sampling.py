"""Sampling defaults of `tnn generate`, `serve` and `api`."""

from collections.abc import Mapping

# Tokens are drawn from the likeliest ones of this mass, at this temperature, or as a `generation_config.json` says.
TEMPERATURE, TOP_P = 1.0, 0.95

# Colder is greedy: scores that are divided by less exceed all numbers.
COLDEST = 1e-5

# Fields of GenerationConfig that have no meaning without sampling.
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def sampling(temperature: float | None = None, top_p: float | None = None, of_model: Mapping | None = None) -> dict:
    """The options of `generate` for one text, over those `of_model` and ours. A temperature of about 0 is greedy."""
    plain = dict.fromkeys(OF_SAMPLING) | {"num_beams": 1, "num_return_sequences": 1}
    asked = given_sampling({"temperature": temperature, "top_p": top_p})
    chosen = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0} | (of_model or {}) | asked
    return plain | ({"do_sample": False} if is_greedy(chosen["temperature"]) else {"do_sample": True} | chosen)


def is_greedy(temperature: float | None) -> bool:
    """Whether a temperature asks for the likeliest tokens."""
    return temperature is not None and 0 <= temperature < COLDEST


def check_sampling(options: dict):
    """Raise a ValueError if options of `generate` ask for sampling and for the likeliest tokens."""
    given, temperature = given_sampling(options), options.get("temperature")
    if options.get("do_sample") is False and given and not is_greedy(temperature):
        raise ValueError(f"--do_sample must be true with --{next(iter(given))}, which means sampling, got false")
    if options.get("do_sample") and is_greedy(temperature):
        raise ValueError(f"--temperature must be above 0 with --do_sample true, got {temperature:g}, which is greedy")


def given_sampling(options: Mapping) -> dict:
    """The options that have no meaning without sampling."""
    return {name: options[name] for name in OF_SAMPLING if options.get(name) is not None}


def with_sampling(options: dict, is_plain: bool, of_model: Mapping) -> dict:
    """The options of `generate`, with sampling, as `of_model`, unless they ask for the likeliest tokens.

    Those that are not plain, of beams and the like, are as transformers has them unless they ask for sampling.
    """
    given = given_sampling(options)
    others = {name: value for name, value in options.items() if name not in OF_SAMPLING}
    if options.get("do_sample") is False or is_greedy(options.get("temperature")):
        return sampling(temperature=0) | others | {"do_sample": False}
    if is_plain or given or options.get("do_sample"):
        return sampling(of_model=of_model | given) | others | {"do_sample": True}
    return {"num_return_sequences": 1, "do_sample": False} | options
