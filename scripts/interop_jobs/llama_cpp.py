"""llama.cpp's converter as it is, but for tokenizers: `llama_cpp.py SCRIPT ARGUMENTS…`.

It knows the tokenizers of the hub by their hashes, and refuses others; ours has no words.
"""

from __future__ import annotations

import os
import runpy
import sys

sys.argv[:1] = []
sys.path[:0] = [os.path.dirname(sys.argv[0])]

from conversion.base import TextModel  # noqa: E402  (it lies beside the script)

TextModel.get_vocab_base_pre = lambda *_: "default"
runpy.run_path(sys.argv[0], run_name="__main__")
