"""Proof: is a checkpoint whole, is it the same as another one, and are its values sane?

`verify.verify` and `verify.verify_quick` look for damage, `fingerprint.fingerprint` gives digests
that do not depend on format or sharding, `diff.diff` compares two checkpoints, `stats.stats` looks
at values, `check` proves an output against its source, and `damage` compares checksums. Nothing
here writes a checkpoint; formats are asked through their protocol.
"""
