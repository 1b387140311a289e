"""Reading rows, and the one line each mistake in a file ends with."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, Image

from gkd.data.reader import read_rows
from gkd.data.row import Row
from gkd.errors import ConfigError
from tests.error_text import contains_in_order

ROWS = [{"q": "one", "n": 1}, {"q": "zwölf", "n": 12}]


def error_of(file: Path | str) -> str:
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
    jsonl(tmp_path, text, "lines.json")
    jsonl(tmp_path, json.dumps(ROWS, indent=1), "list.json")
    jsonl(tmp_path, json.dumps({"version": 1, "data": ROWS}, indent=1), "within.json")
    for name in ("x.jsonl", "x.json-lines", "x.parquet", "saved", "lines.json", "list.json", "within.json"):
        assert [row.values for row in read_rows(str(tmp_path / name))] == ROWS, name


@pytest.mark.parametrize("row", [{"q": "one", "n": 1}, {"messages": [{"role": "user", "content": "a"}]}, {"tests": []}])
def test_a_file_of_one_object_is_a_row(tmp_path: Path, row: dict[str, object]) -> None:
    """As ``datasets`` reads it; messages are no rows."""
    for indent in (None, 1):
        file = jsonl(tmp_path, json.dumps(row, indent=indent), "one.json")
        assert [read.values for read in read_rows(str(file))] == [row]


def test_capitals_and_compressed_files(tmp_path: Path) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    for name in ("X.JSONL", "lines.Json"):
        assert [row.values for row in read_rows(str(jsonl(tmp_path, text, name)))] == ROWS, name
    for name in ("x.jsonl.gz", "x.json.gz", "X.JSONL.GZ"):
        file = jsonl(tmp_path, gzip.compress(text.encode()), name)
        assert [row.values for row in read_rows(str(file))] == ROWS, name
    tabs = jsonl(tmp_path, gzip.compress(b"q\tn\na,b\t1\n"), "X.TSV.GZ")
    assert [(row.values, row.place) for row in read_rows(str(tabs))] == [({"q": "a,b", "n": "1"}, f"{tabs} line 2")]


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b'{"q": 1}\n' * 99)[:-9], gzip.compress(b"")[:10]],
    ids=["another format", "no end", "nothing"],  # the bytes hold the time
)
def test_a_compressed_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    file = jsonl(tmp_path, content, "x.jsonl.gz")
    assert str(file) in error_of(file)


def test_a_pattern_is_its_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, number in (("b2.jsonl", 2), ("a1.jsonl", 1), ("b/c.jsonl", 3), ("no.json", 4)):
        jsonl(tmp_path, json.dumps({"q": number}), name)
    for pattern, numbers in (("*.jsonl", [1, 2]), ("?2.jsonl", [2]), ("**/*.jsonl", [1, 3, 2])):
        assert [row.values["q"] for row in read_rows(f"{tmp_path}/{pattern}")] == numbers, pattern
    jsonl(tmp_path, "", "c3.jsonl")
    assert contains_in_order(error_of(tmp_path / "*.jsonl"), f"{tmp_path}/c3.jsonl", "empty")
    assert f"{tmp_path}/*.csv" in error_of(tmp_path / "*.csv")


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_still_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path, b'\xef\xbb\xbf{"q": 1}\r\n\r\n  \n{"q": 2}')
    assert [(row.values["q"], row.place) for row in read_rows(str(file))] == [
        (1, f"{file} line 1"),
        (2, f"{file} line 4"),
    ]


def test_missing(tmp_path: Path) -> None:
    assert contains_in_order(error_of(tmp_path / "no.jsonl"), f"{tmp_path}/no.jsonl")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty(tmp_path: Path, content: str) -> None:
    file = jsonl(tmp_path, content)
    assert contains_in_order(error_of(file), file, "empty")


def test_a_parquet_file_of_long_texts_is_read_in_small_parts(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a" * 10_000] * 5_000}), file)
    tracemalloc.start()
    try:
        n_rows = sum(1 for _ in read_rows(str(file)))
        assert n_rows == 5_000
        assert tracemalloc.get_traced_memory()[1] < 25_000_000  # of 50 million characters
    finally:
        tracemalloc.stop()


def test_empty_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": pyarrow.array([], pyarrow.string())}), file)
    assert "is empty" in error_of(file)


def test_not_json(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"q": 1}\n\n{"q": 2,}\n')
    assert contains_in_order(error_of(file), f"{file} line 3", "JSON")


def test_nested_too_deep(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "[" * 200_000)
    assert contains_in_order(error_of(file), f"{file} line 1", "JSON")


@pytest.mark.parametrize(
    ("line", "kind"),
    [("[1]", "a list"), ('"x"', "a string"), ("3", "a number"), ("true", "a boolean"), ("null", "null")],
)
def test_not_an_object(tmp_path: Path, line: str, kind: str) -> None:
    file = jsonl(tmp_path, f'{{"q": 1}}\n{line}\n')
    assert contains_in_order(error_of(file), f"{file} line 2", kind)


def test_not_utf8(tmp_path: Path) -> None:
    file = jsonl(tmp_path, b'{"q": 1}\n{"q": "\xff"}\n')
    assert contains_in_order(error_of(file), f"{file} line 2", "UTF-8", "byte 8")


def test_unknown_format(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "q\n1\n", "x.txt")
    assert contains_in_order(error_of(file), file, "format", ".jsonl")


def test_broken_parquet(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "no parquet", "x.parquet")
    assert contains_in_order(error_of(file), file, "Parquet")


@pytest.mark.parametrize("number", [10**18, -(10**18)], ids=["after", "before"])
def test_a_time_that_python_does_not_have(number: int, tmp_path: Path) -> None:
    table = pyarrow.table({"q": ["a", "b"], "at": pyarrow.array([0, number], pyarrow.timestamp("us"))})
    (tmp_path / "shards").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "shards" / "train.parquet")
    Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for name, place in (("shards/train.parquet",) * 2, ("shards", "shards/train.parquet"), ("saved",) * 2):
        assert contains_in_order(error_of(tmp_path / name), f"{tmp_path / place} rows 1 ", "2 ", "value")


def test_files_of_a_directory_may_differ_in_their_columns(tmp_path: Path) -> None:
    """As where all that one has of a column is null; `datasets` takes the types of the first for all."""
    (tmp_path / "shards").mkdir()
    rows: list[dict[str, Any]] = [{"q": "a", "level": None}, {"q": "b", "level": "easy", "x": {"y": 1}}, {"q": "c"}]
    for i, row in enumerate(rows):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "shards" / f"train-{i}.parquet")
    assert [row.values for row in read_rows(str(tmp_path / "shards"))] == rows
    assert [row.values for row in read_rows(f"{tmp_path / 'shards'}:train[1:]")] == rows[1:]


def test_short_floats_are_the_numbers_that_were_written(tmp_path: Path) -> None:
    """3.14 in single precision is 3.140000104904175 in double, which no response states; what is long is left."""
    short, half = pyarrow.float32(), pyarrow.float16()
    table = pyarrow.table(
        {
            "answer": pyarrow.array([3.14, None], short),
            "half": pyarrow.array([0.1, 1e-5], half),
            "several": pyarrow.array([[0.1, 18.9], []], pyarrow.list_(short)),
            "within": pyarrow.array([{"a": 1234.56}, None], pyarrow.struct([("a", short)])),
            "whole": pyarrow.array([123456792.0, 2147483648.0], short),
            "map": pyarrow.array([{"a": 0.5}, None], pyarrow.map_(pyarrow.string(), short)),
            "named": pyarrow.array([3.14, 0.1], short).dictionary_encode(),
            "embedding": pyarrow.array([[0.1] * 100, None], pyarrow.list_(short)),
            "double": pyarrow.array([3.14, 0.1]),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    one, other = (row.values for row in read_rows(str(tmp_path / "x.parquet")))
    assert one.pop("embedding")[0] == pytest.approx(0.1)
    assert [one.pop("whole"), one.pop("map"), one.pop("named")] == [123456792.0, [("a", 0.5)], 3.14]
    assert one == {"answer": 3.14, "half": 0.1, "several": [0.1, 18.9], "within": {"a": 1234.56}, "double": 3.14}
    assert [other["answer"], other["half"], other["several"], other["double"]] == [None, 1e-5, [], 0.1]


@pytest.mark.parametrize("address", ["https://host/train.jsonl", "s3://bucket/a.parquet", "hf://datasets/openai/gsm8k"])
def test_an_address_is_no_name_in_the_cache(address: str) -> None:
    error = error_of(address)
    assert contains_in_order(error, address, "downloaded") and "hf download" not in error


def test_directory_without_data(tmp_path: Path) -> None:
    assert contains_in_order(error_of(tmp_path), tmp_path, "no data")
    (tmp_path / "state.json").write_text("{}")
    assert contains_in_order(error_of(tmp_path), tmp_path, "save_to_disk")


def test_directory_of_several_splits(tmp_path: Path) -> None:
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    assert contains_in_order(error_of(tmp_path / "saved"), "(test, train)", f"{tmp_path}/saved/train")


def test_lacking_key_names_line_setting_nearest_and_what_is_there(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"question": "x", "answer": "y"}\n')
    (row,) = read_rows(str(file))
    with pytest.raises(ConfigError) as caught:
        row.get("questoin", "data.prompt_key")
    parts = (f"{file} line 1", "'questoin'", "(data.prompt_key)", "question?", "question, answer")
    assert contains_in_order(str(caught.value), *parts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": ' + "1" * 5000 + "}", r"line 1 is not JSON: .*digits"),
        ("[" * 100_000, r"line 1 .*JSON.*nested"),
    ],
)
def test_json_that_python_will_not_read(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(str(tmp_path / "a.jsonl")))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="no file"):
        list(read_rows(str(tmp_path / "pipe.jsonl")))


def test_splits_are_named_whatever_their_index_holds(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"several splits \(train\)"):
        list(read_rows(str(tmp_path)))


def test_csv_keeps_text_and_counts_lines(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '\ufeffq,n\n"one, ""1""\nand more",007\n\nzwölf,\n', "x.csv")
    assert [(row.values, row.place) for row in read_rows(str(file))] == [
        ({"q": 'one, "1"\nand more', "n": "007"}, f"{file} line 3"),
        ({"q": "zwölf", "n": ""}, f"{file} line 5"),
    ]
    tabs = jsonl(tmp_path, "q\tn\na,b\t1\n", "x.tsv")
    assert [row.values for row in read_rows(str(tabs))] == [{"q": "a,b", "n": "1"}]
    returns = jsonl(tmp_path, "q,n\ra,1\r", "y.csv")
    assert [row.values for row in read_rows(str(returns))] == [{"q": "a", "n": "1"}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", "q,n\n1,2,3\n", ("x.csv line 2", "3", "header 2")),
        ("x.csv", "q,q\n1,2\n", ("x.csv", "header", "'q'", "twice")),
        ("x.csv", 'q\n"a" b\n', ("x.csv line 2", "CSV")),
        ("x.csv", b"q\n" + 9999 * b"1\n" + b"2\xff\n", ("x.csv line 10001", "UTF-8", "byte 2")),
        ("x.csv", b"q,n\r1,2\r12\xff,3\r", ("x.csv line 3", "UTF-8", "byte 3")),
        ("x.csv", b"q,n\r\n1,2\r\n\xff,3\r\n", ("x.csv line 3", "UTF-8", "byte 1")),
        ("x.csv", "q\n", ("x.csv", "empty")),
        ("x.json", "[1]", ("x.json row 1", "a number")),
        ("x.json", '[\n{"a": 1},\n]', ("x.json", "JSON", "line ")),
        ("x.json", '{"a": 1}\n{"a": 2', ("x.json line 2", "JSON")),
        ("x.json", "3", ("x.json", "list", "a number")),
        ("x.json", " ", ("x.json", "empty")),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, name: str, content: str | bytes, words: tuple[str, ...]
) -> None:
    assert contains_in_order(error_of(jsonl(tmp_path, content, name)), *words)


def test_rows_come_as_they_are_read(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"q": 1}\nbroken\n')
    rows = read_rows(str(file))
    assert next(rows).values == {"q": 1}
    with pytest.raises(ConfigError, match="line 2"):
        next(rows)


def test_nested_columns(tmp_path: Path) -> None:
    row = Row({"reward_model": {"ground_truth": "42", "style": "rule"}, "a.b": 1, "a": {"b": 2}, "l": [{"c": 3}]}, "x")
    assert row.get("reward_model.ground_truth", "data.answer_key") == "42"
    assert (row.get("a.b", ""), row.get("l.0.c", ""), row.find("l.1.c"), row.find("a.c")) == (1, 3, None, None)
    with pytest.raises(ConfigError) as caught:
        row.get("reward_model.ground_thruth", "data.answer_key")
    keys = "reward_model.ground_truth, reward_model.style, a.b, l"
    parts = ("x ", "'reward_model.ground_thruth'", "(data.answer_key)", "reward_model.ground_truth?", keys)
    assert contains_in_order(str(caught.value), *parts)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with the data set someone/sums: subsets main, with two splits, and more, with one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    entry = tmp_path / "hub" / "datasets--someone--sums"
    snapshot = entry / "snapshots" / "abc"
    parts = {"main": ("train", "test"), "more": ("train",)}
    index = ""
    for subset, splits in parts.items():
        (snapshot / subset).mkdir(parents=True)
        index += f"- config_name: {subset}\n  data_files:\n"
        for split in splits:
            rows = pyarrow.Table.from_pylist([{"q": f"{subset} {split} {i}", "l": [i]} for i in range(3)])
            pyarrow.parquet.write_table(rows, snapshot / subset / f"{split}.parquet")
            index += f"  - split: {split}\n    path: {subset}/{split}.parquet\n"
    (snapshot / "README.md").write_text(f"---\nconfigs:\n{index}---\n")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("abc")
    return snapshot


def test_a_cache_that_cannot_be_written_is_answered_with_the_variable_that_names_another(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below a shared ``HF_HOME`` that is read-only: ``datasets`` writes there even where it has to make nothing."""
    (file := cached / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", file / "arrow")
    with pytest.raises(ConfigError) as caught:
        list(read_rows("someone/sums:more:train"))
    assert contains_in_order(str(caught.value), "someone/sums", file / "arrow", "HF_DATASETS_CACHE")


def test_names_in_the_local_cache(cached: Path) -> None:
    for source in ("someone/sums", str(cached)):
        assert next(read_rows(f"{source}:main:test")).values == {"q": "main test 0", "l": [0]}
        assert [row.values["q"] for row in read_rows(f"{source}:main:train[1:]")] == ["main train 1", "main train 2"]
        assert next(read_rows(f"{source}:more")).values["q"] == "more train 0"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("", ("someone/sums", "subsets (main, more)", ":main:train")),
        (":main", ("someone/sums", "splits (train, test)", ":main:train")),
        (":mian:train", ("someone/sums", "subset 'mian'", "main, more")),
        (":main:dev", ("someone/sums", "dev", "['train', 'test']")),
    ],
)
def test_parts_that_a_name_does_not_have(cached: Path, part: str, words: tuple[str, ...]) -> None:
    assert contains_in_order(error_of(Path(f"someone/sums{part}")), *words)


def test_a_name_that_is_not_in_the_cache(cached: Path) -> None:
    error = error_of(Path("someone/none:train"))
    assert contains_in_order(error, "someone/none:train", "hf download --repo-type dataset someone/none")


TEXTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "jsonl": (
        '{"q": "a", "answer": "2020-01-02"}\n{"q": "b", "n": 7}\n',
        [{"q": "a", "answer": "2020-01-02"}, {"q": "b", "n": 7}],
    ),
    "json": ('[{"q": "12:30:00"}, {"q": null}]', [{"q": "12:30:00"}, {"q": None}]),
    "csv": ("q,n\n007,1.50\nNA,\n", [{"q": "007", "n": "1.50"}, {"q": "NA", "n": ""}]),
    "tsv": ("q\tn\n1,5\t2\n\tnull\n", [{"q": "1,5", "n": "2"}, {"q": "", "n": "null"}]),
}


@pytest.mark.parametrize("form", TEXTS)
def test_text_in_a_directory_stays_text(cached: Path, form: str) -> None:
    """The ``datasets`` library infers types of it: 2020-01-02 is midnight, 007 is 7, NA is nothing."""
    text, rows = TEXTS[form]
    blob = cached.parent.parent / "blobs" / "0a1b"
    blob.parent.mkdir()
    blob.write_text(text)
    for index in (cached / "README.md", *cached.rglob("*.parquet")):
        index.unlink()
    (cached / "main" / f"train.{form}").symlink_to(blob)  # as the cache has its files
    (cached / "more" / f"test.{form}.gz").write_bytes(gzip.compress(text.encode()))
    for source in ("someone/sums", str(cached)):
        for part in ("train", "test"):
            assert [row.values for row in read_rows(f"{source}:{part}")] == rows, (source, part)
        for part in ("default:train[1:]+test[:50%]", "train[1:]+test[:50%]"):  # a slice has a colon of its own
            assert [row.values for row in read_rows(f"{source}:{part}")] == [rows[1], rows[0]]
        assert [row.values for row in read_rows(f"{source}:all")] == rows * 2
        assert contains_in_order(error_of(f"{source}:dev"), "dev", "['train', 'test']")
    place = next(read_rows(f"{cached}:train")).place
    assert place == next(read_rows(f"{cached}/main/train.{form}")).place


def test_an_index_may_state_how_text_is_read(cached: Path) -> None:
    """Its subsets are read alike where it states no more than their files."""
    subsets = {"plain": "", "lines": "  skiprows: 1\n", "marks": "  sep: ;\n", "tabs": "  sep: ','\n"}
    index = ""
    for subset, options in subsets.items():
        name = f"{subset}.tsv" if subset == "tabs" else f"{subset}.csv"
        (cached / name).write_text({"lines": "x,y\nq,n\n007,1\n", "marks": "q;n\n007;1\n"}.get(subset, "q,n\n007,1\n"))
        index += f"- config_name: {subset}\n  data_files: {name}\n{options}"
    (cached / "README.md").write_text(f"---\nconfigs:\n{index}---\n")
    assert [row.values for row in read_rows(f"{cached}:plain")] == [{"q": "007", "n": "1"}]
    for subset in ("lines", "marks", "tabs"):
        assert [row.values for row in read_rows(f"{cached}:{subset}")] == [{"q": 7, "n": 1}], subset


def test_what_is_wrong_in_a_file_of_a_directory_is_named(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '{"q": 1}\n{"q": 2,}\n', "train.jsonl")
    assert contains_in_order(error_of(tmp_path), f"{file} line 2", "JSON")


def test_a_split_of_a_saved_directory(tmp_path: Path) -> None:
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    assert [row.values for row in read_rows(f"{tmp_path}/saved:test")] == ROWS


def test_a_split_that_one_saved_data_set_does_not_have(tmp_path: Path) -> None:
    """It was all of the data set, so that a run was trained on what it is validated on."""
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert contains_in_order(error_of(f"{tmp_path}/saved:test"), f"{tmp_path}/saved", "'test'")
    Dataset.from_list(ROWS, split="test").save_to_disk(str(tmp_path / "named"))
    assert [row.values for row in read_rows(f"{tmp_path}/named:test")] == ROWS


def test_pictures_are_not_decoded(tmp_path: Path) -> None:
    table = Dataset.from_dict({"q": ["a"], "image": [{"bytes": b"no picture", "path": None}]})
    table.cast_column("image", Image()).save_to_disk(str(tmp_path / "saved"))
    (row,) = read_rows(str(tmp_path / "saved"))
    assert row.values["image"] == {"bytes": b"no picture", "path": None}


def test_columns_of_json_are_what_they_stand_for(tmp_path: Path) -> None:
    """As `datasets` stores those of several types: a text was read with its quotation marks."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Largest of 3, 8?"}], "answer": 8},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1/2?"}]}], "answer": "a 1/2"},
        {"messages": [{"role": "user", "content": "?"}], "answer": None},
    ]
    kept = pyarrow.json_(pyarrow.string())
    message = pyarrow.struct([("role", pyarrow.string()), ("content", kept)])
    texts = [[{"role": m["role"], "content": json.dumps(m["content"])} for m in row["messages"]] for row in rows]
    answers = [None if row["answer"] is None else json.dumps(row["answer"]) for row in rows]
    schema = pyarrow.schema([("messages", pyarrow.list_(message)), ("answer", kept)])
    storage = pyarrow.table(
        {
            "messages": pyarrow.array(
                texts, pyarrow.list_(pyarrow.struct([("role", "string"), ("content", "string")]))
            ),
            "answer": pyarrow.array(answers, pyarrow.string()),
        }
    )
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(storage.cast(schema), file)
    assert pyarrow.parquet.read_schema(file).field("answer").type == kept
    assert [row.values for row in read_rows(str(file))] == rows
