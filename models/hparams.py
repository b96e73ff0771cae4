"""Hyperparameters of a model. Names: llama.cpp's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, get_args

from pyggml.errors import ModelError, one_of

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    H = TypeVar("H", bound="HParams", default="HParams")  # the hyperparameters of one page; without brackets, HParams
    H_co = TypeVar("H_co", bound="HParams", default="HParams", covariant=True)
else:
    from typing import TypeVar

    H = H_co = TypeVar("H")

PerLayer = int | tuple[int, ...]  # one value for all layers, or one for each
RopeType = Literal["norm", "neox", "mrope", "imrope"]
NormKind = Literal["rms", "layer"]
Gating = Literal["softmax", "sigmoid", "sqrt_softplus"]
SwaType = Literal["standard", "chunked", "symmetric", "prefix"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
Activation = Literal["silu", "gelu", "gelu_erf", "gelu_quick", "relu", "relu_sqr", "tanh", "sigmoid"]

MAX_LAYERS, MAX_EXPERTS = 512, 512  # llama.cpp's; they keep a lying file from costing memory
MAX_INT = 1 << 31
_MAX_FLOAT = 2.0**128  # the end of f32, the type in which graphs hold parameters
_ROPE_NUMBERS = ("rope_freq_base", "rope_freq_scale", "rope_freq_base_swa", "rope_freq_scale_swa")
ROPE_SCALING = ("none", "linear", "yarn", "longrope")


class LayerShape(NamedTuple):
    """The sizes of one layer that may differ from layer to layer, and what follows from them."""

    n_head: int
    n_head_kv: int
    n_ff: int
    n_ff_exp: int  # n_ff of each expert
    n_embd_head_k: int
    n_embd_head_v: int
    n_embd_q: int  # n_head * n_embd_head_k
    n_embd_k_gqa: int  # elements of K per token: n_head_kv * n_embd_head_k
    n_embd_v_gqa: int
    n_embd_out: int  # what the attention's output product reads: n_head * n_embd_head_v


class StateShape(NamedTuple):
    """How many floats a recurrent layer remembers of a sequence."""

    r: int = 0  # floats of the last tokens, for a convolution over time or a token shift
    s: int = 0  # floats of the state proper
    p: int = 0  # floats of the last tokens, for a second convolution


class RopeShape(NamedTuple):
    """How the heads of one layer are roped."""

    n_rot: int  # elements of a head that turn
    first: int  # the first element that turns
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    type: RopeType | None = None  # None: as the model says
    factors: bool = True  # whether the model's frequency factors apply, when it has them


class AttnTemperature(NamedTuple):
    """How Q of a token is scaled by its position, see `attn_temp_scale`."""

    scale: float
    floor_scale: int
    offset: float = 0.0

    def check(self) -> None:
        """Raise ModelError for values out of range."""
        if not 0 < self.floor_scale < MAX_INT:
            refuse("n_attn_temp_floor_scale", self.floor_scale, "it must be a positive 32-bit number")
        for name, value in (("f_attn_temp_scale", self.scale), ("f_attn_temp_offset", self.offset)):
            if not -_MAX_FLOAT < value < _MAX_FLOAT:
                refuse(name, value, "it must be an f32")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a router chooses experts and weighs them.

    gating        the function that turns its logits into weights: the softmax over all experts (Mixtral), sigmoid
                  (DeepSeek-V3), or sqrt_softplus, the root of log(1 + exp(x)) (DeepSeek-V4)
    of_selected   experts are chosen by their logits, and only the logits of the chosen ones go through the gating
    norm          the weights of the chosen experts are divided by their sum
    scale         a factor of the weights, applied last; 0: no factor
    n_group       how many groups of consecutive experts there are. The score of a group is the sum of its two best
                  experts; 0: there are no groups
    n_group_used  how many of the best groups experts are chosen from
    """

    gating: Gating = "softmax"
    of_selected: bool = False
    norm: bool = True
    scale: float = 0.0
    n_group: int = 0
    n_group_used: int = 0

    def check(self, n_expert: int, n_expert_used: int) -> None:
        """Raise ModelError for values that contradict each other, or the number of experts."""
        one_of("the gating of experts", self.gating, get_args(Gating), ModelError)
        if not -_MAX_FLOAT < self.scale < _MAX_FLOAT:
            refuse("expert_weights_scale", self.scale, "it must be an f32")
        if self.n_group <= 1:
            return
        if n_expert % self.n_group or n_expert // self.n_group < 2:
            refuse("expert_group_count", self.n_group, f"the {n_expert} experts make no such groups of two or more")
        if not 0 < self.n_group_used <= self.n_group:
            refuse("expert_group_used_count", self.n_group_used, f"there are {self.n_group} groups")
        if n_expert_used > n_expert // self.n_group * self.n_group_used:
            refuse("expert_group_used_count", self.n_group_used, f"they have no {n_expert_used} experts")


@dataclass(frozen=True, kw_only=True)
class RankHead:
    """How a reranker makes scores of the tokens of a sequence, by its weights `cls`, `cls.norm` and `cls.output`.

    pooling   which tokens the weights read: the mean of all, the first (cls) or the last
    act       the function that is applied to the first product
    soft_max  the scores go through a softmax
    n_out     how many scores there are (classes)
    """

    pooling: Pooling = "cls"
    act: Literal["tanh", "gelu", "gelu_erf"] = "tanh"
    soft_max: bool = False
    n_out: int = 1

    def __post_init__(self) -> None:
        one_of("the pooling of a reranker", self.pooling, get_args(Pooling), ModelError)
        one_of("the activation of a reranker", self.act, ("tanh", "gelu", "gelu_erf"), ModelError)


# Hyperparameters that are names, and the names that they may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "act": get_args(Activation),
    "rope_type": get_args(RopeType),
    "swa_type": get_args(SwaType),
    "pooling": get_args(Pooling),
}


@dataclass(frozen=True, kw_only=True)
class HParams:
    """The hyperparameters of a model, for its graph builder. A value of 0 asks for the default, which the comment
    names.

    These are the hyperparameters of many architectures. Those of one family are in a subclass beside its builder.
    `rope_freq_scale` is 1 / the factor of position scaling; `yarn_ext_factor` is 1 for YaRN, else 0 (-1: by
    `rope_scaling_type`). Raises ModelError for values that contradict each other.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: PerLayer
    n_ff: PerLayer
    n_ctx_train: int
    n_head_kv: PerLayer = 0  # heads of K and V; 0: as n_head
    n_embd_head_k: int = 0  # elements of Q and K of a head; 0: n_embd / n_head
    n_embd_head_v: int = 0  # elements of V of a head; 0: n_embd / n_head
    n_rot: int = 0  # elements of a head that rope turns; 0: as n_embd_head_k
    f_norm_rms_eps: float = 1e-5
    f_norm_eps: float = 1e-5
    f_norm_inner_eps: float = (
        0.0  # epsilon of norms within attention (of latent rows, of Q and K of delta nets); 0: as in other norms
    )
    f_embedding_scale: float = 0.0  # the factor of the embeddings; 0: no factor
    f_residual_scale: float = 0.0  # the factor of the outputs of attention and network; 0: no factor
    f_logit_scale: float = 0.0  # the factor of the logits; 0: no factor
    f_attention_scale: float = 0.0  # the factor of the scores of attention; 0: 1 / sqrt(n_embd_head_k)
    f_clamp_kqv: float = 0.0  # Q, K and V are clamped to -f_clamp_kqv .. f_clamp_kqv; 0: they are not
    act: Activation | None = None  # the activation of networks that the file names; None: the builder's own
    rope_type: RopeType = "norm"  # which elements of a head turn together: neighbours, or those half of n_rot apart
    rope_sections: tuple[int, ...] = ()  # mrope, imrope: how many pairs turn by each of a token's four positions
    k_norm_last: bool = False  # K is normed, with weights, after it is roped
    learned_positions: bool = False  # embeddings of positions are added to the embeddings of tokens
    n_heard: int = 0  # rows of a sound that `encode` takes at once; 0: it takes tokens
    rope_freq_base: float = 10000.0
    rope_scaling_type: str = "linear"
    rope_freq_scale: float = 1.0
    rope_attn_factor: float = 1.0
    n_ctx_orig_yarn: int = 0  # the context that YaRN extends; 0: n_ctx_train
    yarn_ext_factor: float = -1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True  # YaRN rounds the first and the last pair that it scales in part to whole numbers
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: PerLayer = 0  # n_ff of each expert; 0: as n_ff
    n_ff_shexp: int = 0  # width of the expert that all tokens share (of all such experts together); 0: no such expert
    n_layer_dense_lead: int = 0  # layers before the first mixture of experts
    n_moe_layer_step: int = 1  # after them, every n-th layer is a mixture
    router: Router = Router()
    first_block: int = 0  # the block of the file that is layer 0; above 0 for a draft head, whose block comes last
    causal_attn: bool = True  # tokens do not see those after them
    f_max_alibi_bias: float = 0.0  # ALiBi's largest slope exponent; 0: no ALiBi
    f_attn_logit_softcapping: float = 0.0  # a tanh keeps the scores of attention within this; 0: nothing does
    f_final_logit_softcapping: float = 0.0  # a tanh keeps the logits within this; 0: nothing does
    attn_temperature: AttnTemperature | None = None  # None: Q of all positions is scaled alike
    n_swa: int = 0  # positions that a sliding-window layer sees, its own included; 0: there are no such layers
    swa_type: SwaType = "standard"  # see `first_visible`
    swa_pattern: PerLayer = 0  # every swa_pattern-th layer sees all (0: none); or 1 for each layer with the window
    n_embd_head_k_swa: int = 0  # in layers with the window; 0: as n_embd_head_k
    n_embd_head_v_swa: int = 0  # in layers with the window; 0: as n_embd_head_v
    n_rot_swa: int = 0  # in layers with the window; 0: as n_rot
    rope_freq_base_swa: float = 0.0  # in layers with the window; 0: as rope_freq_base
    rope_freq_scale_swa: float = 0.0  # in layers with the window; 0: as rope_freq_scale
    rope_attn_factor_swa: float = 0.0  # in layers with the window; 0: as rope_attn_factor
    yarn_ext_factor_swa: float = -1.0  # in layers with the window; -1: as yarn_ext_factor
    rope_layers: PerLayer = 1  # for each layer, 0 when the layer has no rope
    rope_first: int = 0  # elements of a head before those that rope turns
    rope_first_swa: int = 0  # in layers with the window; 0: as rope_first
    pooling: Pooling = "none"  # how the embeddings of tokens become one of a text, unless the user says
    rank_head: RankHead = RankHead()
    v_in_k: bool = False  # V of a token is the first n_embd_head_v elements of its K: only K is stored

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) is not None:
                one_of(name, value, known, ModelError)
        for name in ("n_vocab", "n_embd", "n_layer", "n_ctx_train"):
            self._in_range(name, getattr(self, name))
        if self.n_layer > MAX_LAYERS:
            refuse("n_layer", self.n_layer, f"more than the {MAX_LAYERS} layers supported")
        self._set("n_head", self._per_layer("n_head", self.n_head))
        self._set("n_ff", self._per_layer("n_ff", self.n_ff))
        if not self.n_head_kv:
            self._set("n_head_kv", self.n_head)
        elif any(self._layers(self.n_head_kv)):  # else no layer attends
            self._set("n_head_kv", self._per_layer("n_head_kv", self.n_head_kv))
        elif len(self._layers(self.n_head_kv)) != self.n_layer:
            refuse("n_head_kv", self.n_head_kv, f"there are {self.n_layer} layers")
        if self.n_ff_exp:
            self._set("n_ff_exp", self._per_layer("n_ff_exp", self.n_ff_exp))
        heads = self._layers(self.n_head)
        first = next(filter(None, heads))  # a layer may have none
        for name in ("n_embd_head_k", "n_embd_head_v"):
            if not getattr(self, name) and self.n_embd % first:
                refuse("n_head", first, f"n_embd {self.n_embd} is no multiple of it, and no {name} is given")
            self._set(name, getattr(self, name) or self.n_embd // first)
            self._in_range(name, getattr(self, name))
        for n_head, n_head_kv in zip(heads, self._layers(self.n_head_kv), strict=True):
            if n_head_kv and n_head % n_head_kv:
                refuse("n_head_kv", n_head_kv, f"n_head {n_head} is no multiple of it")
        self._set("n_rot", self.n_rot or self.n_embd_head_k - self.rope_first)
        for name in ("n_embd_head_k", "n_embd_head_v", "n_rot"):
            self._set(f"{name}_swa", getattr(self, f"{name}_swa") or getattr(self, name))
            self._in_range(f"{name}_swa", getattr(self, f"{name}_swa"))
        self._set("rope_first_swa", self.rope_first_swa or self.rope_first)
        for end in ("", "_swa"):
            first = getattr(self, f"rope_first{end}")
            n_rot, head = getattr(self, f"n_rot{end}"), getattr(self, f"n_embd_head_k{end}")
            if n_rot % 2 or not 0 < n_rot <= head - first:
                rest = f" less the {first} before it" if first else ""
                refuse(f"n_rot{end}", n_rot, f"it must be even and at most n_embd_head_k{end} {head}{rest}")
        if self.v_in_k and (self.n_embd_head_v > self.n_embd_head_k or self.n_embd_head_v_swa > self.n_embd_head_k_swa):
            refuse("n_embd_head_v", self.n_embd_head_v, f"V is part of K, which has {self.n_embd_head_k}")
        self._set("n_ctx_orig_yarn", self.n_ctx_orig_yarn or self.n_ctx_train)
        self._set("f_attention_scale", self.f_attention_scale or 1.0 / math.sqrt(self.n_embd_head_k))
        if self.rope_scaling_type not in ROPE_SCALING:
            refuse("rope_scaling_type", self.rope_scaling_type, f"known are {', '.join(ROPE_SCALING)}")
        if self.yarn_ext_factor < 0:
            self._set("yarn_ext_factor", 1.0 if self.rope_scaling_type == "yarn" else 0.0)
        if self.rope_scaling_type == "none":
            self._set("rope_freq_scale", 1.0)
        for name in ("rope_freq_base", "rope_freq_scale", "rope_attn_factor"):
            self._set(f"{name}_swa", getattr(self, f"{name}_swa") or getattr(self, name))
        if self.yarn_ext_factor_swa < 0:
            self._set("yarn_ext_factor_swa", self.yarn_ext_factor)
        for name in (*_ROPE_NUMBERS, "yarn_beta_fast", "yarn_beta_slow"):
            if not 2.0**-149 <= getattr(self, name) < _MAX_FLOAT:
                refuse(name, getattr(self, name), "it must be positive and an f32")
        if not self.yarn_truncate and 1.0 in (self.rope_freq_base, self.rope_freq_base_swa):
            refuse("rope_freq_base", 1.0, "all pairs turn alike: there is no first one that YaRN scales")
        for name in (
            *("f_norm_rms_eps", "f_attention_scale", "rope_attn_factor", "yarn_ext_factor", "yarn_ext_factor_swa"),
            *("f_norm_eps", "f_embedding_scale", "f_residual_scale", "f_logit_scale", "f_clamp_kqv"),
            *("f_attn_logit_softcapping", "f_final_logit_softcapping"),
        ):
            if not -_MAX_FLOAT < getattr(self, name) < _MAX_FLOAT:
                refuse(name, getattr(self, name), "it must be an f32")
        if self.f_norm_rms_eps < 0:
            refuse("f_norm_rms_eps", self.f_norm_rms_eps, "it must not be negative")
        if not 0 <= self.n_expert <= MAX_EXPERTS:
            refuse("n_expert", self.n_expert, f"it must be 0 to {MAX_EXPERTS}")
        if self.attn_temperature is not None:
            self.attn_temperature.check()
        for name in ("n_swa", "n_ff_shexp", "n_layer_dense_lead"):
            if not 0 <= getattr(self, name) < MAX_INT:
                refuse(name, getattr(self, name), "it must not be negative")
        for name in ("swa_pattern", "rope_layers"):
            value: PerLayer = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) and len(values) != self.n_layer:
                refuse(name, f"{len(values)} values", f"there are {self.n_layer} layers")
            if not all(0 <= v < MAX_INT for v in values):
                refuse(name, value, "it must not be negative")
        sections = self.rope_sections
        if self.n_pos_per_embd > 1 and not (len(sections) == 4 and any(sections[:3]) and min(sections) >= 0):
            refuse("rope_sections", sections, "it must be four whole numbers, not all of the first three 0")
        if not (0 < self.n_expert_used <= self.n_expert or self.n_expert == self.n_expert_used == 0):
            refuse("n_expert_used", self.n_expert_used, f"there are {self.n_expert} experts")
        self._in_range("n_moe_layer_step", self.n_moe_layer_step)
        self.router.check(self.n_expert, self.n_expert_used)

    def layer(self, il: int) -> LayerShape:
        """The sizes of layer `il`."""
        n_head, n_head_kv, n_ff = _of(self.n_head, il), _of(self.n_head_kv, il), _of(self.n_ff, il)
        if self.is_swa(il):
            k, v = self.n_embd_head_k_swa, self.n_embd_head_v_swa
        else:
            k, v = self.n_embd_head_k, self.n_embd_head_v
        n_ff_exp = _of(self.n_ff_exp or self.n_ff, il)
        row = (n_head * k, n_head_kv * k, n_head_kv * v, n_head * v)
        return LayerShape(n_head, n_head_kv, n_ff, n_ff_exp, k, v, *row)

    def has_kv(self, il: int) -> bool:
        """Whether layer `il` has attention with K and V of its own in a cache."""
        return self.layer(il).n_head_kv > 0 and self.kv_layer(il) == il

    def kv_layer(self, il: int) -> int:
        """The layer whose K and V layer `il` attends to: itself, unless a family says otherwise."""
        return il

    @property
    def cache_layers(self) -> Iterable[int]:
        """The layers of the cache: those of the model, and more when something beside attention stores K."""
        return range(self.n_layer)

    def state(self, il: int) -> StateShape:
        """What layer `il` remembers beside K and V. Recurrent families override this."""
        return StateShape()

    @property
    def n_recent(self) -> int:
        """How many of the last tokens of each sequence the memory keeps. Families that read them override this."""
        return 0

    def block(self, il: int) -> int:
        """The block of a file that has the weights of layer `il`."""
        return self.first_block + il

    @property
    def is_head(self) -> bool:
        """Whether this is a draft head: a layer after the model's own that reads hidden states beside tokens."""
        return self.first_block > 0

    def is_moe(self, il: int) -> bool:
        """Whether the feed-forward network of layer `il` is a mixture of experts."""
        return self.n_expert > 0 and il >= self.n_layer_dense_lead and (il + 1) % self.n_moe_layer_step == 0

    @property
    def n_pos_per_embd(self) -> int:
        """How many positions a token has: one, or four (for text: time, height and width, which are equal, and 0)."""
        return 4 if self.rope_type in ("mrope", "imrope") else 1

    @property
    def n_ctx_scaled(self) -> int:
        """How long a text may be, in tokens: as long as in the training, or longer when the rope is scaled."""
        return max(self.n_ctx_train, int(self.n_ctx_orig_yarn / min(self.rope_freq_scale, 1.0)))

    @property
    def fixed_positions(self) -> str:
        """Why tokens in a cache cannot be given other positions; empty when they can."""
        if self.learned_positions:
            return "their embeddings are in K and V (learned positions)"
        if self.k_norm_last:
            return "K was normed after it was roped, and does not turn further"
        return "each has four of them" if self.n_pos_per_embd > 1 else ""

    def is_swa(self, il: int) -> bool:
        """Whether layer `il` attends to a sliding window only."""
        if not self.n_swa:
            return False
        pattern = self.swa_pattern
        return bool(pattern[il]) if isinstance(pattern, tuple) else pattern == 0 or il % pattern < pattern - 1

    def rope(self, il: int) -> RopeShape | None:
        """How layer `il` is roped, or None."""
        if not _of(self.rope_layers, il):
            return None
        if self.is_swa(il):
            base, scale, ext = self.rope_freq_base_swa, self.rope_freq_scale_swa, self.yarn_ext_factor_swa
            return RopeShape(self.n_rot_swa, self.rope_first_swa, base, scale, ext, self.rope_attn_factor_swa)
        base, scale, ext = self.rope_freq_base, self.rope_freq_scale, self.yarn_ext_factor
        return RopeShape(self.n_rot, self.rope_first, base, scale, ext, self.rope_attn_factor)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _in_range(self, name: str, value: int) -> None:
        if not 0 < value < MAX_INT:
            refuse(name, value, "it must be a positive 32-bit number")

    def _per_layer(self, name: str, value: PerLayer) -> PerLayer:
        """One int when all layers have the same value, otherwise a tuple with a value for each layer; some may be 0."""
        values = value if isinstance(value, tuple) else (value,)
        if len(values) not in (1, self.n_layer):
            refuse(name, f"{len(values)} values", f"there are {self.n_layer} layers")
        for v in values:
            self._in_range(name, v or max(values))
        return values[0] if len(set(values)) == 1 else values

    def _layers(self, value: PerLayer) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * self.n_layer


def _of(value: PerLayer, il: int) -> int:
    return value[il] if isinstance(value, tuple) else value


def refuse(name: str, value: object, why: str) -> NoReturn:
    """Raise ModelError for a hyperparameter that no model can have."""
    raise ModelError(f"hyperparameter {name} = {value}: {why}")
