"""Configuration of a Bifocal student: the keys of its base model, and one mixer for each layer."""

from transformers import PretrainedConfig

BASE_TYPES = ("qwen3", "qwen2", "llama")
FULL_ATTENTION = {"window": "full", "sink": "none", "sink_tokens": 0, "states": "none", "mix": "gate"}


class BifocalConfig(PretrainedConfig):
    """What `config.json` says.

    base_model_type decides what the base model adds to a plain decoder: norms of queries and keys
    (qwen3), biases on q, k and v (qwen2), neither (llama).

    mixers holds a dict for each layer:
        window       "full", or the tokens that exact attention reads, the token itself included;
                     0 leaves exact attention out
        sink         "none"; "learned": a logit per query head that takes weight and gives no value;
                     "tokens": the first `sink_tokens` tokens stay readable beside the window
        states       "none", or an mLSTM state "kv" per key-value head or "query" per query head
        mix          "gate": a learned blend of window and state; "sum": their sum

    Rotary positions are kept as `rope_parameters` (rope_type default or llama3, with rope_theta);
    the older pair of rope_theta and rope_scaling is read too.
    """

    model_type = "bifocal"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        base_model_type="qwen3",
        mixers=None,
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=None,
        head_dim=None,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=None,
        initializer_range=0.02,
        use_cache=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.base_model_type = base_model_type
        self.mixers = mixers or [dict(FULL_ATTENTION) for _ in range(num_hidden_layers)]
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.rope_parameters = {**(rope_scaling or {}), **(rope_parameters or {})}
        self.rope_parameters.setdefault("rope_type", self.rope_parameters.pop("type", "default"))
        if self.rope_parameters.get("rope_theta") is None:
            self.rope_parameters["rope_theta"] = rope_theta or 10000.0
        self._check()
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def _check(self):
        if self.base_model_type not in BASE_TYPES:
            raise ValueError(f"base_model_type must be one of {BASE_TYPES}, got {self.base_model_type!r}")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act must be silu, got {self.hidden_act!r}")
        if self.rope_parameters["rope_type"] not in ("default", "llama3"):
            raise ValueError(f"rope_type must be default or llama3, got {self.rope_parameters['rope_type']!r}")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key-value heads evenly"
            )
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(f"mixers must list {self.num_hidden_layers} layers, got {len(self.mixers)}")
        for layer, mixer in enumerate(self.mixers):
            window, states = mixer["window"], mixer["states"]
            pins = mixer["sink"] == "tokens"
            fine = (
                set(mixer) == set(FULL_ATTENTION)
                and (window == "full" or (isinstance(window, int) and window >= 0))
                and mixer["sink"] in ("none", "learned", "tokens")
                and states in ("none", "kv", "query")
                and mixer["mix"] in ("gate", "sum")
                and mixer["sink_tokens"] >= 0
                and pins == (mixer["sink_tokens"] > 0)
                and not (window == 0 and (states == "none" or mixer["sink"] != "none"))
                and not (window == "full" and (states != "none" or mixer["sink"] != "none"))
            )
            if not fine:
                raise ValueError(f"mixer of layer {layer} contradicts itself: {mixer}")
