"""The answers to one prompt share its tokens: they go through the model once, in a training pass and before generating.

TRL gives each of G completions a row of its own, so that the prompt's tokens are computed G times. Here the rows with the same
prompt become one, [prompt, completion 1, ..., completion G]: each completion sees the prompt and itself, and counts its
positions from the prompt's end. The results are TRL's up to rounding. Import it after unsloth.
"""

import dataclasses

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

# decoders that take a mask of our own, whose layers see other tokens only through it, and whose positions are rotary or none,
# so that padding on the left shifts nothing: read in transformers 5.17.0
DECODERS = ("granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")


def can_share(config) -> bool:
    """Whether a model with this config of transformers' works on packed rows: a plain decoder, each layer seeing all tokens."""
    all_full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    sliding = config.model_type == "mistral" and config.sliding_window is not None  # the one that has no layer_types
    return config.model_type in DECODERS and config._attn_implementation == "sdpa" and all_full and not sliding


@dataclasses.dataclass
class Packed:
    """A batch of TRL's, (B, P + C), in R rows of L tokens: the model's arguments, and where its answers belong.

    The arguments are input_ids, position_ids and shift_labels (R, L), and attention_mask (R, 1, L, L), True where seen.
    """

    arguments: dict[str, torch.Tensor]
    rows: torch.Tensor  # of the N completion tokens in the packed ones, in the order of the batch
    columns: torch.Tensor
    scored: torch.Tensor  # (B, C), True at N places

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the packed tokens (R, L) as TRL has them (B, C), 0 in the padding."""
        return values.new_zeros(self.scored.shape).masked_scatter(self.scored, values[self.rows, self.columns])


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> Packed | None:
    """One row for each prompt; None where a prompt is empty. TRL pads prompts on the left and completions on the right.

    A position predicts one token only, and after the prompt there are G different ones: so each completion begins with a copy
    of the prompt's last token, and leaves out its own last one, which predicts nothing.
    """
    kept = attention_mask.bool()
    members = {}
    for i, (ids, here) in enumerate(zip(input_ids[:, :-completion_length], kept[:, :-completion_length])):
        members.setdefault(tuple(ids[here].tolist()), []).append(i)
    if () in members:
        return None
    packed, places = [], {}
    for row, prompt in enumerate(members):
        n = len(prompt) - 1
        ids, positions, labels, owners = list(prompt[:-1]), list(range(n)), [-100] * n, [-1] * n  # -1: seen by all
        for i in members[prompt]:
            answer = input_ids[i, -completion_length:][kept[i, -completion_length:]].tolist()
            places[i] = [(row, len(ids) + j) for j in range(len(answer))]
            ids += [prompt[-1], *answer][: len(answer)]
            positions += range(n, n + len(answer))
            labels += answer
            owners += [i] * len(answer)
        packed.append((ids, positions, labels, owners))
    length = max(len(ids) for ids, *_ in packed)
    fills = (0, 0, -100, -2)  # -2: padding, seen by padding alone
    ids, positions, labels, owners = (
        torch.tensor([row + [fill] * (length - len(row)) for row in column], device=input_ids.device)
        for fill, column in zip(fills, zip(*packed))
    )
    earlier = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
    seen = earlier & ((owners == -1)[:, None] | (owners[:, None] == owners[:, :, None]))
    arguments = dict(input_ids=ids, position_ids=positions, shift_labels=labels, attention_mask=seen[:, None])
    in_order = [place for i in range(len(input_ids)) for place in places[i]]
    rows, columns = torch.tensor(in_order, dtype=torch.long, device=input_ids.device).view(-1, 2).T
    return Packed(arguments, rows, columns, kept[:, -completion_length:])


def pays(config, packed: Packed, rows: int, length: int) -> bool:
    """Whether packed rows take fewer multiplications than `rows` of their own: attention grows with the length's square."""
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    token = 4 * config.hidden_size * width + 3 * config.hidden_size * config.intermediate_size  # a layer's weights, about
    pair = 2 * width  # of a query and a key, and of what weighs a value

    def cost(rows, length):
        return rows * length * (token + length * pair)

    return cost(*packed.arguments["input_ids"].shape) < cost(rows, length)


class Roomy(DynamicLayer):
    """A layer of transformers' cache with room for `length` tokens: appending one copies one, not all before it."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.room = length, None

    def update(self, key_states, value_states, *args, **kwargs):
        """Keys and values (B, heads, tokens, width) so far, these at the end: views of the room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if self.room is None:
            self.room = [new.new_empty(*new.shape[:2], self.length, new.shape[-1]) for new in (key_states, value_states)]
            if seen:
                for room, old in zip(self.room, (self.keys, self.values)):
                    room[:, :, :seen] = old
        for room, new in zip(self.room, (key_states, value_states)):
            room[:, :, seen:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.room = None


def prefill(model, config, input_ids: torch.Tensor, attention_mask: torch.Tensor, new_tokens: int) -> Cache | None:
    """A cache of all but the last token of prompts (B, P), padded on the left; equal ones are computed once.

    It has room for `new_tokens` more. None where no two prompts are equal, or they have one token.
    """
    rows, row_of = torch.unique(torch.cat([input_ids, attention_mask], dim=1), dim=0, return_inverse=True)
    if len(rows) == len(input_ids) or input_ids.shape[1] < 2:
        return None
    ids, mask = rows.chunk(2, dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate() counts on
    cache = Cache(layers=[Roomy(input_ids.shape[1] + new_tokens) for _ in range(config.num_hidden_layers)])
    model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache,
          use_cache=True, logits_to_keep=1)  # fmt: skip
    cache.batch_select_indices(row_of)
    return cache
