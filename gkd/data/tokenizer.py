"""Model directories and their tokenizers: found locally, checked before anything is started.

Nothing here reaches a network: a name that is no directory is looked up in the local Hugging Face cache only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gkd.config import user_path
from gkd.data.hub import looks_like_a_name
from gkd.errors import ConfigError, one_line

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def resolve_model(path: str, setting: str = "model.path") -> str:
    """Return absolute directory of a model given as a directory or as a hub name in the local cache.

    Raises ConfigError, naming ``setting``, when it is neither.
    """
    directory = user_path(path)
    if directory.is_dir():
        return str(directory.resolve())
    if directory.exists():
        raise ConfigError(f"{setting}={path}: is a file, not a directory with a model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ConfigError(
            f"{setting}={path}: no such directory, and no model of that name in the local Hugging Face cache"
            + (f"; this gets it: hf download {path}" if looks_like_a_name(path) else "")
        ) from None


def check_causal_lm(path: str, setting: str) -> str:
    """Return directory of the causal language model at ``path`` (see :func:`resolve_model`).

    Raises ConfigError, naming ``setting`` and ``path``, when there is no model, it is no causal language model, its
    weights are not safetensors or not all there, or it has no tokenizer.
    """
    directory, config = _read_config(path, setting, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if not _is_causal_lm(config):
        raise ConfigError(f"{setting}={path}: is no causal language model but {_architecture(config)}")
    return _check_files(directory, f"{setting}={path}")


def check_student(path: str, setting: str) -> str:
    """Do as :func:`check_causal_lm`. Raises ConfigError also for weights that are stored quantized.

    These are no numbers that an optimizer could step; transformers reads them as such on some machines, and engines
    would keep what the files have.
    """
    directory = check_causal_lm(path, setting)
    config = read_json(Path(directory, "config.json"), f"{setting}={path}")
    if isinstance(stored := config.get("quantization_config"), dict):
        raise ConfigError(
            f"{setting}={path}: its weights are stored quantized ({stored.get('quant_method')}), and such are not "
            "trained; a copy in bfloat16 would do (transformers: dequantize, save_pretrained)"
        )
    return directory


def check_model(path: str, setting: str) -> str:
    """Return the directory of the model at ``path``, of whatever kind; other errors as in check_causal_lm."""
    directory, _ = _read_config(path, setting, "CONFIG_MAPPING_NAMES")
    return _check_files(directory, f"{setting}={path}")


def check_reward_model(path: str, setting: str) -> str:
    """Return the directory of the classification model with one output at ``path``; errors as in check_causal_lm."""
    directory, config = _read_config(path, setting, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")
    if not any(str(a).endswith("ForSequenceClassification") for a in config.get("architectures") or []):
        raise ConfigError(f"{setting}={path}: is no sequence classification model but {_architecture(config)}")
    if (outputs := len(config.get("id2label") or (0, 1))) != 1:
        raise ConfigError(f"{setting}={path}: has {outputs} outputs; a reward model has one")
    return _check_files(directory, f"{setting}={path}")


def _read_config(path: str, setting: str, mapping: str) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the model at ``path`` and its config.json; ``mapping`` as in _require_no_code."""
    directory = Path(resolve_model(path, setting))
    config = read_json(directory / "config.json", f"{setting}={path}")
    _require_no_code(config, f"{setting}={path}", mapping)
    return directory, config


def _architecture(config: dict[str, Any]) -> str:
    return ", ".join(config.get("architectures") or []) or f"model_type {config.get('model_type')!r}"


def _check_files(directory: Path, name: str) -> str:
    """Return the directory. Raises ConfigError where weights or tokenizer are not all there."""
    _check_weights(directory, name)
    if not any((directory / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(f"{name}: has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...)")
    return str(directory)


def _remedy(directory: Path) -> str:
    """Return what makes a model of a checkpoint or an adapter, which others load as models; empty for anything else."""
    if (directory / "state.json").exists():
        step = directory.name.removeprefix("step_")
        return f", but a checkpoint: gkd export {directory.parent.parent} --step {step} OUT makes one of it"
    if (directory / "adapter_config.json").exists():
        return ", but an adapter alone: merged into its model (peft's merge_and_unload) it is one"
    return ""


def read_json(file: Path, name: str) -> dict[str, Any]:
    """Read a file of a model's directory. Raises ConfigError where it is missing, or holds no object."""
    if not file.exists():
        raise ConfigError(f"{name}: has no {file.name}, so it is no Hugging Face model directory{_remedy(file.parent)}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{name}: its {file.name} is not JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: its {file.name} is not a JSON object")
    return content


def _require_no_code(config: dict[str, Any], name: str, mapping: str) -> None:
    """Raise ConfigError for a model that only code beside it can load; transformers would ask on the terminal.

    ``mapping`` names what transformers' own models of the kind are listed in.
    """
    if not config.get("auto_map"):
        return
    from transformers.models.auto import modeling_auto

    if config.get("model_type") not in getattr(modeling_auto, mapping):
        raise ConfigError(
            f"{name}: comes with code of its own (auto_map in config.json), which is not run here; a model of a type "
            "that transformers has would work"
        )


def _is_causal_lm(config: dict[str, Any]) -> bool:
    architectures = [str(a) for a in config.get("architectures") or []]
    if any(a.endswith("ForCausalLM") for a in architectures):
        return True
    # Old names such as GPT2LMHeadModel. Checked last: the import loads torch.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    if architectures:
        return bool(set(architectures) & set(CAUSAL_LM.values()))
    return config.get("model_type") in CAUSAL_LM


def _check_weights(directory: Path, name: str) -> None:
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.exists():
        weight_map = read_json(index, name).get("weight_map")
        if not (isinstance(weight_map, dict) and weight_map and all(isinstance(f, str) for f in weight_map.values())):
            raise ConfigError(f"{name}: its {index.name} has no weight_map from names of weights to files")
        present = {file.name for file in files}
        lacking = sorted(set(weight_map.values()) - present)
        if lacking:
            raise ConfigError(f"{name}: its index names {lacking[0]}, which is not there")
    elif not files:
        raise ConfigError(f"{name}: has no safetensors weights")
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, "numpy"):  # reads the header, which states how long the file is
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{name}: {file.name} cannot be read: {one_line(error)}") from None


def read_tokenizer(directory: str) -> Any:
    """Return the tokenizer in a directory, which splits and joins texts as its ``tokenizer.json`` states.

    Classes of transformers, such as LlamaTokenizer, make a tokenizer anew from that file's vocabulary alone, with a way
    of their own to split: DeepSeek-R1-Distill-Llama's would lose all spaces. Raises what transformers does.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Mistral's own reader, of a tekken.json beside it, has no chat template and is not written as a tokenizer.json.
    only = {"local_files_only": True, "trust_remote_code": False, "mistral_format": False}
    tokenizer = AutoTokenizer.from_pretrained(directory, **only)
    file, backend = Path(directory, "tokenizer.json"), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file():
        return tokenizer
    stated = json.loads(file.read_text(encoding="utf-8"))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        made = getattr(backend, part)
        if stated.get(part) != (None if made is None else json.loads(made.__getstate__())):
            return PreTrainedTokenizerFast.from_pretrained(directory, **only)
    return tokenizer


def load_tokenizer(path: str, setting: str = "model.path") -> Any:
    """Return the tokenizer of the model at ``path``, a transformers tokenizer.

    Raises ConfigError, naming ``setting``, when there is none or it cannot be read.
    """
    directory = resolve_model(path, setting)
    try:
        return read_tokenizer(directory)
    # transformers raises whatever its readers meet: OSError, ValueError, KeyError, tokenizers' bare Exception.
    except Exception as error:
        reason = one_line(error)
        if "trust_remote_code" in str(error):  # without the argument it would ask on the terminal
            raise ConfigError(
                f"{setting}={path}: its tokenizer comes with code of its own (auto_map in tokenizer_config.json), "
                "which is not run here"
            ) from None
        raise ConfigError(f"{setting}={path}: its tokenizer cannot be loaded: {reason}") from None


def tokenizer_hash(tokenizer: Any) -> str:
    """Return SHA-256 (hex) over what ids mean: the token-to-id map.

    ``tokenizer`` is a transformers tokenizer or the path of a model. Rows that a model's embedding has beyond the
    vocabulary do not count: 151,936 and 152,064 rows with the same tokens are the same tokenizer.
    """
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    # Not which token ends a text: a base model and its chat model often differ there alone, and score each other well.
    meaning = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def check_same_tokenizer(student_path: str, teacher_path: str, setting: str = "teacher.model.path") -> None:
    """Raise ConfigError, naming both models and the first token that differs, unless their ids mean the same.

    ``setting`` is what the other model was named by.
    """
    student = load_tokenizer(student_path, "model.path")
    teacher = load_tokenizer(teacher_path, setting)
    if tokenizer_hash(student) != tokenizer_hash(teacher):
        raise ConfigError(
            f"the tokenizers of model.path={student_path} and {setting}={teacher_path} differ: "
            f"{_describe_first_difference(student, teacher)}"
        )


def _describe_first_difference(student: Any, teacher: Any) -> str:
    student_tokens = sorted((index, token) for token, index in student.get_vocab().items())
    teacher_tokens = sorted((index, token) for token, index in teacher.get_vocab().items())
    for (our_id, ours_token), (their_id, their_token) in zip(student_tokens, teacher_tokens, strict=False):
        if (our_id, ours_token) != (their_id, their_token):
            if our_id == their_id:
                return f"id {our_id} is {ours_token!r} in the student, {their_token!r} in the teacher"
            lacking = "teacher" if our_id < their_id else "student"
            return f"id {min(our_id, their_id)} is only used by one of them, the {lacking} lacks it"
    if len(student_tokens) != len(teacher_tokens):
        longer, name = (
            (student_tokens, "student") if len(student_tokens) > len(teacher_tokens) else (teacher_tokens, "teacher")
        )
        index, token = longer[min(len(student_tokens), len(teacher_tokens))]
        return f"id {index}, {token!r}, is only in the {name}"
    raise AssertionError("tokenizers with different hashes differ in a token")
