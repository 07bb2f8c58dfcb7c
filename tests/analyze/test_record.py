"""The attention record: what is written is what is read, and as the schema says."""

import base64
import gzip
import importlib.util
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import change, draw_weights, make_record

from rectiformer.analyze.record import SCHEMA, SiteRecord, from_json, read_record, to_json, write_record
from rectiformer.errors import ArgumentError, DataError


def assert_same(one, other):
    """Equal in everything, arrays bit for bit."""
    assert one.model == other.model
    assert len(one.examples) == len(other.examples)
    for mine, its in zip(one.examples, other.examples, strict=True):
        for name in ("source", "target", "forced", "translation", "gold"):
            assert getattr(mine, name) == getattr(its, name)
        for site, read in zip(mine.sites, its.sites, strict=True):
            for name, value in vars(site).items():
                np.testing.assert_array_equal(getattr(read, name), value, err_msg=name)
                assert np.asarray(getattr(read, name)).dtype == np.asarray(value).dtype, name


@given(st.integers(1, 4), st.integers(0, 7), st.integers(0, 7), st.integers(0, 1000))
def test_dense_weights_survive_the_record(heads, queries, keys, seed):
    weights, visible = draw_weights(heads, queries, keys, seed)
    site = SiteRecord.from_dense("cross", 0, weights, visible)
    np.testing.assert_array_equal(site.dense(), weights)
    assert len(site.weights) == (weights != 0).sum()
    assert site.mass.reshape(heads, queries) == pytest.approx(weights.astype(np.float64).sum(-1), rel=1e-6, abs=1e-7)
    np.testing.assert_array_equal(site.visible.reshape(heads, queries), visible)
    np.testing.assert_array_equal(site.null.reshape(heads, queries), (weights == 0).all(-1) & (visible > 0))


def test_a_query_that_sees_no_key_is_not_null():
    site = SiteRecord.from_dense("encoder", 0, np.zeros((1, 2, 3), np.float32), np.array([[0, 3]]))
    assert site.null.tolist() == [0, 1]


def test_weights_too_small_for_float32_are_zeros():
    site = SiteRecord.from_dense("encoder", 0, np.array([[[1e-60, 1.0]]]), np.array([[2]]))
    assert site.columns.tolist() == [1]


def test_json_and_back_changes_nothing():
    record = make_record()
    content = to_json(record)
    text = json.dumps(content, allow_nan=False)
    again = from_json(json.loads(text), "here")
    assert_same(again, record)
    assert to_json(again) == content


@pytest.mark.parametrize(
    ("name", "magic"), [("a.json", b'{"format":"rectiformer-attention"'), ("a.json.gz", b"\x1f\x8b")]
)
def test_files_are_plain_or_compressed_by_name(tmp_path, name, magic):
    record = make_record()
    write_record(record, tmp_path / name)
    assert_same(read_record(tmp_path / name), record)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(magic)
    write_record(record, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_arrays_are_what_the_format_says():
    site = to_json(make_record())["examples"][0]["sites"][2]
    record = make_record().examples[0].sites[2]
    for name, dtype in (("row_starts", "<u4"), ("columns", "<u4"), ("weights", "<f4"), ("null", "u1")):
        read = np.frombuffer(gzip.decompress(base64.b64decode(site[name]["data"])), dtype)
        assert site[name]["shape"] == [len(read)]
        np.testing.assert_array_equal(read, getattr(record, name))


def conforms(value, schema, root):
    """Whether a value is as a schema says: another reading of draft 2020-12 than the one in the package."""
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    for keyword, wanted in schema.items():
        if keyword == "$ref":
            holds = conforms(value, root["$defs"][wanted.rsplit("/", 1)[1]], root)
        elif keyword == "type":
            names = [wanted] if isinstance(wanted, str) else wanted
            number = "integer" in names and isinstance(value, int) and not isinstance(value, bool)
            holds = number or any(isinstance(value, types[name]) for name in names if name != "integer")
        elif keyword == "const":
            holds = value == wanted
        elif keyword == "enum":
            holds = value in wanted
        elif keyword in ("minimum", "maximum"):
            holds = not isinstance(value, int) or (value >= wanted if keyword == "minimum" else value <= wanted)
        elif keyword == "required":
            holds = not isinstance(value, dict) or set(wanted) <= set(value)
        elif keyword == "properties":
            holds = not isinstance(value, dict) or all(
                conforms(value[k], wanted[k], root) for k in wanted if k in value
            )
        elif keyword == "items":
            holds = not isinstance(value, list) or all(conforms(item, wanted, root) for item in value)
        elif keyword == "prefixItems":
            holds = not isinstance(value, list) or all(map(conforms, value, wanted, [root] * len(wanted)))
        elif keyword in ("minItems", "maxItems"):
            holds = not isinstance(value, list) or (
                len(value) >= wanted if keyword == "minItems" else len(value) <= wanted
            )
        else:
            assert keyword in ("$schema", "$defs", "title", "description", "contentEncoding", "contentMediaType"), (
                keyword
            )
            holds = True
        if not holds:
            return False
    return True


def test_what_is_written_is_as_the_schema_says():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    content = to_json(make_record())
    assert conforms(content, schema, schema)
    if importlib.util.find_spec("jsonschema"):
        from jsonschema import Draft202012Validator

        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(content)


def paths_in(value, path=()):
    """Every path in a JSON value that a list does not repeat."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from paths_in(each, (*path, key))


def test_reader_and_schema_refuse_the_same_structures():
    schema, content = json.loads(SCHEMA.read_text(encoding="utf-8")), to_json(make_record())
    content["examples"] = content["examples"][:1]
    content["examples"][0]["sites"] = content["examples"][0]["sites"][:1]
    refused = 0
    for path in list(paths_in(content))[1:]:
        for value in (None, "text", -1, 2**40, True, [], {}, 1.5):
            changed = change(content, path, value)
            if conforms(changed, schema, schema):
                continue
            refused += 1
            with pytest.raises(DataError) as error:
                from_json(changed, "here")
            assert str(error.value).startswith("here")
            assert "\n" not in str(error.value)
    assert refused > 200


def test_a_site_is_found_by_kind_and_layer():
    example = make_record().examples[0]
    assert example.site("cross", 1) is example.sites[2]
    with pytest.raises(ArgumentError, match=r"no cross attention of layer 7; it has encoder 0, decoder 1, cross 1"):
        example.site("cross", 7)
