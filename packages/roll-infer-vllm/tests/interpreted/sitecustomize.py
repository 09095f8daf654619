"""Runs Triton's kernels with its interpreter in vLLM's processes, so that V2 runs on a CPU. Python imports it first.

PyPI's Triton has no backend for CPUs, and without one vLLM has no second model runner there. The backend of this module
only announces itself: the interpreter computes kernels with numpy.
"""

import sys

# A process of vLLM or a worker of Ray, not a resource tracker.
if any(argument.endswith(("--multiprocessing-fork", "default_worker.py")) for argument in sys.orig_argv):
    from triton.backends import Backend, backends

    class Driver:
        """Driver that is never used."""

        is_active = staticmethod(lambda: True)

    backends["cpu"] = Backend(compiler=None, driver=Driver)
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # the interpreter does not support this kernel; vLLM then uses PyTorch
