"""Text: lines of files to pairs of subword ids on disk, and back. No model."""
