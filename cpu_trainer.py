"""TRL's GRPOTrainer for a CPU, where every token through the model counts: the same steps, up to rounding, in less time.

Three of its methods are overridden, read in TRL 1.15.0; each goes back to TRL's own where it cannot help. What each gave
stands in docs/pace.md. Import it after unsloth.
"""

import contextlib
import functools

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from trl import GRPOTrainer

import shared_prompt

COPIED_AT_MOST = 2 * 2**30  # bytes of RAM for copies of the weights to generate with; above, the adapter stays beside them
FEW_ROWS = 16  # up to here MKL multiplies weights with columns faster than rows with weights (8 rows: 40 ms against 55)


class CPUTrainer(GRPOTrainer):
    """Computes equal prompts once, leaves out a backward pass that has nothing to say, and generates with merged weights."""

    copies = None  # made at the first generation, written anew at each

    def config_to_share(self):
        """transformers' config of the model, where it can work on shared prompts, else None."""
        config = self.accelerator.unwrap_model(self.model).config
        return config if shared_prompt.can_share(config) else None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
                                           compute_entropy=False, **others):  # fmt: skip
        """Log-probs and entropies (B, C), in passes of batch_size as TRL's; `others` are of images and of experts."""
        config = self.config_to_share()
        if config and not any(value is not None and value is not False for value in others.values()):
            size = batch_size or len(input_ids)
            batches = list(zip(input_ids.split(size), attention_mask.split(size)))
            packed = [shared_prompt.pack(ids, mask, logits_to_keep) for ids, mask in batches]
            if all(one and shared_prompt.pays(config, one, *ids.shape) for one, (ids, _) in zip(packed, batches)):
                with self.accelerator.autocast():
                    outputs = [model(**one.arguments, fused_lm_head=True) for one in packed]
                log_probs = torch.cat([one.unpack(output.log_probs) for one, output in zip(packed, outputs)])
                if not compute_entropy:
                    return log_probs, None, None
                return log_probs, torch.cat([one.unpack(output.entropy) for one, output in zip(packed, outputs)]), None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **others
        )

    def _compute_loss(self, model, inputs):
        """TRL's loss; without a backward pass where all advantages are 0 and nothing else pulls.

        The gradients are zeros then, as TRL's are, and not missing: Adam goes on by its momentum.
        """
        # a mean of equal rewards is off by their rounding
        equal = inputs["advantages"].abs().max() < 1e-6
        pulled = self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled or not equal
        if pulled or not torch.is_grad_enabled():
            return super()._compute_loss(model, inputs)
        with torch.no_grad():
            loss = super()._compute_loss(model, inputs)
        # a loss that is no number must spoil the gradient, as it would have
        return loss + loss * 0 * sum(p.sum() for p in model.parameters() if p.requires_grad)

    def _generate_single_turn(self, prompt_ids, *others, **named):
        """TRL's generation, while the adapter is part of the weights; its call of generate() begins after the prompts."""
        model, config = self.accelerator.unwrap_model(self.model), self.config_to_share()
        own = vars(model).get("generate")  # unsloth sets one on the model itself
        if config:
            model.generate = functools.partial(generate_after_prefill, model, config, model.generate)
        try:
            with self.merged(model):
                return super()._generate_single_turn(prompt_ids, *others, **named)
        finally:
            if own:
                model.generate = own
            elif config:
                del model.generate

    @contextlib.contextmanager
    def merged(self, model):
        """Within, each projection works with a copy of its weights that the adapter is added to: one product, not three.

        What is trained is not touched, so that no rounding stays behind.
        """
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        projections, head = [layer.get_base_layer() for layer in layers], model.get_output_embeddings()
        size = sum(projection.weight.nbytes for projection in projections)
        if not all(map(can_merge, layers)) or type(head) is not torch.nn.Linear or size > COPIED_AT_MOST:
            yield
            return
        if self.copies is None:
            self.copies = [torch.empty_like(projection.weight) for projection in projections]
        try:
            for layer, projection, copy in zip(layers, projections, self.copies):
                (name,) = layer.active_adapters
                a, b = layer.lora_A[name].weight.data, layer.lora_B[name].weight.data
                torch.addmm(projection.weight.data, b, a, alpha=layer.scaling[name], out=copy)
                projection.forward = functools.partial(product, copy, projection.bias)
                layer.merged_adapters.append(name)
            head.forward = functools.partial(product, head.weight, head.bias)
            yield
        finally:
            for module in (*projections, head):
                vars(module).pop("forward", None)
            for layer in layers:
                layer.merged_adapters.clear()


def product(weight, bias, x):
    """x (..., in) with a weight (out, in), as torch's linear(), which is the slower way for the few rows of decoding."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.mm(weight, rows.T).T.contiguous().view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def can_merge(layer) -> bool:
    """Whether the layer is a projection in 32 bits with one plain LoRA beside it."""
    base = layer.get_base_layer()
    return (
        type(layer) is LoraLinear
        and type(base) is torch.nn.Linear
        and base.weight.dtype == torch.float32
        and len(layer.active_adapters) == 1
        and not (layer.merged or layer.disable_adapters or layer.fan_in_fan_out or layer.lora_variant)
        and not any(layer.lora_bias.values())
    )


def generate_after_prefill(model, config, generate, input_ids, attention_mask, generation_config, **others):
    """`generate`, with a cache of the prompts where TRL asks for the next tokens and nothing more."""
    wanted, cache = generation_config, None
    if not others and wanted.max_new_tokens and wanted.use_cache is not False and not wanted.cache_implementation:
        cache = shared_prompt.prefill(model, config, input_ids, attention_mask, wanted.max_new_tokens)
    if cache:
        others["past_key_values"] = cache
    return generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **others)
