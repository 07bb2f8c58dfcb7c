"""CTranslate2 finds the translations that we find with the softmax twin, wherever its search is ours."""

import pytest
from integrations.agreement import assert_same_greedily, share_of_same

from rectiformer.translate.options import SearchOptions

ctranslate2 = pytest.importorskip("ctranslate2")


def test_ctranslate2_translates_as_the_run_does(translator, held_out, tmp_path):
    from rectiformer.integrations.ctranslate2 import export_ctranslate2
    from rectiformer.integrations.export import name_tokens

    ours = translator("softmax")
    export_ctranslate2(ours, tmp_path / "out")
    engine = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32", intra_threads=1)
    sources = [[piece.text for piece in ours.source.pieces(line)] for line in held_out]
    ids = {name: id for id, name in enumerate(name_tokens(ours.target))}
    found = {}
    for beam in (1, 4):
        how = {"beam_size": beam, "length_penalty": 0, "max_decoding_length": 200, "disable_unk": True}
        best = engine.translate_batch(sources, **how, return_scores=True)
        texts = [ours.target.decode([ids[name] for name in each.hypotheses[0]]) for each in best]
        right = ours.translate(held_out, SearchOptions(beam=beam, length_penalty=0, max_repeats=0, extra_length=40))
        found[beam] = right, texts, [each.scores[0] for each in best]
    assert_same_greedily(*found[1][:2])
    assert share_of_same(*found[4]) > 0.9
