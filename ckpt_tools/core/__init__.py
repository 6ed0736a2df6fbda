"""What a checkpoint is, in plain types and integers; no file is opened here."""
