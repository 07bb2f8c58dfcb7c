"""Which text a configuration names, and whether it can belong together, before any of it is read."""

from __future__ import annotations

from rectiformer.config import DataConfig, Files
from rectiformer.errors import ConfigError
from rectiformer.text.datasets import parse_address
from rectiformer.text.lines import DATASET


def has_split(config: DataConfig, split: str) -> bool:
    """Whether there are pairs of this split, "train" or "valid"."""
    return bool(files_of(config, split)[0]) or not (config.source or config.stream)


def has_documents(config: DataConfig) -> bool:
    """Whether the text says where documents start."""
    return config.documents != "none" or (config.grammar == "documents" and not config.source)


def files_of(config: DataConfig, split: str) -> tuple[Files, Files]:
    """Source and target files of a split."""
    return (config.source, config.target) if split == "train" else (config.valid_source, config.valid_target)


def input_files(config: DataConfig) -> Files:
    """All files of all splits."""
    texts = config.source + config.target + config.valid_source + config.valid_target
    return texts + config.document_tables


def check_files(config: DataConfig) -> None:
    """Raise a ConfigError where the configured files cannot belong together, whatever they hold."""
    for split, prefix in (("train", "data."), ("valid", "data.valid_")):
        sources, targets = files_of(config, split)
        if config.format == "tsv" and targets:
            raise ConfigError(f'{prefix}target is given, but with data.format = "tsv" {prefix}source holds both sides')
        if config.format == "lines" and len(sources) != len(targets):
            raise ConfigError(
                f"{prefix}source names {len(sources)} files but {prefix}target {len(targets)}; name one for each"
            )
    if config.stream and config.source:
        raise ConfigError(
            f"data.stream reads the training text from standard input, but data.source names {len(config.source)} "
            "files; leave it empty, or prepare them apart and give the folder by --data"
        )
    if config.weights and len(config.weights) != max(1, len(config.source)):
        raise ConfigError(
            f"data.weights has {len(config.weights)} numbers but data.source {len(config.source)} files; give one for "
            "each, or none"
        )
    if config.documents == "column" and config.format != "tsv":
        raise ConfigError(f'data.documents = "column" needs data.format = "tsv", not "{config.format}"')
    if config.document_tables and len(config.document_tables) != len(config.source):
        raise ConfigError(
            f"data.document_tables names {len(config.document_tables)} files but data.source {len(config.source)}; "
            "name one for each, or none"
        )
    if config.source and config.documents == "none" and (config.segment_length or config.document_tables):
        key = "segment_length" if config.segment_length else "document_tables"
        raise ConfigError(f'data.{key} needs documents: say where they start in data.documents, now "none"')
    if config.mixed and not config.segment_length:
        raise ConfigError(
            "data.mixed = true, but data.segment_length = 0: there are no limits to mix; name the longest"
        )
    if config.segment_length == 1:
        raise ConfigError(
            "data.segment_length = 1, but a sentence needs a subword beside its separator; use 2 or more, or 0"
        )
    if config.segment_length and not config.source and config.grammar != "documents":
        raise ConfigError(
            f'data.segment_length needs documents: use data.grammar = "documents", not "{config.grammar}"'
        )
    if input_files(config).count("-") > 1:
        raise ConfigError("standard input (`-`) is named more than once in [data], but it can be read once only")
    for name in input_files(config):
        if name.startswith(DATASET):
            parse_address(name.removeprefix(DATASET))
