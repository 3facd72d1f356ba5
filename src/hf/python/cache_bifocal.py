"""The cache of a Bifocal student: per layer a ring of recent keys and values, pinned sink tokens, an mLSTM state.

Letters: B sequences, T tokens, G key-value heads, S states, d head width.
"""

import math

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class BifocalLayerCache(CacheLayerMixin):
    """What one layer remembers of each sequence.

    keys, values [B, G, slots, d] and positions [B, slots] of the tokens that near can still see, position -1 where a
    slot holds nothing. A windowed layer has `sink_tokens` pinned slots, a ring of `window` slots, and a last slot that
    takes what need not be kept. C [B, S, d, d], n [B, S, d] and m [B, S] are the mLSTM's state, always in float32.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False  # a state cannot forget its last tokens
    TENSORS = ("keys", "values", "positions", "C", "n", "m")

    def __init__(self, window, pinned):
        super().__init__()
        self.window = window  # tokens, or None for all
        self.pinned = pinned
        self.seen = 0  # columns that went in, padding included
        self.reset()

    def reset(self):
        for name in self.TENSORS:
            setattr(self, name, None)
        self.seen = 0
        self.is_initialized = False

    def update(self, key_states, value_states, positions):
        """Stores keys and values [B, G, T, d] with their positions [B, T], -1 for padding."""
        self.is_initialized = True
        if self.window is None:
            if self.keys is None:
                self.keys, self.values, self.positions = key_states, value_states, positions
            else:
                self.keys = torch.cat([self.keys, key_states], dim=2)
                self.values = torch.cat([self.values, value_states], dim=2)
                self.positions = torch.cat([self.positions, positions], dim=1)
            return self.keys, self.values
        batch, heads, _, width = key_states.shape
        spare = self.pinned + self.window
        if self.keys is None:
            self.keys = key_states.new_zeros(batch, heads, spare + 1, width)
            self.values = value_states.new_zeros(batch, heads, spare + 1, width)
            self.positions = positions.new_full((batch, spare + 1), -1)
        # The ring takes the last `window` of these tokens, so no two of them want the same slot.
        is_pinned = positions < self.pinned
        newest = positions.amax(dim=1, keepdim=True)
        is_kept = (positions >= 0) & (is_pinned | (positions > newest - self.window))
        ring = self.pinned + (positions - self.pinned) % self.window
        slot = torch.where(is_kept, torch.where(is_pinned, positions, ring), spare)
        spread = slot[:, None, :, None].expand_as(key_states)
        self.keys = self.keys.scatter(2, spread, key_states)
        self.values = self.values.scatter(2, spread, value_states)
        self.positions = self.positions.scatter(1, slot, torch.where(is_kept, positions, -1))
        return self.keys, self.values

    def state(self, batch, states, width, device):
        """C, n, m; empty before the first token."""
        if self.C is None:
            self.C = torch.zeros(batch, states, width, width, device=device)
            self.n = torch.zeros(batch, states, width, device=device)
            self.m = torch.full((batch, states), -math.inf, device=device)
        return self.C, self.n, self.m

    def _each(self, change):
        for name in self.TENSORS:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def reorder_cache(self, beam_idx):
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats):
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._each(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self):
        raise NotImplementedError("a Bifocal cache has a small fixed size and is not offloaded")

    prefetch = offload

    def crop(self, *_):
        raise ValueError("a Bifocal cache cannot be cropped: its states do not keep single tokens")

    def lazy_initialization(self, *_):
        pass  # the first tokens say how large the tensors are

    def get_seq_length(self, *_):
        return self.seen

    def get_mask_sizes(self, query_length, *_):
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + count, 0

    def get_max_length(self):
        return -1  # no limit, although the size is fixed

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class BifocalCache(Cache):
    """One BifocalLayerCache per layer, and how many real tokens of each sequence went in."""

    def __init__(self, config):
        layers = []
        for mixer in config.mixers:
            window = None if mixer["window"] == "full" else mixer["window"]
            layers.append(BifocalLayerCache(window, mixer["sink_tokens"]))
        super().__init__(layers=layers)
        self.lengths = None  # [B]

    def count(self, valid):
        """Positions [B, T] of these columns, -1 where they are padding; counts them as gone in."""
        if self.lengths is None:
            self.lengths = torch.zeros(valid.shape[0], dtype=torch.long, device=valid.device)
        if self.lengths.shape[0] != valid.shape[0]:
            raise ValueError(f"the cache holds {self.lengths.shape[0]} sequences, the input has {valid.shape[0]}")
        counted = self.lengths[:, None] + valid.long().cumsum(dim=1)
        self.lengths = counted[:, -1]
        for layer in self.layers:
            layer.seen += valid.shape[1]
        return torch.where(valid, counted - 1, -1)

    def nbytes(self):
        """Bytes of all tensors that it holds."""
        tensors = [getattr(layer, name) for layer in self.layers for name in BifocalLayerCache.TENSORS]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def reset(self):
        super().reset()
        self.lengths = None

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.lengths = self.lengths.index_select(0, beam_idx.to(self.lengths.device))

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self.lengths = self.lengths.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.lengths = self.lengths[indices.to(self.lengths.device)]
