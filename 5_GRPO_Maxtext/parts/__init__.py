"""What the scripts of this folder are built of; read a file when a script sends you there.

Every script imports a part before it imports jax, so what has to happen before the libraries are imported
happens here, once.
"""

import os

from parts import late_imports

# XLA splits even the smallest matrix product over all cores. On a model this small the hand-over costs more
# than it saves, and a product in one thread also makes a run repeatable bit for bit. TPUs ignore this flag.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # "PyTorch was not found": it is not needed
late_imports.begin_imports()
