"""A model for TRL and PEFT alone, without Unsloth: what `--backend trl` and `--backend paged` train."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed


def load_model(config, gpu, name: str):
    """The frozen base (16 bits or NF4 on a GPU, 32 bits on a CPU) and its tokenizer."""
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=torch.bfloat16 if gpu else torch.float32,
        quantization_config=in_4_bits if config.load_in == "4bit" else None,
        device_map={"": 0} if gpu else None,
        attn_implementation="sdpa",
    )
    model.config.use_cache = True
    return model, AutoTokenizer.from_pretrained(name, padding_side="left")


def attach_lora(config, model):
    """The model with its trainable part in 32 bits, which begins as no change at all: B is 0."""
    set_seed(config.seed)
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(config.target_modules),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)
