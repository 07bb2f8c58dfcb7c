"""Numbers from strings and arrays: translation scores, word alignments and their error. No model, no files."""
