"""Model directories: found, checked, and their tokenizers compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gkd.data.model_info import ModelInfo
from gkd.data.tokenizer import (
    check_causal_lm,
    check_same_tokenizer,
    check_student,
    load_tokenizer,
    read_tokenizer,
    resolve_model,
    tokenizer_hash,
)
from gkd.errors import ConfigError
from tests.data.models import WORDS, save_model, word_tokenizer
from tests.error_text import contains_in_order


@pytest.fixture(scope="session")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "good")


@pytest.fixture
def model(good_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_model, tmp_path / "model"))


def edit_config(model: Path, file: str = "config.json", **changes: object) -> None:
    config = json.loads((model / file).read_text()) | changes
    (model / file).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def complaint(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_causal_lm(str(path), "teacher.model.path")
    message = str(caught.value)
    assert message.startswith(f"teacher.model.path={path}: ")
    assert "\n" not in message
    return message.removeprefix(f"teacher.model.path={path}: ")


def test_a_good_model_is_given_as_an_absolute_directory(good_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good_model.parent)
    assert check_causal_lm("good", "model.path") == str(good_model)
    assert resolve_model(str(good_model)) == str(good_model)


def test_a_checkpoint_and_an_adapter_are_named_with_what_makes_models_of_them(tmp_path: Path) -> None:
    for directory, file in (("run/checkpoints/step_7", "state.json"), ("peft", "adapter_config.json")):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / file).write_text("{}")
    assert f"gkd export {tmp_path / 'run'} --step 7 " in complaint(tmp_path / "run" / "checkpoints" / "step_7")
    assert "merge_and_unload" in complaint(tmp_path / "peft")


@pytest.mark.parametrize("path", ["no/such", "/no/such/directory", "nobody/no-such-model", "a b"])
def test_no_directory_and_not_cached(path: str) -> None:
    could_be_had = path in {"no/such", "nobody/no-such-model"}
    assert contains_in_order(complaint(path), f"hf download {path}") == could_be_had


def test_a_cached_hub_name_resolves_without_a_network(
    good_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(good_model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert check_causal_lm("org/tiny", "model.path") == str(snapshot)


def test_a_file(good_model: Path) -> None:
    assert contains_in_order(complaint(good_model / "config.json"), "file", "directory")


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert contains_in_order(complaint(model), "config.json")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_config(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    assert "its config.json is not" in complaint(model)


def test_no_causal_language_model(model: Path) -> None:
    edit_config(model, architectures=["BertForMaskedLM"], model_type="bert")
    assert contains_in_order(complaint(model), "BertForMaskedLM")
    edit_config(model, architectures=None, model_type="vit")
    assert contains_in_order(complaint(model), "model_type 'vit'")


def test_other_names_of_causal_language_models(model: Path) -> None:
    edit_config(model, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    assert check_causal_lm(str(model), "model.path") == str(model)
    edit_config(model, architectures=None, model_type="llama")
    assert check_causal_lm(str(model), "model.path") == str(model)


def test_weights_that_are_stored_quantized_are_not_trained(model: Path) -> None:
    edit_config(model, quantization_config=None)
    assert check_student(str(model), "model.path") == str(model)
    edit_config(model, quantization_config={"quant_method": "mxfp4"})
    assert check_causal_lm(str(model), "teacher.model.path") == str(model)
    with pytest.raises(ConfigError, match=r"^model\.path=.* \(mxfp4\)"):
        check_student(str(model), "model.path")


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert contains_in_order(complaint(model), "safetensors")


def test_a_missing_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert contains_in_order(complaint(model), "model-2.safetensors")


@pytest.mark.parametrize(
    "index", [{"weight_map": ["model.safetensors"]}, {"weight_map": {"a": 1}}, {"weight_map": {}}, {"metadata": {}}]
)
def test_an_index_that_is_none(model: Path, index: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert contains_in_order(complaint(model), "model.safetensors.index.json", "weight_map")


def test_an_index_to_files_elsewhere(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert contains_in_order(complaint(model), "../../etc/passwd")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"eos_token_id": "<eos>"}),
        ("config.json", {"eos_token_id": [1, "x"]}),
        ("config.json", {"eos_token_id": True}),
        ("config.json", {"eos_token_id": 1.5}),
        ("config.json", {"eos_token_id": {"a": 1}}),
        ("config.json", {"vocab_size": "many"}),
        ("config.json", {"vocab_size": 0}),
        ("config.json", {"max_position_embeddings": "long"}),
        ("config.json", {"max_position_embeddings": [1]}),
        ("config.json", {"hidden_size": "wide"}),
        ("config.json", {"rope_parameters": 5}),
        ("config.json", {"model_type": 5}),
        ("config.json", {"text_config": 5}),
        ("generation_config.json", {"eos_token_id": "<eos>"}),
    ],
)
def test_odd_values_in_a_models_settings_are_one_line(model: Path, file: str, changes: dict[str, object]) -> None:
    edit_config(model, file, **changes)
    with pytest.raises(ConfigError, match=r"^model\.path=.*") as caught:
        check_causal_lm(str(model), "model.path")
        ModelInfo.read(str(model), "model.path", load_tokenizer(str(model)))
    assert "\n" not in str(caught.value)
    (key,) = changes
    assert key in str(caught.value) or "no model" in str(caught.value)


OWN_CODE = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}}


def test_a_model_with_code_of_its_own_is_refused_and_nobody_is_asked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    edit_config(model, model_type="own", architectures=["OwnForCausalLM"], **OWN_CODE)
    for file in ("configuration_own.py", "modeling_own.py"):
        (model / file).write_text("raise SystemExit('it ran')")
    assert contains_in_order(complaint(model), "auto_map", "config.json")
    with pytest.raises(ConfigError, match=r"^model\.path="):
        ModelInfo.read(str(model), "model.path")


def test_code_beside_a_model_that_transformers_has_is_left_alone(model: Path) -> None:
    edit_config(model, **OWN_CODE)
    assert check_causal_lm(str(model), "model.path") == str(model)
    assert ModelInfo.read(str(model), "model.path").vocabulary == len(WORDS)


def test_a_tokenizer_with_code_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    edit_config(model, "tokenizer_config.json", **changes)
    (model / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"^model\.path=.*: .*\bcode\b"):
        check_causal_lm(str(model), "model.path")
        load_tokenizer(str(model))


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert contains_in_order(complaint(model), "no tokenizer")


def test_a_broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model\.path=.*: .*tokenizer.*: .+"):
        load_tokenizer(str(model))


def test_padded_vocabularies_are_the_same_tokenizer(good_model: Path, tmp_path: Path) -> None:
    padded = save_model(tmp_path / "padded", vocab_size=len(WORDS) + 64)
    assert tokenizer_hash(str(padded)) == tokenizer_hash(word_tokenizer())
    check_same_tokenizer(str(good_model), str(padded))


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ((*WORDS[:6], "x", "c", "d"), ("id 6", "'b'", "student", "'x'", "teacher")),
        ((*WORDS, "e"), ("id 9", "'e'", "teacher")),
        (WORDS[:-1], ("id 8", "'d'", "student")),
        ((*WORDS[:7], "d", "c"), ("id 7", "'c'", "student", "'d'", "teacher")),  # the same words, of other ids
    ],
)
def test_different_tokenizers(
    good_model: Path, tmp_path: Path, words: tuple[str, ...], difference: tuple[str, ...]
) -> None:
    other = tmp_path / "other"
    word_tokenizer(words).save_pretrained(other)
    assert tokenizer_hash(str(other)) != tokenizer_hash(str(good_model))
    with pytest.raises(ConfigError) as caught:
        check_same_tokenizer(str(good_model), str(other))
    assert contains_in_order(str(caught.value), f"model.path={good_model}", f"teacher.model.path={other}", *difference)


def test_another_end_token_is_no_difference(good_model: Path, tmp_path: Path) -> None:
    """As between a base model and its chat model: every id means the same."""
    word_tokenizer(WORDS, "d").save_pretrained(tmp_path / "chat")
    check_same_tokenizer(str(good_model), str(tmp_path / "chat"))


@pytest.mark.parametrize("kept", [0, 20, -1])
def test_broken_weights(kept: int, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert complaint(model).startswith("model.safetensors ")


def test_broken_generation_settings(model: Path) -> None:
    (model / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        ModelInfo.read(str(model), "model.path")


def test_texts_are_split_and_joined_as_the_file_states(model: Path) -> None:
    """As of DeepSeek-R1-Distill-Llama, whose class would make of its vocabulary a tokenizer that drops all spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stated = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<s>", "</s>", *alphabet])}, []))
    stated.pre_tokenizer, stated.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    stated.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": "x"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    text = "What is 2 + 2?\nThink."
    for path in (model, model / "written"):
        tokenizer = read_tokenizer(str(path))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == stated.encode(text).ids and tokenizer.decode(ids) == text
        assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", "x")
        tokenizer.save_pretrained(model / "written")


def test_mistrals_own_format_beside_a_tokenizer_changes_nothing(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template="x")
    model = save_model(tmp_path / "model", tokenizer=tokenizer)
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**stated, "model_type": "mistral"}))
    (model / "tekken.json").write_text("{}")
    read = read_tokenizer(str(model))
    assert read.get_vocab() == tokenizer.get_vocab() and read.chat_template == "x"
