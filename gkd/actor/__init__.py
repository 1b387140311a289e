"""The student in training: FSDP2 over its ranks, packing, adapters, its optimizer and state."""

import logging

# peft imports bitsandbytes, which recommends on a CPU another package for 4-bit weights, whether there are any or not.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
