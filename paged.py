"""TRL's GRPOTrainer with transformers' continuous batching, whose engine stays from step to step and runs in the main thread.

TRL builds cache and graphs anew at each generation, casts the adapter to 16 bits for good, and takes what is there when the
engine's thread has died. transformers keeps an engine on request, but also the blocks of prompts that an older policy filled.
What is used of it was read in transformers 5.17.0 (generation/continuous_batching) and TRL 1.15.0, and is held by tests.
"""

import torch
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, ContinuousBatchingManager
from trl import GRPOTrainer

import budget


def engine_arguments(config) -> dict:
    """transformers' ContinuousBatchingConfig for a rollout of a train.Config: room for all its sequences at once.

    No prompt's blocks are shared: they would still be those of the policy that filled them when the next one generates.
    A CUDA graph is padded to the next 8 tokens and the next eighth of the cache; by themselves to 64 tokens and all of it.
    """
    blocks = budget.paged_blocks(config)
    return {
        "block_size": budget.PAGED_BLOCK,
        "num_blocks": blocks,
        "max_batch_tokens": max(256, config.rollout_batch),
        "max_requests_per_batch": config.rollout_batch,
        "allow_block_sharing": False,
        "safety_margin": 0.0,  # no request grows beyond the blocks that there are
        "max_memory_percent": 0.9,
        "use_cuda_graph": config.use_cuda_graph,
        "q_padding_interval_size": 8,
        "kv_padding_interval_size": max(256, blocks * budget.PAGED_BLOCK // 8),
    }


class PagedTrainer(GRPOTrainer):
    """Generates with one engine, made at the first rollout; `on_cache` is called with the tensors of its cache then."""

    engine = None

    def on_cache(self, tensors: list[torch.Tensor]) -> None:
        """Keys and values of all layers are there, and stay."""

    def _generate_single_turn(self, prompt_ids, *others, **named):
        """Token ids of a completion for each prompt, and no log-probs (TRL computes its own)."""
        model = self.accelerator.unwrap_model(self.model).get_base_model()
        was_training, attention = model.training, model.config._attn_implementation
        model.eval()
        try:
            if self.engine is None:
                self.engine = make_engine(model, self.generation_config, self.continuous_batching_config)
                cache = self.engine.batch_processor.cache
                self.on_cache([*cache.key_cache, *cache.value_cache])
            self.engine.switch_to_cb_friendly_attn(model)
            return generate(self.engine, prompt_ids), None
        finally:
            model.set_attn_implementation(attention)
            model.train(was_training)


@torch.no_grad()
def make_engine(model, generation_config, arguments) -> ContinuousBatchingManager:
    """An engine with its cache and its first CUDA graph. Raises torch.cuda.OutOfMemoryError where a card has no room for it."""
    engine = ContinuousBatchingManager(model, generation_config, arguments)
    engine.switch_to_cb_friendly_attn(model)
    try:
        with torch.random.fork_rng():  # it seeds all generators anew: a resumed run would leave its own
            engine.warmup()
    except MemoryError as error:  # transformers' word for the card too, which Python's own does not say
        if model.device.type != "cuda":
            raise
        raise torch.cuda.OutOfMemoryError(f"GPU: no room for the cache of continuous batching: {error}") from error
    return engine


@torch.no_grad()
def generate(engine: ContinuousBatchingManager, prompts: list[list[int]]) -> list[list[int]]:
    """Token ids of a completion for each prompt, in their order, from the engine's own loop, run here and not in its thread.

    Raises RuntimeError for an answer that failed or is missing: the engine itself only logs it.
    """
    engine.background_thread_status.clear()
    requests = engine.add_requests(prompts)
    engine.background_thread_status.request_stop(BackgroundThreadStatus.FLUSH_AND_STOP, engine.distributed_helper.global_rank)
    engine._run_generation_loop()
    answers = {}
    while not engine.output_router.output_queue.empty():
        answer = engine.output_router.output_queue.get()
        answers[answer.request_id] = answer
    failed = [answer.error for answer in answers.values() if answer.error]
    if failed or len(answers) < len(requests):
        why = engine.background_thread_status.fatal_error or (failed[0] if failed else "no reason given")
        said = f"continuous batching answered {len(answers) - len(failed)} of {len(requests)} prompts: {why}"
        raise RuntimeError(said) from engine.background_thread_status.fatal_error
    return [answers[request].generated_tokens for request in requests]
