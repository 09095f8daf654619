"""DeepSpeed trains in float16 only on processors with instructions for it. torch has slower ways for the others, so
that the search for the scale of the loss can be tested on any."""

from __future__ import annotations

import deepspeed

deepspeed.get_accelerator().is_fp16_supported = lambda: True
