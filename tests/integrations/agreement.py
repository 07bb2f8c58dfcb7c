"""How far another engine finds what we find."""


def assert_same_greedily(right, texts):
    """Greedy decoding leaves no choice between translations, except beyond our length limit."""
    for ours, text in zip(right, texts, strict=True):
        best = ours.candidates[0]
        assert text == best.text if best.ended else text.startswith(best.text)


def share_of_same(right, texts, log_probabilities):
    """The share of beam search's translations that are ours.

    Other engines drop an end that is not among their best `beam` next tokens, and we keep it: where translations
    differ, what we found must be the more probable.
    """
    pairs = [(ours.candidates[0], text) for ours, text in zip(right, texts, strict=True)]
    for (best, text), log_probability in zip(pairs, log_probabilities, strict=True):
        assert text == best.text or best.log_probability > log_probability
    return sum(text == best.text for best, text in pairs) / len(pairs)
