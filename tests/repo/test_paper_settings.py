"""Presets and recipes against the settings that the papers print: equal, or a difference that the docs list."""

import yaml

from helpers.scripts import ROOT
from modeling_tnn import load_preset
from tnn_programs.cli.parser import parse_overrides

DIFFERENCES = (ROOT / "docs" / "research" / "differences.md").read_text()

# TNN table 13.
TNN_BLOCK = {"gtu_dim": lambda d: 3 * d, "intermediate_size": lambda d: d, "hidden_act": lambda d: "silu"}


def tnn_table_13(layers: int, width: int, rpe_layers: int, rpe_dim: int, decay: float) -> dict:
    own = {"num_hidden_layers": layers, "hidden_size": width, "rpe_layers": rpe_layers, "rpe_dim": rpe_dim}
    return own | {"rpe_act": "relu", "decay": decay} | {name: of(width) for name, of in TNN_BLOCK.items()}


def rtf_table_8(layers: int, width: int, states: int, denominators: int | None) -> dict:
    # No number of denominators is one for each channel, 256 in the table.
    own = {"num_hidden_layers": layers, "hidden_size": width, "rtf_state_size": states}
    return own | {"rtf_num_denominators": denominators, "norm_type": "batchnorm", "tno_type": "rtf"}


RTF_SIZES = {**dict.fromkeys(("listops", "text", "retrieval"), (6, 256, 4, 1)), "image": (6, 512, 64, 1),
             **dict.fromkeys(("pathfinder", "path-x"), (6, 256, 64, None))}  # fmt: skip
PIXELS = ("image", "pathfinder", "path-x")


def ski_section_52(decay: float, rank: int, taps: int) -> dict:
    return {"tno_type": "ski", "ski_rank": rank, "ski_filter_size": taps, "ski_decay": decay}


# PyTorch's linear layers and embeddings of N(0, 1/d), in the released code of both papers; no table has it.
START = {"initializer": "torch"}

# Preset -> what a paper says of it. For SKI the decay is that of the TNN's preset, or 0.99 if that has none.
PRESETS = {
    "tnn-causal": tnn_table_13(6, 512, 6, 64, 0.99) | START,
    "tnn-bidirectional": tnn_table_13(12, 768, 6, 64, 0.99),
    "tnn-image-tiny": tnn_table_13(12, 192, 1, 48, 0.95),
    "tnn-image-small": tnn_table_13(12, 384, 1, 48, 0.9),
    "tnn-causal-rpe3": {"rpe_layers": 3} | START,  # SKI table 1
    "tnn-causal-fd": {"rpe_layers": 3, "tno_type": "fd"} | START,
    "lra/fd-image": {"rpe_layers": 3, "tno_type": "fd"},  # SKI section 5.2
    "lra/ski-listops": ski_section_52(0.99, 64, 32),
    "lra/ski-text": ski_section_52(0.9, 64, 32),
    "lra/ski-retrieval": ski_section_52(0.6, 64, 32),
    "lra/ski-image": ski_section_52(0.7, 32, 16),
    "lra/ski-pathfinder": ski_section_52(0.99, 32, 16),
    "lra/ski-path-x": ski_section_52(0.999, 32, 16),
    **{f"lra/rtf-{task}": rtf_table_8(*sizes) for task, sizes in RTF_SIZES.items()},
    **{f"lra/rtf-s4-{task}": rtf_table_8(*sizes) | {"toeplitz_mixer": "s4", "use_glu": False}
       | {"input_channels": 1 if task in PIXELS else None} for task, sizes in RTF_SIZES.items()},
    # RTF tables 12 and 13.
    "tnn-causal-s4-rtf": {"toeplitz_mixer": "s4", "tno_type": "rtf", "rtf_state_size": 64},
    "tnn-causal-hyena-rtf": {"toeplitz_mixer": "hyena", "num_hidden_layers": 12, "hidden_size": 768, "hyena_rank": 384,
                             "rtf_state_size": 64, "hidden_dropout_prob": 0.25, "max_position_embeddings": 1024},
    # RTF appendix C.4.
    "tnn-causal-multihyena": {"toeplitz_mixer": "multihyena", "num_hidden_layers": 12, "hidden_size": 768,
                              "num_mixer_heads": 256, "layer_types": ["toeplitz", "full_attention"] * 6},
    # Of the released configuration.
    "hyenadna-small-32k": {"tno_type": "hyena", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024,
                           "hyena_filter_order": 64, "hyena_filter_emb_dim": 5, "hyena_filter_length": 32770},
    # TNN table 14 says "the original size of S4": its depth and width are in RTF table 8.
    **{f"lra/tnn-large-{task}": {"num_hidden_layers": 6, "hidden_size": 512 if task == "image" else 256}
       for task in ("listops", "text", "retrieval", *PIXELS)},
}  # fmt: skip

LM = {"max_steps": 50_000, "adam_beta1": 0.9, "adam_beta2": 0.98, "learning_rate": 5e-4, "weight_decay": 0.2}
LM |= {"block_size": 512, "max_grad_norm": None}


def rtf_table_9(batch, epochs, examples, dropout, rate, decay, operator_rate=None, operator_decay=None) -> dict:
    own = {"batch": batch, "max_steps": epochs * examples // batch, "hidden_dropout_prob": dropout}
    groups = {"operator_learning_rate": operator_rate, "operator_weight_decay": operator_decay}
    return own | {"learning_rate": rate, "weight_decay": decay} | groups


def s4d_table_9(states, *settings) -> dict:
    poles = r"tno\.(log_real|imag|log_step)$:learning_rate=0.001,weight_decay=0"
    own = {"tno_type": "s4d", "s4d_state_size": states, "parameter_groups": [poles]}
    return rtf_table_9(*settings, 0.05) | own


# Recipe -> what a paper says of it. Numbers of training examples are those of the Long Range Arena.
RECIPES = {
    # TNN table 12.
    **dict.fromkeys(("wikitext103", "wikitext103-fd"),
                    LM | {"batch": 128, "warmup_steps": 4_000, "lr_scheduler_type": "inverse_sqrt"}),
    "wikitext103-masked": LM | {"batch": 512, "warmup_steps": 3_000, "lr_scheduler_type": "polynomial"}
    | {"adam_epsilon": 1e-6},
    "images/imagenet": {"batch": 2048, "num_train_epochs": 300, "warmup_steps": 0.0167, "learning_rate": 2.5e-4,
                        "lr_scheduler_type": "cosine", "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-8,
                        "weight_decay": 0.1, "max_grad_norm": 1.0,
                        "label_smoothing_factor": 0.1},  # DeiT's table 9, for lack of a word in the paper
    # RTF tables 8 and 9.
    "lra/rtf-s4-listops": rtf_table_9(32, 50, 96_000, 0.0, 0.002, 0.07),
    "lra/rtf-s4-text": rtf_table_9(16, 32, 25_000, 0.1, 0.005, 0.05, 1e-4, 0.025),
    "lra/rtf-s4-retrieval": rtf_table_9(64, 20, 147_086, 0.0, 0.002, 0.0, 1e-6, 0.0),
    "lra/rtf-s4-image": rtf_table_9(50, 200, 45_000, 0.1, 0.006, 0.05, 0.005, 0.05),
    **dict.fromkeys(("lra/rtf-pathfinder", "lra/rtf-s4-pathfinder"), rtf_table_9(64, 200, 160_000, 0.1, 0.002, 0.05)),
    "lra/rtf-s4-path-x": rtf_table_9(16, 50, 160_000, 0.1, 0.001, 0.05, 0.001, 0.0),
    "lra/s4d-listops": s4d_table_9(4, 32, 50, 96_000, 0.0, 0.01),
    "lra/s4d-text": s4d_table_9(4, 16, 32, 25_000, 0.0, 0.01),
    "lra/s4d-retrieval": s4d_table_9(4, 64, 20, 147_086, 0.0, 0.01),
    "lra/s4d-image": s4d_table_9(64, 50, 200, 45_000, 0.1, 0.01),
    "lra/s4d-pathfinder": s4d_table_9(64, 64, 200, 160_000, 0.0, 0.004),
    "lra/s4d-path-x": s4d_table_9(64, 16, 50, 160_000, 0.0, 0.002),
    # RTF table 13; the steps of 100 and (table 12) of 25 epochs depend on the tokenizer.
    "wikitext103-hyena": {"batch": 128, "block_size": 1024, "learning_rate": 1e-3, "weight_decay": 0.25},
    "wikitext103-s4": {"batch": 128, "block_size": 1024},
    # RTF tables 10 and 11.
    **dict.fromkeys(("synthetic/copying-s4", "synthetic/copying"), {
        "memory": 1024, "num_tokens": 64, "max_train_samples": 10_000, "max_eval_samples": 1_000, "batch": 8,
        "num_train_epochs": 50, "learning_rate": 0.001, "weight_decay": 0.0, "num_hidden_layers": 4,
        "hidden_size": 1024}),
    "synthetic/delay": {"length": 4000, "memory": 1000, "batch": 64, "num_train_epochs": 20, "learning_rate": 0.001,
                        "weight_decay": 0.0, "hidden_size": 4},
}  # fmt: skip

# What is here instead. `docs/research/differences.md` gives the reasons.
DIFFERENT = {
    ("tnn-causal", "num_hidden_layers"): 7,
    ("tnn-causal", "initializer"): "small_embeddings",
    ("tnn-causal-rpe3", "initializer"): "small_embeddings",
    ("tnn-causal-fd", "initializer"): "small_embeddings",
    ("tnn-image-tiny", "decay"): 0.9,
    ("lra/rtf-path-x", "rtf_state_size"): 2048,
    ("lra/rtf-s4-path-x", "rtf_state_size"): 2048,
    ("wikitext103", "max_grad_norm"): 1.0,
    ("wikitext103-masked", "max_grad_norm"): 1.0,
    ("wikitext103-fd", "max_grad_norm"): 1.0,
    ("wikitext103-fd", "learning_rate"): 1e-3,
    ("synthetic/copying", "hidden_size"): 64,
}


def settings_of(recipe: str) -> dict:
    """The options of a recipe, with the whole batch and, for the Long Range Arena, the fields of the model."""
    fields = yaml.safe_load((ROOT / "configuration" / "recipes" / f"{recipe}.yaml").read_text())
    numbers = {name: float(value) for name, value in fields.items() if name.endswith(("_rate", "_epsilon"))}
    fields |= numbers  # YAML reads 1e-6 as a text
    if "global_batch_tokens" in fields:
        fields["batch"] = fields["global_batch_tokens"] / fields["block_size"]
    else:
        fields["batch"] = fields["per_device_train_batch_size"] * fields.get("gradient_accumulation_steps", 1)
    if recipe.startswith("lra/"):
        overrides = parse_overrides(fields.get("config_overrides"))
        fields = load_preset(fields["config_name"], **overrides).to_dict() | fields
        if fields.get("operator_learning_rate") is not None:  # such operators have no decay unless one is given
            fields.setdefault("operator_weight_decay", 0.0)
    return fields


def compare(name: str, ours: dict, papers: dict):
    for field, value in papers.items():
        if (name, field) in DIFFERENT:
            assert ours[field] == DIFFERENT[name, field] != value
            assert f"| `{name}` |" in DIFFERENCES, f"differences.md does not list {name}"
        else:
            assert ours.get(field) == value, (name, field)


def test_presets_and_recipes_have_the_settings_of_their_papers():
    for name, papers in PRESETS.items():
        config = load_preset(name)
        compare(name, config.to_dict() | {"gtu_dim": config.gtu_dim}, papers)
    for name, papers in RECIPES.items():
        compare(name, settings_of(name), papers)
