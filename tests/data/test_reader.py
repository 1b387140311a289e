"""Reading rows, and the one line each mistake in a file ends with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from gkd.data.reader import read_rows
from gkd.errors import ConfigError

ROWS = [{"q": "one", "n": 1}, {"q": "zwölf", "n": 12}]


def error_of(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_rows(str(file)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def jsonl(tmp_path: Path, content: str | bytes, name: str = "x.jsonl") -> Path:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    jsonl(tmp_path, text)
    jsonl(tmp_path, text, "x.json-lines")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    for name in ("x.jsonl", "x.json-lines", "x.parquet", "saved"):
        assert [row.values for row in read_rows(str(tmp_path / name))] == ROWS, name


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_still_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path, b'\xef\xbb\xbf{"q": 1}\r\n\r\n  \n{"q": 2}')
    assert [(row.values["q"], row.place) for row in read_rows(str(file))] == [
        (1, f"{file} line 1"),
        (2, f"{file} line 4"),
    ]


def test_missing(tmp_path: Path) -> None:
    assert error_of(tmp_path / "no.jsonl") == f"data file {tmp_path}/no.jsonl does not exist"


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty(tmp_path: Path, content: str) -> None:
    file = jsonl(tmp_path, content)
    assert error_of(file) == f"data file {file} is empty: it has no rows"


def test_empty_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": pyarrow.array([], pyarrow.string())}), file)
    assert "is empty" in error_of(file)


def test_not_json(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"q": 1}\n\n{"q": 2,}\n')
    assert error_of(file).startswith(f"{file} line 3 is not JSON: ")


def test_nested_too_deep(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "[" * 200_000)
    assert error_of(file).startswith(f"{file} line 1 is not JSON: ")


@pytest.mark.parametrize(
    ("line", "kind"),
    [("[1]", "a list"), ('"x"', "a string"), ("3", "a number"), ("true", "a boolean"), ("null", "null")],
)
def test_not_an_object(tmp_path: Path, line: str, kind: str) -> None:
    file = jsonl(tmp_path, f'{{"q": 1}}\n{line}\n')
    assert error_of(file) == f"{file} line 2 is not a JSON object but {kind}"


def test_not_utf8(tmp_path: Path) -> None:
    file = jsonl(tmp_path, b'{"q": 1}\n{"q": "\xff"}\n')
    assert error_of(file) == f"{file} line 2 is not valid UTF-8: invalid start byte at byte 8"


def test_unknown_format(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "q\n1\n", "x.csv")
    assert error_of(file).startswith(f"data file {file} is of an unknown format: expected .jsonl")


def test_broken_parquet(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "no parquet", "x.parquet")
    assert error_of(file).startswith(f"data file {file} is not a readable Parquet file: ")


def test_directory_of_something_else(tmp_path: Path) -> None:
    assert error_of(tmp_path).startswith(f"data directory {tmp_path} was not written by datasets' save_to_disk: ")


def test_directory_of_several_splits(tmp_path: Path) -> None:
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    assert error_of(tmp_path / "saved").endswith(f"(test, train): name one, such as {tmp_path}/saved/train")


def test_lacking_key_names_line_setting_nearest_and_what_is_there(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"question": "x", "answer": "y"}\n')
    (row,) = read_rows(str(file))
    with pytest.raises(ConfigError) as caught:
        row.get("questoin", "data.prompt_key")
    assert str(caught.value) == (
        f"{file} line 1 has no key 'questoin' (data.prompt_key) (did you mean question?); "
        "the keys there are: question, answer"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": ' + "1" * 5000 + "}", r"line 1 is not JSON: .*digits"),
        ("[" * 100_000, r"line 1 is not JSON: nested too deep"),
    ],
)
def test_json_that_python_will_not_read(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(str(tmp_path / "a.jsonl")))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="is no file"):
        list(read_rows(str(tmp_path / "pipe.jsonl")))


def test_splits_are_named_whatever_their_index_holds(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"several splits \(train\)"):
        list(read_rows(str(tmp_path)))
