"""Bifocal students in plain PyTorch, for `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`.

A student is a Qwen3, Qwen2.5 or Llama decoder in which each layer's attention is a mixer of two branches:

    near   exact attention over the last W tokens, perhaps with a sink
    far    an mLSTM with softmax features, which sums up the whole document in a state of fixed size

The cache has a fixed size too: a ring of W keys and values, pinned sink tokens, and the float32 state. Only layers
with window "full" keep every token. Prompts of any length go in whole or in pieces, with the same result.

Batches may be padded anywhere, best on the left: `attention_mask` says which tokens are real. The others enter
neither window nor state and take no position; what the model returns for them means nothing.

Letters: B sequences, T tokens, H query heads, G key-value heads, R = H // G, S states, d head width, D model width.
"""

import inspect
import math

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache_bifocal import BifocalCache
from .configuration_bifocal import BifocalConfig

# transformers renamed the argument and the output that hold the cache in the course of version 5.
CACHE = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"

NEAR_BLOCK = 256  # queries that attend at a time: bounds the memory of long prompts
FAR_CHUNK = 64  # tokens that the mLSTM takes at a time
TINY = 1e-30  # keeps 0/0 away in the mLSTM's read and is far below any real normaliser


# ---- Parts of a decoder -------------------------------------------------------------------------------------------


class BifocalRMSNorm(nn.Module):
    """Root mean square norm in float32, cast, then times the weight."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_frequencies(config, device, dtype):
    """Radians per position [d/2]; llama3 slows long waves down by `factor` and keeps short ones."""
    rope = config.rope_parameters
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=dtype) / config.head_dim
    frequencies = rope["rope_theta"] ** -exponents
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / rope["factor"] + kept * frequencies
    return frequencies


def rotary_tables(config, positions, dtype):
    """cos and sin [B, 1, T, d/2]. Angles are float64, so that far positions lose nothing."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = rotary_frequencies(config, positions.device, exact)
    angles = (positions.clamp(min=0).to(exact)[:, :, None] * frequencies)[:, None]
    return angles.cos().float().to(dtype), angles.sin().float().to(dtype)


def rotate(x, cos, sin):
    """Rotary positions: feature i is paired with feature i + d/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class BifocalAttention(nn.Module):
    """The base model's projections, under its own names."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        has_bias = config.base_model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=has_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=has_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=has_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if config.base_model_type == "qwen3":
            self.q_norm = BifocalRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = BifocalRMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x, cos, sin):
        """q [B, H, T, d], k and v [B, G, T, d] of x [B, T, D]; q and k are rotated."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class BifocalMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# ---- The mixer ----------------------------------------------------------------------------------------------------


def attend(q, k, v, q_positions, k_positions, window, pinned, sink):
    """Softmax attention of q [B, H, T, d] over k, v [B, G, K, d]; returns [B, H, T, d].

    A query reads keys at positions up to its own, within `window` tokens (None: all) or below `pinned`. sink [H] joins
    the softmax unscaled and carries no value.
    """
    batch, heads, count, width = q.shape
    groups = k.shape[1]
    at, key_at = q_positions[:, :, None], k_positions[:, None, :]
    visible = (key_at >= 0) & (key_at <= at)
    if window is not None:
        visible = visible & ((at - key_at < window) | (key_at < pinned))
    q = q.reshape(batch, groups, -1, width)  # the R query heads of a key-value head, one after the other
    scores = (q @ k.transpose(-1, -2)).float().unflatten(2, (-1, count)) / math.sqrt(width)  # [B, G, R, T, K]
    scores = scores.masked_fill(~visible[:, None, None], torch.finfo(torch.float32).min)
    if sink is not None:
        column = sink.float().view(1, groups, -1, 1, 1).expand(batch, -1, -1, count, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)
    if sink is not None:
        weights = weights[..., :-1]
    return (weights.flatten(2, 3).to(v.dtype) @ v).reshape(batch, heads, count, width)


def weight_of(exponent, stabiliser):
    """exp(exponent - stabiliser), 0 where nothing was seen yet and both are -inf."""
    return torch.exp(exponent - stabiliser.masked_fill(stabiliser == -math.inf, 0.0))


def mlstm_chunk(fq, fk, v, i, log_f, state):
    """One chunk of the mLSTM, all its tokens at once; returns h [B, S, R, C, d] and the state behind it.

    fq [B, S, R, C, d], fk and v [B, S, C, d], input gates i and logarithms of forget gates log_f [B, S, C], all float32.
    A token with i = -inf and log_f = 0 changes nothing. In the chunk, token s enters token t's sum with weight
    exp(sum of log_f over s+1..t + i_s), the state before the chunk with exp(sum of log_f over ..t + m); both are
    divided by exp(m_t), their largest so far, as the token-by-token definition does.
    """
    C, n, m = state
    count = i.shape[-1]
    # decay[t, s]: each sum is added up by itself, so large sums that nearly cancel never meet.
    ones = torch.ones(count, count, dtype=torch.bool, device=i.device)
    steps = log_f[..., :, None].expand(*log_f.shape, count).masked_fill(~ones.tril(-1), 0.0)
    inside = (steps.cumsum(dim=-2) + i[..., None, :]).masked_fill(~ones.tril(), -math.inf)
    before = log_f.cumsum(dim=-1) + m[..., None]
    m = torch.maximum(inside.amax(dim=-1), before)  # [B, S, C]
    inside, before = weight_of(inside, m[..., None]), weight_of(before, m)

    products = (fq @ fk[:, :, None].transpose(-1, -2)) * inside[:, :, None]  # [B, S, R, C, C]
    values = products @ v[:, :, None] + (fq @ C[:, :, None]) * before[:, :, None, :, None]
    normaliser = products.sum(dim=-1) + (fq @ n[:, :, None, :, None])[..., 0] * before[:, :, None]
    h = values / (normaliser[..., None] + TINY)

    last, carry = inside[..., -1, :, None], before[..., -1, None]
    C = carry[..., None] * C + (last * fk).transpose(-1, -2) @ v
    n = carry * n + (last * fk).sum(dim=-2)
    return h, (C, n, m[..., -1])


def features(x, matrices):
    """Softmax over the features of A x, head by head: x [B, n, T, d], matrices [n, d, d]."""
    return (x.float() @ matrices.float().transpose(-1, -2)).softmax(dim=-1)


def linear_in_float32(x, layer):
    return F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


class BifocalMixer(nn.Module):
    """Both branches of one layer and their blend. Holds the tensors that the base model lacks, as far as this layer's
    settings need them."""

    def __init__(self, config, settings):
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.window = None if settings["window"] == "full" else settings["window"]
        self.pinned = settings["sink_tokens"]
        self.states = {"none": 0, "kv": config.num_key_value_heads, "query": heads}[settings["states"]]
        self.sink = nn.Parameter(torch.zeros(heads)) if settings["sink"] == "learned" else None
        if self.states > 0:
            self.feature_q = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))
            self.feature_k = nn.Parameter(torch.eye(width).repeat(self.states, 1, 1))
            self.i_gate = nn.Linear(config.hidden_size, self.states, bias=False)
            self.f_gate = nn.Linear(config.hidden_size, self.states)
        self.o_gate = None
        if self.states > 0 and self.window != 0 and settings["mix"] == "gate":
            self.o_gate = nn.Linear(config.hidden_size, heads)

    def forward(self, x, q, k, v, positions, memory):
        """Mixed heads [B, H, T, d]. x [B, T, D]: the layer's normalised input; memory: its BifocalLayerCache."""
        near = self.near(q, k, v, positions, memory) if self.window != 0 else None
        if self.states == 0:
            return near
        far = self.far(x, q, k, v, positions >= 0, memory)
        if near is None:
            return far.to(q.dtype)
        if self.o_gate is None:
            return (near.float() + far).to(q.dtype)
        gate = torch.sigmoid(linear_in_float32(x, self.o_gate)).transpose(1, 2)[..., None]  # [B, H, T, 1]
        return (gate * far + (1 - gate) * near.float()).to(q.dtype)

    def near(self, q, k, v, positions, memory):
        parts = []
        for begin in range(0, q.shape[2], NEAR_BLOCK):
            block = slice(begin, begin + NEAR_BLOCK)
            new_k, new_v, at = k[:, :, block], v[:, :, block], positions[:, block]
            keys, values, key_at = new_k, new_v, at
            if memory.keys is not None:
                keys = torch.cat([memory.keys, new_k], dim=2)
                values = torch.cat([memory.values, new_v], dim=2)
                key_at = torch.cat([memory.positions, at], dim=1)
            parts.append(attend(q[:, :, block], keys, values, at, key_at, self.window, self.pinned, self.sink))
            memory.update(new_k, new_v, at)
        return torch.cat(parts, dim=2)

    def far(self, x, q, k, v, valid, memory):
        with torch.autocast(x.device.type, enabled=False):
            if self.states != k.shape[1]:  # a state per query head: each has keys and values of its own
                k, v = (heads.repeat_interleave(self.states // heads.shape[1], dim=1) for heads in (k, v))
            fq = features(q, self.feature_q).unflatten(1, (self.states, -1))
            fk = features(k, self.feature_k)
            v = v.float()
            i = linear_in_float32(x, self.i_gate).transpose(1, 2).masked_fill(~valid[:, None], -math.inf)
            log_f = F.logsigmoid(linear_in_float32(x, self.f_gate)).transpose(1, 2).masked_fill(~valid[:, None], 0.0)
            state = memory.state(x.shape[0], self.states, k.shape[-1], x.device)
            parts = []
            for begin in range(0, x.shape[1], FAR_CHUNK):
                chunk = slice(begin, begin + FAR_CHUNK)
                h, state = mlstm_chunk(
                    fq[:, :, :, chunk], fk[:, :, chunk], v[:, :, chunk], i[..., chunk], log_f[..., chunk], state
                )
                parts.append(h)
            memory.C, memory.n, memory.m = state
            return torch.cat(parts, dim=3).flatten(1, 2)


# ---- The model ----------------------------------------------------------------------------------------------------


class BifocalDecoderLayer(nn.Module):
    def __init__(self, config, settings):
        super().__init__()
        self.input_layernorm = BifocalRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BifocalAttention(config)
        self.mixer = BifocalMixer(config, settings)
        self.post_attention_layernorm = BifocalRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = BifocalMLP(config)

    def forward(self, x, positions, cos, sin, memory):
        normed = self.input_layernorm(x)
        heads = self.mixer(normed, *self.self_attn.project(normed, cos, sin), positions, memory)
        x = x + self.self_attn.o_proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


def wants_dict(config, return_dict):
    """Whether forward returns an output object: the argument, or where there is none the configuration, decides."""
    return getattr(config, "return_dict", True) if return_dict is None else return_dict


class BifocalPreTrainedModel(PreTrainedModel):
    config_class = BifocalConfig
    base_model_prefix = "model"
    _no_split_modules = ["BifocalDecoderLayer"]
    _is_stateful = True  # tokens that went in cannot be taken back, so there is no assisted generation

    def _init_weights(self, module):
        """Start values of an untrained student; tensors that a checkpoint filled are left alone."""
        if isinstance(module, BifocalMixer):
            if module.sink is not None:
                nn.init.zeros_(module.sink)
            if module.states > 0:
                for features_of in (module.feature_q, module.feature_k):
                    self._fill(features_of, torch.eye(features_of.shape[-1]))
                nn.init.zeros_(module.i_gate.weight)
                nn.init.zeros_(module.f_gate.weight)
                self._fill(module.f_gate.bias, torch.linspace(3.0, 9.0, module.states))
            if module.o_gate is not None:
                nn.init.zeros_(module.o_gate.weight)
                nn.init.constant_(module.o_gate.bias, -1.0)
            for gate in ("i_gate", "f_gate", "o_gate"):
                if getattr(module, gate, None) is not None:
                    getattr(module, gate)._is_hf_initialized = True
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, BifocalRMSNorm):
            nn.init.ones_(module.weight)

    @staticmethod
    def _fill(parameter, values):
        if not getattr(parameter, "_is_hf_initialized", False):
            with torch.no_grad():
                parameter.copy_(values.to(parameter.device))


class BifocalModel(BifocalPreTrainedModel):
    """Embedding, layers and the final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BifocalDecoderLayer(config, settings) for settings in config.mixers])
        self.norm = BifocalRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        output_attentions=None,
        return_dict=None,
        cache=None,
        **kwargs,
    ):
        """attention_mask [B, tokens so far]: 1 for real tokens, 0 for padding, those of the cache included.
        position_ids may be left out: positions count the real tokens of a sequence. Those that generate() makes, which
        count real tokens or columns, are let pass; others are refused."""
        if output_attentions:
            raise ValueError("Bifocal layers have no attention matrix to return")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, BifocalCache):
            raise ValueError(f"a Bifocal model needs a BifocalCache, got {type(cache).__name__}")
        memory = BifocalCache(self.config) if cache is None else cache
        seen = memory.get_seq_length()
        positions = memory.count(self._valid(attention_mask, seen, x))
        if position_ids is not None:
            columns = torch.arange(seen, seen + x.shape[1], device=x.device)
            if not (((position_ids == positions) | (positions < 0)).all() or (position_ids == columns).all()):
                raise ValueError("position_ids must count the real tokens of each sequence from 0: leave them out")
        cos, sin = rotary_tables(self.config, positions, x.dtype)
        hidden_states = []
        for layer, layer_memory in zip(self.layers, memory.layers):
            hidden_states.append(x)
            x = layer(x, positions, cos, sin, layer_memory)
        x = self.norm(x)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            **{CACHE: memory if use_cache else None},
        )
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    @staticmethod
    def _valid(attention_mask, seen, x):
        """Which of the new columns [B, T] hold real tokens."""
        if attention_mask is None:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        wanted = (x.shape[0], seen + x.shape[1])
        if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != wanted:
            shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
            raise ValueError(f"attention_mask must be {wanted}, one entry per token so far, got {shape}")
        return attention_mask[:, seen:].to(x.device) != 0


class BifocalForCausalLM(BifocalPreTrainedModel, GenerationMixin):
    # A list of names before version 5, then a map from the tied name to its source.
    _tied_weights_keys = (
        ["lm_head.weight"]
        if int(transformers.__version__.split(".")[0]) < 5
        else {"lm_head.weight": "model.embed_tokens.weight"}
    )

    def __init__(self, config):
        super().__init__(config)
        self.model = BifocalModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        output_attentions=None,
        return_dict=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        """Logits [B, T, vocabulary], or of the last `logits_to_keep` tokens. labels [B, T]: the loss is the mean cross
        entropy of label t + 1 at token t; -100 leaves a label out."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            cache=cache,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """generate() calls this for the cache it will use."""
        given = model_kwargs.get(CACHE)
        if given is not None and not isinstance(given, BifocalCache):
            raise ValueError(f"a Bifocal model needs a BifocalCache, got {type(given).__name__}")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: leave it out, the cache of a Bifocal "
                "model has a fixed size as it is"
            )
        if given is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = BifocalCache(self.config)
