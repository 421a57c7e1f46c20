"""The configuration of Toeplitz neural networks: every field of the model, with its meaning and its limits.

The fields follow "Toeplitz Neural Network for Sequence Modeling" (Qin et al., ICLR 2023: TNN), "SKI to go Faster"
(Moreno et al., 2023: FD, SKI) and "State-Free Inference of State-Space Models: The Transfer Function Approach"
(Parnichkun et al., ICML 2024: RTF).
"""

import math
import os
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import NoneType
from typing import Any, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .extensions import IMPLEMENTATIONS, extensions
from .hub import own_classes, save_code

LAYER_TYPES = TOEPLITZ, FULL, SLIDING = "toeplitz", "full_attention", "sliding_attention"
MIXERS = GTU, HYENA, S4, MULTIHYENA = "gtu", "hyena", "s4", "multihyena"

# The operators of this package, each with its directions: whether `causal` may be True, and False.
DIRECTIONS = {  # programs read the names from this text
    "rpe": (True, True), "fd": (True, True), "ski": (False, True), "rtf": (True, True), "s4d": (True, True),
    "modal": (True, False), "explicit": (True, True), "hyena": (True, True), "exponential": (True, True),
}  # fmt: skip
BUILT_IN = frozenset(DIRECTIONS)

# The classes of imported operators by `tno_type`. `tno_auto.py` and `register_operator` fill the table.
OPERATORS: dict[str, type] = {}

CHOICES = {
    "norm_type": ("simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm", "batchnorm"),
    "final_norm_type": (None, "simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm"),
    "rpe_norm_type": (None, "simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm"),
    "norm_position": ("pre", "post", "res_post"),
    "initializer": ("torch", "normal", "normal_gtu", "small_embeddings"),
    "spatial_dims": (1, 2),
    "spatial_mixing": ("product", "sum"),
    "position_embedding": (None, "sinusoidal"),
    "tno_implementation": IMPLEMENTATIONS,
    "fd_input": ("omega", "cos"),
    "rpe_input": ("lag", "normalized", "sinusoidal"),
    "ski_interpolation": ("linear", "released"),
    "ski_initializer": ("normal", "local"),
    "rtf_constraint": (None, "l1_montel"),
    "rtf_initializer": ("zeros", "xavier", "montel"),
    "s4d_initializer": ("lin", "inv", "legs"),
    "s4d_discretization": ("zoh", "bilinear"),
    "hyena_filter_beyond": ("error", "zeros"),
    "classifier_pooling": (None, "last", "mean"),
    "toeplitz_mixer": MIXERS,
}

Limit = tuple[Callable[[Any], bool], str]


def one_of(allowed: Iterable) -> Limit:
    """Return the limit of a field with the values `allowed`."""
    return allowed.__contains__, f"one of {', '.join(map(repr, allowed))}"


def between(least: int, most: int) -> Limit:
    """Return the limit of an integer in [least, most]."""
    return lambda value: least <= value <= most, f"in [{least}, {most:,}]"


# A configuration may come from an unknown source: sizes that no machine can hold are refused before allocation.
LARGEST_SIZE = 2**24

DROPOUTS = ("hidden_dropout_prob", "classifier_dropout", "attention_dropout")
POSITIVE = ("initializer_range", "layer_norm_eps", "rms_norm_eps")
# The limits of single fields: a predicate, and the text that follows "must be" in the error. Integers without an entry
# here are sizes (`SIZES`).
LIMITS: dict[str, Limit] = {name: one_of(allowed) for name, allowed in CHOICES.items()} | {
    "layer_types": (set(LAYER_TYPES).issuperset, f"a list of {', '.join(map(repr, LAYER_TYPES))}"),
    "num_hidden_layers": between(1, 2**10),
    "sliding_window": between(2, LARGEST_SIZE),  # transformers' cache of one token would store all tokens
    "short_conv_kernel": between(1, 64),  # longer filters are what the operator is for
    **dict.fromkeys(("rpe_layers", "hyena_filter_inner_mlps"), between(0, 2**7)),
    "hyena_filter_emb_dim": (range(3, 2**10, 2).__contains__, "an odd number in [3, 1,023]"),
    "rpe_window": (lambda value: value >= 1, "at least 1"),
    "fd_resolution": ({2**power for power in range(26)}.__contains__, f"a power of two in [1, {2**25:,}]"),
    **dict.fromkeys(("decay", "ski_decay"), (lambda value: 0 < value <= 1, "in (0, 1]")),
    **dict.fromkeys(
        ("s4d_dt_min", "s4d_dt_max", "hyena_filter_freq"), (lambda value: 0 < value <= 1000, "in (0, 1000]")
    ),
    **dict.fromkeys(DROPOUTS, (lambda value: 0 <= value < 1, "in [0, 1)")),
    **dict.fromkeys(POSITIVE, (lambda value: 0 < value < math.inf, "a finite number above 0")),
}
ACTIVATIONS = ("hidden_act", "rpe_act", "fd_act", "mlp_act", "classifier_act")

# The fields that `per_layer_config` may change, besides those of the operators, which follow `rpe_dim` below.
PER_LAYER = {"tno_type", "num_filter_groups", "hyena_skip", "hidden_act", "mlp_act", "intermediate_size"}

# Grids of kernels are no parameters: a small folder could ask for any size.
SHORTEST_GRID, LONGEST_GRID, GRID_OF_LENGTH = 2**16, 2**19, 128
GRID_FIELDS = {"fd": ("fd_resolution",), "ski": ("ski_grid_length",), "rtf": ("rtf_truncation_length",)}

# The rotary positions that are possible, and the numbers that each needs. Frequencies that follow from the length of
# the sequence ("dynamic", "longrope") are not: the outputs at the first tokens would change with later tokens.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_TYPES = {"default": (), "linear": ("factor",), "yarn": ("factor",), "llama3": LLAMA3}


def has_attention(config: "TnnConfig") -> bool:
    """Whether a layer of the model is attention."""
    return any(kind != TOEPLITZ for kind in config.layer_types)


def _in_attention(derive: Callable) -> Callable:
    return lambda config: derive(config) if has_attention(config) else None


def _in_heads(derive: Callable) -> Callable:
    return lambda config: derive(config) if config.toeplitz_mixer == MULTIHYENA else None


# Fields that follow from others unless they are set, each from those before it.
DERIVED_LAYERS: dict[str, Callable[["TnnConfig"], Any]] = {
    "layer_types": lambda config: [TOEPLITZ] * config.num_hidden_layers,
    "num_attention_heads": _in_attention(lambda config: max(1, config.hidden_size // 64)),
    "num_key_value_heads": _in_attention(lambda config: config.num_attention_heads),
    "head_dim": _in_attention(lambda config: max(1, config.hidden_size // config.num_attention_heads)),
    "attention_dropout": _in_attention(lambda config: 0.0),
    "num_mixer_heads": _in_heads(lambda config: max(1, config.gtu_dim // 16)),
    "num_filter_groups": _in_heads(attrgetter("num_mixer_heads")),
}
# Without attention these fields are None and are not saved. Their names are those of transformers.
ATTENTION_FIELDS = {"layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_dropout"}
ATTENTION_FIELDS |= {"rope_parameters", "sliding_window"}

# Fields that follow from the length of the training.
LENGTHS = ("ski_grid_length", "rtf_truncation_length", "rpe_input_length", "explicit_length", "hyena_filter_length")
DERIVED_LENGTHS: dict[str, Callable[["TnnConfig"], Any]] = dict.fromkeys(LENGTHS, attrgetter("axis_length")) | {
    "fd_resolution": lambda config: 1 << (config.axis_length - 1).bit_length()
}
LENGTH_FIELDS = DERIVED_LENGTHS.keys()

# Those that a trained model keeps if the fields that they followed from are changed at load.
FIXED = DERIVED_LENGTHS | {"intermediate_size": attrgetter("hidden_size")}
DERIVED = DERIVED_LAYERS | FIXED


@strict
class TnnConfig(PreTrainedConfig):
    """Configuration of a [`TnnModel`] and its heads. The defaults are the causal language model of the TNN paper.

    Layers may differ, as in transformers: `per_layer_config` is a dictionary from the number of a layer to its fields,
    which may be those of operators, `tno_type`, `num_filter_groups`, `hyena_skip`, `hidden_act`, `mlp_act` and
    `intermediate_size`. `config.per_layer_config[i]` is the configuration of layer i. The model's own configuration
    gives no value for a field that differs.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        hidden_size: Width of the token representations, d.
        num_hidden_layers: Number of blocks, each of a mixer and a GLU.
        layer_types (defaults to `"toeplitz"` for all): Mixer of each block: `"toeplitz"` (the `toeplitz_mixer`), the
            name of its operator (a `tno_type`; it becomes `"toeplitz"` and an entry of `per_layer_config`),
            `"full_attention"` or `"sliding_attention"` (softmax attention).
        toeplitz_mixer: `"gtu"` (the gated Toeplitz unit), `"hyena"` (Hyena of order 2, with the operator as its long
            filter), `"s4"` (S4's: the operator, `hidden_act`, a linear map and a gate; needs `gtu_expansion=1`) or
            `"multihyena"` (Hyena with heads, of one filter for the outer product of keys and values: it can recall).
        max_position_embeddings: Length the model is trained for. It does not limit the length of inputs. Fields with
            defaults from it (from its square root if `spatial_dims=2`) are fixed when a model is built or saved.
        short_conv_kernel: Number of taps of the short convolutions of `"hyena"`, in [1, 64]; odd with `causal=False`.
        hyena_rank: Width between the two linear maps, with `hidden_act`, at the end of `"hyena"`. None for one map.
        hyena_norm: Whether `"hyena"` normalises its gated product: an RMS norm with a scale per channel, eps 1e-6.
        hyena_skip: Whether `"hyena"` adds its input, times a weight per channel, to the product of the long filter.
        num_mixer_heads (defaults to the GTU width // 16): Heads of `"multihyena"`, a divisor of that width.
            None for other mixers.
        num_attention_heads (defaults to `hidden_size // 64`): Number of attention heads. None without attention.
        num_key_value_heads (defaults to `num_attention_heads`): Number of heads of keys and values, its divisor.
        head_dim (defaults to `hidden_size // num_attention_heads`): Width of a head.
        rope_parameters: Rotary positions in attention, as in transformers: `{"rope_type": "default", "rope_theta":
            10000.0}`, or `"linear"`, `"yarn"` or `"llama3"` with their numbers. None for no positions.
        sliding_window: Number of tokens that `"sliding_attention"` sees, with the present one, at least 2; with
            `causal=False`, on each side.
        attention_dropout (defaults to 0): Dropout of attention weights.
        causal: Whether a position sees only itself and earlier ones. `TnnForCausalLM` needs `True`, `TnnForMaskedLM`
            and `TnnForImageClassification` need `False`, the other classes take both.
        tno_type: Source of the Toeplitz coefficients: `"rpe"` (an MLP of the lag, times a decay), `"fd"` (an MLP of
            the frequency), `"ski"` (a short filter plus a low-rank interpolated kernel, not causal), `"rtf"` (a
            rational transfer function), `"s4d"` (a diagonal state-space model), `"modal"` (a recurrence fitted by
            `to_recurrent`), `"explicit"` (a parameter per lag below `explicit_length`, times the decay), `"hyena"`
            (Hyena's implicit filter, an MLP of sines), `"exponential"` (a sum of real exponentials, with poles and
            residues for each filter), or a name given to `register_operator`.
        num_filter_groups: Number of filters, each for as many neighbouring channels, a divisor of the GTU width. None
            for a filter per channel. With `"multihyena"` a divisor of `num_mixer_heads`, and by default this number.
        tno_implementation: Computation of Toeplitz products: `"fused"` (fast) or `"eager"` (PyTorch's own operations),
            with the same values and derivatives of any order; `"triton"`, for GPUs, in the precision of the
            activations (where it cannot run, `"fused"` does, with a warning); or `"auto"`: `"triton"` on NVIDIA's GPUs
            of compute capability 8.0 and newer for kernels of up to 4,096 taps (512 in float32) on both sides
            together, else `"fused"`.
        tno_class: Module and name of the class of an operator that `register_operator` added. Set when a model is
            built or saved, so that a failed load can say what to import first.
        max_kernel_length (defaults to `128 * max_position_embeddings`): Largest `fd_resolution`,
            `rtf_truncation_length` or `ski_grid_length` of a saved configuration that loads, for the operator that has
            it; the default is in [65,536, 524,288]. It guards against folders that ask for much memory, so it is an
            argument of `from_pretrained` only, and not saved.
        gtu_expansion: The gated Toeplitz unit has int(gtu_expansion * hidden_size) channels.
        gtu_norm: Whether the gated product is normalised before the output projection of the GTU.
        use_glu: Whether a block has a GLU after its mixer.
        intermediate_size (defaults to `hidden_size`): Inner width of the GLU.
        mlp_act: Activation of an MLP, y = W_down act(W_up x), in place of the GLU. None for the GLU.
        hidden_act: Activation of the mixer and of the gate of the GLU.
        norm_type: Norm of the blocks, of the GTU (`gtu_norm`) and of the RPE: `"simplermsnorm"` (without parameters),
            `"rmsnorm"`, `"gatedrmsnorm"`, `"scalenorm"`, `"layernorm"` or, for the blocks only, `"batchnorm"` (over
            the real tokens of a batch, in each process alone).
        norm_position: `"pre"`: x + f(norm(x)), with a final LayerNorm (or batch norm); `"post"`: norm(x + f(x));
            `"res_post"`: x + norm(f(x)).
        layer_norm_eps: Epsilon of every LayerNorm.
        rms_norm_eps: Epsilon of the norms `"simplermsnorm"`, `"rmsnorm"` and `"gatedrmsnorm"` outside of encoders, by
            default that of the released code.
        final_norm_type: Norm after the last block with `norm_position="pre"`. None for a LayerNorm, or a batch norm
            where `norm_type` is one.
        output_biases_only: Whether the last linear map of a mixer, and that of attention, are the only ones of a block
            with a bias. Otherwise all of mixers and GLUs have one, and none of attention.
        scale_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        embedding_norm: Whether embeddings pass through a LayerNorm.
        position_embedding: `"sinusoidal"` adds absolute positions to the embeddings, from the first real token.
        spatial_dims: 1 for a sequence. 2 for the tokens of a square image in row-major order, mixed along rows and
            columns (not causal).
        spatial_mixing: Combination of both if `spatial_dims=2`: `"product"`, twice the product along both axes (the
            Long Range Arena models), or `"sum"`, rows plus columns (the ImageNet models).
        image_size: Side in pixels of the images of `TnnForImageClassification`.
        patch_size: Side in pixels of a patch, a square of the image that becomes one token.
        num_channels: Number of channels of an image.
        input_channels: Number of channels of real-valued input: the model reads `input_values` through a linear map in
            place of tokens, and neither `vocab_size` nor `scale_embedding` has an effect. None for a model of tokens.
        prediction_length: Number of future values that `TnnForTimeSeriesPrediction` predicts at once.
        rpe_dim: Width of the relative position encoder (`"rpe"` and `"fd"`).
        rpe_layers: Number of its hidden layers besides its input and output projections, from 0.
        rpe_input: Input of the encoder of `"rpe"`: the `"lag"`, the lag over `rpe_input_length` (`"normalized"`), or
            sines and cosines of the lag (`"sinusoidal"`).
        rpe_input_length (defaults to `max_position_embeddings`): Lag that `"normalized"` maps to 1.
        rpe_act: Activation of the encoder of `"rpe"`.
        rpe_residual: Whether hidden layers of the encoder have a residual connection.
        rpe_norm_type (defaults to `norm_type`): Norm of the encoder (`"layernorm"` with a batch norm).
        rpe_hidden_norm: Whether hidden layers of the encoder have a norm, as its output has.
        rpe_window: Lag from which `"rpe"` coefficients are zero. None for no limit.
        explicit_length (defaults to `max_position_embeddings`): Number of lags on each side that have a parameter if
            `tno_type="explicit"`.
        decay: Decay per lag of `"rpe"` and `"explicit"` coefficients, in (0, 1]; None for no decay. In half precision,
            lags that hold less than 2^-12 of a kernel with it are not computed.
        learnable_decay: Whether each channel of `"rpe"` learns a decay between `decay` and 1. `"explicit"` ignores it.
        fd_resolution (defaults to at least `max_position_embeddings`): Number of taps of an `"fd"` kernel on each
            side, a power of two; the frequency grid has `fd_resolution + 1` points.
        fd_input: Input of the frequency MLP: `"omega"` in [0, pi] as published, or `"cos"` for cos(omega), for which
            the decay theorems of the paper hold.
        fd_act: Activation of the frequency MLP.
        ski_rank: Number of inducing points, at least 2.
        ski_grid_length (defaults to `max_position_embeddings`): Number of positions with inducing points.
        ski_filter_size: Number of taps of the short filter of `"ski"`; an even number is raised by one.
        ski_interpolation: Interpolation between inducing points: `"linear"`, as published, or `"released"`, for models
            trained with the released code.
        ski_initializer: First values: `"normal"`, all from N(0, 1), as in the released code, or `"local"`, a short
            filter of norm 1 (taps from N(0, 1/taps)) and a low-rank part of zeros.
        ski_decay: lambda of the inverse time warp x(s) = sign(s) lambda^|s|, in (0, 1].
        rtf_state_size: Order N of the rational function, below `rtf_truncation_length`.
        rtf_truncation_length (defaults to `max_position_embeddings`): Number of points of the unit circle at which
            `"rtf"` samples its function, rounded up to an even number.
        rtf_num_denominators: Number of denominators shared by groups of consecutive filters, a divisor of the number
            of filters. None for one per filter.
        rtf_constraint: `"l1_montel"` keeps all poles inside the unit circle. With None they may leave it in training;
            then a sequence cannot be continued from a cache.
        rtf_initializer: First coefficients: `"zeros"`, `"xavier"` (uniform, 1/sqrt(N)) or `"montel"` (uniform, 1/N).
        s4d_state_size: Number N of real states per channel of `"s4d"`, an even number: N/2 pairs of complex poles.
        s4d_initializer: First poles: `"lin"` (S4D-Lin), `"inv"` (S4D-Inv) or `"legs"` (S4D-LegS).
        s4d_discretization: `"zoh"` (zero-order hold) or `"bilinear"`.
        s4d_dt_min: Smallest first step of a channel; steps are spread evenly on a logarithmic scale.
        s4d_dt_max: Largest first step of a channel.
        hyena_filter_length (defaults to `max_position_embeddings`): Number M of positions of the grid of `"hyena"`.
            Its features are stored with the weights.
        hyena_filter_beyond: Sequences longer than M: `"error"` (a ValueError), or `"zeros"` for lags from M on.
        hyena_filter_order: Width of the MLP of `"hyena"`.
        hyena_filter_emb_dim: Number of features of a position that it reads, an odd number: the position, and a cosine
            and a sine at each frequency.
        hyena_filter_inner_mlps: Number of its hidden layers besides its input and output projections, from 0.
        hyena_filter_freq: First factor of the arguments of its sines, which is learned for each unit.
        num_modes: Number of complex exponentials of a `"modal"` kernel, each of two states, or of real ones of an
            `"exponential"` kernel.
        modal_window: Number of first taps that a `"modal"` kernel stores exactly.
        converted_from: The `tno_type` that `to_recurrent` converted the model from.
        hidden_dropout_prob: Dropout after the embeddings, each mixer and each GLU.
        classifier_dropout (defaults to `hidden_dropout_prob`): Dropout of the classification head.
        classifier_pooling (defaults to `"last"` for causal models, else `"mean"`): Hidden state that text classifiers
            use: that of the `"last"` real token, or the `"mean"` over all, which needs the whole sequence (no cache).
        classifier_act: Activation between two linear layers of the classification head; None for one layer.
        tie_word_embeddings: Whether language modelling heads share the input embeddings.
        initializer: `"torch"`: PyTorch's default for linear layers and N(0, 1/d) for embeddings (the causal models of
            the papers); `"normal"`: N(0, initializer_range^2) and zero biases (as BERT), but of maps that read lags,
            frequencies, values or pixels, whose biases are N(0, initializer_range^2); `"normal_gtu"`: as `"torch"`,
            but N(0, initializer_range^2) for weights and biases of the GTU; `"small_embeddings"`: as `"torch"`, but
            N(0, d^-1.5) for embeddings, so that a new language model does not repeat the token just read.
        initializer_range: Standard deviation of `"normal"` and `"normal_gtu"`.
        use_cache: Whether causal models return a cache, the state that continues a sequence.
        skip_logits: Whether language models in training compute the loss alone, in less time and memory: `logits` is
            None where `labels` are given. Evaluation returns logits. It belongs to a training, and is not saved.

    Raises:
        ValueError: a field has a value outside its limits, or two fields contradict each other.
    """

    model_type = "tnn"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    base_model_tp_plan = {}  # `check` adds that of the layers
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    _automatic = frozenset()  # the names of fields that follow from others
    _models = None  # the file of the models, while one of them is saved

    # Tokens and layers.
    vocab_size: int = 50265
    hidden_size: int = 512
    num_hidden_layers: int = 7
    layer_types: list[str] | None = None
    toeplitz_mixer: str = GTU
    max_position_embeddings: int = 512
    # Hyena, the mixer.
    short_conv_kernel: int = 3
    hyena_rank: int | None = None
    hyena_norm: bool = False
    hyena_skip: bool = False
    num_mixer_heads: int | None = None
    # Attention.
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_parameters: dict | None = None
    sliding_window: int | None = None
    attention_dropout: int | float | None = None
    # The operator.
    causal: bool = True
    tno_type: str = "rpe"
    num_filter_groups: int | None = None
    tno_implementation: str = "auto"
    tno_class: str | None = None
    max_kernel_length: int | None = None
    # Blocks.
    gtu_expansion: int | float = 3
    gtu_norm: bool = False
    use_glu: bool = True
    intermediate_size: int | None = None
    mlp_act: str | None = None
    hidden_act: str = "silu"
    norm_type: str = "simplermsnorm"
    norm_position: str = "pre"
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float = 1e-8
    final_norm_type: str | None = None
    output_biases_only: bool = False
    # Embeddings of tokens.
    scale_embedding: bool = True
    embedding_norm: bool = False
    position_embedding: str | None = None
    # Images and real values.
    spatial_dims: int = 1
    spatial_mixing: str = "product"
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    input_channels: int | None = None
    prediction_length: int | None = None
    # rpe, explicit.
    rpe_dim: int = 64
    rpe_layers: int = 6
    rpe_input: str = "lag"
    rpe_input_length: int | None = None
    rpe_act: str = "relu"
    rpe_residual: bool = False
    rpe_norm_type: str | None = None
    rpe_hidden_norm: bool = True
    rpe_window: int | None = None
    explicit_length: int | None = None
    decay: int | float | None = 0.99
    learnable_decay: bool = False
    # fd.
    fd_resolution: int | None = None
    fd_input: str = "omega"
    fd_act: str = "relu"
    # ski.
    ski_rank: int = 32
    ski_grid_length: int | None = None
    ski_filter_size: int = 16
    ski_interpolation: str = "linear"
    ski_initializer: str = "normal"
    ski_decay: int | float = 0.99
    # rtf.
    rtf_state_size: int = 64
    rtf_truncation_length: int | None = None
    rtf_num_denominators: int | None = None
    rtf_constraint: str | None = "l1_montel"
    rtf_initializer: str = "xavier"
    # s4d.
    s4d_state_size: int = 64
    s4d_initializer: str = "lin"
    s4d_discretization: str = "zoh"
    s4d_dt_min: int | float = 0.001
    s4d_dt_max: int | float = 0.1
    # hyena, the operator.
    hyena_filter_length: int | None = None
    hyena_filter_beyond: str = "error"
    hyena_filter_order: int = 64
    hyena_filter_emb_dim: int = 5
    hyena_filter_inner_mlps: int = 2
    hyena_filter_freq: int | float = 10
    # modal.
    num_modes: int = 32
    modal_window: int = 16
    converted_from: str | None = None
    # Dropout and heads.
    hidden_dropout_prob: int | float = 0.1
    classifier_dropout: int | float | None = None
    classifier_pooling: str | None = None
    classifier_act: str | None = "tanh"
    tie_word_embeddings: bool = True
    # Initialisation and use.
    initializer: str = "torch"
    initializer_range: float = 0.02
    use_cache: bool = True
    skip_logits: bool = False
    # Special tokens, as in transformers.
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        _check_names(type(self), kwargs)
        _take_layer_fields(self, kwargs)
        self._check_fields()
        self._automatic = frozenset(name for name in DERIVED if getattr(self, name) is None)
        self._derive()
        self._check_together()
        if (num_labels := kwargs.get("num_labels") or 0) > 2**16:  # the base class makes a list of names
            raise ValueError(f"`num_labels` must be at most {2**16:,}, got {num_labels}")
        without_rope = not (self.rope_parameters or kwargs.get("rope_theta") or kwargs.get("rope_scaling"))
        self.rope_parameters = dict(self.rope_parameters or {})  # the base class writes into it
        super().__post_init__(**kwargs)
        if without_rope:
            self.rope_parameters = None
        for config in self.layer_configs if self.is_heterogeneous else ():
            config._check_together()

    def __setattr__(self, name: str, value: Any):
        """Set a field, check it alone, and derive the fields that follow from it. `check` checks fields together."""
        if "_automatic" not in vars(self):  # __post_init__ checks and derives all of them
            return super().__setattr__(name, value)
        _check_field(name, value)
        if name == "tno_type":
            require_operator(value)
        super().__setattr__(name, value)
        if name in DERIVED:
            self._automatic = self._automatic - {name} | ({name} if value is None else set())
        if name in TnnConfig.__annotations__:  # the base class sets forty others
            self._derive()

    def __eq__(self, other: object) -> bool:
        # A derived value equals the same value given.
        return isinstance(other, PreTrainedConfig) and self.to_dict() == other.to_dict()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "TnnConfig":
        """Build a configuration from a dictionary, as in transformers; `kwargs` override fields.

        Fields that a saved configuration derived from `max_position_embeddings` stay as they were trained. A preset
        has no derived fields: they are derived after the overrides. A wrong field raises a ValueError.
        """
        try:
            if "transformers_version" in config_dict and any(config_dict.get(name) is None for name in FIXED):
                trained = cls(**config_dict)
                config_dict = config_dict | {name: vars(trained)[name] for name in FIXED}
            overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__annotations__}
            fields = config_dict | {"max_kernel_length": None} | overrides  # no file lifts the limit
            loaded = super().from_dict(fields, **kwargs)
        except (AttributeError, TypeError) as error:  # a file may hold anything, and transformers checks few fields
            raise ValueError(f"The configuration has a field of a wrong kind: {error}") from error
        config = loaded[0] if isinstance(loaded, tuple) else loaded  # with the arguments that are no fields
        if not overrides.keys() & LENGTH_FIELDS:
            config.check_kernel_length()
        return loaded

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, as in transformers; without those of attention if there is none."""
        left_out = {"_automatic", "_models", "max_kernel_length", "skip_logits"}
        left_out |= set() if has_attention(self) else ATTENTION_FIELDS
        return {name: value for name, value in super().to_dict().items() if name not in left_out}

    def check(self):
        """Check all fields together (a ValueError), and fix the derived ones: they no longer follow from others."""
        for config in self.layer_configs:
            config._check_fields()
            config._check_together()
        self._automatic = self._automatic.difference(FIXED)
        if self.rope_parameters:
            self.standardize_rope_params()  # they may have been set after the rest
        # transformers 5.17 has added the embeddings to the plan of a configuration that ties them.
        others = {name: how for name, how in self.base_model_tp_plan.items() if not name.startswith("layers.")}
        plan = extensions.tensor_plan(self)
        self.base_model_tp_plan = others | plan
        registered = [qualified_name(OPERATORS[name]) for name in self.tno_types if name not in BUILT_IN]
        self.tno_class = ", ".join(registered) or None

    @property
    def layer_configs(self) -> list["TnnConfig"]:
        """The configurations of the layers, one for all where they are the same."""
        return [*self.per_layer_config] if self.is_heterogeneous else [self]

    @property
    def tno_types(self) -> list[str]:
        """The names of the operators of all Toeplitz layers, each once."""
        if not self.is_heterogeneous:
            return [self.tno_type]
        pairs = zip(self.layer_types, self.per_layer_config, strict=True)
        return list(dict.fromkeys(config.tno_type for kind, config in pairs if kind == TOEPLITZ))

    @property
    def gtu_dim(self) -> int:
        """Width of the gated Toeplitz unit: the number of channels that have a Toeplitz matrix."""
        return int(self.gtu_expansion * self.hidden_size)

    @property
    def operator_dim(self) -> int:
        """Number of channels of the inputs of an operator."""
        return self.gtu_dim * (self.gtu_dim // self.num_mixer_heads if self.toeplitz_mixer == MULTIHYENA else 1)

    @property
    def axis_length(self) -> int:
        """Number of positions along one axis: of the sequence, or of a row or column of the image."""
        length = self.max_position_embeddings
        return length if self.spatial_dims == 1 else math.isqrt(length)

    @property
    def encoder_norm_type(self) -> str:
        """Norm of the relative position encoder."""
        return self.rpe_norm_type or ("layernorm" if self.norm_type == "batchnorm" else self.norm_type)

    @property
    def pooling(self) -> str:
        """Pooling of text classifiers, `"last"` or `"mean"`."""
        return self.classifier_pooling or ("last" if self.causal else "mean")

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """Check and save the configuration. A model that is saved calls it, and saves its code, see `hub.py`."""
        self.check()
        own, code = own_classes(self, save_directory), {}
        if self._models is not None:
            self._auto_class = None  # transformers would change the map
            os.makedirs(save_directory, exist_ok=True)
            operators = {name: OPERATORS[name] for name in self.tno_types if name not in BUILT_IN}
            code = save_code(save_directory, self._models, operators)
        self.auto_map = code | own
        if not self.auto_map:
            del self.auto_map
        super().save_pretrained(os.path.normpath(save_directory), push_to_hub, **kwargs)
        vars(self).pop("_auto_class", None)

    def validate_layer_type(self):
        """Nothing to check here: `_check_layers` does, and knows Toeplitz layers."""

    def _derive(self):
        for name, derive in DERIVED.items():  # in this order: some follow from others
            if name in self._automatic and (value := derive(self)) != vars(self)[name]:
                super().__setattr__(name, value)

    # Not named validate_*: transformers would turn errors of such methods into a type that is not a ValueError.
    def _check_fields(self):
        for name in (*LIMITS, *ACTIVATIONS):
            _check_field(name, getattr(self, name))

    def _check_together(self):
        allowed = f"a number for which gtu_expansion * hidden_size is in [1, {LARGEST_SIZE:,}]"
        self.require("gtu_expansion", 1 <= self.gtu_expansion * self.hidden_size <= LARGEST_SIZE, allowed)
        given = self.decay is not None or not self.learnable_decay
        self.require("decay", given, "a number (the lower bound) when learnable_decay=True")
        self.require("gtu_norm", not (self.gtu_norm and self.norm_type == "batchnorm"), "False with a batch norm")
        self.require("mlp_act", self.use_glu or self.mlp_act is None, "None with use_glu=False")
        _check_layers(self)
        _check_mixer(self)
        if self.spatial_dims == 2:
            self.require("causal", not self.causal, "False with spatial_dims=2 (an image has no order)")
            square = self.axis_length**2 == self.max_position_embeddings
            self.require("max_position_embeddings", square, "a square with spatial_dims=2")
        directions, check, _ = self._operator()
        self.require("causal", directions[not self.causal], f"{not self.causal} with tno_type={self.tno_type!r}")
        check(self)

    def _operator(self) -> tuple[tuple[bool, bool], Callable[["TnnConfig"], None], tuple[str, ...]]:
        """Return the directions of the operator, its check of several fields, and its fields with sizes of grids."""
        require_operator(self.tno_type, self.tno_class)
        if self.tno_type in BUILT_IN:
            return DIRECTIONS[self.tno_type], _check_built_in, GRID_FIELDS.get(self.tno_type, ())
        cls = OPERATORS[self.tno_type]
        return (cls.supports_causal, cls.supports_bidirectional), cls.check_config, cls.grid_fields

    def check_kernel_length(self):
        """Raise a ValueError if the grid of the kernels is out of proportion to the length of the model."""
        usual = min(LONGEST_GRID, max(SHORTEST_GRID, GRID_OF_LENGTH * self.axis_length))
        limit = self.max_kernel_length or usual
        allowed = f"at most {limit:,}, or max_kernel_length must be given to from_pretrained to allow more"
        for config in self.layer_configs if TOEPLITZ in self.layer_types else ():
            for name in config._operator()[2]:
                config.require(name, getattr(config, name) <= limit, allowed)

    def require(self, name: str, holds: bool, allowed: str):
        """Raise a ValueError "`name` must be {allowed}, got {value}" on the field `name` unless `holds`."""
        if not holds:
            raise ValueError(f"`{name}` must be {allowed}, got {getattr(self, name)!r}")


# Token ids are no sizes, and only who loads a folder can set `max_kernel_length`.
SIZES = {name for name, kind in TnnConfig.__annotations__.items() if kind in (int, int | None)}
SIZES -= {"bos_token_id", "pad_token_id", "max_kernel_length"}
LIMITS = dict.fromkeys(SIZES, between(1, LARGEST_SIZE)) | LIMITS
OPTIONAL = {name for name, kind in TnnConfig.__annotations__.items() if NoneType in get_args(kind)} - CHOICES.keys()


def _check_field(name: str, value: Any):
    """Check a field alone. `@strict` checks its type before."""
    if name in ACTIVATIONS:
        from transformers.activations import ACT2FN  # takes seconds to import

        limit = one_of(ACT2FN)
    else:
        limit = LIMITS.get(name)
    if limit is None or (value is None and name in OPTIONAL):
        return
    holds, allowed = limit
    if not holds(value):
        raise ValueError(f"`{name}` must be {allowed}{' or None' if name in OPTIONAL else ''}, got {value!r}")


def _take_layer_fields(config: "TnnConfig", others: dict[str, Any]):
    """Check the names in `per_layer_config`, of the `others`, and move names of operators from `layer_types` to it."""
    fields = {int(index): {**given} for index, given in (others.get("per_layer_config") or {}).items()}
    known, names = DIRECTIONS | OPERATORS, [*TnnConfig.__annotations__]
    allowed = PER_LAYER.union(names[names.index("rpe_dim") : names.index("converted_from")])
    if wrong := sorted(set().union(*fields.values()) - allowed):
        own = ", ".join(sorted(PER_LAYER))
        raise ValueError(f"`per_layer_config` must have fields of operators or {own}, got {', '.join(wrong)}")
    for index, kind in enumerate(config.layer_types or ()):
        if kind in known:
            fields[index] = {"tno_type": kind} | fields.get(index, {})
    config.layer_types = config.layer_types and [TOEPLITZ if kind in known else kind for kind in config.layer_types]
    if fields:
        others["per_layer_config"] = fields


def _check_layers(config: "TnnConfig"):
    kinds, count = config.layer_types, config.num_hidden_layers
    config.require("layer_types", len(kinds) == count, f"a list of num_hidden_layers={count} names")
    if not has_attention(config):
        config.require("rope_parameters", config.rope_parameters is None, "None without layers of attention")
        return
    heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
    config.require("num_key_value_heads", heads % config.num_key_value_heads == 0, f"a divisor of {heads} heads")
    config.require("head_dim", width <= LARGEST_SIZE, f"at most {LARGEST_SIZE:,} for {heads} heads together")
    if SLIDING in kinds:
        config.require("sliding_window", config.sliding_window is not None, f"an integer for layers of {SLIDING!r}")
    if config.rope_parameters is not None:
        _check_rope(config, config.rope_parameters)


def _check_rope(config: "TnnConfig", given: dict[str, Any]):
    kind = given.get("rope_type", given.get("type", "default"))
    known = isinstance(kind, str) and kind in ROPE_TYPES
    config.require("rope_parameters", known, f"None or have a rope_type of {', '.join(map(repr, ROPE_TYPES))}")
    for name in ("rope_theta", *ROPE_TYPES[kind]):
        value = given.get(name, 10_000.0 if name == "rope_theta" else None)
        positive = isinstance(value, int | float) and 0 < value < math.inf
        config.require("rope_parameters", positive, f"a dict with a number above 0 as {name!r}")
    whole = given.get("partial_rotary_factor") in (None, 1)
    config.require("rope_parameters", whole, "a dict without a 'partial_rotary_factor' other than 1")
    config.require("head_dim", config.head_dim % 2 == 0, "even with rope_parameters")


def _check_mixer(config: "TnnConfig"):
    width, heads, mixer = config.gtu_dim, config.num_mixer_heads, config.toeplitz_mixer
    config.require("num_mixer_heads", width % (heads or 1) == 0, f"a divisor of the GTU width {width}")
    config.require("num_mixer_heads", heads is None or mixer == MULTIHYENA, f"None with toeplitz_mixer={mixer!r}")
    divided = f"the GTU width {width}" if heads is None else f"num_mixer_heads={heads}"
    divides = (heads or width) % (config.num_filter_groups or 1) == 0
    config.require("num_filter_groups", divides, f"a divisor of {divided}")
    if mixer in (HYENA, MULTIHYENA):
        why = f"1 with toeplitz_mixer={mixer!r}, a mixer of sequences"
        config.require("spatial_dims", config.spatial_dims == 1, why)
        centred = config.causal or config.short_conv_kernel % 2 == 1
        config.require("short_conv_kernel", centred, "odd with causal=False")
        config.require("hyena_norm", not (config.hyena_norm and config.gtu_norm), "False with gtu_norm, another norm")
    config.require("hyena_skip", not config.hyena_skip or mixer == HYENA, f"False with toeplitz_mixer={mixer!r}")
    if mixer == S4:
        whole = config.gtu_dim == config.hidden_size
        config.require("gtu_expansion", whole, "1 with toeplitz_mixer='s4', whose operator mixes the input itself")
        config.require("gtu_norm", not config.gtu_norm, "False with toeplitz_mixer='s4', which has no gated product")


def _check_built_in(config: "TnnConfig"):
    """Check what an operator of this package asks of several fields together."""
    if config.tno_type == "ski":
        longest = config.ski_grid_length
        config.require("ski_rank", 2 <= config.ski_rank <= longest, f"in [2, ski_grid_length={longest}]")
    if config.tno_type == "rtf":
        longest = config.rtf_truncation_length
        config.require("rtf_state_size", config.rtf_state_size < longest, f"below rtf_truncation_length={longest}")
        groups, width = config.num_filter_groups, config.gtu_dim
        divided = f"num_filter_groups={groups}" if groups else f"the GTU width {width}"
        divides = (groups or width) % (config.rtf_num_denominators or 1) == 0
        config.require("rtf_num_denominators", divides, f"a divisor of {divided}")
    if config.tno_type == "s4d":
        config.require("s4d_state_size", config.s4d_state_size % 2 == 0, "an even number")
        longest = config.s4d_dt_max
        config.require("s4d_dt_min", config.s4d_dt_min <= longest, f"at most s4d_dt_max={longest}")


def qualified_name(cls: type) -> str:
    """Return the module and the name of a class, joined by a dot."""
    return f"{cls.__module__}.{cls.__qualname__}"


def require_operator(tno_type: str, registered_as: str | None = None):
    """Raise a ValueError if no operator is `tno_type`. A model that was saved with one names it, `registered_as`."""
    known = DIRECTIONS | OPERATORS
    if tno_type in known:
        return
    message = f"`tno_type` must be one of {', '.join(map(repr, known))}, got {tno_type!r}"
    if registered_as is not None:
        message += f". The model was saved with the operator {registered_as}: import its module first"
    raise ValueError(message)


def _check_names(config_class: type, names: Iterable[str]):
    """Refuse fields of a configuration file that would replace methods and properties of the class."""
    for name in names:
        replaceable = name == "model_type" or getattr(getattr(config_class, name, None), "fset", None) is not None
        if hasattr(config_class, name) and not replaceable:
            raise ValueError(f"`{name}` is not a field: it belongs to the class {config_class.__name__}. Remove it.")
