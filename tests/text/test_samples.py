"""What a run's text is like, as far as its configuration tells."""

import pytest

from rectiformer.config import DataConfig
from rectiformer.text.samples import languages, sample_pairs


def files(source="", target="", **others):
    return DataConfig(source=(source,) if source else (), target=(target,) if target else (), **others)


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (files(), ("de", "en")),
        (files("data/train.de.xz", "data/train.en.xz"), ("de", "en")),
        (files("corpus.fr", "corpus.pt-BR"), ("fr", "pt-BR")),
        (files("a.de.txt", "a.en.txt"), ("de", "en")),
        (files("train.src", "train.txt"), ("src", "")),
        (files("pairs.tsv", format="tsv"), ("", "")),
        (DataConfig(stream=True, valid_source=("v.cs",), valid_target=("v.en",)), ("cs", "en")),
    ],
    ids=str,
)
def test_languages_are_read_off_file_names(config, codes):
    assert languages(config) == codes


def test_samples_are_validation_pairs_of_different_length():
    pairs = sample_pairs(DataConfig(), 8)
    lengths = [len(source) for source, _ in pairs]
    assert len(set(pairs)) == 8
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.5 * lengths[0]
    assert max(len(text) for pair in pairs for text in pair) <= 160


def test_samples_come_from_the_files_while_they_are_there(tmp_path):
    valid = [tmp_path / "valid.de", tmp_path / "valid.en"]
    config = files("a.de", "a.en", valid_source=(str(valid[0]),), valid_target=(str(valid[1]),))
    assert sample_pairs(config, 8) == []
    valid[0].write_text(f"Gut.\n{'lang ' * 40}\nSehr gut.\n")
    valid[1].write_text("Fine.\nlong\nVery fine.\n")
    assert sample_pairs(config, 8) == [("Gut.", "Fine."), ("Sehr gut.", "Very fine.")]
    assert sample_pairs(config, 1) == [("Gut.", "Fine.")]
    valid[1].write_bytes(b"\xff\n")
    assert sample_pairs(config, 8) == []
