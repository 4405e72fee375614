"""Log-probs of a whole rollout without gradients, in passes as large as the training ones. Import it after unsloth."""

import torch


def in_training_batches(trainer) -> None:
    """Let a trainer score a rollout per_device_train_batch_size rows at a time, each pass packed without its padding.

    By itself Unsloth scores all rows of a rollout at once, or, told to make more passes, pads them to the longest: it packs
    only what fits one pass. Where a packed pass is too much, its rows go one by one. The pass with most tokens goes first:
    Unsloth spends a second on checking one against its rows whenever it, or its longest row, is longer than all before. The
    method is TRL's, and Unsloth's replacement returns columns from the longest prompt's end on, so that a part may lack
    columns on the left, which belong to prompts: read in TRL 1.15.0 and unsloth 2026.10.9.
    """
    score, args = trainer._get_per_token_logps_and_entropies, trainer.args

    def in_passes(model, input_ids, attention_mask, *positional, **named):
        def scored(ids, mask, passes):
            args.unsloth_grpo_mini_batch = passes
            return score(model, ids, mask, *positional, **named)[0]

        rows, passes = args.per_device_train_batch_size, args.unsloth_grpo_mini_batch
        batches = list(zip(input_ids.split(rows), attention_mask.split(rows)))
        tokens, parts = [mask.sum().item() for _, mask in batches], [None] * len(batches)
        try:
            for i in sorted(range(len(batches)), key=tokens.__getitem__, reverse=True):
                ids, mask = batches[i]
                try:
                    parts[i] = scored(ids, mask, 1)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    parts[i] = scored(ids, mask, len(ids))
        finally:
            args.unsloth_grpo_mini_batch = passes
        if parts[0] is None:  # Unsloth's loss asks too, only to hear that there are none
            return None, None, None
        width = max(part.shape[1] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (width - part.shape[1], 0)) for part in parts]), None, None

    trainer._get_per_token_logps_and_entropies = in_passes
