"""Columns of Hugging Face datasets as lines: from disk and from files, without the network, a part at a time."""

import json

import pytest

from rectiformer.cli.translating import hash_lines
from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.text.lines import DATASET_ROWS, read_lines
from rectiformer.text.prepared import Prepared, prepare

datasets = pytest.importorskip("datasets", exc_type=ImportError)

PAIRS = [(f"der Hund {n}", f"the dog {n}") for n in range(DATASET_ROWS + 7)] + [
    ("zwei\nZeilen\u2028", "two lines"),
    (None, "x"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows saved to disk, with and without splits, and as parquet and JSON."""
    folder = tmp_path_factory.mktemp("datasets")
    table = datasets.Dataset.from_dict(
        {"translation": [{"de": de, "en": en} for de, en in PAIRS], "id": range(len(PAIRS))}
    )
    table.save_to_disk(folder / "plain")
    datasets.DatasetDict({"train": table, "valid": table.select(range(9))}).save_to_disk(folder / "splits")
    table.to_parquet(folder / "rows.parquet")
    rows = [json.dumps({"translation": {"de": de, "en": en}, "id": n}) for n, (de, en) in enumerate(PAIRS)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("name", ["plain", "splits", "rows.parquet", "rows.jsonl"])
def test_cells_are_lines(folder, name):
    found = list(read_lines(f"hf:{folder / name}?column=translation.de"))
    assert found == [(de or "").replace("\n", " ") for de, _ in PAIRS]


def test_columns_of_a_csv_file_are_lines_too(tmp_path):
    (tmp_path / "rows.csv").write_text('de,en\n"Hund, alt",dog\nHaus,house\n')
    assert list(read_lines(f"hf:{tmp_path / 'rows.csv'}?column=de")) == ["Hund, alt", "Haus"]


def test_ranks_that_translate_a_dataset_know_it_again(tmp_path):
    (tmp_path / "rows.csv").write_text("de,en\nHund,dog\nHaus,house\n")
    (tmp_path / "de").write_text("Hund\nHaus\n")
    names = [str(tmp_path / "de"), *(f"hf:{tmp_path / 'rows.csv'}?column={column}" for column in ("de", "en"))]
    plain, same, other = (hash_lines(name, "error") for name in names)
    assert plain == same != other


def test_a_split_can_be_named(folder):
    assert len(list(read_lines(f"hf:{folder / 'splits'}?column=translation.en&split=valid"))) == 9


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("plain", ConfigError, "names no column; write hf:.*plain.column=NAME"),
        ("plain?column=text", DataError, "has no column 'text'; it has translation, id"),
        ("plain?column=translation.fr", DataError, r"row 1: no 'translation\.fr' in "),
        ("plain?column=id", DataError, "row 1: id is 0, not text"),
        ("splits?column=id&split=test", DataError, "has no split 'test'; it has train, valid"),
        ("plain?column=id&colum=x", ConfigError, "unknown option .*colum'; did you mean 'column'"),
    ],
)
def test_what_is_wrong_is_named(folder, address, error, message):
    with pytest.raises(error, match=message) as found:
        list(read_lines(f"hf:{folder / address}"))
    assert "\n" not in str(found.value)


def test_a_file_of_another_kind_and_no_dataset_are_refused(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(ConfigError, match="its name ends in none of"):
        list(read_lines(f"hf:{tmp_path / 'a.txt'}?column=a"))
    with pytest.raises(DataError, match="cannot read hf:"):
        list(read_lines(f"hf:{tmp_path}?column=a"))


def test_a_dataset_is_prepared_like_files(folder, tmp_path):
    for side, ending in enumerate(("de", "en")):
        lines = [(pair[side] or "").replace("\n", " ") for pair in PAIRS]
        (tmp_path / f"a.{ending}").write_bytes("".join(line + "\n" for line in lines).encode())
    columns = [f"hf:{folder / 'splits'}?column=translation.{ending}" for ending in ("de", "en")]
    vocabulary = VocabularyConfig(size=60)
    data = DataConfig(
        source=(columns[0],),
        target=(columns[1],),
        valid_source=(columns[0] + "&split=valid",),
        valid_target=(columns[1] + "&split=valid",),
    )
    found = prepare(Config(data=data, vocabulary=vocabulary), tmp_path / "hf")
    files = DataConfig(source=(str(tmp_path / "a.de"),), target=(str(tmp_path / "a.en"),))
    assert found.hash == prepare(Config(data=files, vocabulary=vocabulary), tmp_path / "files").hash
    assert (found.train[0].pairs, found.valid.pairs) == (len(PAIRS) - 1, 9)
    assert Prepared.open(tmp_path / "hf").is_from(Config(data=data, vocabulary=vocabulary))
