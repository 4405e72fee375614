"""The shapes of models: built in by name, or read from a config.json, with how many parameters and bytes follow from them."""

import dataclasses
import json
import re
from pathlib import Path

from checks import PROJECTIONS, Refused, one_line, short


class NotPlanned(Refused):
    """A model that there is no memory plan for; it may train all the same."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a config.json says of a decoder with grouped-query attention and a gated MLP."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int  # tokens that positions are made for
    tied: bool  # the head is the embedding
    qk_norms: bool = False
    qkv_bias: bool = False
    quantized: str | None = None  # how the checkpoint is: bitsandbytes, fp8
    nested: bool = True  # 4-bit with scales that are quantized themselves
    kept: tuple[str, ...] = ()  # its modules that stay in 16 bits

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: input and output width."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, queries),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (queries, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(i * o for i, o in self.linears.values())

    @property
    def head_parameters(self) -> int:
        """The output head's, which every token reads, also where it is the embedding."""
        return self.vocabulary * self.hidden

    @property
    def other_parameters(self) -> int:
        """Embedding, an untied head, norms, biases: never quantized."""
        per_layer = 2 * self.hidden + self.qk_norms * 2 * self.head_dim
        per_layer += self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        return (1 if self.tied else 2) * self.head_parameters + self.layers * per_layer + self.hidden

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters

    def kv_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Bytes of KV cache for one token: keys and values of all layers in 16 bits, or in 8."""
        return (1 if kv_cache_dtype == "fp8" else 2) * 2 * self.layers * self.kv_heads * self.head_dim

    def on_card(self, load_in: str) -> str:
        """What the linear layers are on the card, 4bit, fp8 or 16bit: as the checkpoint is, or else as asked for."""
        return {"bitsandbytes": "4bit", "fp8": "fp8"}.get(self.quantized, load_in)

    def kept_parameters(self) -> int:
        """Weights that the checkpoint keeps in 16 bits, by vLLM's rule: a layer's path, one above it, or one name in it."""
        total = 0
        for layer in range(self.layers) if self.kept else ():
            for name, (i, o) in self.linears.items():
                parts = ["model", "layers", str(layer), *name.split(".")]
                paths = {".".join(parts[:n]) for n in range(1, len(parts) + 1)} | set(parts)
                total += i * o * bool(paths & set(self.kept))
        return total

    def lora_parameters(self, r: int, targets=PROJECTIONS) -> int:
        """Trainable parameters of a LoRA of rank r on the target projections."""
        return self.layers * r * sum(i + o for name, (i, o) in self.linears.items() if name.rpartition(".")[2] in targets)


def qwen3(name, hidden, intermediate, layers, heads, tied):
    return Shape(name, hidden, intermediate, layers, heads, 8, 128, 151936, 40960, tied, qk_norms=True)


SHAPES = {
    shape.name.lower(): shape
    for shape in (
        qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, True),
        qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, True),
        qwen3("Qwen3-4B", 2560, 9728, 36, 32, True),
        qwen3("Qwen3-8B", 4096, 12288, 36, 32, False),
        qwen3("Qwen3-14B", 5120, 17408, 40, 40, False),
        qwen3("Qwen3-32B", 5120, 25600, 64, 64, False),
        Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152, 8192, True),
        Shape("SmolLM2-360M", 960, 2560, 32, 15, 5, 64, 49152, 8192, True),
        Shape("SmolLM2-1.7B", 2048, 8192, 24, 32, 32, 64, 49152, 8192, True),
    )
}

# model_type in config.json -> norms on queries and keys, biases on q, k and v
ARCHITECTURES = {
    "granite": (False, False),
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (False, True),
    "qwen3": (True, False),
    "smollm3": (False, False),
}


def shape_of(model: str) -> Shape:
    """The shape of a model: one built in, by its name (any owner, also Unsloth's 4-bit copies), a folder, or a config.json.

    Raises Refused, naming the value and the ones that work.
    """
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        given = path.suffix == ".json" or path.is_file()
    except OSError:  # a name that no file can have
        given = False
    if given:
        return read_shape(path)
    if not is_built_in(model):
        known = ", ".join(shape.name for shape in SHAPES.values())
        raise NotPlanned(f"--model {model[:80]}: its shape is not built in ({known}); give its folder or its config.json")
    return SHAPES[plain_name(model)]


def is_built_in(model: str) -> bool:
    return plain_name(model) in SHAPES


def plain_name(model: str) -> str:
    """A model's name without its owner, its kind of training and its quantization."""
    name = re.sub(r"(-unsloth)?-bnb-4bit$", "", model.rpartition("/")[2].lower())
    return re.sub(r"-(base|instruct|thinking)(-2507)?$", "", name)


def read_shape(path: Path) -> Shape:
    """The shape in a config.json; Refused where it is missing, malformed, or of an architecture that is not planned for."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise Refused(f"--model {path}: {error.strerror}; give a folder that holds a config.json, or the file") from None
    except (ValueError, RecursionError) as error:
        why = f"no JSON ({one_line(error)}); a config.json as save_pretrained writes it works"
        raise Refused(f"--model {path}: {why}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise NotPlanned(f"--model {path}: model_type {short(kind)}; planned for are {', '.join(ARCHITECTURES)}")
    sizes = {}
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        sizes[name] = positive(config, name, path)
    heads = sizes["num_attention_heads"]
    if kind == "llama" and config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None:
        config["head_dim"] = 128 if kind == "qwen3" else sizes["hidden_size"] // heads
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = 2**20
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    sizes |= {name: positive(config, name, path) for name in names}
    tied = config.get("tie_word_embeddings", kind == "smollm3")
    quantization = config.get("quantization_config") or {}
    kept = quantization.get("llm_int8_skip_modules") or [] if isinstance(quantization, dict) else []
    if not isinstance(tied, bool):
        raise Refused(f"--model {path}: tie_word_embeddings is {short(tied)}; it must be true or false")
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise Refused(f"--model {path}: llm_int8_skip_modules is {short(kept)}; it must be a list of names")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(quantization, dict) or method not in (None, "fp8", "bitsandbytes") or quantization.get("load_in_8bit"):
        raise NotPlanned(f"--model {path}: quantized by {short(method)}; planned for are bitsandbytes in 4 bits, fp8, or none")
    qk_norms, qkv_bias = ARCHITECTURES[kind]
    return Shape(
        name=path.parent.name or str(path),
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocabulary=sizes["vocab_size"],
        context=sizes["max_position_embeddings"],
        tied=tied,
        qk_norms=qk_norms,
        qkv_bias=qkv_bias or config.get("attention_bias") is True,
        quantized=method,
        nested=method != "bitsandbytes" or quantization.get("bnb_4bit_use_double_quant") is True,
        kept=tuple(kept),
    )


def positive(config: dict, name: str, path: Path) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value < 2**24:
        raise Refused(f"--model {path}: {name} is {value!r}; it must be a whole number above 0, and below {2**24}")
    return value


def weights_of(shape: Shape, load_in: str, plain_scales: bool = False) -> tuple[int, str]:
    """Bytes of the base weights on the card, and in words what they are made of.

    With plain scales, those of 4-bit weights are in 32 bits, also where the checkpoint has nested ones (decode.py).
    """
    if shape.quantized == "fp8":  # a 32-bit scale for each block of 128 x 128
        quantized, each, what = shape.linear_parameters, 1 + 4 / 128**2, "8 bits with block scales"
    elif shape.on_card(load_in) == "fp8":  # vLLM makes them as it loads: a 32-bit scale for each output
        outputs = shape.layers * sum(o for _, o in shape.linears.values())
        quantized, what = shape.linear_parameters, "8 bits with a scale a row"
        each = 1 + 4 * outputs / quantized
    elif shape.on_card(load_in) == "4bit":
        # NF4: a scale for each 64 weights, in 32 bits, or in 8 with a 32-bit one for each 256 of those (double quantization)
        quantized = shape.linear_parameters - shape.kept_parameters()
        nested = shape.nested and not plain_scales
        each = 1 / 2 + (1 / 64 + 4 / (64 * 256) if nested else 4 / 64)
        what = "4 bits with nested scales" if nested else "4 bits with scales"
    else:
        return 2 * shape.parameters, f"{shape.parameters / 1e9:.2f} B parameters in 16 bits"
    rest = shape.parameters - quantized
    return round(quantized * each) + 2 * rest, f"{quantized / 1e9:.2f} B in {what}, {rest / 1e9:.2f} B in 16 bits"
