"""The answers to bad input, as tests/messages.txt records them: a command and its line, in turn.

    $ trainer.total_step=5              settings, as :func:`gkd.config.compose.compose` takes them
    $ own: model.path=FILES/none        the same beside own models and data, for ``python -m gkd.main``
    $ node: head --port 0               arguments of ``python -m gkd.cli.launch.node``

To add one, write its command into the file; to renew all lines, run ``python -m tests.messages`` and read the diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from gkd.config import settings
from gkd.config.compose import compose
from gkd.errors import ConfigError

FILE = Path(__file__).with_name("messages.txt")
OWN, NODE = "own: ", "node: "
ROW = '{"question": "1 2 =", "answer": "1 2"}\n'


def entries() -> dict[str, str]:
    """Read the file: lines by command."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    by_command: dict[str, str] = {}
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            assert command not in by_command, f"{FILE.name} has {command} twice"
            by_command[command] = ""
        else:
            assert not by_command[command], f"{FILE.name} has two lines for {command}"
            by_command[command] = line
    return by_command


def overrides(command: str) -> list[str]:
    """Split a command as a shell does; ``\\udcff`` stands for a byte that is no text."""
    return [part.replace("\\udcff", "\udcff") for part in shlex.split(command)]


def names_what_is_wrong(line: str, command: str) -> bool:
    """Whether a line names the option or setting that is wrong, or quotes what it is given."""
    if command.startswith(NODE):
        return any(part in line for part in overrides(command) if part.startswith("--"))
    words = set(re.findall(r"\w+", line))
    for part in overrides(command.removeprefix(OWN)):
        key, _, value = part.lstrip("+").partition("=")
        if part in line or (key and set(key.split(".")) <= words) or (len(value) > 3 and value.strip("[]'") in line):
            return True
    return bool(set(re.findall(r"[\w.]+", line)) & set(settings()))


def refusal(command: str) -> str:
    """What ``compose`` raises for a command, as a ConfigError and nothing else."""
    try:
        compose(overrides(command))
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"accepted: {command}")


def arguments(command: str, files: Path) -> list[str]:
    """What ``gkd.main`` is given for a command beside own models and data."""
    return [*own(files), *(part.replace("FILES", str(files)) for part in overrides(command.removeprefix(OWN)))]


def own(files: Path) -> list[str]:
    """A distillation of own models on own data, to which further settings can be added."""
    return [
        "+recipe=on_policy_distill", f"model.path={files / 'student'}", f"teacher.model.path={files / 'teacher'}",
        f"data.train_files=[{files / 'good.jsonl'}]", f"data.val_files=[{files / 'good.jsonl'}]",
        "data.prompt_key=question", "data.answer_key=answer", "rollout.max_response_length=8",
        f"trainer.output_dir={files / 'new'}",
    ]  # fmt: skip


def make_files(directory: Path) -> Path:
    """Write two tiny models with one tokenizer, others that cannot be used, and data files in every state."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    from gkd.recipes.sort_digits.sorting import make_tokenizer

    tokenizer = make_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    for name in ("student", "teacher", "other"):
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(tokenizer), max_position_embeddings=64))
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    narrow = LlamaForCausalLM(LlamaConfig(**shape | {"hidden_size": 24}, vocab_size=len(tokenizer)))
    narrow.save_pretrained(directory / "narrow")
    tokenizer.save_pretrained(directory / "narrow")
    config = narrow.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    shutil.copytree(directory / "narrow", directory / "quantized")
    (directory / "quantized" / "config.json").write_text(json.dumps(config))
    BertModel(BertConfig(**shape, vocab_size=20)).save_pretrained(directory / "bert")
    tokenizer.save_pretrained(directory / "bert")
    # Another tokenizer: two words have changed places.
    described = json.loads((directory / "other" / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (directory / "other" / "tokenizer.json").write_text(json.dumps(described))
    long = json.dumps({"question": "1 " * 60 + "=", "answer": "1"}) + "\n"
    for name, text in {
        "good": ROW * 3,
        "empty": "",
        "broken": ROW + "{not json\n" + ROW,
        "other_key": '{"text": "1 2 ="}\n',
        "unanswered": ROW + '{"question": "1 =", "answer": null}\n',
        "long": long,
        "some_long": ROW + long,
    }.items():
        (directory / f"{name}.jsonl").write_text(text)
    (directory / "run").mkdir()
    (directory / "run" / "metrics.jsonl").write_text("{}\n")
    return directory


def ending(command: str, files: Path) -> str:
    """Run a program in this process: its last line of errors."""
    from gkd.cli.launch.node import main as node
    from gkd.cli.train import main

    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        node_command = overrides(command.removeprefix(NODE))
        assert (node(node_command) if command.startswith(NODE) else main(arguments(command, files))) == 2
    return errors.getvalue().splitlines()[-1].removeprefix("error: ").replace(str(files), "FILES")


def renew() -> None:
    """Write the lines of all commands anew."""
    text = FILE.read_text()
    parts = [text[: text.index("$ ")]]
    with tempfile.TemporaryDirectory() as directory:
        files = make_files(Path(directory).resolve())
        for command in entries():
            line = ending(command, files) if command.startswith((OWN, NODE)) else refusal(command)
            parts.append(f"$ {command}\n{line}\n\n")
    FILE.write_text("".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    renew()
