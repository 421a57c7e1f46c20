"""Toeplitz neural networks: the blocks, the base model, its heads, and the model of images.

    GTU:    y = W_o( u * TNO(v) ),  u = act(W_u x),  v = act(W_v x)                TNN paper, "token mixer"
    GLU:    y = W_down( act(W_gate x) * W_up x ),   or an MLP, W_down act(W_up x)  (mlp_act)
    block:  x = x + GTU(norm(x));  x = x + GLU(norm(x))                            (norm_position="pre")
    mixers: Hyena or the mixer of S4 in place of the GTU in all blocks             (toeplitz_mixer, `mixers.py`)
    hybrid: attention in place of the GTU in some blocks                           (layer_types)
    images: x = W_patch patch,  x = blocks(x),  logits = W_head norm(mean(x))      TNN paper, ImageNet models

B batch, L length, d hidden size, D = gtu_dim channels of the Toeplitz operator; for images C channels, H and W sides
in pixels, P patch size, L = (H/P)^2 tokens. Names, outputs and losses are those of transformers.

Padding: v is set to zero at masked positions after its projection and activation, so padding adds nothing to a
Toeplitz product, which depends only on differences of positions.
"""

import inspect
from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin, MaxLengthCriteria, StopStringCriteria
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SampleTSPredictionOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import TnnAttention, TnnRotaryEmbedding, make_attention_inputs
from .cache_tnn import CACHE, open_cache, takes_cache, with_cache_as
from .configuration_tnn import OPERATORS, TOEPLITZ, TnnConfig, has_attention
from .extensions import extensions
from .inputs import (
    can_be_read,
    check_attention_mask,
    check_class_labels,
    check_keywords,
    check_labels,
    check_last_size,
    check_pixel_values,
    check_spans,
    check_tokens,
    check_values,
    end_with_real,
    extend_mask,
    is_elsewhere,
    pool_tokens,
    require_tensor,
    take_options,
)
from .linear import apply_linear, apply_together
from .mixers import TOEPLITZ_MIXERS, SkipWeight
from .norms import NORM_POSITIONS, LayerNorm, SimpleRMSNorm, build_final_norm, build_norm, with_mask
from .numerics import by_parts, parameter_dtype
from .packing import Documents, documents_of, positions_of, read_bounds
from .position_encoder import CastingLinear, sinusoidal_embedding
from .self_check import check_loaded
from .signals import TimeSeriesPredictionOutput, TnnValueEmbedding, squared_error, standardize
from .tno import NO_CONTEXT, LayerContext, ToeplitzOperator
from .toeplitz_fused import activated_product

# From `initializer` to the standard deviation of embeddings, as a power of d. With -0.5 and tied output weights the
# token just read has a logit of up to d^0.5, with -0.75 of up to d^0.25; other logits have a deviation of d^-0.25.
EMBEDDING_POWERS = {"torch": -0.5, "normal_gtu": -0.5, "small_embeddings": -0.75}


class TnnGatedLinearUnit(nn.Module):
    """The channel mixer: a gated linear unit, or with `mlp_act` an MLP, which has no gate."""

    together, joined = ("gate_proj", "up_proj"), None  # as in the GTU

    def __init__(self, config: TnnConfig):
        super().__init__()
        gated, bias = config.mlp_act is None, not config.output_biases_only
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=bias) if gated else None
        self.up_proj = nn.Linear(*sizes, bias=bias)
        self.down_proj = nn.Linear(*reversed(sizes), bias=bias)
        self.act = ACT2FN[config.hidden_act if gated else config.mlp_act]
        self.implementation, self.width = config.tno_implementation, config.intermediate_size

    def forward(self, hidden_states: torch.Tensor, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        rows, length = hidden_states.shape[:2]
        width, joined = rows * self.width, self.joined if context.past_length is None else None
        return by_parts(lambda chosen: self.mix(hidden_states[:, chosen], joined), length, width, hidden_states, dim=1)

    def mix(self, hidden_states: torch.Tensor, joined: tuple | None) -> torch.Tensor:
        """The same for some of the positions."""
        if self.gate_proj is None:
            return apply_linear(self.down_proj, self.act(apply_linear(self.up_proj, hidden_states)))
        gate, up = apply_together(apply_linear, (self.gate_proj, self.up_proj), hidden_states, joined)
        return apply_linear(self.down_proj, activated_product(gate, up, self.act, self.implementation))


class TnnBlock(GradientCheckpointingLayer):
    """One layer of the model: a token mixer (GTU) and a GLU, each with a norm and a residual connection."""

    regions = None  # compiles the layer while it is trained, see `compile/regions.py`

    def __init__(self, config: TnnConfig, layer_idx: int):
        super().__init__()
        self.mixer = self.attention = None
        own = config.per_layer_config[layer_idx]
        norm = build_norm(config, config.hidden_size)
        if config.layer_types[layer_idx] == TOEPLITZ:
            self.mixer_norm, self.mixer = norm, TOEPLITZ_MIXERS[config.toeplitz_mixer](own, layer_idx)
        else:
            self.attention_norm, self.attention = norm, TnnAttention(config, layer_idx)
        self.glu_norm = build_norm(config, config.hidden_size)
        self.glu = TnnGatedLinearUnit(own) if config.use_glu else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm_position = config.norm_position

    def forward(self, hidden_states: torch.Tensor, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        # Hooks that record attention, and the exchange of processes, are in no graph.
        eager = self.mixer is None or context.layout is not None or context.cache is not None
        if eager or self.regions is None or not self.training:
            return self.mix(hidden_states, context)
        if context.documents is not None:  # the graph finds them
            context = context._replace(documents=context.documents._replace(batches=None))
        return self.regions(TnnBlock.mix, self, hidden_states, context)

    def mix(self, hidden_states: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """The same, as one graph of torch.compile may have it."""

        def mix_tokens(x):
            return self.dropout(self.attention(x, context)[0] if self.mixer is None else self.mixer(x, context))

        def mix_channels(x):
            return self.dropout(self.glu(x, context))

        norms = (self.attention_norm if self.mixer is None else self.mixer_norm, self.glu_norm)
        mixer_norm, glu_norm = (with_mask(norm, context.mask) for norm in norms)
        add_residual = NORM_POSITIONS[self.norm_position]
        hidden_states = add_residual(hidden_states, mixer_norm, mix_tokens)
        return hidden_states if self.glu is None else add_residual(hidden_states, glu_norm, mix_channels)


class TnnPreTrainedModel(PreTrainedModel):
    """Base class of all TNN models: configuration class, initialisation, loading and conversion."""

    config_class = TnnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TnnBlock"]
    _skip_keys_device_placement = [CACHE]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _can_record_outputs = {"hidden_states": TnnBlock, "attentions": OutputRecorder(TnnAttention, index=1)}
    # The operators make the kernels: they stay in float32, and quantizers skip them. Patterns, matched from the start.
    _keep_in_fp32_modules = [r".+\.mixer\.(tno|short)"]

    def __init__(self, config: TnnConfig):
        config.check()
        super().__init__(config)
        if config.input_channels is not None and self.main_input_name == "input_ids":
            self.main_input_name, self._input_embed_layer = "input_values", "embed_values"
        exact = sorted({name for kind in config.tno_types for name in OPERATORS[kind].fp32_parameters})
        if TOEPLITZ not in config.layer_types:  # there is no operator
            self._keep_in_fp32_modules = []
        elif exact:  # in bfloat16 too
            self._keep_in_fp32_modules_strict = [rf".+\.mixer\.tno\.(.+\.)?({'|'.join(exact)})"]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *model_args, use_safetensors=True, self_check=True, **kwargs
    ):
        """Load a model as in transformers, with two precautions against untrusted checkpoints, and a check.

        Weights are read only from safetensors, never from pickle, unless `use_safetensors=False`. The sizes that the
        configuration declares are compared with the weights before memory is allocated (`CheckpointMismatchError`).
        What the model gives is compared with what it gave when it was saved (`SelfCheckError`), see `self_check.py`,
        unless `self_check=False`: that of a large model at its first pass in evaluation.
        """
        use_safetensors = use_safetensors is not False
        if use_safetensors:
            extensions.check_before_loading(cls, pretrained_model_name_or_path, kwargs)
        loaded = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, use_safetensors=use_safetensors, **kwargs
        )
        if self_check:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
            check_loaded(model, pretrained_model_name_or_path, kwargs)
        return loaded

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, *arguments):
        """Divide the model as in transformers. Stages without a layer, or of real values, are a ValueError."""
        stages, layers = getattr(distributed_config, "pp_size", 1), model.config.num_hidden_layers
        if stages > 1 and model.config.input_channels is not None:
            raise ValueError("`pp_size` must be 1 for real values, got a pipeline, which passes on tokens alone")
        if stages > layers:
            raise ValueError(f"`pp_size` must be at most {layers}, a stage for each layer, got {stages}")
        return super().maybe_distribute_model(model, distributed_config, *arguments)

    def save_pretrained(self, save_directory, is_main_process=True, *arguments, **options):
        """Save the model as in transformers, with its code, see `hub.py`, and what it gives, see `self_check.py`."""
        self.config._models = __file__
        try:
            super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        finally:
            self.config._models = None
        if is_main_process and not options.get("push_to_hub"):
            extensions.write_check(self, save_directory)

    def _upload_modified_files(self, working_dir, *arguments, **options):
        extensions.write_check(self, working_dir)
        return super()._upload_modified_files(working_dir, *arguments, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CastingLinear):  # as transformers initialises those of torch
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        if self.config.initializer == "normal_gtu" and getattr(module, "is_gtu_projection", False):
            for parameter in module.parameters():
                init.normal_(parameter, std=self.config.initializer_range)
        elif self.config.initializer == "normal" and getattr(module, "maps_zeros", False):
            init.normal_(module.bias, std=self.config.initializer_range)
        elif self.config.initializer != "normal" and isinstance(module, (nn.Linear, nn.Conv2d, CastingLinear)):
            module.reset_parameters()
        if self.config.initializer in EMBEDDING_POWERS and isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size ** EMBEDDING_POWERS[self.config.initializer])
        if module is getattr(self, "lm_head", None) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, SimpleRMSNorm | SkipWeight):
            for scale in module.parameters():
                init.ones_(scale)
        if isinstance(module, ToeplitzOperator):
            module.reset_parameters()

    def to_recurrent(self, order: int = 64, window: int = 16, tolerance: float | None = None) -> tuple:
        """Return a copy of a causal model whose kernels are recurrences of low order (`tno_type="modal"`).

        Its state and cost per token do not depend on the text's length. Recurrences of more states (`rtf`, `s4d`,
        `exponential`; `modal` stays `modal`) are reduced by balanced truncation to `s4d`; others are returned as is.

        Args:
            order: number of real states per channel, fewer for a kernel of lower numerical rank.
            window: number of first taps of each kernel that are kept exactly; not of a recurrence.
            tolerance: largest relative l2 error of a layer's taps. It takes the smallest sufficient order among 8, 16,
                32, 64 and 128, of a recurrence any that a bound proves sufficient. `order` is not used.

        Returns:
            The model, and a `LayerReport` for each layer (none if it is as it was), see `tools/recurrent.py`.

        Raises:
            ValueError: the model is bidirectional, has adapters or quantized weights, the tolerance cannot be met, or
                a pole of a recurrence that is to be reduced lies on or outside the unit circle.
        """
        return extensions.to_recurrent(self, order, window, tolerance)


class TnnModel(TnnPreTrainedModel):
    """The base model: embeddings and a stack of blocks, causal or bidirectional as the configuration says.

    With `config.input_channels`, it reads real values in place of tokens.
    """

    sequence_parallel = None  # divides the tokens of a pass over processes, see `parallel/sequence.py`

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.embed_tokens = self.embed_values = None
        if config.input_channels is None:
            # No padding_idx: an RMS norm gives a row of zeros no direction.
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_values = TnnValueEmbedding(config)
        eps = config.layer_norm_eps
        self.embed_norm = LayerNorm(config.hidden_size, eps=eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList([TnnBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = build_final_norm(config)
        self.rotary = None if config.rope_parameters is None else TnnRotaryEmbedding(config)
        scales = config.scale_embedding and self.embed_values is None
        self.embedding_scale = config.hidden_size**0.5 if scales else 1.0
        self.reads_positions = config.position_embedding == "sinusoidal" or self.rotary is not None
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """The hidden states of the last layer, `(B, L, d)`.

        Args:
            input_ids: `(B, L)` token ids.
            attention_mask: `(B, past + L)`, 0 at padding, on any side. Without it all tokens are real.
            past_key_values: the cache that a causal model returned for the tokens before these. `cache` is the same.
            inputs_embeds: `(B, L, d)` embeddings instead of `input_ids`, before `scale_embedding`.
            use_cache: whether to return the cache (causal models only), as `cache` from transformers 5.24 on, and as
                `past_key_values` before.
            position_ids: `(B, L)`. Where they are 0 again within a row, another document begins. Documents do not see
                each other. `seq_idx` `(B, L)` or else `cu_seq_lens_q` `(N + 1,)`, as collators of transformers give
                them, say it in their place.
            input_values: `(B, L, input_channels)` real values instead of `input_ids` and only with
                `config.input_channels`; `(B, L)` if that is 1. NaN and other values that are not finite are missing.

        Raises:
            TypeError: an argument is not a tensor, has another dtype, or is unknown.
            ValueError: several or none of `input_ids`, `inputs_embeds` and `input_values` are given, or that of
                another kind of model, the sequence is empty, an id is outside the vocabulary (checked on the CPU
                only), a shape is wrong, a row holds several documents and a cache is used, or a bidirectional model
                gets a cache.
        """
        check_keywords(kwargs)
        tokens = self.check_inputs(input_ids, input_values, inputs_embeds)
        bounds = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
        if bounds != (None, None):
            position_ids = read_bounds(tokens, attention_mask, *bounds)
        documents = self.find_documents(tokens, attention_mask, past_key_values, position_ids, use_cache)
        context = LayerContext(attention_mask, past_key_values, documents)
        if self.sequence_parallel is not None:
            tokens, context = self.sequence_parallel.divide(tokens, context)
        use_cache = use_cache if documents is None else False
        return self._forward(tokens, context, position_ids, use_cache=use_cache, return_dict=True, **kwargs)

    @merge_with_config_defaults
    @capture_outputs
    def _forward(self, tokens, context: LayerContext, position_ids, use_cache, **kwargs) -> BaseModelOutputWithPast:
        """The part of `forward` after the checks, which need `use_cache` as the caller gave it."""
        inputs_embeds = self.embed_tokens(tokens) if tokens.dim() == 2 else tokens
        attention_mask = context.mask
        context = self.open_pass(tokens, inputs_embeds, context, position_ids, use_cache)
        hidden_states = self.start(inputs_embeds, context)
        del inputs_embeds  # a gigabyte for a million positions
        attention_inputs = make_attention_inputs(self, hidden_states, attention_mask, context)
        context = context._replace(attention_inputs=attention_inputs)
        layers = self.layers[: self.config.num_hidden_layers]
        kernels = extensions.kernels_of_layers(layers, hidden_states, context)
        for layer, kernel in zip(layers, kernels, strict=True):
            hidden_states = layer(hidden_states, context=context._replace(kernel=kernel))
        hidden_states = with_mask(self.norm, context.mask)(hidden_states)
        cache = context.cache if use_cache else None
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE: cache})

    def check_inputs(self, input_ids, input_values, inputs_embeds) -> torch.Tensor:
        """Check the input, and return ids `(B, L)` or embeddings `(B, L, d)`: those given, or those of values."""
        if self.embed_values is None:
            check_tokens(input_ids, inputs_embeds, self.embed_tokens, self.config, input_values)
            return inputs_embeds if input_ids is None else input_ids
        check_values(input_ids, input_values, inputs_embeds, self.config.input_channels, self.config.hidden_size)
        return self.embed_values(input_values) if inputs_embeds is None else inputs_embeds

    def find_documents(self, tokens, attention_mask, cache, position_ids, use_cache) -> Documents | None:
        """The documents of packed rows, or None. A cache needs rows of one document."""
        default = self.config.use_cache and not self.training
        cached = self.config.causal and (cache is not None or (default if use_cache is None else use_cache))
        # Flash attention takes no mask that separates documents.
        flash = has_attention(self.config) and "flash" in self.config._attn_implementation
        in_graph = extensions.keeps_products() and not cached and not flash
        documents = documents_of(tokens, attention_mask, position_ids, in_graph)
        if documents is not None and self.config.causal and (use_cache or cache is not None):
            raise ValueError("A row must be one document when a cache is used, got several (`position_ids`)")
        return documents

    def open_pass(self, tokens, inputs_embeds, context: LayerContext, position_ids, use_cache) -> LayerContext:
        """The pass with its cache, mask and positions. A compiled step has all of them already."""
        step = extensions.open_step(context, inputs_embeds, position_ids)
        if step is not None:
            return step
        cache, past_length = open_cache(self, context.cache, use_cache)
        mask = check_attention_mask(context.mask, inputs_embeds, past_length)
        if context.mask is None and past_length == 0 and tokens.dim() == 2 and can_be_read(tokens):
            self.warn_if_padding_and_no_attention_mask(tokens, None)
        positions = context.positions
        if self.reads_positions and positions is None:
            positions = positions_of(context.documents, context.mask, past_length, inputs_embeds)
        return context._replace(mask=mask, cache=cache, past_length=past_length, positions=positions)

    def start(self, inputs_embeds: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """The input of the first layer of this stage of a pipeline, `(B, L, d)`."""
        if context.mask is not None:
            # NaN at padding would reach gradients: 0 * NaN is NaN. Finite rows stay as they are.
            inputs_embeds = inputs_embeds.masked_fill(~(context.mask[..., None] | inputs_embeds.isfinite()), 0)
        if is_elsewhere(self.layers[0]):  # these are the hidden states of an earlier stage
            return inputs_embeds
        hidden_states = inputs_embeds * self.embedding_scale
        if self.config.position_embedding == "sinusoidal":
            size, dtype = hidden_states.shape[2], hidden_states.dtype
            hidden_states = hidden_states + sinusoidal_embedding(context.positions, size, dtype)
        return self.dropout(self.embed_norm(hidden_states))


class TnnPredictionHeadTransform(nn.Module):
    """The transform LayerNorm(gelu(W x)) before the vocabulary projection of the masked language model."""

    def __init__(self, config: TnnConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        return self.norm(nn.functional.gelu(apply_linear(self.dense, hidden_states)))


def head_output(cls: type, outputs: BaseModelOutput, **fields):
    """Return an output of the class `cls` with `fields` and the states of the base model's `outputs`."""
    states = {name: outputs.get(name) for name in ("hidden_states", "attentions", CACHE)}
    return cls(**fields, **{name: state for name, state in states.items() if name in cls.__dataclass_fields__})


class TnnPreTrainedLanguageModel(TnnPreTrainedModel):
    """Base class of language models, whose `lm_head` projects on the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # Plans of transformers for the head: tensor parallelism, and stages of a pipeline.
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: TnnConfig):
        config.require("input_channels", config.input_channels is None, f"None for {type(self).__name__}")
        super().__init__(config)

    def loss_and_logits(
        self, hidden_states, labels, skip_logits, shift_labels=None, ignore_index=-100, **kwargs
    ) -> tuple:
        """Return loss and logits `(B, L, V)` of hidden states `(B, L, d)`; None for what is not asked for.

        `shift_labels` `(B, L)` are shifted already. `num_items_in_batch` divides the sum over labels, by default
        their number.
        """
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None:
                check_labels(given, hidden_states, self.config.vocab_size, name, ignore_index)
        if labels is None and shift_labels is None:
            if skip_logits:
                raise ValueError("`labels` must be given with skip_logits=True, got None")
            return None, apply_linear(self.lm_head, hidden_states)
        options = {"ignore_index": ignore_index, "num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
        options |= {"labels": labels, "shift_labels": shift_labels}
        skip_logits = self.config.skip_logits and self.training if skip_logits is None else skip_logits
        loss = extensions.head_loss(self, hidden_states, **options) if skip_logits else None
        if loss is not None:
            return loss, None
        logits = extensions.head_logits(self.lm_head, hidden_states)
        logits = apply_linear(self.lm_head, hidden_states) if logits is None else logits
        loss = self.loss_function(logits=logits, vocab_size=logits.shape[2], **options | kwargs)
        return loss, None if skip_logits else logits


class TnnForCausalLM(TnnPreTrainedLanguageModel, GenerationMixin):
    """A causal TNN with a language modelling head, as in the WikiText-103 experiments of the TNN paper.

    `config.causal=False` raises a ValueError.
    """

    def __init__(self, config: TnnConfig):
        config.require("causal", config.causal, f"True for {type(self).__name__}")
        super().__init__(config)
        self.model = TnnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values=None, **kwargs):
        """Return the padding mask unchanged: a Toeplitz model has no attention pattern to prepare."""
        return attention_mask

    def prepare_inputs_for_generation(self, *args, inputs_embeds: torch.Tensor | None = None, **kwargs) -> dict:
        """Return the inputs of the next pass, as in transformers. A static cache is made ready for a compiled step."""
        kwargs.pop("tokenizer", None)  # that of `stop_strings`, which transformers hands on to the model
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        return extensions.prepare_step(self.model, inputs)

    def generate(self, inputs: torch.LongTensor | None = None, *args, **kwargs):
        """Generate tokens as in transformers, after a check of the ids. A batch without rows is returned unchanged."""
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        if input_ids is not None:
            check_tokens(input_ids, None, self.get_input_embeddings(), self.config)
            if len(input_ids) == 0:
                return input_ids
        custom = kwargs.get("custom_generate")
        if callable(custom):  # transformers keeps streamers and tokenizers for its own loops
            if "streamer" in inspect.signature(custom).parameters:
                kwargs["custom_generate"] = partial(custom, streamer=kwargs.get("streamer"))
            if kwargs.get("stop_strings") and kwargs.get("tokenizer"):
                stops = StopStringCriteria(kwargs.pop("tokenizer"), kwargs.pop("stop_strings"))
                kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), stops]
        return super().generate(inputs, *args, **with_cache_as(CACHE, kwargs))

    # transformers ends texts at `max_position_embeddings` unless told where, and warns of them. No length is a limit.
    def _prepare_generated_length(self, generation_config, has_default_max_length, **given):
        if has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = generation_config.max_length
        return super()._prepare_generated_length(generation_config, has_default_max_length, **given)

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for limit in criteria:
            if isinstance(limit, MaxLengthCriteria):
                limit.max_position_embeddings = None
        return criteria

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        position_ids: torch.LongTensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Return the logits `(B, L, vocab_size)` of the next tokens, and with `labels` the loss.

        Args:
            labels: `(B, L)`, usually the `input_ids`. They are shifted inside; -100 is ignored.
            skip_logits: whether only the loss is computed, which takes less time and memory. Unless given, that is
                `config.skip_logits` in training (`model.train()`) with labels, and False elsewhere.
            logits_to_keep: the number of last positions that get logits (0: all), or a tensor of positions.
            kwargs: `shift_labels` `(B, L)`, the token after each position, replace `labels`; trainers that split
                sequences over devices give them. `ignore_index` replaces -100.

        The other arguments and the errors are those of [`TnnModel.forward`].
        """
        loss_options = take_options(kwargs, "shift_labels", "ignore_index")
        kwargs |= {"past_key_values": past_key_values, "use_cache": use_cache, "position_ids": position_ids}
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        loss, logits = self.loss_and_logits(hidden_states, labels, skip_logits, **loss_options, **kwargs)
        return head_output(CausalLMOutputWithPast, outputs, loss=loss, logits=logits)


# Trainer's label smoothing shifts the labels of the classes in this list.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TnnConfig.model_type] = TnnForCausalLM.__name__


class TnnForMaskedLM(TnnPreTrainedLanguageModel):
    """A bidirectional TNN with a masked language modelling head. `config.causal=True` raises a ValueError."""

    def __init__(self, config: TnnConfig):
        config.require("causal", not config.causal, f"False for {type(self).__name__}")
        super().__init__(config)
        self.model = TnnModel(config)
        self.transform = TnnPredictionHeadTransform(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Return the logits `(B, L, vocab_size)` of the tokens at each position, and with `labels` the loss.

        `labels` `(B, L)` are the tokens to predict; -100, or `ignore_index`, is ignored. `skip_logits` is that of
        [`TnnForCausalLM.forward`]; the other arguments and the errors are those of [`TnnModel.forward`].
        """
        loss_options = take_options(kwargs, "ignore_index")
        kwargs |= {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        outputs = self.model(input_ids, attention_mask, return_dict=True, **kwargs)
        hidden_states = self.transform(outputs.last_hidden_state)
        loss, logits = self.loss_and_logits(hidden_states, labels, skip_logits, **loss_options, **kwargs)
        return head_output(MaskedLMOutput, outputs, loss=loss, logits=logits)


def head_dropout(config: TnnConfig) -> nn.Dropout:
    """Return the dropout of a classification head."""
    return nn.Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


class TnnClassificationHead(nn.Module):
    """Two linear layers with `classifier_act` between them, each after dropout, or one if it is None; d inputs and
    `config.num_labels` outputs unless given."""

    def __init__(self, config: TnnConfig, num_features: int | None = None, num_labels: int | None = None):
        super().__init__()
        self.dropout = head_dropout(config)
        num_features, self.dense = num_features or config.hidden_size, None
        if config.classifier_act is not None:
            self.dense, self.act = nn.Linear(num_features, config.hidden_size), ACT2FN[config.classifier_act]
            num_features = config.hidden_size
        self.out_proj = nn.Linear(num_features, num_labels or config.num_labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """`(B, num_features)` to `(B, num_labels)`."""
        pooled = self.dropout(pooled)
        if self.dense is not None:
            pooled = self.dropout(self.act(apply_linear(self.dense, pooled)))
        return apply_linear(self.out_proj, pooled)


class TnnPreTrainedClassifier(TnnPreTrainedModel):
    """Base class of heads with one answer for each sequence or image."""

    # The loss is a mean over sequences: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def encode(self, input_ids, attention_mask, inputs_embeds, **kwargs) -> BaseModelOutputWithPast:
        """Return the outputs of the base model. Packed rows raise a ValueError."""
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        given = (input_ids, inputs_embeds, kwargs.get("input_values"))
        tokens = next(one for one in given if one is not None)
        if documents_of(tokens, attention_mask, kwargs.get("position_ids")) is not None:
            raise ValueError("A row must be one document for a classification, got several (`position_ids`)")
        return outputs

    def pool(self, input_ids, attention_mask, outputs: BaseModelOutputWithPast) -> torch.Tensor:
        """Return one vector for each sequence, `(B, d)`. Without a mask, a causal model leaves out `pad_token_id`."""
        padding = self.config.pad_token_id if self.config.causal else None
        if attention_mask is None and input_ids is not None and padding is not None:
            attention_mask = input_ids != padding  # as in transformers
        return pool_tokens(self.config.pooling, outputs.last_hidden_state, attention_mask)

    def class_loss(self, logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor | None:
        """Return the loss of `logits` `(B, num_labels)` that `config.problem_type` asks for; None without labels."""
        if labels is None:
            return None
        check_class_labels(labels, logits, self.config.problem_type == "regression")
        return self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)


class TnnForSequenceClassification(TnnPreTrainedClassifier):
    """A TNN with a classification or regression head on the mean of its real tokens (bidirectional) or on the last
    real token (causal). `config.classifier_pooling` changes this."""

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Return the logits `(B, num_labels)`, and with `labels` the loss that `config.problem_type` names.

        `labels` are `(B,)` classes or values, or `(B, num_labels)` for several labels at once. Without a mask, a
        causal model uses the last token that is not `config.pad_token_id`, as the models of transformers do.

        The other arguments and the errors are those of [`TnnModel.forward`]. Packed rows, and with mean pooling a
        cache that holds tokens, raise a ValueError.
        """
        is_whole = not isinstance(past_key_values, Cache) or past_key_values.get_seq_length() == 0
        if self.config.pooling == "mean" and not is_whole:
            raise ValueError("`past_key_values` must be empty with classifier_pooling='mean', got tokens")
        kwargs |= {"past_key_values": past_key_values, "use_cache": use_cache, "input_values": input_values}
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, **kwargs)
        logits = self.classifier(self.pool(input_ids, attention_mask, outputs))
        loss = self.class_loss(logits, labels)
        return head_output(SequenceClassifierOutputWithPast, outputs, loss=loss, logits=logits)


class TnnForMultipleChoice(TnnPreTrainedClassifier):
    """A TNN that chooses one of several texts: a classification head scores each text alone."""

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config, num_labels=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """Return the logits `(B, C)` of C choices, and with `labels` `(B,)`, the right ones, the loss.

        `input_ids` and `attention_mask` are `(B, C, L)`, `inputs_embeds` `(B, C, L, d)`, `input_values`
        `(B, C, L, input_channels)`. The other arguments and the errors are those of
        [`TnnForSequenceClassification.forward`].
        """
        vectors = {"inputs_embeds": inputs_embeds, "input_values": input_values}
        name, tokens = next(((n, one) for n, one in vectors.items() if one is not None), ("input_ids", input_ids))
        letters = "(B, C, L) for ids, (B, C, L, d) for embeddings and (B, C, L, input_channels) for values"
        require_tensor(name, tokens, letters, 4 if name in vectors else 3)
        given = (input_ids, attention_mask, inputs_embeds, input_values)
        ids, mask, embeds, values = (None if one is None else one.flatten(0, 1) for one in given)  # (B * C, ...)
        outputs = self.encode(ids, mask, embeds, input_values=values, **kwargs)
        logits, loss = self.classifier(self.pool(ids, mask, outputs)).view(-1, tokens.shape[1]), None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = nn.functional.cross_entropy(logits.float(), labels.view(-1).to(logits.device))
        return head_output(MultipleChoiceModelOutput, outputs, loss=loss, logits=logits)


class TnnForTokenClassification(TnnPreTrainedModel):
    """A TNN with a linear head on each token, for tagging such as named entities, or for regression.

    A causal model sees no token after the one it classifies. Rows may hold several documents, as those of a language
    model.
    """

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnModel(config)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.is_regression = config.problem_type == "regression"
        if self.is_regression:  # Trainer counts the labels that are not -100, which is a value like others
            self.accepts_loss_kwargs = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Return the logits `(B, L, num_labels)`, and with `labels` the mean cross-entropy.

        `labels` `(B, L)` are the class of each token; -100 is ignored. `num_items_in_batch` divides the sum of the
        loss, instead of their number. With `config.problem_type="regression"`, `labels` `(B, L, num_labels)`, or
        `(B, L)` for one, are values, of which NaN is ignored, and the loss is the mean squared error. The other
        arguments and the errors are those of [`TnnModel.forward`].
        """
        kwargs |= {"inputs_embeds": inputs_embeds, "input_values": input_values}
        outputs = self.model(input_ids, attention_mask, return_dict=True, **kwargs)
        logits, loss = apply_linear(self.classifier, self.dropout(outputs.last_hidden_state)), None
        if labels is not None and self.is_regression:
            loss = squared_error(logits, labels, "labels")
        elif labels is not None:
            check_labels(labels, logits, self.num_labels, limit="num_labels")
            count = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=count)
        return head_output(TokenClassifierOutput, outputs, loss=loss, logits=logits)


class TnnForQuestionAnswering(TnnPreTrainedClassifier):
    """A TNN that finds the span of an answer in a text: a linear head gives each token two scores."""

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.model = TnnModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Return the logits `(B, L)` of the first and last token of the answer, and with both positions the loss.

        `start_positions` and `end_positions` are `(B,)`; L or more is ignored, and padding is a ValueError (checked on
        the CPU only). At padding the logits are the lowest number of their dtype, so that no answer is there. The
        other arguments and the errors are those of [`TnnModel.forward`]. Packed rows raise a ValueError.
        """
        kwargs |= {"input_values": input_values}
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, **kwargs)
        logits, loss = apply_linear(self.qa_outputs, outputs.last_hidden_state), None  # (B, L, 2)
        if attention_mask is not None:
            hidden = attention_mask[:, -logits.shape[1] :, None].to(logits.device) == 0
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        start, end = (one.contiguous() for one in logits.unbind(-1))
        if start_positions is not None and end_positions is not None:
            check_spans(start_positions, end_positions, start, None if attention_mask is None else ~hidden[..., 0])
            loss = self.loss_function(start.float(), end.float(), start_positions, end_positions)
        return head_output(QuestionAnsweringModelOutput, outputs, loss=loss, start_logits=start, end_logits=end)


class TnnForAudioClassification(TnnForSequenceClassification):
    """The classifier of sequences for raw audio, samples of one channel: `config.input_channels` must be 1."""

    main_input_name = "input_values"
    input_modalities = ("audio",)
    _input_embed_layer = "embed_values"

    def __init__(self, config: TnnConfig):
        config.require("input_channels", config.input_channels == 1, "1 for TnnForAudioClassification")
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"

    def freeze_feature_encoder(self):
        """Leave the map of the samples as it is in training, as `run_audio_classification.py` of transformers asks."""
        self.get_input_embeddings().requires_grad_(False)

    def forward(
        self,
        input_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Return the logits `(B, num_labels)` of audio `(B, L)` and the loss, as [`TnnForSequenceClassification`]."""
        given = {"input_values": input_values, "labels": labels}
        return super().forward(kwargs.pop("input_ids", None), attention_mask, **given, **kwargs)


class TnnForTimeSeriesPrediction(TnnPreTrainedClassifier):
    """A TNN that predicts the next `config.prediction_length` values of each of `config.input_channels` time series.

    Past values are scaled by their mean and standard deviation, and a linear head on the pooled hidden state (see
    `classifier_pooling`) predicts the values that follow, scaled alike. Either field without a number is a ValueError.
    """

    main_input_name = "past_values"
    input_modalities = ("time",)
    _input_embed_layer = "embed_values"

    def __init__(self, config: TnnConfig):
        for name in ("input_channels", "prediction_length"):
            config.require(name, getattr(config, name) is not None, "a number for TnnForTimeSeriesPrediction")
        super().__init__(config)
        self.model = TnnModel(config)
        self.dropout = head_dropout(config)
        self.prediction_head = nn.Linear(config.hidden_size, config.prediction_length * config.input_channels)
        self.post_init()

    def scaled(self, past_values, past_observed_mask, attention_mask) -> tuple:
        """Check the past values, and return `standardize` of them."""
        check_last_size("past_values", past_values, self.config.input_channels)
        return standardize(past_values, past_observed_mask, attention_mask)

    def predict(self, values: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs) -> tuple:
        """Return scaled predictions `(B, H, C)` for scaled values `(B, L, C)`, and the outputs of the base model."""
        ids, embeds = kwargs.pop("input_ids", None), kwargs.pop("inputs_embeds", None)
        outputs = self.encode(ids, attention_mask, embeds, input_values=values, **kwargs)
        pooled = self.dropout(self.pool(None, attention_mask, outputs))
        sizes = (self.config.prediction_length, self.config.input_channels)
        return apply_linear(self.prediction_head, pooled).unflatten(-1, sizes), outputs

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor | None = None,
        past_observed_mask: torch.Tensor | None = None,
        future_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TimeSeriesPredictionOutput:
        """Return the predictions of the values after `past_values`, and with `future_values` the loss.

        It is the mean squared error of the scaled values, to which each series and channel adds alike, in any units.

        Args:
            past_values: `(B, L, input_channels)`, in any units. NaN is missing.
            past_observed_mask: `(B, L, input_channels)`, 0 at missing values. Without it all but NaN are observed.
            future_values: `(B, prediction_length, input_channels)` that follow. The loss leaves out NaN, and is 0
                for channels whose past values are constant, which have no scale.
            attention_mask: `(B, L)`, 0 at padding of series that are shorter than others.

        Raises:
            TypeError, ValueError: as [`TnnModel.forward`] for `past_values` as its `input_values`.
        """
        values, loc, scale = self.scaled(past_values, past_observed_mask, attention_mask)
        scaled, outputs = self.predict(values, attention_mask, use_cache=False, **kwargs)
        predictions = (scaled * scale + loc).to(past_values.dtype)
        loss = None
        if future_values is not None:
            loss = squared_error(scaled, future_values, "future_values", loc, scale)
        fields = {"loss": loss, "prediction_outputs": predictions, "loc": loc, "scale": scale}
        return head_output(TimeSeriesPredictionOutput, outputs, **fields)

    @torch.no_grad()
    def generate(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        prediction_length: int | None = None,
    ) -> SampleTSPredictionOutput:
        """Predict any number of values: predictions are read as observed values until there are enough.

        A causal model that pools the last hidden state reads each value once, and its cache holds the others: the
        state of `"rtf"` and `"s4d"` does not grow. Other models read the whole series again for each
        `config.prediction_length` values. Arguments and errors are those of [`forward`], and

        Args:
            prediction_length (defaults to that of the configuration): number of values to predict, n.

        Returns:
            `SampleTSPredictionOutput` whose `sequences` `(B, 1, n, input_channels)` are one forecast of each series.
        """
        length = self.config.prediction_length if prediction_length is None else prediction_length
        if length < 1:
            raise ValueError(f"`prediction_length` must be at least 1, got {length}")
        values, loc, scale = self.scaled(past_values, past_observed_mask, attention_mask)
        if attention_mask is not None:  # the predictions follow the last real values
            values, attention_mask = end_with_real(values, attention_mask)
        cached = self.config.causal and self.config.pooling == "last"
        cache, unread, blocks = DynamicCache(config=self.config) if cached else None, values, []
        while sum(block.shape[1] for block in blocks) < length:
            if blocks:
                unread = blocks[-1] if cached else torch.cat([values, *blocks], dim=1)
                attention_mask = None if attention_mask is None else extend_mask(attention_mask, blocks[-1])
            block, _ = self.predict(unread, attention_mask, past_key_values=cache, use_cache=cached)
            blocks.append(block.to(values.dtype))
        predictions = torch.cat(blocks, dim=1)[:, :length] * scale + loc
        return SampleTSPredictionOutput(sequences=predictions.to(past_values.dtype)[:, None])


class TnnImageModel(TnnPreTrainedModel):
    """The base model of images: patch embeddings and a stack of blocks."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        size = config.patch_size
        projection = nn.Conv2d(config.num_channels, config.hidden_size, size, stride=size)
        projection.maps_zeros = True  # of black patches, to a row that a norm can divide by its length
        self.patch_embedding = nn.Sequential(OrderedDict(projection=projection))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList([TnnBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutput:
        """Return the hidden states of the last layer, `(B, L, d)`, for `pixel_values` `(B, C, H, W)`."""
        check_pixel_values(pixel_values, self.config.num_channels, self.config.patch_size)
        dtype = parameter_dtype(self.patch_embedding, pixel_values)
        patches = self.patch_embedding(pixel_values.to(dtype)).flatten(2)  # (B, d, L), row by row
        hidden_states = self.dropout(patches.transpose(1, 2))
        kernels = extensions.kernels_of_layers(self.layers, hidden_states, NO_CONTEXT)
        for layer, kernel in zip(self.layers, kernels, strict=True):
            hidden_states = layer(hidden_states, context=LayerContext(kernel=kernel))
        return BaseModelOutput(last_hidden_state=hidden_states)


class TnnForImageClassification(TnnPreTrainedClassifier):
    """A TNN over the patches of an image, with a linear head on the normalised mean of their hidden states.

    A ValueError is raised for `config.causal=True`, or if `max_position_embeddings` is not the number of patches.
    """

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: TnnConfig):
        config.require("causal", not config.causal, "False for TnnForImageClassification")
        config.require("input_channels", config.input_channels is None, "None for images, which have num_channels")
        config.require("layer_types", not has_attention(config), "'toeplitz' for all layers of images")
        side, rest = divmod(config.image_size, config.patch_size)
        patches = f"the number of patches, ({config.image_size} / {config.patch_size})^2, a whole number"
        fits = rest == 0 and side**2 == config.max_position_embeddings
        config.require("max_position_embeddings", fits, patches)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnImageModel(config)
        self.norm = build_norm(config, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Return the logits `(B, num_labels)` of `pixel_values` `(B, C, H, W)`, and with `labels` the loss.

        `labels` are those of [`TnnForSequenceClassification.forward`]. A wrong shape raises a ValueError.
        """
        check_keywords(kwargs)
        outputs = self.model(pixel_values, return_dict=True, **kwargs)
        pooled = outputs.last_hidden_state.mean(dim=1)  # (B, d)
        logits = apply_linear(self.classifier, self.norm(pooled[:, None])[:, 0])
        loss = self.class_loss(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


extensions.load()
