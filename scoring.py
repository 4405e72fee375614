"""Log-probs of a whole rollout without gradients, in passes as large as the training ones. Import it after unsloth."""

import torch


def in_training_batches(trainer) -> None:
    """Let a trainer score a rollout per_device_train_batch_size rows at a time, each pass packed without its padding.

    Unsloth scores all rows of a rollout at once, or, told to make more passes, pads them to the longest: it packs only what
    fits one pass. The method is TRL's, and Unsloth's replacement returns columns from the longest prompt's end on, so that
    a part's result may lack columns on the left, which belong to prompts: read in TRL 1.15.0 and unsloth 2026.10.9.
    """
    score, args = trainer._get_per_token_logps_and_entropies, trainer.args

    def in_passes(model, input_ids, attention_mask, *positional, **named):
        rows, passes = args.per_device_train_batch_size, args.unsloth_grpo_mini_batch
        if len(input_ids) <= rows:  # also where Unsloth's loss asks, only to hear that there are none
            return score(model, input_ids, attention_mask, *positional, **named)
        args.unsloth_grpo_mini_batch = 1
        try:
            parts = [
                score(model, ids, mask, *positional, **named)[0]
                for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows))
            ]
        finally:
            args.unsloth_grpo_mini_batch = passes
        width = max(part.shape[1] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (width - part.shape[1], 0)) for part in parts]), None, None

    trainer._get_per_token_logps_and_entropies = in_passes
